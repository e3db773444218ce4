"""UMIA: which units of which routed experts the host corrects. Pure functions; jit, vmap and scan compatible.

Predicted squared error of unit j of a pair, from base activations and four stored norms (design page, section 2):
    ne_j = h0^2 |R2|^2 + |B2|^2 mean(x^2) ((silu'(u0) v0)^2 |R1|^2 + silu(u0)^2 |R3|^2)
Importance = lambda_layer * (priority_token [/ |x_t|^2 if lambda is calibrated]) * weight^2 * ne_j.

A policy is any function from a LayerStep to its critical_mask [T, k, F]. Those here are small frozen classes whose
numbers are traced, so that changing a fraction compiles nothing:

    def my_policy(step):                       # load(..., policy=my_policy)
        return importance(step) > 1e-6
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num, Shaped

Leaf = Any  # a jax.Array, or whatever JAX puts in its place in a pytree
RANKS = (0, 1, 2, 3, 4, 6)  # values of r the paper's rule may take


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "expert_ids",
        "expert_weights",
        "u0",
        "v0",
        "h0",
        "norms",
        "mean_square",
        "stream_square",
        "priority",
        "layer_weight",
        "calibrated",
    ],
    meta_fields=["num_experts"],
)
@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One layer's step as a policy sees it: T tokens, k routed slots, F units an expert.

    Fields are arrays; shapes are comments, as JAX also builds the class with other leaves (axes under vmap).
    """

    expert_ids: Leaf  # [T, k] int32, -1 = no expert
    expert_weights: Leaf  # [T, k] routing weights, any order
    u0: Leaf  # [T, k, F] base-only values
    v0: Leaf  # [T, k, F]
    h0: Leaf  # [T, k, F]
    norms: Leaf  # [T, k, F, 4] |R1|^2, |R3|^2, |R2|^2, |B2|^2 of each unit
    mean_square: Leaf  # [T] mean(x^2) of the experts' input
    stream_square: Leaf  # [T] |x_t|^2 of the stream entering the block
    priority: Leaf  # [T] pi_t >= 0; 0 = never corrected by importance
    layer_weight: Leaf  # [] lambda
    calibrated: Leaf  # [] bool, True: lambda was measured against errors divided by |x_t|^2
    num_experts: int  # E, static


Policy = Callable[[LayerStep], Bool[Array, "T k F"]]


def unit_error(step: LayerStep) -> Float[Array, "T k F"]:
    """Predict the squared error ne_j of each unit of each pair; 0 where there is no expert."""
    sigmoid = jax.nn.sigmoid(step.u0)
    silu = step.u0 * sigmoid
    slope = sigmoid * (1 + step.u0 * (1 - sigmoid))
    r1, r3, r2, b2 = jnp.moveaxis(step.norms.astype(jnp.float32), -1, 0)
    mean_square = step.mean_square[:, None, None]
    error = step.h0**2 * r2 + b2 * mean_square * ((slope * step.v0) ** 2 * r1 + silu**2 * r3)
    return jnp.where((step.expert_ids >= 0)[..., None], error, 0)


def importance(step: LayerStep) -> Float[Array, "T k F"]:
    """Give UMIA's value of correcting each unit for each pair: larger = more critical."""
    token = jnp.where(step.calibrated, step.priority / jnp.maximum(step.stream_square, 1e-30), step.priority)
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


def _shared_choice(step: LayerStep, values: Float[Array, "T k F"], share: Float[Array, ""]) -> Bool[Array, "T k F"]:
    """Keep the units with the largest summed value, `share` of the units the step could read."""
    t, k, f = values.shape
    eligible = (step.expert_ids >= 0) & (step.priority > 0)[:, None]
    slot, slots = _unit_slots(step.expert_ids, step.num_experts)
    total = jax.ops.segment_sum(jnp.where(eligible[..., None], values, 0).reshape(-1, f), slot, slots)
    active = jax.ops.segment_max(eligible.reshape(-1).astype(jnp.int32), slot, slots) > 0
    total = jnp.where(active[:, None], total, -jnp.inf)
    count = jnp.floor(share * (active.sum() * f).astype(jnp.float32) + 1e-3)
    chosen = largest_mask(total.reshape(-1), count).reshape(slots, f)
    return chosen[slot].reshape(t, k, f) & eligible[..., None]


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoCorrection:
    """Correct nothing: the base alone."""

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Give a mask that is False everywhere."""
        return jnp.zeros(step.u0.shape, bool)

    def __str__(self) -> str:
        return "none"


@jax.tree_util.register_static
@dataclass(frozen=True)
class CorrectAll:
    """Correct every unit of every routed pair, prompt tokens included."""

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Give a mask that is True for every routed pair."""
        return jnp.broadcast_to((step.expert_ids >= 0)[..., None], step.u0.shape)

    def __str__(self) -> str:
        return "all"


@partial(jax.tree_util.register_dataclass, data_fields=["share"], meta_fields=[])
@dataclass(frozen=True)
class Fraction:
    """Correct a share of the units that a layer's step could read, those of largest importance.

    A unit that several tokens share counts once; its value is the sum over them. share: 0..1, traced.
    """

    share: float | Shaped[Array, ""]

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units; ties go to the lower (slot, unit), NaN importance is never chosen."""
        return _shared_choice(step, importance(step), jnp.asarray(self.share, jnp.float32))

    def __str__(self) -> str:
        return f"fraction={float(self.share):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["r"], meta_fields=[])
@dataclass(frozen=True)
class FixedRank:
    """Correct all units of the first r experts of each token, by routing weight. r: 0..k, traced."""

    r: int | Shaped[Array, ""]

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose whole experts; equal weights go to the lower slot."""
        return _first_experts(step, jnp.asarray(self.r, jnp.int32))

    def __str__(self) -> str:
        return f"rank={int(self.r)}"


@partial(jax.tree_util.register_dataclass, data_fields=["alpha", "tau"], meta_fields=[])
@dataclass(frozen=True)
class PaperRank:
    """The paper's rule: r = the largest of RANKS with alpha * mean over live tokens(w_(i)) > tau for all i <= r.

    Source: RapidMoE (arXiv 2610.01265), as the design page, section 1, tells it. w_(i): a token's i-th largest
    routing weight. alpha: of the layer, > 0; tau: of the phase.
    """

    alpha: float | Shaped[Array, ""]
    tau: float | Shaped[Array, ""]

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose whole experts, the same r for all tokens of the step."""
        live = (step.expert_ids >= 0).any(-1)
        ordered = -jnp.sort(-step.expert_weights, axis=-1)
        mean = jnp.where(live[:, None], ordered, 0).sum(0) / jnp.maximum(live.sum(), 1)
        passing = jnp.cumprod((self.alpha * mean > self.tau).astype(jnp.int32)).sum()
        allowed = jnp.asarray(RANKS, jnp.int32)
        return _first_experts(step, jnp.max(jnp.where(allowed <= passing, allowed, 0)))

    def __str__(self) -> str:
        return f"rank(alpha={float(self.alpha):g}, tau={float(self.tau):g})"


def _first_experts(step: LayerStep, r: Int32[Array, ""]) -> Bool[Array, "T k F"]:
    order = jnp.argsort(jnp.argsort(-step.expert_weights, axis=-1, stable=True), axis=-1)
    chosen = (order < r) & (step.expert_ids >= 0) & (step.priority > 0)[:, None]
    return jnp.broadcast_to(chosen[..., None], step.u0.shape)


def policy_name(policy: Policy) -> str:
    """Give a policy's name for reports: as make_policy reads it, or the name of a user's function."""
    if isinstance(policy, jax.tree_util.Partial):
        return getattr(policy.func, "__name__", "user")
    return str(policy)


def make_policy(value: str | Policy | None) -> Policy:
    """Turn what a user wrote into a policy.

    Args:
      value: "none", "all", "fraction=0.15", "rank=2" (fixed r), "rank=ALPHA,TAU" (the paper's rule), a policy
        object, or a function of a LayerStep. None = "none".
    Raises: ValueError with the accepted forms.
    """
    if value is None:
        return NoCorrection()
    if callable(value):
        known = isinstance(value, NoCorrection | CorrectAll | Fraction | FixedRank | PaperRank)
        return value if known else jax.tree_util.Partial(value)
    name, _, argument = value.strip().partition("=")
    try:
        numbers = [float(n) for n in argument.split(",")] if argument else []
    except ValueError:
        numbers = [math.nan]
    match name, numbers:
        case "none", []:
            return NoCorrection()
        case "all", []:
            return CorrectAll()
        case "fraction", [share] if 0 <= share <= 1:
            return Fraction(share)
        case "rank", [r] if r >= 0 and r == int(r):
            return FixedRank(int(r))
        case "rank", [alpha, tau] if alpha > 0:
            return PaperRank(alpha, tau)
    raise ValueError(
        f"policy={value!r} is not understood; use none, all, fraction=0..1 (share of unit bytes), rank=0,1,2,... "
        "(whole experts a token), rank=ALPHA,TAU or a function of a LayerStep"
    )
