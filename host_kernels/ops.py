"""The host kernels as JAX operations on the CPU backend: thin wrappers of the XLA FFI handlers.

All work under jit, scan and vmap (sequential). The base of all layers goes in whole, with the layer as an operand, so
that a scan over layers copies no weights.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Float, Int32, UInt32

from rapidmoe_jax.config import GROUP_SIZE
from rapidmoe_jax.experts import SplitExperts


class Correction(NamedTuple):
    """What a residual correction reads: one step of one layer."""

    x: Float[Array, "T D"]  # float32, the experts' input
    expert_ids: Int32[Array, "T k"]  # -1 = no expert (padded or finished row)
    expert_weights: Float[Array, "T k"]  # routing weights
    u0: Float[Array, "T k F"]  # base-only values of every pair
    v0: Float[Array, "T k F"]
    h0: Float[Array, "T k F"]
    critical_mask: Bool[Array, "T k F"]  # True = corrected
    layer: Int32[Array, ""]  # counts layers with experts


def base_gate_up(
    x: Float[Array, "T D"], expert_ids: Int32[Array, "T k"], layer: Int32[Array, ""], experts: SplitExperts
) -> tuple[Float[Array, "T k F"], Float[Array, "T k F"], Float[Array, "T k F"]]:
    """Compute u0 = B1 x, v0 = B3 x, h0 = silu(u0) v0 of every routed pair.

    experts.exact: float32 activations; else int8 with a scale a group of 64.
    """
    out = jax.ShapeDtypeStruct((*expert_ids.shape, experts.codes.shape[3]), jnp.float32)
    call = jax.ffi.ffi_call("rapidmoe_base_gate_up", (out, out, out), vmap_method="sequential")
    base = (experts.codes, experts.scale, experts.offset)
    u0, v0, h0 = call(x, expert_ids, layer, *base, bits=np.int64(experts.base_bits), exact=experts.exact)
    return u0, v0, h0


def base_down(
    h0: Float[Array, "T k F"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    layer: Int32[Array, ""],
    experts: SplitExperts,
) -> Float[Array, "T D"]:
    """Compute y_base = sum over a token's slots of weight * B2 h0.

    experts.exact: float32 sums; else 15-bit integer coefficients, or bfloat16 for many tokens an expert where the
    processor multiplies that.
    """
    out = jax.ShapeDtypeStruct((h0.shape[0], experts.scale.shape[-1] * GROUP_SIZE), jnp.float32)
    call = jax.ffi.ffi_call("rapidmoe_base_down", out, vmap_method="sequential")
    base = (experts.codes, experts.scale, experts.offset)
    bits = np.int64(experts.base_bits)
    return call(h0, expert_ids, expert_weights, layer, *base, bits=bits, exact=experts.exact)


def _handler(name: str, shapes: Callable[..., list[tuple[tuple[int, ...], Any]]]) -> Callable[..., list[Array]]:
    """Make an operation of an FFI handler with a side effect in XLA, which then neither merges nor drops nor moves it.

    jax.ffi.ffi_call(has_side_effect=True) would also tell JAX, which then leaves its fast dispatch: 1.4 ms a decode
    step of the demo model (2 cores, 2026-12-01). Order comes from data: done takes start's ticket.

    Args:
      shapes: the operands' avals -> (shape, dtype) of each result.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **_: [ShapedArray(*result) for result in shapes(*avals)])
    mlir.register_lowering(primitive, jax.ffi.ffi_lowering(name, has_side_effect=True), platform="cpu")

    @functools.cache
    def compiled(**attributes):
        return jax.jit(functools.partial(primitive.bind, **attributes))

    primitive.def_impl(lambda *operands, **attributes: compiled(**attributes)(*operands))

    def call(*operands, **attributes):
        return sequential_vmap(functools.partial(primitive.bind, **attributes))(*operands)

    return call


_start = _handler("rapidmoe_residual_start", lambda *_: [((), jnp.uint32)])
_done = _handler("rapidmoe_residual_done", lambda _, y: [(y.shape, jnp.float32), ((2,), jnp.int32)])


def residual_start(request: Correction, experts: SplitExperts, *, replaces: bool = False) -> UInt32[Array, ""]:
    """Hand a correction to the worker pool and return its ticket without waiting.

    experts.exact: float32 throughout; else int8 activations and coefficients.

    Args:
      replaces: True if y_base leaves out the pairs whose units are all critical: the correction then gives their whole
        output, so that the base's half of W2 is not read twice.
    """
    limit = np.float32(experts.swiglu_limit)
    return _start(*request, store=np.int64(experts.store), exact=experts.exact, replaces=replaces, limit=limit)[0]


def residual_done(
    ticket: UInt32[Array, ""], y_base: Float[Array, "T D"]
) -> tuple[Float[Array, "T D"], Int32[Array, " 2"]]:
    """Wait for a correction; a ticket is good for one call.

    Returns: y_base + delta, and [records read, unit-tokens corrected] as the kernel counted them.
    """
    y, counts = _done(ticket, y_base)
    return y, counts
