"""Low-bit codes of weight rows: packing, the base, the residual.

    base      w ~ scale * code + offset                     code in 0 .. 2^bits - 1, groups of 64 along the row
    residual  w ~ scale * (code - (2^bits - 1) / 2)         what the base lost, symmetric, its own scale

Works on numpy rows [N, D]. Knows nothing of experts or files. The packed layout is written down in
host_kernels/layout.h; tests/test_quant.py compares the two bit by bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, UInt8

from rapidmoe_jax.config import GROUP_SIZE


class Codes(NamedTuple):
    """Codes of N rows with a scale and an offset a group of 64."""

    code: UInt8[np.ndarray, "N D"]  # unpacked, 0 .. 2^bits - 1
    scale: Float16[np.ndarray, "N G"]
    offset: Float16[np.ndarray, "N G"]


# Turns rows [N, D] into base codes of `bits`. residual_bits: bits of the residual that will follow, for
# quantisers whose base is the top of a longer code.
Quantizer = Callable[..., Codes]


def _groups(w: np.ndarray) -> np.ndarray:
    return w.reshape(w.shape[0], -1, GROUP_SIZE)


def quantize_nested(w: Float[np.ndarray, "N D"], *, bits: int, residual_bits: int) -> Codes:
    """Take the top `bits` of one (bits + residual_bits)-bit code, each bucket at its midpoint. Needs no data.

    The zero point belongs to the long code, so a 2-bit base keeps a fine one (NUMERICS: .61 against .90 relative
    output error of a 2-bit zero point). Source: design page, section 3.
    """
    grouped = _groups(w.astype(np.float32))
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    top = 2 ** (bits + residual_bits) - 1
    scale = ((high - low) / top * 2**residual_bits).astype(np.float16)
    step = scale.astype(np.float32) / 2**residual_bits
    safe = np.where(step > 0, step, 1)
    zero = np.rint(-low / safe)
    code = np.clip(np.rint(grouped / safe[..., None]) + zero[..., None], 0, top)
    offset = (step * ((2**residual_bits - 1) / 2 - zero)).astype(np.float16)
    return Codes((code.astype(np.uint16) >> residual_bits).astype(np.uint8).reshape(w.shape), scale, offset)


def quantize_minmax(w: Float[np.ndarray, "N D"], *, bits: int, residual_bits: int) -> Codes:
    """Round each group to 2^bits levels spread evenly from its smallest to its largest weight.

    The plain baseline: no zero point, the offset is a half float. residual_bits is not used.
    """
    del residual_bits
    grouped = _groups(w.astype(np.float32))
    low = grouped.min(-1).astype(np.float16)
    scale = ((grouped.max(-1) - grouped.min(-1)) / (2**bits - 1)).astype(np.float16)
    step = scale.astype(np.float32)
    code = np.rint((grouped - low.astype(np.float32)[..., None]) / np.where(step > 0, step, 1)[..., None])
    return Codes(np.clip(code, 0, 2**bits - 1).astype(np.uint8).reshape(w.shape), scale, low)


QUANTIZERS: dict[str, Quantizer] = {"nested": quantize_nested, "minmax": quantize_minmax}

# Tried scales of a residual group, as a share of the one that just covers its largest weight.
_RESIDUAL_SHRINK = (1.0, 0.94, 0.88, 0.8, 0.7)


def quantize_residual(w: Float[np.ndarray, "N D"], *, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise what a base lost: symmetric codes, the scale of each group chosen for the least squared error.

    Returns: code [N, D] uint8 and scale [N, D / 64] float16; w ~ scale * (code - (2^bits - 1) / 2).
    """
    grouped = _groups(w.astype(np.float32))
    middle = (2**bits - 1) / 2
    largest = np.abs(grouped).max(-1)
    best_error = np.full(largest.shape, np.inf, np.float32)
    best_scale = np.zeros(largest.shape, np.float16)
    best_code = np.zeros(grouped.shape, np.uint8)
    for shrink in _RESIDUAL_SHRINK:
        scale = (largest / 2 ** (bits - 1) * shrink).astype(np.float16)
        step = scale.astype(np.float32)[..., None]
        code = np.clip(np.rint(grouped / np.where(step > 0, step, 1) + middle), 0, 2**bits - 1)
        error = sum_squares(grouped - step * (code - middle))
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_code = np.where(better[..., None], code.astype(np.uint8), best_code)
    return best_code.reshape(w.shape), best_scale


def sum_squares(grouped: Float[np.ndarray, "*N 64"]) -> Float[np.ndarray, "*N"]:
    """Sum the squares of each group in float32, in an order written down: eight running sums, then in pairs."""
    lane = np.square(grouped).reshape(*grouped.shape[:-1], -1, 8)
    total = lane[..., 0, :]
    for i in range(1, lane.shape[-2]):
        total = total + lane[..., i, :]
    pairs = total[..., ::2] + total[..., 1::2]
    fours = pairs[..., ::2] + pairs[..., 1::2]
    return fours[..., 0] + fours[..., 1]


def dequantize(codes: Codes) -> Float[np.ndarray, "N D"]:
    """Give the weights that base codes stand for, float32."""
    grouped = _groups(codes.code).astype(np.float32)
    w = grouped * codes.scale.astype(np.float32)[..., None] + codes.offset.astype(np.float32)[..., None]
    return w.reshape(codes.code.shape)


def dequantize_residual(code: np.ndarray, scale: np.ndarray, *, bits: int) -> Float[np.ndarray, "N D"]:
    """Give the weights that residual codes stand for, float32."""
    grouped = _groups(code).astype(np.float32) - (2**bits - 1) / 2
    return (grouped * scale.astype(np.float32)[..., None]).reshape(code.shape)


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Give the bit planes of a row in order, as (bits of the plane, shift of its bits in the code)."""
    return ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),)


def pack(code: UInt8[np.ndarray, "*N D"], *, bits: int) -> UInt8[np.ndarray, "*N P"]:
    """Pack rows of codes into bytes, P = D * bits / 8, in the layout of host_kernels/layout.h."""
    packed = []
    for n, shift in planes(bits):
        part = (code >> shift) & (2**n - 1)
        part = part.reshape(*code.shape[:-1], -1, 8 // n, 8 * n)  # [..., group, place in the byte, byte]
        shifts = (n * np.arange(8 // n, dtype=np.uint8))[:, None]
        packed.append(np.bitwise_or.reduce(part << shifts, axis=-2).reshape(*code.shape[:-1], -1))
    return np.concatenate(packed, axis=-1)


def unpack(packed: UInt8[np.ndarray, "*N P"], *, bits: int) -> UInt8[np.ndarray, "*N D"]:
    """Undo pack()."""
    width = packed.shape[-1] * 8 // bits
    code = np.zeros((*packed.shape[:-1], width), np.uint8)
    start = 0
    for n, shift in planes(bits):
        size = width * n // 8
        part = packed[..., start : start + size].reshape(*packed.shape[:-1], -1, 1, 8 * n)
        shifts = (n * np.arange(8 // n, dtype=np.uint8))[:, None]
        code |= (((part >> shifts) & (2**n - 1)) << shift).reshape(code.shape)
        start += size
    return code
