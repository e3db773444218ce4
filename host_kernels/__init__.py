"""C++ kernels on the host: residual corrections and the low-bit base on a CPU. See ops.py for the JAX side.

Importing checks that the installed jaxlib can run the compiled handlers and registers them with XLA.
"""

import os
import re
import warnings
from pathlib import Path

import jax
import jaxlib

from rapidmoe_jax.host_kernels import _host

__all__ = ["_host", "isa", "select_isa", "set_threads", "threads"]


def _runtime_ffi_version() -> tuple[int, int]:
    text = (Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ImportError(f"jaxlib {jaxlib.__version__} has no XLA FFI version in its headers; reinstall jaxlib")
    return int(major[1]), int(minor[1])


def check_ffi_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Refuse handlers built for a newer FFI than the installed jaxlib's: XLA would fail to start its backend.

    Raises: ImportError with both versions and the remedy.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"rapidmoe_jax was built for XLA FFI {built[0]}.{built[1]}, the installed jaxlib {jaxlib.__version__} has "
            f"{runtime[0]}.{runtime[1]}; reinstall with: pip install --force-reinstall --no-deps rapidmoe_jax"
        )


check_ffi_version(_host.XLA_FFI_VERSION, _runtime_ffi_version())
for _name, _handler in _host.registrations().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")


def set_threads(threads: int | None) -> int:
    """Set the threads that compute host kernels in this process, the waiting caller included.

    Args:
      threads: >= 1 and at most the cores this process may use (affinity mask, cgroup limit); None = $RAPIDMOE_THREADS,
        or all of them.
    Returns: the number set.
    Raises: ValueError if out of range.
    """
    cores = _host.available_cores()
    asked = os.environ.get("RAPIDMOE_THREADS", "").strip()
    if threads is None and asked and not asked.isdigit():
        raise ValueError(f"RAPIDMOE_THREADS={asked!r} is no number; use 1..{cores} or unset it")
    wanted = threads if threads is not None else int(asked or cores)
    if not 1 <= wanted <= cores:
        raise ValueError(f"threads={wanted} is outside 1..{cores}, the cores this process may use")
    _host.set_threads(wanted)
    return wanted


def threads() -> int:
    """Give the number of threads that compute host kernels."""
    return _host.threads()


def select_isa(name: str) -> str:
    """Choose the kernels' instruction set for this process: "auto", "scalar", "avx2", "avx512", "avx512_bf16" or "amx".

    Returns: the name in use. Warns where that is the scalar one, which is many times slower.
    Raises: ValueError if this processor does not have it.
    """
    _host.select_isa(name)
    if _host.isa() == "scalar":
        warnings.warn(
            "host kernels run in plain scalar code (no AVX2 on this processor, or not wanted): expect text about "
            "ten times slower",
            stacklevel=2,
        )
    return _host.isa()


def isa() -> str:
    """Give the name of the instruction set in use."""
    return _host.isa()
