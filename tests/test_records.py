"""Residual files that were damaged: an error that names the file, or wrong numbers; never a crash."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, random_experts, random_step
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops

CASE = Case("records", 128, 9, 3, 2)
SHAPE = (CASE.experts, CASE.units, CASE.width, 3, 4)
SIZE = 4096 + CASE.experts * CASE.units * _host.record_layout(3, 4, CASE.width)["bytes"]


@pytest.fixture
def file(tmp_path):
    random_experts(CASE, SplitConfig(), tmp_path)
    return next(tmp_path.glob("*.bin"))


# Fresh examples each run; the file stays, so that its fixture needs no reset.
fresh = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fresh
@given(st.dictionaries(st.integers(0, 47), st.integers(1, 255), min_size=1))
def test_any_damage_to_a_header_is_refused(file, changes):
    damaged = bytearray(file.read_bytes())
    for at, change in changes.items():
        damaged[at] ^= change
    copy = file.with_suffix(".damaged")
    copy.write_bytes(damaged)
    with pytest.raises(RuntimeError, match=str(copy)):
        _host.open_store([str(copy)], *SHAPE)


@fresh
@given(st.integers(0, SIZE + 64).filter(lambda size: size != SIZE))
@example(SIZE - 1)
@example(SIZE + 1)
def test_any_other_length_is_refused(file, size):
    copy = file.with_suffix(".damaged")
    copy.write_bytes((file.read_bytes() + bytes(64))[:size])
    with pytest.raises(RuntimeError, match=r"shorter than a header|bytes, wanted"):
        _host.open_store([str(copy)], *SHAPE)


@pytest.mark.parametrize("tokens", [1, 50])
def test_damaged_records_give_numbers_and_no_crash(tokens, file, isa, tmp_path):
    (tmp_path / "experts").mkdir()
    experts, _ = random_experts(CASE, SplitConfig(), tmp_path / "experts", exact=False)
    rng = np.random.default_rng()
    noise = rng.integers(0, 256, file.stat().st_size - 4096, np.uint8).tobytes()
    file.write_bytes(file.read_bytes()[:4096] + noise)
    store = _host.open_store([str(file)], *SHAPE)
    step = random_step(CASE, tokens)
    u0, v0, h0 = ops.base_gate_up(step["x"], step["expert_ids"], jnp.int32(0), experts)
    request = ops.Correction(**step, u0=u0, v0=v0, h0=h0, critical_mask=jnp.ones(u0.shape, bool), layer=jnp.int32(0))
    args = (np.asarray(a) for a in request[:-1])
    delta, records, _ = _host.residual_delta(store, 0, False, 0.0, *args)
    assert delta.shape == step["x"].shape
    assert records == len(np.unique(step["expert_ids"])) * CASE.units
