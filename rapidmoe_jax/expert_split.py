"""One expert split: its base arrays, its records of residual codes, and the norms the policies read."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from rapidmoe_jax import quant
from rapidmoe_jax.config import GROUP_SIZE, SplitConfig
from rapidmoe_jax.host_kernels import _host


class SplitExpert(NamedTuple):
    """One expert [3, F, D] as base and residual."""

    arrays: dict[str, np.ndarray]  # codes [3, F, P], scale and offset [3, F, G], norms [F, 4] bfloat16
    records: UInt8[np.ndarray, "F R"]  # host_kernels/layout.h
    base: Float[np.ndarray, "3 F D"] | None  # dequantised; None from split_nested
    sums: dict[str, float]  # squared sums: weights, the base's error, the error left after the residual


def split_expert(
    w: Float[np.ndarray, "3 F D"],
    spec: SplitConfig,
    base: quant.Codes,
    residual: tuple[np.ndarray, np.ndarray],
    moment: Float[np.ndarray, "D D"] | None = None,
) -> SplitExpert:
    """Put an expert's base and residual codes in the layout of the checkpoint, with norms and errors.

    Args:
      base: codes of the 3F rows.
      residual: code [3F, D] and scale [3F, D / 64] of what the base lost.
      moment: second moment of the expert's input, any scale. With it the norms of R1 and R3 are those that inputs of
        this kind see: norm = E[(R . x)^2] / E[mean(x^2)]; without, |R|^2, as if all inputs were uncorrelated.
    """
    _, units, width = w.shape
    rows = w.reshape(3 * units, width)
    base_w = quant.dequantize(base)
    code, scale = residual
    residual_w = quant.dequantize_residual(code, scale, bits=spec.residual_bits)
    norm = np.square(residual_w).sum(-1).reshape(3, units)
    if moment is not None and np.trace(moment) > 0:
        gate_up = residual_w[: 2 * units]
        seen = ((gate_up @ moment) * gate_up).sum(-1) / (np.trace(moment) / width)
        norm[:2] = np.maximum(seen, 0).reshape(2, units)
    norms = [norm[0], norm[1], norm[2], np.square(base_w[2 * units :]).sum(-1)]
    arrays = {
        "codes": quant.pack(base.code, bits=spec.base_bits).reshape(3, units, -1),
        "scale": base.scale.reshape(3, units, -1),
        "offset": base.offset.reshape(3, units, -1),
        "norms": np.stack(norms, -1).astype(ml_dtypes.bfloat16),
    }
    packed = quant.pack(code, bits=spec.residual_bits).reshape(3, units, -1)
    records = pack_records(spec, arrays, packed, scale.reshape(3, units, -1))
    sums = {
        "weight": float(np.square(rows).sum()),
        "base": float(np.square(rows - base_w).sum()),
        "rest": float(np.square(rows - base_w - residual_w).sum()),
    }
    return SplitExpert(arrays, records, base_w.reshape(w.shape), sums)


def split_nested(w: Float[np.ndarray, "3 F D"], spec: SplitConfig) -> SplitExpert:
    """Split one expert without data, by the host kernels: split_expert of quantize_nested and quantize_residual.

    Codes, scales and records bit for bit, norms up to rounding. Raises ValueError if scales do not fit half precision.
    """
    codes, scale, offset, norms, records, sums = _host.split_expert(w, spec.base_bits, spec.residual_bits)
    scale, offset = scale.view(np.float16), offset.view(np.float16)
    _check_scales(scale, offset, w)
    arrays = {"codes": codes, "scale": scale, "offset": offset, "norms": norms.astype(ml_dtypes.bfloat16)}
    weight, base, rest = sums.sum(0).tolist()
    return SplitExpert(arrays, records, None, {"weight": weight, "base": base, "rest": rest})


def check_codes(base: quant.Codes, rows: np.ndarray, spec: SplitConfig) -> None:
    """Raise ValueError for codes that do not fit: a quantiser's fault, or weights beyond half-precision scales."""
    groups = (rows.shape[0], rows.shape[1] // GROUP_SIZE)
    got = (base.code.shape, base.scale.shape, base.offset.shape)
    if got != (rows.shape, groups, groups) or base.scale.dtype != np.float16 or base.offset.dtype != np.float16:
        raise ValueError(
            f"the quantiser gave codes, scales and offsets of shapes {got} and dtype {base.scale.dtype}, wanted "
            f"{(rows.shape, groups, groups)} and float16"
        )
    if base.code.max() >= 2**spec.base_bits:
        raise ValueError(f"the quantiser gave a code {base.code.max()}, wanted less than {2**spec.base_bits}")
    _check_scales(base.scale, base.offset, rows)


def _check_scales(scale: np.ndarray, offset: np.ndarray, w: np.ndarray) -> None:
    if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
        raise ValueError(f"weights up to {np.abs(w).max():g} do not fit half-precision scales; rescale the model")


def pack_records(
    spec: SplitConfig, base: dict[str, np.ndarray], residual: np.ndarray, residual_scale: np.ndarray
) -> np.ndarray:
    """Lay out one expert's records [F, bytes] as host_kernels/layout.h says."""
    units, width = base["scale"].shape[1], base["scale"].shape[2] * GROUP_SIZE
    at = _host.record_layout(spec.base_bits, spec.residual_bits, width)
    records = np.zeros((units, at["bytes"]), np.uint8)
    parts = {
        "r1": residual[0],
        "r3": residual[1],
        "b2": base["codes"][2],
        "r2": residual[2],
        "r1_scale": residual_scale[0].view(np.uint8),
        "r3_scale": residual_scale[1].view(np.uint8),
        "b2_scale": base["scale"][2].view(np.uint8),
        "b2_offset": base["offset"][2].view(np.uint8),
        "r2_scale": residual_scale[2].view(np.uint8),
    }
    for name, part in parts.items():
        records[:, at[name] : at[name] + part.shape[1]] = part
    return records
