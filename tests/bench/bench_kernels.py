"""Time the host kernels on one layer of a published shape, against this machine's read bandwidth.

    python tests/bench/bench_kernels.py [--shape qwen3-30b-a3b] [--base-bits 3] [--residual-bits 4] [--threads N]

Prints conditions, the ceiling (a plain vector sum over a buffer larger than the caches, same threads), then for each
kernel: time, bytes of codes and scales read a second, share of the ceiling, and XLA's time where there is a twin.
The last line is one JSON object. A run is one jitted scan over steps with different experts, so that neither the
caches nor Python's dispatch (some 300 us a call) are timed; the time is per step.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import published_case, random_experts, random_step

from rapidmoe_jax.bench import machine
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops, set_threads
from rapidmoe_jax.models.shapes import SHAPES
from rapidmoe_jax.pallas import reference

SHARES = (0.15, 0.25, 1.0)
STEPS = 8


def median_s(step, inputs, repeats: int, *operands) -> tuple[float, float]:
    """Median and spread (p90 - p10) of step(input, *operands), scanned over the stacked inputs, per input."""
    count = len(jax.tree.leaves(inputs)[0])

    @jax.jit
    def run(inputs, *operands):
        def body(total, one):
            return total + step(one, *operands).reshape(-1)[0], None

        return jax.lax.scan(body, jnp.float32(0), inputs)[0]

    jax.block_until_ready(run(inputs, *operands))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(inputs, *operands))
        times.append((time.perf_counter() - begin) / count)
    low, high = np.percentile(times, [10, 90])
    return statistics.median(times), float(high - low)


def measure_overlap(correct, requests, experts, repeats: int) -> dict[str, float]:
    """Time XLA work alone, a correction alone, and the work put between the correction's start and done."""
    size = 512
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)) / size

    def work(x, rounds):
        return jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ matrix), x)

    def alone(request, rounds):
        return work(jnp.broadcast_to(request.x[:1, :size], (size, size)), rounds)

    def between(request, rounds):
        ticket = ops.residual_start(request, experts)
        x, ticket = jax.lax.optimization_barrier((request.x, ticket))
        done = alone(request._replace(x=x), rounds)
        return ops.residual_done(ticket, request.x + 0 * done[0, 0])[0]

    residual, _ = median_s(correct, requests, repeats)
    once, _ = median_s(alone, requests, repeats, jnp.int32(1))
    rounds = jnp.int32(max(1, round(residual / once)))  # as long as the correction
    xla, _ = median_s(alone, requests, repeats, rounds)
    together, _ = median_s(between, requests, repeats, rounds)
    return {"xla_us": xla * 1e6, "residual_us": residual * 1e6, "together_us": together * 1e6,
            "sum_us": (xla + residual) * 1e6}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--base-bits", type=int, default=3)
    parser.add_argument("--residual-bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    case = published_case(args.shape)
    spec = SplitConfig(base_bits=args.base_bits, residual_bits=args.residual_bits)
    set_threads(args.threads)
    where = machine()
    print(f"{where['cpu']}, {where['threads']} threads, {where['isa']}, jax {where['jax']}")
    print(f"{case.name}: D {case.width}, F {case.units}, E {case.experts}, k {case.top_k}; base {spec.base_bits} bits, "
          f"residual {spec.residual_bits} bits, int8 activations; median of {args.repeats}")  # fmt: skip
    ceiling = _host.read_bandwidth(np.ones(1 << 28, np.uint8), 10)
    print(f"read bandwidth (vector sum over 256 MiB): {ceiling / 1e9:.1f} GB/s\n")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        experts, _ = random_experts(case, spec, Path(folder), exact=False, distinct=1)
        row_bytes = experts.codes.shape[-1] + 2 * 2 * experts.scale.shape[-1]
        layer = jnp.int32(0)

        def gate_up(s, experts):
            return jnp.stack(ops.base_gate_up(s[0], s[1], layer, experts))

        def gate_up_xla(s, experts):
            return jnp.stack(reference.base_gate_up(s[0], s[1], layer, experts))

        def down(s, experts):
            return ops.base_down(s[3], s[1], s[2], layer, experts)

        def correct(request):
            return ops.residual_done(ops.residual_start(request, experts), request.x)[0]

        def report(name, tokens, seconds, spread, size, twin=None):
            rate = size / seconds
            rows.append({"kernel": name, "tokens": tokens, "us": seconds * 1e6, "gb_s": rate / 1e9,
                         "share_of_read_bandwidth": rate / ceiling, "x_xla": twin and twin / seconds})  # fmt: skip
            line = f"{name:23} T={tokens:<4} {seconds * 1e6:9.0f} +-{spread * 1e6:<7.0f} us  {rate / 1e9:6.2f} GB/s"
            line += f"  {100 * rate / ceiling:5.1f} % of read bandwidth"
            print(line + (f"  {twin / seconds:5.1f} x XLA" if twin else ""), flush=True)

        for tokens in args.tokens:
            each = [tuple(random_step(case, tokens, seed=i).values()) for i in range(STEPS)]
            active = float(np.mean([len(np.unique(s[1])) for s in each]))
            steps = tuple(jnp.stack(a) for a in zip(*each, strict=True))
            values = jnp.stack([gate_up(s, experts) for s in each])  # [STEPS, 3, T, k, F]
            seconds, spread = median_s(gate_up, steps, args.repeats, experts)
            twin = median_s(gate_up_xla, tuple(a[:1] for a in steps), 3, experts)[0] if tokens == 1 else None
            report("base gate/up", tokens, seconds, spread, active * 2 * case.units * row_bytes, twin)
            seconds, spread = median_s(down, (*steps, values[:, 2]), args.repeats, experts)
            report("base down", tokens, seconds, spread, active * case.units * row_bytes)
            for share in SHARES:
                chosen = np.random.default_rng(0).random((case.experts, case.units)) < share
                mask = jnp.asarray(chosen[np.asarray(steps[1])])
                layers = jnp.zeros(STEPS, jnp.int32)
                requests = ops.Correction(*steps, values[:, 0], values[:, 1], values[:, 2], mask, layers)
                records = sum(int(chosen[np.unique(s[1])].sum()) for s in each) / STEPS
                seconds, spread = median_s(correct, requests, args.repeats)
                size = records * experts.record_bytes
                report(f"residual {100 * share:.0f} % of units", tokens, seconds, spread, size)
        overlap = measure_overlap(correct, requests, experts, args.repeats)
        print("overlap: XLA work {xla_us:.0f} us, correction {residual_us:.0f} us, between start and done "
              "{together_us:.0f} us (sum {sum_us:.0f})".format(**overlap))  # fmt: skip
    result = {
        "machine": where,
        "shape": case.name,
        "base_bits": spec.base_bits,
        "residual_bits": spec.residual_bits,
        "read_gb_s": ceiling / 1e9,
        "rows": rows,
        "overlap": overlap,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
