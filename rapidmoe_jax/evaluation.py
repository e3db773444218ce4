"""Measure what the split costs: loss, KL and top-1 agreement against the float model, policy by policy.

Every token is corrected as in decoding (a policy step of its own), teacher-forced over windows of held-out text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32

from rapidmoe_jax import steps
from rapidmoe_jax.model import Model
from rapidmoe_jax.policies import CorrectAll, Fraction, GlobalShare, NoCorrection, policy_name
from rapidmoe_jax.policy import Policy

FRACTIONS = (0.05, 0.10, 0.15, 0.25, 0.50)


class Text(NamedTuple):
    """Windows of held-out text; window i is tokens[size * i : size * (i + 1)], predicting the next token of each."""

    tokens: Int32[np.ndarray, " N"]
    size: int
    windows: int


def check_text(model: Model, reference: Model, tokens: np.ndarray, window: int | None, windows: int) -> Text:
    """Check that a split model and its float model can be compared on a text.

    Args:
      window: tokens a window; None = 1024 or what the model allows.
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
    return Text(tokens[: n * windows + 1].astype(np.int32), n, windows)


def compare_window(
    model: Model, reference: Model, text: Text, window: int, policies: Sequence[Policy]
) -> Iterator[Float64[np.ndarray, " 4"]]:
    """Run one window under several policies.

    Yields: sums over the window's tokens, first of the float model, then a policy: negative log-likelihood, KL, top-1
      agreement, records read.
    """
    n = text.size
    inputs, targets = (text.tokens[window * n + i : window * n + n + i] for i in (0, 1))
    ref, _ = steps.score_step(reference.config, reference.params, reference.experts, inputs, NoCorrection())
    yield np.append(np.asarray(steps.compare_logits(ref, ref, targets), np.float64), 0.0)
    for policy in policies:
        logits, stats = steps.score_step(model.config, model.params, model.experts, inputs, policy)
        yield np.append(np.asarray(steps.compare_logits(logits, ref, targets), np.float64), float(stats.units))


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
      tokens: token ids, at least window * windows + 1.
      fractions: shares of unit bytes between none and all: policy share on a calibrated checkpoint, else fraction.
      policies: further ones to add as rows.
      window: tokens a window; None = 1024 or what the model allows.
      windows: how many.
      progress: called with (windows done, windows in all), over all rows.
    Returns: {"float": {"nll", "perplexity"}, "rows": [{"policy", "fraction", "nll", "perplexity", "kl",
      "top1_agreement", "host_bytes_per_token", "device_bytes"}], "tokens"}; nll and kl in nats a token, fraction the
      share of unit bytes that was read.
    Raises: ValueError if the text is too short, a model is of the wrong kind or a policy does not suit it.
    """
    text = check_text(model, reference, tokens, window, windows)
    share = GlobalShare if model.is_calibrated else Fraction
    rows = [NoCorrection(), *(share(f) for f in sorted(fractions)), *map(model.check_policy, policies), CorrectAll()]
    sums, total = np.zeros((len(rows) + 1, 4)), windows * (len(rows) + 1)
    for w in range(windows):
        for i, new in enumerate(compare_window(model, reference, text, w, rows)):
            sums[i] += new
            if progress:
                progress(w * (len(rows) + 1) + i + 1, total)
    (nll, *_), *each = (sums / (windows * text.size)).tolist()
    return {
        "float": {"nll": nll, "perplexity": math.exp(nll)},
        "rows": [row(model, policy, *mean) for policy, mean in zip(rows, each, strict=True)],
        "tokens": windows * text.size,
    }


def row(model: Model, policy: Policy, nll: float, kl: float, agreement: float, units: float) -> dict[str, Any]:
    """Name the means of one policy, as evaluate() does."""
    return {
        "policy": policy_name(policy),
        "fraction": units * model.record_bytes / model.max_step_bytes,
        "nll": nll,
        "perplexity": math.exp(nll),
        "kl": kl,
        "top1_agreement": agreement,
        "host_bytes_per_token": units * model.record_bytes,
        "device_bytes": model.device_bytes,
    }
