"""UMIA: what a policy sees of a layer's step, and the importance of each unit. Pure; jit, vmap and scan compatible.

Predicted squared error of unit j of a pair, from base activations and four stored norms (design page, section 2):
    ne_j = h0^2 |R2|^2 + |B2|^2 mean(x^2) ((dh/du)^2 |R1|^2 + (dh/dv)^2 |R3|^2)       at u0, v0
Importance = lambda_layer * (priority_token [/ |x_t|^2 if lambda is calibrated]) * weight^2 * ne_j. With a calibrated
lambda it is in nats: the predicted part of the final KL that correcting the unit takes away.

A policy is any function from a LayerStep to its critical_mask [T, k, F]; policies.py has those with names. One that
takes a budget can look at what earlier layers of the step read (`spent`) and at what later ones are expected to ask for
(`calibration`). A small class, its numbers traced:

    @partial(jax.tree_util.register_dataclass, data_fields=["units"], meta_fields=[])
    @dataclass(frozen=True)
    class Best:
        units: int                                        # a layer and step

        def __call__(self, step):
            return choose_units(step, importance(step), self.units)

    model.policy = Best(200)                              # or load(..., policy=Best(200)); weights stay loaded
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num, Shaped

from rapidmoe_jax.activation import gated_slopes
from rapidmoe_jax.experts import Calibration

Leaf = Any  # a jax.Array, or whatever JAX puts in its place in a pytree
Number = int | float | Shaped[Array, ""]  # of a policy: traced, so that another value compiles nothing


# Fields of a LayerStep that hold one entry a token.
TOKEN_FIELDS = (
    "x", "expert_ids", "expert_weights", "u0", "v0", "h0", "norms", "mean_square", "stream_square", "priority",
)  # fmt: skip
_SHARED_FIELDS = ("spent", "layer", "calibration")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[*TOKEN_FIELDS, *_SHARED_FIELDS],
    meta_fields=["num_layers", "num_experts", "record_bytes", "swiglu_limit", "prefill"],
)
@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One layer's step as a policy sees it: T tokens, k routed slots, F units an expert.

    Fields are arrays; shapes are comments, as JAX also builds the class with other leaves (axes under vmap).
    """

    x: Leaf  # [T, D] the experts' input
    expert_ids: Leaf  # [T, k] int32, -1 = no expert
    expert_weights: Leaf  # [T, k] routing weights, any order
    u0: Leaf  # [T, k, F] base-only values
    v0: Leaf  # [T, k, F]
    h0: Leaf  # [T, k, F]
    norms: Leaf  # [T, k, F, 4] |R1|^2, |R3|^2, |R2|^2, |B2|^2 of each unit
    mean_square: Leaf  # [T] mean(x^2) of the experts' input
    stream_square: Leaf  # [T] |x_t|^2 of the stream entering the block
    priority: Leaf  # [T] pi_t >= 0; 0 = never corrected by importance
    spent: Leaf  # [] int32, records that earlier layers of this step have read
    layer: Leaf  # [] int32, counts layers with experts
    calibration: Calibration  # of all layers
    num_layers: int  # layers with experts, static
    num_experts: int  # E, static
    record_bytes: int  # host bytes a unit, static
    swiglu_limit: float = 0.0  # of the experts' activation (activation.py), static
    prefill: bool = False  # static

    @property
    def layer_weight(self) -> Leaf:
        """Give this layer's lambda."""
        return self.calibration.layer_weight[self.layer]


Policy = Callable[[LayerStep], Bool[Array, "T k F"]]


def unit_error(step: LayerStep) -> Float[Array, "T k F"]:
    """Predict the squared error ne_j of each unit of each pair; 0 where there is no expert."""
    _, by_u, by_v = gated_slopes(step.u0, step.v0, step.swiglu_limit)
    r1, r3, r2, b2 = jnp.moveaxis(step.norms.astype(jnp.float32), -1, 0)
    mean_square = step.mean_square[:, None, None]
    error = step.h0**2 * r2 + b2 * mean_square * (by_u**2 * r1 + by_v**2 * r3)
    return jnp.where((step.expert_ids >= 0)[..., None], error, 0)


def importance(step: LayerStep) -> Float[Array, "T k F"]:
    """Give UMIA's value of correcting each unit for each pair: larger = more critical."""
    token = jnp.where(
        step.calibration.calibrated, step.priority / jnp.maximum(step.stream_square, 1e-30), step.priority
    )
    return step.layer_weight * (token[:, None] * step.expert_weights**2)[..., None] * unit_error(step)


def largest_mask(values: Float[Array, " N"], count: int | Num[Array, ""]) -> Bool[Array, " N"]:
    """Mark the `count` largest values without a sort: bisection over the order of float bit patterns.

    Args:
      values: NaN and -inf are never marked.
      count: may be traced; more than there are values to mark = all of them.
    Returns: True for the largest; ties go to the lower index.
    """
    values = jnp.where(jnp.isnan(values), -jnp.inf, values).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.int32)  # + 0.0: -0.0 and 0.0 tie
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # int order = float order
    able = values > -jnp.inf
    count = jnp.minimum(jnp.asarray(count, jnp.int32), able.sum(dtype=jnp.int32))

    def halve(_, bounds):  # invariant: at least count values are >= low, fewer than count are >= high
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low & 1) + (high & 1)) // 2
        enough = jnp.sum(order >= middle, dtype=jnp.int32) >= count
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = jnp.int32(-(2**31)) + jnp.zeros_like(count), jnp.int32(0x7F800001) + jnp.zeros_like(count)
    threshold, _ = jax.lax.fori_loop(0, 32, halve, start)
    above, equal = order > threshold, order == threshold
    room = count - above.sum(dtype=jnp.int32)
    return (above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))) & able & (count > 0)


def _unit_slots(expert_ids: Int32[Array, "T k"], num_experts: int) -> tuple[Int32[Array, " P"], int]:
    """Number the step's experts so that pairs of one expert share a number in 0..slots-1 (static, small)."""
    ids = expert_ids.reshape(-1)
    if ids.size > num_experts:
        return jnp.where(ids < 0, num_experts, ids), num_experts + 1
    same = ids[:, None] == ids[None, :]
    return jnp.argmax(same, axis=1).astype(jnp.int32), ids.size  # the first pair with this expert


def count_units(mask: Bool[Array, "T k F"], expert_ids: Int32[Array, "T k"], num_experts: int) -> Int32[Array, ""]:
    """Count the (expert, unit) records a mask makes the host read: each once, however many tokens share it."""
    if mask.shape[0] == 1:  # a token's experts are distinct
        return mask.sum(dtype=jnp.int32)
    slot, slots = _unit_slots(expert_ids, num_experts)
    return jax.ops.segment_max(mask.reshape(-1, mask.shape[-1]), slot, slots).sum(dtype=jnp.int32)


def choose_units(
    step: LayerStep,
    values: Float[Array, "T k F"],
    count: Num[Array, ""] | int | None = None,
    *,
    share: Num[Array, ""] | float | None = None,
    above: Num[Array, ""] | float | None = None,
) -> Bool[Array, "T k F"]:
    """Keep the units with the largest value, each summed over the step's tokens that share it.

    Tokens without an expert or of priority 0 neither add value nor are corrected. NaN is never kept; ties go to the
    lower (slot, unit).

    Args:
      values: larger = more critical.
      count: keep at most this many; may be traced, as may the others.
      share: keep at most this share of the units the step could read, 0..1.
      above: keep none of a smaller value.
    """
    t, k, f = values.shape
    eligible = (step.expert_ids >= 0) & (step.priority > 0)[:, None]
    slot, slots = _unit_slots(step.expert_ids, step.num_experts)
    total = jax.ops.segment_sum(jnp.where(eligible[..., None], values, 0).reshape(-1, f), slot, slots)
    active = jax.ops.segment_max(eligible.reshape(-1).astype(jnp.int32), slot, slots) > 0
    total = jnp.where(active[:, None], total, -jnp.inf)
    if above is not None:
        total = jnp.where(total >= above, total, -jnp.inf)
    if share is not None:
        count = jnp.floor(share * (active.sum() * f).astype(jnp.float32) + 1e-3)
    if count is None:
        chosen = total > -jnp.inf
    else:
        chosen = largest_mask(total.reshape(-1), count).reshape(slots, f)
    return chosen[slot].reshape(t, k, f) & eligible[..., None]
