"""Time the host kernels on one layer of a published shape, against this machine's read bandwidth.

    python tests/bench/bench_kernels.py [--shape qwen3-30b] [--base-bits 3] [--residual-bits 4] [--threads N]

Prints conditions, the ceiling (a plain vector sum over a buffer larger than the caches, same threads), then for each
kernel: time, bytes of codes and scales read a second, share of the ceiling, and XLA's time where there is a twin.
The last line is one JSON object. Calls take different experts in turn, so that the caches do not hold them.
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
from cases import BENCH_CASES, random_experts, random_step

from rapidmoe_jax.bench import machine
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops, set_threads
from rapidmoe_jax.pallas import reference

SHARES = (0.15, 0.25, 1.0)


def median_s(run, inputs, repeats: int) -> tuple[float, float]:
    """Median and spread (p90 - p10) of run(input) over inputs in turn, after one round of warm-up."""
    for i in inputs:
        jax.block_until_ready(run(i))
    times = []
    for r in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(inputs[r % len(inputs)]))
        times.append(time.perf_counter() - begin)
    low, high = np.percentile(times, [10, 90])
    return statistics.median(times), float(high - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[c.name for c in BENCH_CASES], default="qwen3-30b")
    parser.add_argument("--base-bits", type=int, default=3)
    parser.add_argument("--residual-bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    case = next(c for c in BENCH_CASES if c.name == args.shape)
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
        base = (jnp.int32(0), experts.codes, experts.scale, experts.offset)
        row_bytes = experts.codes.shape[-1] + 2 * 2 * experts.scale.shape[-1]
        gate_up = jax.jit(lambda s, *b: ops.base_gate_up(s[0], s[1], *b, bits=spec.base_bits, exact=False))
        down = jax.jit(lambda h, s, *b: ops.base_down(h, s[1], s[2], *b, bits=spec.base_bits, exact=False))
        xla = jax.jit(lambda s, *b: reference.base_gate_up_reference(s[0], s[1], *b, bits=spec.base_bits))

        @jax.jit
        def correct(request):
            ticket = ops.residual_start(request, store=experts.store, exact=False)
            return ops.residual_done(ticket, request.x)

        def report(name, tokens, seconds, spread, size, twin=None):
            rate = size / seconds
            rows.append({"kernel": name, "tokens": tokens, "us": seconds * 1e6, "gb_s": rate / 1e9,
                         "share_of_read_bandwidth": rate / ceiling, "x_xla": twin and twin / seconds})  # fmt: skip
            line = f"{name:23} T={tokens:<4} {seconds * 1e6:9.0f} +-{spread * 1e6:<7.0f} us  {rate / 1e9:6.2f} GB/s"
            line += f"  {100 * rate / ceiling:5.1f} % of read bandwidth"
            print(line + (f"  {twin / seconds:5.1f} x XLA" if twin else ""), flush=True)

        for tokens in args.tokens:
            steps = [tuple(random_step(case, tokens, seed=i).values()) for i in range(8)]
            active = float(np.mean([len(np.unique(s[1])) for s in steps]))
            values = [gate_up(s, *base) for s in steps]
            seconds, spread = median_s(lambda s: gate_up(s, *base), steps, args.repeats)
            twin = median_s(lambda s: xla(s, *base), steps[:2], 3)[0] if tokens == 1 else None
            report("base gate/up", tokens, seconds, spread, active * 2 * case.units * row_bytes, twin)
            pairs = [(v[2], s) for v, s in zip(values, steps, strict=True)]
            seconds, spread = median_s(lambda p: down(*p, *base), pairs, args.repeats)
            report("base down", tokens, seconds, spread, active * case.units * row_bytes)
            for share in SHARES:
                requests = []
                for i, (s, v) in enumerate(zip(steps, values, strict=True)):
                    chosen = np.random.default_rng(i).random((case.experts, case.units)) < share
                    mask = jnp.asarray(chosen[np.asarray(s[1])])
                    requests.append(ops.Correction(*s, *v, mask, jnp.int32(0)))
                records = float(np.mean([int(correct(r)[1][0]) for r in requests]))
                seconds, spread = median_s(lambda r: correct(r)[0], requests, args.repeats)
                report(
                    f"residual {100 * share:.0f} % of units", tokens, seconds, spread, records * experts.record_bytes
                )
    print(json.dumps({"machine": where, "shape": case.name, "base_bits": spec.base_bits,
                      "residual_bits": spec.residual_bits, "read_gb_s": ceiling / 1e9, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
