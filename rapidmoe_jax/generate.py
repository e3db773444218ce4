"""Generate text: prefill the prompts in chunks, then decode row by row until each is done.

Knows nothing of how experts run; steps.py does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rapidmoe_jax import steps
from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.controller import budget_policy, update
from rapidmoe_jax.moe import MoEStats
from rapidmoe_jax.policies import BudgetTime
from rapidmoe_jax.policy import Policy
from rapidmoe_jax.sampling import Sampling
from rapidmoe_jax.text import TextStream

CHUNKS = (16, 64, 256)  # prompt tokens a prefill step, the smallest that fits: few shapes to compile


class Piece(NamedTuple):
    """New text of one row while it is generated."""

    index: int  # which prompt
    token: int | None  # the token that brought it; None for text held back until the end
    text: str


@dataclass(frozen=True)
class ResidualReport:
    """What the residual did during a generation."""

    units: int  # records read from host memory
    host_bytes: int  # their bytes
    host_bytes_per_token: float  # over decoded tokens of all rows, prefill not counted
    error_share: float  # share of the predicted squared error that was corrected, 0..1, decode only


@dataclass(frozen=True)
class Generation:
    """One prompt's result."""

    text: str
    tokens: list[int]  # generated, without a final end-of-text token
    finish_reason: str  # "eos", "stop" (a stop string), "length" or "cancelled"
    prompt_tokens: int
    ttft_s: float  # from the call to the first token, of the whole batch
    tpot_s: float  # mean time a later decode step takes
    tok_per_s: float  # decoded tokens a second, all rows together
    residual: ResidualReport


class _Totals:
    """Sums of MoEStats over steps, read from the device when asked."""

    def __init__(self) -> None:
        self.steps: list[MoEStats] = []

    def sums(self) -> tuple[int, float, float]:
        units = sum(int(s.units) for s in self.steps)
        return units, sum((float(s.error) for s in self.steps), 0.0), sum((float(s.corrected) for s in self.steps), 0.0)


@dataclass
class _Row:
    stream: TextStream
    length: int
    tokens: list[int]
    reason: str | None = None


def prefill(
    model: Any, prompts: Sequence[Sequence[int]], cache: KVCache, policy: Policy
) -> tuple[Any, KVCache, list[MoEStats]]:
    """Run prompts of different lengths through the model, chunk by chunk.

    Returns: logits [B, V] after each prompt's last token, the cache, the stats of each chunk.
    """
    lengths = np.array([len(p) for p in prompts], np.int32)
    longest, start = int(lengths.max()), 0
    logits, stats = None, []
    while start < longest:
        size = next((c for c in CHUNKS if c >= longest - start), CHUNKS[-1])
        size = min(size, cache.k.shape[2] - start)
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + size]
            tokens[row, : len(part)] = part
        out, cache, new = steps.prefill_step(
            model.config,
            model.params,
            model.experts,
            cache,
            tokens,
            np.int32(start),
            lengths,
            policy,
            np.int32(model.prefill_tokens),
        )
        ends_here = (lengths > start) & (lengths <= start + size)
        logits = out if logits is None else jnp.where(ends_here[:, None], out, logits)
        stats.append(new)
        start += size
    return logits, cache, stats


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    callback: Callable[[Piece], bool | None] | None,
) -> Iterator[Piece | list[Generation]]:
    """Generate for a batch. Yields a Piece for each row and step that brings text, and at last the results.

    Args:
      model: config, params, experts, policy, prefill_tokens, codec; for a budget_us policy cost and controller.
      callback: called with each Piece; True ends the generation of all rows ("cancelled").
    """
    begin, policy = time.perf_counter(), model.policy  # a change of policy holds from the next call on
    timed = policy if isinstance(policy, BudgetTime) and model.is_split else None
    most = model.max_step_bytes * len(prompts)
    if timed:
        policy = budget_policy(timed, model.cost, model.controller, most)
    rows = [_Row(TextStream(model.codec, stop, p), len(p), []) for p in prompts]
    cache = KVCache.allocate(model.config, len(rows), model.cache_len(rows, max_new_tokens), model.params.embed.dtype)
    logits, cache, prefill_stats = prefill(model, prompts, cache, policy)
    count = np.zeros(len(rows), np.int32)
    token = np.asarray(steps.first_token(logits, sampling, count))
    ttft = time.perf_counter() - begin
    totals, decode_begin, cancelled = _Totals(), time.perf_counter(), False
    while True:
        step_begin = time.perf_counter()
        for piece in _take(rows, token, model.codec.eos_ids, max_new_tokens):
            cancelled |= bool(callback(piece)) if callback else False
            if piece.text:
                yield piece
        live = np.array([r.reason is None for r in rows])
        if cancelled or not live.any():
            break
        position = np.array([r.length + len(r.tokens) - 1 for r in rows], np.int32)
        count = np.array([len(r.tokens) for r in rows], np.int32)
        out, cache, new = steps.decode_step(
            model.config, model.params, model.experts, cache, token, position, live, policy, sampling, count
        )
        totals.steps.append(new)
        token = np.asarray(out)
        if timed and timed.adaptive:
            measured = (time.perf_counter() - step_begin) * 1e6
            if len(totals.steps) > 1:  # the first may compile
                host_bytes = int(new.units) * model.record_bytes
                model.controller = update(model.controller, model.cost, measured, host_bytes)
            policy = budget_policy(timed, model.cost, model.controller, most)
    decode_s = time.perf_counter() - decode_begin
    yield _results(model, rows, totals, prefill_stats, ttft, decode_s)


def _take(rows: list[_Row], token: np.ndarray, eos: frozenset[int], max_new_tokens: int) -> Iterator[Piece]:
    """Give each live row its new token; decide which are done."""
    for index, row in enumerate(rows):
        if row.reason is not None:
            continue
        new = int(token[index])
        if new in eos:
            row.reason = "eos"
            yield Piece(index, None, row.stream.finish())
            continue
        row.tokens.append(new)
        text = row.stream.add(new)
        if row.stream.stopped:
            row.reason = "stop"
        elif len(row.tokens) >= max_new_tokens:
            row.reason = "length"
            text += row.stream.finish()
            if row.stream.stopped:
                row.reason = "stop"
        yield Piece(index, new, text)


def _results(
    model: Any, rows: list[_Row], totals: _Totals, prefill_stats: list[MoEStats], ttft: float, decode_s: float
) -> list[Generation]:
    units, error, corrected = totals.sums()
    prefill_units = sum(int(s.units) for s in prefill_stats)
    decoded = sum(max(len(r.tokens) - 1, 0) for r in rows)
    record = model.record_bytes
    report = ResidualReport(
        units=units + prefill_units,
        host_bytes=(units + prefill_units) * record,
        host_bytes_per_token=units * record / decoded if decoded else 0.0,
        error_share=corrected / error if error else 0.0,
    )
    decode_steps = len(totals.steps)
    results = []
    for row in rows:
        row.stream.finish()
        results.append(
            Generation(
                text=row.stream.text,
                tokens=row.tokens,
                finish_reason=row.reason or "cancelled",
                prompt_tokens=row.length,
                ttft_s=ttft,
                tpot_s=decode_s / decode_steps if decode_steps else 0.0,
                tok_per_s=decoded / decode_s if decode_steps else 0.0,
                residual=report,
            )
        )
    return results
