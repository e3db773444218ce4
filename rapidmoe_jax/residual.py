"""Run the residual correction of a critical set: delta[t] = sum of weight * (h_j W2_j - h0_j B2_j).

    h_j = activation(u0_j + R1_j . x, v0_j + R3_j . x)      (silu(u) v, or activation.py's clamped form)

Executors, one interface (start, then done; work between the two overlaps):
    host       XLA FFI into the C++ worker pool; CPU backend
    callback   jax.pure_callback into the same kernels; any backend, slow
    reference  plain JAX on records held as an array: the definition
    off        no correction
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from rapidmoe_jax.activation import gated
from rapidmoe_jax.config import GROUP_SIZE
from rapidmoe_jax.experts import SplitExperts
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.host_kernels.ops import Correction, residual_done, residual_start
from rapidmoe_jax.pallas.reference import dequantize_rows

Pending = UInt32[Array, ""] | Float[Array, "T D"] | None


def start(request: Correction, experts: SplitExperts, *, replaces: bool = False) -> Pending:
    """Begin a correction. Returns what done() needs.

    Args:
      replaces: y_base will leave out the pairs whose units are all critical (ops.residual_start); host executor only.
    """
    if replaces and experts.executor != "host":
        raise ValueError(
            f"replaces=True with executor={experts.executor!r}: only the host executor gives whole experts"
        )
    match experts.executor:
        case "host":
            return residual_start(request, experts, replaces=replaces)
        case "callback":
            return _callback_delta(request, experts)
        case "reference":
            return delta_reference(request, experts)
        case "off":
            return None
    raise ValueError(f"executor={experts.executor!r} is unknown; use host, callback, reference or off")


def done(pending: Pending, y_base: Float[Array, "T D"], experts: SplitExperts) -> Float[Array, "T D"]:
    """Wait for a correction and give y_base + delta."""
    if pending is None:
        return y_base
    if experts.executor == "host":
        return residual_done(pending, y_base)[0]
    return y_base + pending


def _callback_delta(request: Correction, experts: SplitExperts) -> Float[Array, "T D"]:
    store, exact, limit = experts.store, experts.exact, experts.swiglu_limit

    def run(*arrays):
        x, ids, weights, u0, v0, h0, mask, layer = (np.asarray(a) for a in arrays)
        return _host.residual_delta(store, int(layer), exact, limit, x, ids, weights, u0, v0, h0, mask)[0]

    out = jax.ShapeDtypeStruct(request.x.shape, jnp.float32)
    return jax.pure_callback(run, out, *request, vmap_method="sequential")


def delta_reference(request: Correction, experts: SplitExperts) -> Float[Array, "T D"]:
    """Compute delta in plain JAX, float32, one token at a time: the definition of every other executor."""
    if experts.records is None:
        raise ValueError("executor='reference' needs the residual records as an array; load with executor='reference'")
    records, width = experts.records, request.x.shape[-1]
    at = _host.record_layout(experts.base_bits, experts.residual_bits, width)
    b, r = experts.base_bits, experts.residual_bits
    scale_bytes = width // GROUP_SIZE * 2

    def halves(record: UInt8[Array, "k F R"], name: str) -> Float[Array, "k F G"]:
        part = record[..., at[name] : at[name] + scale_bytes]
        return jax.lax.bitcast_convert_type(part.reshape(*part.shape[:-1], -1, 2), jnp.float16)

    def rows(record: UInt8[Array, "k F R"], name: str, bits: int) -> Float[Array, "k F D"]:
        codes = record[..., at[name] : at[name] + width * bits // 8]
        scale = halves(record, name + "_scale")
        if name == "b2":
            return dequantize_rows(codes, scale, halves(record, "b2_offset"), bits=bits)
        middle = scale.astype(jnp.float32) * (-(2**bits - 1) / 2)
        return dequantize_rows(codes, scale, middle, bits=bits)

    def token(args) -> Float[Array, " D"]:
        x, ids, weights, u0, v0, h0, mask = args
        record = records[request.layer, jnp.maximum(ids, 0)]
        du = jnp.einsum("kfd,d->kf", rows(record, "r1", r), x, precision="highest")
        dv = jnp.einsum("kfd,d->kf", rows(record, "r3", r), x, precision="highest")
        h = gated(u0 + du, v0 + dv, experts.swiglu_limit)
        g = jnp.where((ids >= 0)[:, None] & mask, weights[:, None], 0)
        b2 = rows(record, "b2", b)
        for_base = jnp.einsum("kf,kfd->d", g * (h - h0), b2, precision="highest")
        return for_base + jnp.einsum("kf,kfd->d", g * h, rows(record, "r2", r), precision="highest")

    return jax.lax.map(token, tuple(request[:-1]))
