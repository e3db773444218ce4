"""The mixture-of-experts layer: route, base, critical set, correction, combine.

    y = sum over slots of weight * expert(x)  =  y_base + delta

Flow of a split layer: gate/up from the base -> policy -> start the correction -> down from the base -> done.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from rapidmoe_jax import residual
from rapidmoe_jax.activation import gated
from rapidmoe_jax.experts import FloatExperts, SplitExperts
from rapidmoe_jax.host_kernels import ops
from rapidmoe_jax.pallas import reference
from rapidmoe_jax.policies import NoCorrection
from rapidmoe_jax.policy import TOKEN_FIELDS, LayerStep, Policy, count_units, unit_error

_TOKENS_AT_ONCE = 128  # of critical_mask token by token: bounds what a policy gathers


class MoEStats(NamedTuple):
    """What the residual did in one or more layer steps."""

    units: Int32[Array, "*T"]  # records read, each once a step; one entry a token if each is a step of its own
    unit_tokens: Int32[Array, ""]  # (token, unit) corrections
    error: Float[Array, ""]  # predicted squared error of the base, weight^2 ne summed
    corrected: Float[Array, ""]  # the part of it that the critical set covers


class StepContext(NamedTuple):
    """What a layer needs to know of the step besides its activations."""

    live: Bool[Array, " T"]  # False: a padded or finished row; no expert runs for it
    priority: Float[Array, " T"]  # pi_t of the policies
    per_token: bool = False  # True: each token is a step of its own for the policy, as in decoding one by one
    prefill: bool = False  # True: the tokens are a chunk of prompts

    def no_stats(self) -> MoEStats:
        """Give the stats of a step that has done nothing yet."""
        units = jnp.zeros(self.live.shape if self.per_token else (), jnp.int32)
        return MoEStats(units, jnp.int32(0), jnp.float32(0), jnp.float32(0))


def moe_layer(
    x: Float[Array, "T D"],
    stream_square: Float[Array, " T"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    layer: Int32[Array, ""],
    experts: FloatExperts | SplitExperts,
    policy: Policy,
    context: StepContext,
    spent: Int32[Array, "*T"],
    bias: Float[Array, "E F 2"] | None = None,
) -> tuple[Float[Array, "T D"], MoEStats]:
    """Run the routed experts of one layer.

    Args:
      x: the experts' input, float32 or bfloat16; results are float32.
      stream_square: |x_t|^2 of the stream entering the block, before its norm.
      expert_ids, expert_weights: from the family's router.
      layer: counts layers with experts.
      spent: records that earlier layers of the step have read, as in MoEStats.units.
      bias: of gate and up. (That of down does not depend on the experts' work: the caller adds it.)
    """
    x = x.astype(jnp.float32)
    expert_ids = jnp.where(context.live[:, None], expert_ids, -1)
    expert_weights = jnp.where(expert_ids >= 0, expert_weights, 0).astype(jnp.float32)
    if isinstance(experts, FloatExperts):
        y = float_experts(x, expert_ids, expert_weights, experts.weights[layer], bias, experts.swiglu_limit)
        return y, context.no_stats()

    base = ops if experts.base_kernel == "host" else reference
    u0, v0, h0 = base.base_gate_up(x, expert_ids, layer, experts)
    if bias is not None:
        near = jnp.where((expert_ids >= 0)[..., None, None], bias[jnp.maximum(expert_ids, 0)], 0).astype(jnp.float32)
        u0, v0 = u0 + near[..., 0], v0 + near[..., 1]
    if bias is not None or experts.swiglu_limit:
        h0 = jnp.where((expert_ids >= 0)[..., None], gated(u0, v0, experts.swiglu_limit), 0)
    if experts.executor == "off" or isinstance(policy, NoCorrection):
        return base.base_down(h0, expert_ids, expert_weights, layer, experts), context.no_stats()

    step = LayerStep(
        expert_ids=expert_ids,
        expert_weights=expert_weights,
        u0=u0,
        v0=v0,
        h0=h0,
        norms=_gather_norms(experts, layer, expert_ids),
        mean_square=jnp.mean(x**2, -1),
        stream_square=stream_square,
        priority=context.priority * context.live,
        x=x,
        spent=spent,
        layer=layer,
        calibration=experts.calibration,
        num_layers=experts.codes.shape[0],
        swiglu_limit=experts.swiglu_limit,
        num_experts=experts.num_experts,
        record_bytes=experts.record_bytes,
        prefill=context.prefill,
    )
    mask = critical_mask(step, policy, per_token=context.per_token)
    request = ops.Correction(x, expert_ids, expert_weights, u0, v0, h0, mask, layer)
    # On one and the same processor a pair with every unit critical is left to the correction: W2's base is read once.
    replaces = experts.executor == "host" and base is ops
    pending = residual.start(request, experts, replaces=replaces)
    # The barrier keeps the base's second half after start, so that the two run side by side.
    h0, pending = jax.lax.optimization_barrier((h0, pending))
    base_ids = jnp.where(mask.all(-1), -1, expert_ids) if replaces else expert_ids
    y_base = base.base_down(h0, base_ids, expert_weights, layer, experts)
    y = residual.done(pending, y_base, experts)
    return y, _stats(step, mask, per_token=context.per_token)


def _gather_norms(
    experts: SplitExperts, layer: Int32[Array, ""], expert_ids: Int32[Array, "T k"]
) -> Float[Array, "T k F 4"]:
    """Take the norms of the routed experts. As bits: XLA's CPU would first widen the norms of all experts."""
    bits = experts.norms[layer, jnp.maximum(expert_ids, 0)]
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def critical_mask(step: LayerStep, policy: Policy, *, per_token: bool) -> Bool[Array, "T k F"]:
    """Ask the policy, for the whole step or token by token.

    Raises: ValueError if a user's policy returns another shape or dtype.
    """
    if per_token:
        tokens = {name: getattr(step, name) for name in (*TOKEN_FIELDS, "spent")}

        def one(token):
            fields = {name: value if name == "spent" else value[None] for name, value in token.items()}
            return policy(dataclasses.replace(step, **fields))[0]

        mask = jax.lax.map(one, tokens, batch_size=_TOKENS_AT_ONCE)
    else:
        mask = policy(step)
    if mask.shape != step.u0.shape or mask.dtype != bool:
        raise ValueError(
            f"policy {policy}: returned {mask.dtype} {list(mask.shape)}, wanted bool {list(step.u0.shape)} "
            "(critical_mask [T, k, F], True = corrected)"
        )
    return mask & (step.expert_ids >= 0)[..., None]


def _stats(step: LayerStep, mask: Bool[Array, "T k F"], *, per_token: bool) -> MoEStats:
    error = step.expert_weights[..., None] ** 2 * unit_error(step)
    unit_tokens = mask.sum(dtype=jnp.int32)
    one_by_one = mask.sum((1, 2), dtype=jnp.int32)
    units = one_by_one if per_token else count_units(mask, step.expert_ids, step.num_experts)
    return MoEStats(units, unit_tokens, error.sum(), jnp.where(mask, error, 0).sum())


def float_experts(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    weights: Float[Array, "E 3 F D"],
    bias: Float[Array, "E F 2"] | None = None,
    swiglu_limit: float = 0.0,
) -> Float[Array, "T D"]:
    """Run unsplit experts. Few pairs: pair by pair; many: expert by expert over all tokens."""
    shift = jnp.zeros((*weights.shape[::2], 2)) if bias is None else bias.astype(jnp.float32)
    if expert_ids.size < weights.shape[0]:

        def pair(total, args):
            token, expert, weight = args
            w, b = weights[jnp.maximum(expert, 0)], shift[jnp.maximum(expert, 0)]
            u, v = jnp.einsum("mfd,d->mf", w[:2], x[token], precision="highest") + b.T
            y = jnp.matmul(gated(u, v, swiglu_limit), w[2], precision="highest")
            return total.at[token].add(weight * y), None

        tokens = jnp.repeat(jnp.arange(x.shape[0]), expert_ids.shape[1])
        return jax.lax.scan(pair, jnp.zeros_like(x), (tokens, expert_ids.reshape(-1), expert_weights.reshape(-1)))[0]

    def one(total, args):
        expert, w, b = args
        weight = jnp.where(expert_ids == expert, expert_weights, 0).sum(-1)
        u, v = jnp.einsum("td,mfd->mtf", x, w[:2], precision="highest") + b.T[:, None]
        return total + weight[:, None] * jnp.matmul(gated(u, v, swiglu_limit), w[2], precision="highest"), None

    return jax.lax.scan(one, jnp.zeros_like(x), (jnp.arange(weights.shape[0]), weights, shift))[0]
