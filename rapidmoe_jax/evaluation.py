"""Measure what the split costs: loss, KL and top-1 agreement against the float model, policy by policy.

Every token is corrected as in decoding (a policy step of its own), teacher-forced over windows of held-out text.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rapidmoe_jax import steps
from rapidmoe_jax.model import Model
from rapidmoe_jax.policy import CorrectAll, Fraction, NoCorrection, Policy, make_policy, policy_name

FRACTIONS = (0.05, 0.10, 0.15, 0.25, 0.50)


def read_tokens(path: str | Path) -> np.ndarray:
    """Read token ids from a .npy file or a JSON list. Raises ValueError if it is neither."""
    path = Path(path)
    try:
        ids = np.load(path) if path.suffix == ".npy" else np.array(json.loads(path.read_text()))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read as token ids ({e}); use a .npy array or a JSON list") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: holds {ids.dtype} of shape {list(ids.shape)}, wanted a list of integers")
    return ids


def evaluate(
    model: Model,
    reference: Model,
    tokens: np.ndarray,
    *,
    fractions: Sequence[float] = FRACTIONS,
    policies: Sequence[str | Policy] = (),
    window: int | None = None,
    windows: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare a split model under several policies with its float model.

    Args:
      model: a split model; its policy is left as it is.
      reference: the float model.
      tokens: token ids; window i is tokens[n*i : n*i + n] as input, predicting the next token of each.
      fractions: shares of unit bytes between none and all.
      policies: further ones to add as rows.
      window: n, tokens a window; None = 1024 or what the model allows.
      windows: how many.
      progress: called with (windows done, windows in all), over all rows.
    Returns: {"float": {"nll", "perplexity"}, "rows": [{"policy", "fraction", "nll", "perplexity", "kl",
      "top1_agreement", "host_bytes_per_token", "device_bytes"}], "tokens"}; nll and kl in nats a token.
    Raises: ValueError if the text is too short or a model is of the wrong kind.
    """
    if not model.is_split or reference.is_split:
        raise ValueError("evaluate: wanted a split model and the float model it came from")
    if model.config != reference.config:
        raise ValueError("evaluate: the split model and the float model have different configurations")
    n = window or min(1024, model.max_cache_len)
    if not 1 <= n <= model.max_cache_len:
        raise ValueError(f"evaluate: window={n} is outside 1..{model.max_cache_len}, the cache length")
    if windows < 1 or len(tokens) < n * windows + 1:
        raise ValueError(f"evaluate: {windows} window(s) of {n} need {n * windows + 1} tokens, got {len(tokens)}; "
                         "ask for fewer windows")  # fmt: skip
    if int(np.max(tokens)) >= model.config.vocab_size or int(np.min(tokens)) < 0:
        raise ValueError(f"evaluate: token ids up to {int(np.max(tokens))}, the model has {model.config.vocab_size}")
    tokens = tokens[: n * windows + 1].astype(np.int32)
    rows: list[tuple[Policy, float | None]] = [(NoCorrection(), 0.0)]
    rows += [(Fraction(f), f) for f in sorted(fractions)]
    rows += [(make_policy(p), None) for p in policies]
    rows += [(CorrectAll(), 1.0)]
    sums = np.zeros((len(rows) + 1, 4))
    total = windows * len(rows)
    for w in range(windows):
        inputs, targets = tokens[w * n : w * n + n], tokens[w * n + 1 : w * n + n + 1]
        ref, _ = steps.score_step(reference.config, reference.params, reference.experts, inputs, NoCorrection())
        sums[0, :3] += np.asarray(steps.compare_logits(ref, ref, targets))
        for i, (policy, _) in enumerate(rows):
            if progress:
                progress(w * len(rows) + i, total)
            logits, stats = steps.score_step(model.config, model.params, model.experts, inputs, policy)
            sums[i + 1, :3] += np.asarray(steps.compare_logits(logits, ref, targets))
            sums[i + 1, 3] += int(stats.units)
    if progress:
        progress(total, total)
    means = sums / (windows * n)
    return {
        "float": {"nll": means[0, 0], "perplexity": math.exp(means[0, 0])},
        "rows": [
            {
                "policy": policy_name(policy),
                "fraction": fraction,
                "nll": nll,
                "perplexity": math.exp(nll),
                "kl": kl,
                "top1_agreement": agreement,
                "host_bytes_per_token": units * model.record_bytes,
                "device_bytes": model.device_bytes,
            }
            for (policy, fraction), (nll, kl, agreement, units) in zip(rows, means[1:].tolist(), strict=True)
        ],
        "tokens": windows * n,
    }
