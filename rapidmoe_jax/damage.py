"""What calibration measures of one expert and one layer: second moments for the quantiser, damage for the policies.

A layer's lambda is the KL that its base does, over the sum of what it multiplies, g^2 ne / |x_t|^2: so the importance
of a unit is its predicted share of the KL, in nats, and layers compare. How many units of a layer lie above a
threshold is kept as a histogram: budgets are turned into thresholds with it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from rapidmoe_jax.calibration import LayerText
from rapidmoe_jax.rank import RANKS

POOLED_TOKENS = 300  # weight of the layer's pooled second moment against the tokens an expert saw
_SAMPLE = 512  # tokens of the layer that stand for all of them in the pooled moment of h
_LOG2_FIRST, _LOG2_STEP, _BINS = -64, 0.5, 140  # histogram of log2(g^2 ne / |x|^2)
_TAUS = 64
_PREFILL_TOKENS = 256


class ExpertText(NamedTuple):
    """What one expert sees of a text, and its second moments, tokens weighted by (routing weight / |x_t|)^2."""

    rows: Int32[np.ndarray, " n"]  # tokens routed to it
    slots: Int32[np.ndarray, " n"]
    x: Float[np.ndarray, "n D"]
    hidden: Float[np.ndarray, "n F"]  # of the float expert
    h_x: Float[np.ndarray, "D D"]
    h_h: Float[np.ndarray, "F F"]


class LayerExperts:
    """A layer's experts over a text; their second moments are shrunk to what all tokens of the layer give."""

    def __init__(self, text: LayerText):
        self.text = text
        self.weight = text.expert_weights**2 / np.maximum(text.stream_square, 1e-30)[:, None]
        self.pooled = _moment(text.x, self.weight.sum(1)) / text.expert_ids.size
        count = len(text.x)
        chosen = np.random.default_rng(0).choice(count, min(_SAMPLE, count), replace=False)
        self._sample, self._sample_weight = text.x[chosen], self.weight[chosen].mean(1)

    def see(self, expert: int, w: Float[np.ndarray, "3 F D"]) -> ExpertText:
        """Run an expert over its tokens; the moments of one that saw no token are the pooled ones."""
        rows, slots = (a.astype(np.int32) for a in np.nonzero(self.text.expert_ids == expert))
        x, weight, total = self.text.x[rows], self.weight[rows, slots], len(rows) + POOLED_TOKENS
        hidden = self.text.hidden(expert, x, w)[0]
        pooled_h = _moment(self.text.hidden(expert, self._sample, w)[0], self._sample_weight) / len(self._sample)
        h_x = (_moment(x, weight) + POOLED_TOKENS * self.pooled) / total
        return ExpertText(rows, slots, x, hidden, h_x, (_moment(hidden, weight) + POOLED_TOKENS * pooled_h) / total)


def _moment(a: Float[np.ndarray, "N K"], weight: Float[np.ndarray, " N"]) -> Float[np.ndarray, "K K"]:
    return (a * weight[:, None]).T @ a


class ExpertDamage(NamedTuple):
    """What one expert gives and what its base loses over a text."""

    result: Float[np.ndarray, "n D"]  # routing weight times the float expert's output
    error: Float[np.ndarray, "n D"]  # what the base's output differs by, 0 where the token is not probed
    histogram: Float[np.ndarray, " b"]  # probed units by log2(g^2 ne / |x|^2)
    importance: float  # their sum


def expert_damage(
    text: LayerText, expert: int, seen: ExpertText, w: np.ndarray, base: np.ndarray, norms: np.ndarray
) -> ExpertDamage:
    """Compare one expert with its base over a text.

    Args:
      w, base: float and dequantised base weights [3, F, D].
      norms: [F, 4] as in the checkpoint.
    """
    rows, x, g = seen.rows, seen.x, text.expert_weights[seen.rows, seen.slots][:, None]
    result = g * (seen.hidden @ w[2])
    error = np.zeros_like(result)
    probed = text.probe[rows]
    x, g = x[probed], g[probed]
    h0, by_u, by_v = text.hidden(expert, x, base)
    error[probed] = g * (h0 @ base[2]) - result[probed]
    r1, r3, r2, b2 = norms.astype(np.float32).T
    gate_up = by_u**2 * r1 + by_v**2 * r3  # the numpy twin of policy.unit_error
    ne = h0**2 * r2 + b2 * np.square(x).mean(1, keepdims=True) * gate_up
    damage = g**2 * ne / np.maximum(text.stream_square[rows][probed], 1e-30)[:, None]
    bins = np.floor((np.log2(np.maximum(damage, 1e-30)) - _LOG2_FIRST) / _LOG2_STEP).astype(int)
    histogram = np.bincount(np.clip(bins, 0, _BINS - 1).reshape(-1), minlength=_BINS).astype(np.float32)
    return ExpertDamage(result, error, histogram, float(damage.sum(dtype=np.float64)))


def summary(
    reports: Sequence[dict[str, Any]], damages: Sequence[float], routing: Sequence[np.ndarray], tokens: int
) -> dict[str, Any]:
    """Turn what the layers reported into the checkpoint's calibration record.

    Args:
      reports: of the layers with experts, with "histogram" and "importance".
      damages: predicted KL of each layer's base alone, summed over the probed tokens.
      routing: each layer's routing weights [n, k], largest first.
      tokens: probed tokens.
    Returns: lambda a layer; kl, nats a token, a layer; units, units a token by log2 of importance, a layer; rank.
    """
    importance = np.array([r["importance"] for r in reports])
    kl = np.maximum(np.array(damages), 1e-30)
    alpha = np.sqrt(kl / np.array([np.square(w).sum() for w in routing]))
    alpha /= alpha.mean()
    return {
        "lambda": (kl / np.maximum(importance, 1e-30)).tolist(),
        "kl": (kl / tokens).tolist(),
        "units": [(np.array(r["histogram"]) / tokens).tolist() for r in reports],
        "log2_first": _LOG2_FIRST,
        "log2_step": _LOG2_STEP,
        "rank": _rank_table(alpha, routing),
    }


def _rank_table(alpha: np.ndarray, routing: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Search the paper's tau: the share of the routed experts that each tau corrects, in decode and in prefill."""
    taus = np.geomspace(1e-3, alpha.max() * 1.01, _TAUS)
    top_k = routing[0].shape[1]
    allowed = np.array([r for r in RANKS if r <= top_k])

    def share(weights: Sequence[np.ndarray]) -> list[float]:
        shares = np.zeros((len(weights), _TAUS))
        for i, (a, w) in enumerate(zip(alpha, weights, strict=True)):
            passing = (a * w[:, :, None] > taus).cumprod(1).sum(1)  # [n, taus]
            shares[i] = (allowed[np.searchsorted(allowed, passing, side="right") - 1] / top_k).mean(0)
        return shares.mean(0).tolist()

    chunks = [
        np.stack([part.mean(0) for part in np.array_split(w, max(len(w) // _PREFILL_TOKENS, 1))]) for w in routing
    ]
    return {"alpha": alpha.tolist(), "tau": taus.tolist(), "decode": share(routing), "prefill": share(chunks)}
