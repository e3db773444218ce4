"""Measure what a decode step costs on this machine, for budgets in microseconds. Measured once, then cached on disk."""

import hashlib
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from rapidmoe_jax import steps
from rapidmoe_jax.cache import KVCache
from rapidmoe_jax.controller import CostModel
from rapidmoe_jax.machine import cache_folder, machine
from rapidmoe_jax.policies import BudgetBytes, NoCorrection
from rapidmoe_jax.sampling import Sampling
from rapidmoe_jax.store import write_json

STEPS = 24  # timed steps of each kind, in turns
_SLOTS = 64
_SHARES = (0.0, 0.1, 0.4)  # of the bytes a step could read


def cost_model(model: Any) -> CostModel:
    """Give the cost model of a loaded split model: from the cache folder, or measured now (seconds).

    Args:
      model: config, params, experts, folder, max_step_bytes.
    """
    key = machine() | {"model": str(model.folder.resolve()), "bytes": model.max_step_bytes}
    key |= {"exact": model.experts.exact, "executor": model.experts.executor}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / f"cost-{name}.json"
    try:
        return CostModel(**json.loads(file.read_text())["cost"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not measured yet, or not readable: measure
    cost = measure(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"cost": cost._asdict(), **key})
    return cost


def measure(model: Any) -> CostModel:
    """Time decode steps of one row without correction and at several budgets; medians, kinds in turns."""
    budgets = [share * model.max_step_bytes for share in _SHARES]
    policies = [NoCorrection(), *map(BudgetBytes, budgets)]
    cache = KVCache.allocate(model.config, 1, _SLOTS, model.params.embed.dtype)
    times: list[list[float]] = [[] for _ in policies]
    read: list[list[float]] = [[] for _ in policies]
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, STEPS + 2).astype(np.int32)
    sampling, live = Sampling.make(0.0, 0, 1.0, 0), np.ones(1, bool)
    for step, token in enumerate(tokens):
        position = np.full(1, step % _SLOTS, np.int32)
        for kind, policy in enumerate(policies):
            begin = time.perf_counter()
            out, cache, stats = steps.decode_step(
                model.config, model.params, model.experts, cache, token[None], position, live, policy, sampling,
                np.zeros(1, np.int32),
            )  # fmt: skip
            jax.block_until_ready(out)
            if step > 1:  # the first compile
                times[kind].append((time.perf_counter() - begin) * 1e6)
                read[kind].append(int(stats.units) * model.record_bytes)
    base, empty, some, many = (statistics.median(t) for t in times)
    spread = statistics.mean(read[3]) - statistics.mean(read[2])
    rate = spread / max(many - some, 1.0)
    return CostModel(base, max(empty - base, 0.0), rate)
