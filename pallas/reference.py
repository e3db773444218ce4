"""The base experts in plain XLA: the definition of the GPU kernels, and the path of platforms without one.

    u0 = B1 x,  v0 = B3 x,  h0 = silu(u0) v0,  y_base = sum over slots of weight * B2 h0
Weights are dequantised in float32 for the routed pairs of one token at a time. The functions have the signatures of
host_kernels/ops.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int32, UInt8

from rapidmoe_jax.config import GROUP_SIZE
from rapidmoe_jax.experts import SplitExperts
from rapidmoe_jax.quant import planes


def unpack_codes(packed: UInt8[Array, "*N P"], *, bits: int) -> UInt8[Array, "*N D"]:
    """Undo quant.pack() in JAX."""
    width = packed.shape[-1] * 8 // bits
    code = jnp.zeros((*packed.shape[:-1], width), jnp.uint8)
    start = 0
    for n, shift in planes(bits):
        size = width * n // 8
        part = packed[..., start : start + size].reshape(*packed.shape[:-1], -1, 1, 8 * n)
        shifts = (n * jnp.arange(8 // n, dtype=jnp.uint8))[:, None]
        code |= (((part >> shifts) & (2**n - 1)) << shift).reshape(code.shape)
        start += size
    return code


def dequantize_rows(
    packed: UInt8[Array, "*N P"], scale: Float16[Array, "*N G"], offset: Float[Array, "*N G"], *, bits: int
) -> Float[Array, "*N D"]:
    """Give the float32 weights of packed rows: scale * code + offset."""
    code = unpack_codes(packed, bits=bits).astype(jnp.float32)
    grouped = code.reshape(*code.shape[:-1], -1, GROUP_SIZE)
    grouped = grouped * scale.astype(jnp.float32)[..., None] + offset.astype(jnp.float32)[..., None]
    return grouped.reshape(code.shape)


def _matrices(experts: SplitExperts, layer: Int32[Array, ""], ids: Int32[Array, " k"], which: slice) -> Array:
    """Dequantise matrices of the routed experts of one token: [k, matrices, F, D]."""
    e = jnp.maximum(ids, 0)
    parts = (a[layer, e, which] for a in (experts.codes, experts.scale, experts.offset))
    return dequantize_rows(*parts, bits=experts.base_bits)


def base_gate_up(
    x: Float[Array, "T D"], expert_ids: Int32[Array, "T k"], layer: Int32[Array, ""], experts: SplitExperts
) -> tuple[Float[Array, "T k F"], Float[Array, "T k F"], Float[Array, "T k F"]]:
    """Compute u0, v0, h0 of every routed pair; zero where the expert id is -1."""

    def token(args):
        x_t, ids = args
        uv = jnp.einsum("kmfd,d->kmf", _matrices(experts, layer, ids, slice(0, 2)), x_t, precision="highest")
        return jnp.where((ids >= 0)[:, None, None], uv, 0)

    uv = jax.lax.map(token, (x.astype(jnp.float32), expert_ids))
    u0, v0 = uv[:, :, 0], uv[:, :, 1]
    return u0, v0, jax.nn.silu(u0) * v0


def base_down(
    h0: Float[Array, "T k F"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    layer: Int32[Array, ""],
    experts: SplitExperts,
) -> Float[Array, "T D"]:
    """Compute y_base."""

    def token(args):
        h_t, ids, weights = args
        w = _matrices(experts, layer, ids, slice(2, 3))[:, 0]
        return jnp.einsum("kfd,kf,k->d", w, h_t, jnp.where(ids >= 0, weights, 0), precision="highest")

    return jax.lax.map(token, (h0, expert_ids, expert_weights))
