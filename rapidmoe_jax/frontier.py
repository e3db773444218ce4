"""`rapidmoe frontier`: loss and KL against host bytes and against time, one curve a policy.

The product's policies beside those that show where they stand: random units, whole experts by routing weight, the
paper's rule, and an oracle that knows each unit's true error.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rapidmoe_jax.activation import gated
from rapidmoe_jax.bench import bench
from rapidmoe_jax.evaluation import Text, check_text, compare_window, row
from rapidmoe_jax.experts import FloatExperts, SplitExperts
from rapidmoe_jax.model import Model
from rapidmoe_jax.models.decoder import layer_runs
from rapidmoe_jax.pallas.reference import dequantize_rows
from rapidmoe_jax.policies import BudgetBytes, CorrectAll, Fraction, GlobalShare, NoCorrection, policy_name
from rapidmoe_jax.policy import LayerStep, Number, Policy, choose_units
from rapidmoe_jax.rank import RankShare
from rapidmoe_jax.store import write_json

SHARES = (0.02, 0.05, 0.10, 0.15, 0.25, 0.50)
_RANK_SHARES = (0.10, 0.25, 0.40, 0.55, 0.75)
_WEIGHTS = (0.85, 0.6, 0.4, 0.25, 0.15, 0.08)


@partial(jax.tree_util.register_dataclass, data_fields=["share"], meta_fields=[])
@dataclass(frozen=True)
class RandomUnits:
    """Correct units by lot, the same share in every layer; the lot is drawn from the token's activations."""

    share: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        seed = jax.lax.bitcast_convert_type(step.x.sum(), jnp.int32)
        return choose_units(step, jax.random.uniform(jax.random.key(seed), step.u0.shape), share=self.share)

    def __str__(self) -> str:
        return f"random={float(self.share):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclass(frozen=True)
class WeightyExperts:
    """Correct whole experts whose routing weight is at least `weight`."""

    weight: Number

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose whole experts."""
        chosen = (step.expert_ids >= 0) & (step.expert_weights >= self.weight)
        return jnp.broadcast_to(chosen[..., None], step.u0.shape)

    def __str__(self) -> str:
        return f"weight={float(self.weight):g}"


@partial(jax.tree_util.register_dataclass, data_fields=["share", "weights", "bias", "dots"], meta_fields=[])
@dataclass(frozen=True)
class Oracle:
    """Correct units above one threshold on their true error, lambda g^2 |h W2 - h0 B2|^2 / |x_t|^2."""

    share: Number
    weights: Any  # [L, E, 3, F, D] the float model's
    bias: Any  # [L, E, F, 2] of gate and up; None = none
    dots: Any  # [L, E, F, 3] |W2|^2, W2 . B2, |B2|^2

    def __call__(self, step: LayerStep) -> Bool[Array, "T k F"]:
        """Choose the units."""
        ids = jnp.maximum(step.expert_ids, 0)
        u, v = jnp.einsum("tkmfd,td->mtkf", self.weights[step.layer, ids, :2], step.x)
        if self.bias is not None:
            bias = self.bias[step.layer, ids]
            u, v = u + bias[..., 0], v + bias[..., 1]
        h, (w, wb, b) = gated(u, v, step.swiglu_limit), jnp.moveaxis(self.dots[step.layer, ids], -1, 0)
        error = h**2 * w - 2 * h * step.h0 * wb + step.h0**2 * b
        weight = step.priority / jnp.maximum(step.stream_square, 1e-30) * step.layer_weight
        values = (weight[:, None] * step.expert_weights**2)[..., None] * jnp.where(
            (step.expert_ids >= 0)[..., None], error, 0
        )
        return choose_units(step, values, above=GlobalShare(self.share).threshold(step))

    def __str__(self) -> str:
        return f"oracle={float(self.share):g}"


def _expert_bias(reference: Model) -> Float[Array, "L E F 2"] | None:
    if not reference.config.expert_bias:
        return None
    states = zip(layer_runs(reference.config), reference.params.runs, strict=True)
    return jnp.concatenate([state["mlp"]["gate_up_bias"][...] for (moe, _, _), state in states if moe])


def _second_dots(weights: Float[Array, "L E 3 F D"], experts: SplitExperts) -> Float[Array, "L E F 3"]:
    def layer(args):
        w, codes, scale, offset = args
        b = dequantize_rows(codes, scale, offset, bits=experts.base_bits)
        return jnp.stack([(w * w).sum(-1), (w * b).sum(-1), (b * b).sum(-1)], -1)

    parts = [a[:, :, 2] for a in (weights, experts.codes, experts.scale, experts.offset)]
    return jax.lax.map(layer, tuple(parts))


def curves(model: Model, reference: Model) -> dict[str, list[Policy]]:
    """Give the policies of each curve, by budget. Every curve also has the ends none and all."""
    assert isinstance(model.experts, SplitExperts) and isinstance(reference.experts, FloatExperts)
    weights = reference.experts.weights
    dots = _second_dots(weights, model.experts)
    return {
        "random units": [RandomUnits(s) for s in SHARES],
        "experts by routing weight": [WeightyExperts(w) for w in _WEIGHTS],
        "rank (the paper's rule)": [RankShare(s) for s in _RANK_SHARES],
        "fraction a layer": [Fraction(s) for s in SHARES],
        "budget_bytes a step": [BudgetBytes(s * model.max_step_bytes) for s in SHARES],
        "share (importance)": [GlobalShare(s) for s in SHARES],
        "oracle importance": [Oracle(s, weights, _expert_bias(reference), dots) for s in SHARES],
    }


def frontier(
    model: Model,
    reference: Model,
    tokens: np.ndarray,
    out: Path,
    *,
    window: int | None = None,
    windows: int = 4,
    timed: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure every curve; write OUT/frontier.json, and OUT/frontier.png where matplotlib is installed.

    What is measured goes to OUT/windows.json as it comes: the same call goes on where an interrupted one stopped.

    Args:
      model: a calibrated split model.
      reference, tokens, window, windows: as evaluate().
      timed: also time decode steps under each policy (not of the oracle).
      progress: called with (steps done, steps in all).
    Returns: {"curves": {name: [rows of evaluate(), with "tpot_s"]}, "ends": rows of none and all, "float", "tokens"}.
    Raises: ValueError as evaluate(); if the model is not calibrated; if OUT has another run's measurements.
    """
    text = check_text(model, reference, tokens, window, windows)
    if not model.is_calibrated:
        raise ValueError(f"frontier: {model.folder} was split without a calibration text; split it with --calibration")
    named = curves(model, reference)
    policies = [NoCorrection(), *(p for ps in named.values() for p in ps), CorrectAll()]
    names = [policy_name(p) for p in policies]
    out.mkdir(parents=True, exist_ok=True)
    sums, times = _measure(model, reference, text, policies, out, timed, progress)
    (nll, *_), *means = (sums / (windows * text.size)).tolist()
    rows = {}
    for name, policy, mean in zip(names, policies, means, strict=True):
        rows[name] = row(model, policy, *mean) | {"tpot_s": times.get(name)}
    result = {
        "float": {"nll": nll},
        "ends": [rows["none"], rows["all"]],
        "curves": {name: [rows[policy_name(p)] for p in ps] for name, ps in named.items()},
        "tokens": windows * text.size,
    }
    write_json(out / "frontier.json", result)
    return result


def _measure(
    model: Model, reference: Model, text: Text, policies: Sequence[Policy], out: Path, timed: bool, progress: Any
) -> tuple[np.ndarray, dict[str, float]]:
    """Run what OUT/windows.json does not have yet. Returns sums [1 + policies, 4] and seconds a token by name."""
    file, names = out / "windows.json", [policy_name(p) for p in policies]
    plan = {"model": str(model.folder.resolve()), "window": text.size, "policies": names,
            "tokens": int(text.tokens[: text.size].astype(np.int64).sum())}  # fmt: skip
    known = json.loads(file.read_text()) if file.exists() else {"plan": plan, "windows": {}, "times": {}}
    if known["plan"] != plan:
        raise ValueError(
            f"{file}: holds another model's, text's or release's measurements; remove it or choose another OUT"
        )
    to_time = [p for p in policies if timed and not isinstance(p, Oracle)]
    total = text.windows * (len(policies) + 1) + len(to_time)
    for w in range(text.windows):
        sums = known["windows"].get(str(w), [])
        if not sums:
            for i, new in enumerate(compare_window(model, reference, text, w, policies)):
                sums.append(new.tolist())
                if progress:
                    progress(w * (len(policies) + 1) + i + 1, total)
            known["windows"][str(w)] = sums
            write_json(file, known)
    own = model.policy
    for i, policy in enumerate(to_time):
        if policy_name(policy) not in known["times"]:
            model.policy = policy
            known["times"][policy_name(policy)] = bench(model, prompt_tokens=16, new_tokens=48, repeats=3, policies=())[
                "tpot_s"
            ]
            write_json(file, known)
        if progress:
            progress(total - len(to_time) + i + 1, total)
    model.policy = own
    sums = np.sum([known["windows"][str(w)] for w in range(text.windows)], axis=0)
    return sums, known["times"]


def plot(result: dict[str, Any], path: Path, title: str) -> None:
    """Draw KL and loss against host bytes, and KL against time, as PNG. Needs matplotlib (the extra `plot`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6))
    base, whole = result["ends"]
    for name, rows in result["curves"].items():
        style = {"marker": "o", "markersize": 3, "linewidth": 2.2 if "share" in name else 1.2,
                 "linestyle": "--" if "oracle" in name else "-", "label": name}  # fmt: skip
        kib = [r["host_bytes_per_token"] / 1024 for r in [*rows, whole]]
        axes[0].plot(kib, [r["kl"] for r in [*rows, whole]], **style)
        axes[1].plot(kib, [r["nll"] for r in [*rows, whole]], **style)
        seen = [r for r in [base, *rows, whole] if r["tpot_s"]]
        if len(seen) > 2:
            axes[2].plot([r["tpot_s"] * 1e3 for r in seen], [r["kl"] for r in seen], **style)
    for axis, label in zip(axes[:2], ("KL to the float model, nats a token", "loss, nats a token"), strict=True):
        axis.axhline(base["kl"] if axis is axes[0] else base["nll"], color="gray", linewidth=0.8, linestyle=":")
        axis.set(xlabel="host KiB a token", ylabel=label, xscale="log")
    axes[1].axhline(result["float"]["nll"], color="black", linewidth=0.8, linestyle=":")
    axes[0].set_yscale("log")
    axes[2].set(xlabel="ms a token, one row", ylabel="KL to the float model, nats a token", yscale="log")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{title}; dotted: base alone, float model")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
