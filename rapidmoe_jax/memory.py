"""Large arrays on their way to the device, laid out so that a CPU device takes them as they are."""

import math
from typing import Any

import jax
import numpy as np

_PAGE = 4096


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an uninitialised array that starts on a page.

    NumPy starts large arrays 16 bytes after a page; jaxlib takes no such array as it is, and its copy would double the
    memory a model needs while it loads.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + size].view(dtype).reshape(shape)


def to_device(value: np.ndarray) -> jax.Array:
    """Move to the default device; a CPU takes an array of `empty` without a copy, and it must not change any more."""
    return jax.device_put(value, may_alias=True)
