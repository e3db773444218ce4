"""The policies by importance, as shares, budgets or thresholds, and the names of all policies.

Small frozen classes whose numbers are traced: changing a budget compiles nothing.
"""

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rapidmoe_jax.policy import LayerStep, Number, Policy, choose_units, importance
from rapidmoe_jax.rank import FixedRank, PaperRank, RankShare


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
    """Correct a share of the units that a layer's step could read, those of largest importance. share: 0..1.

    The same share in every layer; a unit that several tokens share counts once.
    """

    share: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        return choose_units(step, importance(step), share=jnp.asarray(self.share, jnp.float32))

    def __str__(self) -> str:
        return f"fraction={float(self.share):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["share"], meta_fields=[])
@dataclass(frozen=True)
class GlobalShare:
    """Correct all units above one threshold for all layers and tokens. share: of the unit bytes, in the mean, 0..1.

    Calibration tells the threshold that this share of the units passes; hard tokens get more than easy ones.
    """

    share: Number

    def threshold(self, step: LayerStep) -> Float[Array, ""]:
        """Give the importance, in nats, that the share passes."""
        able = step.num_layers * step.expert_ids.shape[1] * step.u0.shape[2]
        tau = _threshold(step, step.calibration.later_units[0], jnp.asarray(self.share, jnp.float32) * able)
        return jnp.where(jnp.asarray(self.share) >= 1, -jnp.inf, tau)

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        return choose_units(step, importance(step), above=self.threshold(step))

    def __str__(self) -> str:
        return f"share={float(self.share):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["nats"], meta_fields=[])
@dataclass(frozen=True)
class Quality:
    """Correct as much as leaves `nats` of predicted KL a token uncorrected, in the mean, by one threshold for all."""

    nats: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        nats = jnp.asarray(self.nats, jnp.float32)
        tau = jnp.exp2(jnp.interp(nats, step.calibration.left, step.calibration.log2_tau))
        return choose_units(step, importance(step), above=jnp.where(nats <= 0, -jnp.inf, tau))

    def __str__(self) -> str:
        return f"quality={float(self.nats):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["budget_bytes"], meta_fields=[])
@dataclass(frozen=True)
class BudgetBytes:
    """Read at most `budget_bytes` of unit records a step, all layers and tokens together.

    Each layer takes the units above the threshold at which it and the layers after it are expected to use up what is
    left; the last one takes the rest. Without calibration, layers get equal parts of what is left.
    """

    budget_bytes: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        _, slots, units = step.u0.shape
        budget = jnp.floor(jnp.asarray(self.budget_bytes, jnp.float32) / step.record_bytes)
        left = jnp.maximum(budget - step.spent.astype(jnp.float32), 0)
        layers = (step.num_layers - step.layer).astype(jnp.float32)
        pairs = ((step.priority > 0)[:, None] & (step.expert_ids >= 0)).sum()
        tau = _threshold(step, step.calibration.later_units[step.layer], left / jnp.maximum(pairs / slots, 1))
        enough = left >= layers * pairs * units
        calibrated = step.calibration.calibrated
        tau = jnp.where(calibrated & (layers > 1) & ~enough, tau, -jnp.inf)
        count = jnp.where(calibrated, left, jnp.ceil(left / layers))
        return choose_units(step, importance(step), count, above=tau)

    def __str__(self) -> str:
        return f"budget_bytes={float(self.budget_bytes):.0f}"


@partial(jax.tree_util.register_dataclass, data_fields=["budget_us"], meta_fields=["adaptive"])
@dataclass(frozen=True)
class BudgetTime:
    """Correct as much as a decode step of `budget_us` has time for. The model turns it into bytes, step by step.

    adaptive: True: bytes follow the measured step times; False: they follow the cost model alone, so that runs repeat.
    """

    budget_us: Number
    adaptive: bool = True

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Refuse: seconds mean nothing inside a step."""
        raise ValueError("budget_us is a policy of generate and bench; elsewhere use budget_bytes")

    def __str__(self) -> str:
        return f"budget_us={float(self.budget_us):g}" + ("" if self.adaptive else ",frozen")


def _threshold(step: LayerStep, units: Float[Array, " K"], wanted: Float[Array, ""]) -> Float[Array, ""]:
    """Give the threshold on importance that `wanted` units pass, of falling counts by threshold."""
    return jnp.exp2(jnp.interp(-wanted, -units, step.calibration.log2_tau))


FORMS = (
    "none, all, share=0..1 (of the unit bytes, one threshold for all layers), quality=NATS (predicted loss left), "
    "budget_bytes=N a step (KiB, MiB, GiB may follow), budget_us=N a decode step (,frozen may follow), fraction=0..1 "
    "(the same share in every layer), rank=0,1,2,... (whole experts a token), rank=ALPHA,TAU or rank_share=0..1 (the "
    "paper's rule)"
)


def needs_calibration(policy: Policy) -> bool:
    """True if a policy means something on a calibrated checkpoint only."""
    return isinstance(policy, GlobalShare | Quality | RankShare)


def policy_name(policy: Policy) -> str:
    """Give a policy's name for reports: as make_policy reads it, or the name of a user's function."""
    if isinstance(policy, jax.tree_util.Partial):
        return getattr(policy.func, "__name__", "user")
    return str(policy)


def make_policy(value: str | Policy | None) -> Policy:
    """Turn what a user wrote into a policy.

    Args:
      value: one of FORMS, a policy object, or a function of a LayerStep. None = "none".
    Raises: ValueError with the accepted forms.
    """
    if value is None:
        return NoCorrection()
    if callable(value):
        return value if _is_pytree(value) else jax.tree_util.Partial(value)
    name, _, argument = value.strip().partition("=")
    adaptive = not argument.endswith(",frozen")
    numbers = _numbers(argument.removesuffix(",frozen"), in_bytes=name == "budget_bytes")
    match name, numbers:
        case "none", [] if not argument:
            return NoCorrection()
        case "all", [] if not argument:
            return CorrectAll()
        case "fraction", [share] if 0 <= share <= 1:
            return Fraction(share)
        case "share", [share] if 0 <= share <= 1:
            return GlobalShare(share)
        case "quality", [nats] if nats >= 0:
            return Quality(nats)
        case "budget_bytes", [count] if count >= 0:
            return BudgetBytes(count)
        case "budget_us", [time] if time > 0:
            return BudgetTime(time, adaptive)
        case "rank", [r] if r >= 0 and r == int(r):
            return FixedRank(int(r))
        case "rank", [alpha, tau] if alpha > 0:
            return PaperRank(alpha, tau)
        case "rank_share", [share] if 0 <= share <= 1:
            return RankShare(share)
    raise ValueError(f"policy={value!r} is not understood; use {FORMS} or a function of a LayerStep")


def _is_pytree(policy: Any) -> bool:
    """True if JAX takes the policy apart itself, as it does a registered class."""
    return not jax.tree_util.all_leaves([policy])


def _numbers(text: str, *, in_bytes: bool) -> list[float]:
    if not text:
        return []
    unit = re.search(r"[KMG]iB$", text) if in_bytes else None
    scale = 1024 ** ("KMG".index(unit[0][0]) + 1) if unit else 1
    try:
        return [float(n) * scale for n in text.removesuffix(unit[0] if unit else "").split(",")]
    except ValueError:
        return [math.nan]
