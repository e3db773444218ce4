"""Does budget_us hold? The controller against a simulated host with jitter, drift, bursts and a second process.

    python tests/bench/bench_controller.py

The host: a step takes base + bytes / rate, the host's part times a slow drift (AR(1), 5 %), each layer's share times
8 % jitter, one layer in 200 a burst of 1.8 x. At half of the run another process takes half of the cores: host times
double; later it goes away. Error = |measured - budget| / budget. The baseline is the frozen cost model.
"""

import argparse
import json

import numpy as np

from rapidmoe_jax.controller import START, CostModel, budget_policy, update
from rapidmoe_jax.policies import BudgetTime

COST = CostModel(base_us=9000.0, round_trip_us=1500.0, bytes_per_us=60_000.0)  # 48 layers, 60 GB/s
BUDGET_US, LAYERS, MAX_BYTES = 20_000.0, 48, 4 * 10**9


def run(steps: int, adaptive: bool, seed: int) -> np.ndarray:
    """Simulate; the second process is there from 1/2 to 3/4 of the steps. Returns measured times."""
    rng = np.random.default_rng(seed)
    policy, state, drift, times = BudgetTime(BUDGET_US, adaptive), START, 0.0, np.zeros(steps)
    for i in range(steps):
        host_bytes = float(budget_policy(policy, COST, state, MAX_BYTES).budget_bytes) * rng.uniform(0.96, 1.0)
        drift = 0.98 * drift + 0.05 * np.sqrt(1 - 0.98**2) * rng.normal()
        layers = np.exp(rng.normal(0, 0.08, LAYERS)) * np.where(rng.random(LAYERS) < 1 / 200, 1.8, 1)
        load = 2.0 if steps // 2 <= i < 3 * steps // 4 else 1.0
        host = (COST.round_trip_us + host_bytes / COST.bytes_per_us) * layers.mean() * np.exp(drift) * load
        times[i] = COST.base_us + host
        state = update(state, COST, times[i], host_bytes)
    return times


def recovery(error: np.ndarray) -> int:
    """Steps until the mean error of 8 steps is within 10 %."""
    mean = np.convolve(error, np.ones(8) / 8, "valid")
    return int(np.argmax(mean < 0.1)) if (mean < 0.1).any() else len(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    n, out = args.steps, {}
    print(f"budget {BUDGET_US:.0f} us, {COST}, {args.runs} runs of {n} steps")
    for name, adaptive in (("adaptive", True), ("frozen", False)):
        times = np.stack([run(n, adaptive, seed) for seed in range(args.runs)])
        error = np.abs(times / BUDGET_US - 1)
        calm, loaded = slice(32, n // 2), slice(n // 2 + 32, 3 * n // 4)
        signed = times[:, calm] / BUDGET_US - 1
        lag = [float(np.corrcoef(s[:-k], s[k:])[0, 1]) for s in signed for k in (1, 2, 4, 8)]
        out[name] = {
            "p95_error": float(np.percentile(error[:, calm], 95)),
            "p95_error_loaded": float(np.percentile(error[:, loaded], 95)),
            "mean_us": float(times[:, calm].mean()),
            "recovery_steps_max": max(recovery(e[n // 2 :]) for e in error),
            "recovery_steps_after_max": max(recovery(e[3 * n // 4 :]) for e in error),
            "lowest_autocorrelation": float(np.reshape(lag, (-1, 4)).mean(0).min()),  # oscillation would be near -1
        }
        print(name, {k: round(v, 3) for k, v in out[name].items()})
    print(json.dumps({"bench": "controller", "budget_us": BUDGET_US, **out}))


if __name__ == "__main__":
    main()
