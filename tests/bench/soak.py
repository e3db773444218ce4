"""Run corrections at full load for a long time: make soak [SOAK_SECONDS=600].

Three Python threads run random steps of several shapes, bit widths, masks and numbers of tokens, three corrections in
flight each; stores are opened and closed while they run. Ends with exit code 1 if a result differs from the first one
of the same step, if a correction is still in flight at the end, or if memory grew by more than 8 MiB after the first
fifth of the time (when everything has been compiled and each thread has its buffers).
"""

import argparse
import itertools
import json
import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import TEST_CASES, Case, random_experts, random_step

from rapidmoe_jax.bench import machine
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops

CASES = (*TEST_CASES, Case("wide", 1024, 96, 8, 4))
BITS = ((2, 2), (3, 4), (4, 4))
TOKENS = (1, 5, 40)
SEEDS = 4  # different steps of a kind
IN_FLIGHT = 3
GROWTH = 8 << 20


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@jax.jit
def run(step, share, experts):
    """The sum of IN_FLIGHT corrections started one after the other, each with other critical units."""
    u0, v0, h0 = ops.base_gate_up(step["x"], step["expert_ids"], jnp.int32(0), experts)
    tickets = []
    for i in range(IN_FLIGHT):
        mask = jax.random.uniform(jax.random.key(i), u0.shape) < share
        tickets.append(ops.residual_start(ops.Correction(**step, u0=u0, v0=v0, h0=h0, critical_mask=mask,
                                                         layer=jnp.int32(0)), experts))  # fmt: skip
    y = ops.base_down(h0, step["expert_ids"], step["expert_weights"], jnp.int32(0), experts)
    for ticket in reversed(tickets):
        y, _ = ops.residual_done(ticket, y)
    return y


class Soak:
    """What the threads share: the experts, first results, counts."""

    def __init__(self, folder: Path):
        self.experts = []
        for (i, case), (base, residual), exact in itertools.product(enumerate(CASES), BITS, (False, True)):
            spec = SplitConfig(base_bits=base, residual_bits=residual)
            place = folder / f"{i}-{base}{residual}-{exact}"
            place.mkdir()
            self.experts.append((case, random_experts(case, spec, place, exact=exact)[0], next(place.glob("*.bin"))))
        self.first: dict[tuple, np.ndarray] = {}
        self.lock = threading.Lock()
        self.corrections = self.wrong = 0

    def work(self, seed: int, until: float) -> None:
        """Run random steps until that time."""
        rng = np.random.default_rng(seed)
        while time.monotonic() < until:
            which, tokens, share = rng.integers(len(self.experts)), rng.choice(TOKENS), rng.choice((0.0, 0.2, 1.0))
            case, experts, file = self.experts[which]
            key = (int(which), int(tokens), float(share), int(rng.integers(SEEDS)))
            y = np.asarray(run(random_step(case, int(tokens), seed=key[3]), jnp.float32(share), experts))
            shape = (case.experts, case.units, case.width, experts.base_bits, experts.residual_bits)
            _host.close_store(_host.open_store([str(file)], *shape))
            with self.lock:
                self.corrections += IN_FLIGHT
                self.wrong += not np.array_equal(self.first.setdefault(key, y), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    where = machine()
    print(f"{where['cpu']}, {where['threads']} threads, {where['isa']}, jax {where['jax']}; {args.seconds:.0f} s")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        for case, experts, _ in soak.experts:  # compiled before the clock starts
            for tokens in TOKENS:
                jax.block_until_ready(run(random_step(case, tokens), jnp.float32(1), experts))
        begin = time.monotonic()
        threads = ThreadPoolExecutor(3)
        work = [threads.submit(soak.work, i, begin + args.seconds) for i in range(3)]
        settled = 0
        for fifth in range(1, 6):
            time.sleep(max(0.0, begin + args.seconds * fifth / 5 - time.monotonic()))
            settled = settled or memory()
            print(f"{args.seconds * fifth / 5:6.0f} s  {soak.corrections:9} corrections  {memory() / 2**20:8.1f} MiB  "
                  f"{soak.wrong} results changed", flush=True)  # fmt: skip
        for one in work:
            one.result()
    growth, lost = memory() - settled, _host.jobs_in_flight()
    print(json.dumps({"machine": where, "seconds": args.seconds, "corrections": soak.corrections, "wrong": soak.wrong,
                      "in_flight": lost, "growth_bytes": growth}))  # fmt: skip
    raise SystemExit(1 if soak.wrong or lost or growth > GROWTH else 0)


if __name__ == "__main__":
    main()
