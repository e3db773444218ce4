"""The policies by routing weight, whole experts at a time: a fixed number, and the paper's rule (the one to beat)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from rapidmoe_jax.policy import LayerStep, Number

RANKS = (0, 1, 2, 3, 4, 6)  # values of r the paper's rule may take


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

    alpha: Number
    tau: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose whole experts, the same r for all tokens of the step."""
        return _paper_rule(step, self.alpha, self.tau)

    def __str__(self) -> str:
        return f"rank={float(self.alpha):g},{float(self.tau):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["share"], meta_fields=[])
@dataclass(frozen=True)
class RankShare:
    """The paper's rule with the checkpoint's alpha a layer, and the tau that gives `share` of the bytes in the mean.

    Prefill and decode have a tau each, from the search that calibration made.
    """

    share: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose whole experts, the same r for all tokens of the step."""
        known = step.calibration
        shares = known.rank_prefill if step.prefill else known.rank_decode
        tau = jnp.interp(-jnp.asarray(self.share, jnp.float32), -shares, known.rank_tau)
        return _paper_rule(step, known.alpha[step.layer], tau)

    def __str__(self) -> str:
        return f"rank_share={float(self.share):g}"


def _paper_rule(step: LayerStep, alpha: Number, tau: Number) -> Bool[Array, "T k F"]:
    live = (step.expert_ids >= 0).any(-1)
    ordered = -jnp.sort(-step.expert_weights, axis=-1)
    mean = jnp.where(live[:, None], ordered, 0).sum(0) / jnp.maximum(live.sum(), 1)
    passing = jnp.cumprod((alpha * mean > tau).astype(jnp.int32)).sum()
    allowed = jnp.asarray(RANKS, jnp.int32)
    return _first_experts(step, jnp.max(jnp.where(allowed <= passing, allowed, 0)))


def _first_experts(step: LayerStep, r: Int32[Array, ""]) -> Bool[Array, "T k F"]:
    order = jnp.argsort(jnp.argsort(-step.expert_weights, axis=-1, stable=True), axis=-1)
    chosen = (order < r) & (step.expert_ids >= 0) & (step.priority > 0)[:, None]
    return jnp.broadcast_to(chosen[..., None], step.u0.shape)
