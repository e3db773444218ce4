import subprocess
import sys

import numpy as np
import pytest

from rapidmoe_jax import host_kernels
from rapidmoe_jax.host_kernels import _host


@pytest.mark.parametrize("runtime", [(0, 2), (1, 3)])
def test_handlers_built_for_a_newer_jaxlib_are_refused_by_name(runtime):
    with pytest.raises(ImportError, match=r"was built for XLA FFI 0\.3.*has \d\.\d; reinstall with: pip install"):
        host_kernels.check_ffi_version((0, 3), runtime)


def test_an_older_build_runs_on_a_newer_jaxlib():
    host_kernels.check_ffi_version((0, 3), (0, 5))
    host_kernels.check_ffi_version(_host.XLA_FFI_VERSION, host_kernels._runtime_ffi_version())


def test_without_avx2_text_comes_from_scalar_code_and_a_warning_says_so(demo):
    fast = demo.generate("It was a", max_new_tokens=4)
    with pytest.warns(UserWarning, match="plain scalar code .no AVX2"):
        assert host_kernels.select_isa("scalar") == "scalar"
    try:
        slow = demo.generate("It was a", max_new_tokens=4)
    finally:
        host_kernels.select_isa("auto")
    assert slow.tokens == fast.tokens


def test_an_instruction_set_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'avx1024' is unknown or not on this processor"):
        host_kernels.select_isa("avx1024")


def test_threads_come_from_argument_environment_or_affinity(monkeypatch):
    cores = _host.available_cores()
    try:
        monkeypatch.setenv("RAPIDMOE_THREADS", "1")
        assert host_kernels.set_threads(None) == 1 == host_kernels.threads()
        assert host_kernels.set_threads(cores) == cores
    finally:
        monkeypatch.delenv("RAPIDMOE_THREADS")
        assert host_kernels.set_threads(None) == cores


def test_a_smaller_affinity_mask_gives_a_smaller_pool():
    code = (
        "import os; os.sched_setaffinity(0, {0})\n"
        "from rapidmoe_jax import host_kernels; print(host_kernels.set_threads(None))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


@pytest.mark.parametrize(
    "text, cpus", [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 0), ("", 0), ("-1 0", 0)]
)
def test_a_cgroup_limit_is_read_in_whole_processors(text, cpus, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    assert _host.cgroup_cpus(str(tmp_path)) == cpus
    assert _host.cgroup_cpus(str(tmp_path / "absent")) == 0


def test_read_bandwidth_is_plausible():
    assert 5e8 < _host.read_bandwidth(np.ones(1 << 24, np.uint8), 3) < 2e12
