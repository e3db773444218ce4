"""`rapidmoe bench`: time prefill and decode of a loaded model, several policies in one run."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rapidmoe_jax.machine import machine
from rapidmoe_jax.model import Model
from rapidmoe_jax.policies import policy_name


def bench(
    model: Model,
    *,
    prompt_tokens: int = 256,
    new_tokens: int = 64,
    repeats: int = 5,
    policies: Sequence[str] = ("none",),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Time generation of one row under the model's policy, and under others for comparison.

    Policies take turns, so that a change of the machine's speed meets all of them; medians over `repeats`.

    Returns: {"prefill_tok_per_s", "decode_tok_per_s", "ttft_s", "tpot_s", "host_bytes_per_token", "device_bytes",
      "policy", "machine", "prompt_tokens", "new_tokens", "compared": {policy: {"decode_tok_per_s", "tpot_s",
      "ttft_s", "tpot_ratio"}}}; tpot_ratio = the model's policy over that one.
    """
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt_tokens).tolist()
    own = model.policy
    runs: dict[str, list[Any]] = {"own": [], **{p: [] for p in policies}}
    done, total = 0, (repeats + 1) * len(runs)
    try:
        for repeat in range(repeats + 1):
            for name, results in runs.items():
                model.policy = own if name == "own" else name
                result = model.generate(ids, max_new_tokens=new_tokens)
                if repeat:  # the first round compiles
                    results.append(result)
                done += 1
                if progress:
                    progress(done, total)
    finally:
        model.policy = own
    medians = {
        name: {
            "ttft_s": statistics.median(r.ttft_s for r in results),
            "tpot_s": statistics.median(r.tpot_s for r in results),
        }
        for name, results in runs.items()
    }
    mine = medians.pop("own")
    compared = {
        name: {**m, "decode_tok_per_s": 1 / m["tpot_s"], "tpot_ratio": mine["tpot_s"] / m["tpot_s"]}
        for name, m in medians.items()
    }
    return {
        "prefill_tok_per_s": prompt_tokens / mine["ttft_s"],
        "decode_tok_per_s": 1 / mine["tpot_s"],
        **mine,
        "host_bytes_per_token": runs["own"][-1].residual.host_bytes_per_token,
        "device_bytes": model.device_bytes,
        "policy": policy_name(own),
        "machine": machine(),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "compared": compared,
    }
