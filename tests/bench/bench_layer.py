"""Time one whole mixture-of-experts layer on the host: ours at several bit widths, and KTransformers' kt-kernel.

    python tests/bench/bench_layer.py [--shape qwen3-30b-a3b] [--tokens 1 4 16 128] [--threads N]

"3+4 all" corrects every unit (base 3 bits, residual 4 bits), "4 none" runs a plain 4-bit base. kt-kernel is measured
where it is importable (pip install kt-kernel; it wants torch), on random weights in its GGUF formats and, with AMX, in
its own. Experts are drawn uniformly, other ones each call; the time is the median over calls, without Python's dispatch
for ours (one jitted scan), with it for kt-kernel (some 10 us). The last line is one JSON object.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import STEPS, median_s
from cases import Case, published_case, random_experts, random_step

from rapidmoe_jax.bench import machine
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops, set_threads
from rapidmoe_jax.models.shapes import SHAPES

OURS = {"3+4 all": (3, 4, True), "2+2 all": (2, 2, True), "4 none": (4, 4, False), "3+4 none": (3, 4, False)}
KT_FORMATS = {"Q8_0": (32, 34), "Q4_K": (256, 144), "Q2_K": (256, 84)}  # weights and bytes of a block


def bytes_read(case: Case, experts, active: float, whole: bool) -> float:
    """Bytes of codes and scales that a layer step must read."""
    row = experts.codes.shape[-1] + 4 * experts.scale.shape[-1]
    return active * case.units * (2 * row + experts.record_bytes if whole else 3 * row)


def ours(case: Case, tokens: list[int], repeats: int, ceiling: float) -> list[dict]:
    """Time each of OURS at each number of tokens."""
    rows = []
    for name, (base_bits, residual_bits, whole) in OURS.items():
        with tempfile.TemporaryDirectory() as folder:
            spec = SplitConfig(base_bits=base_bits, residual_bits=residual_bits)
            experts, _ = random_experts(case, spec, Path(folder), exact=False, distinct=1)

            def layer_step(s, experts, whole=whole):
                x, ids, weights = s
                u0, v0, h0 = ops.base_gate_up(x, ids, jnp.int32(0), experts)
                if not whole:
                    return ops.base_down(h0, ids, weights, jnp.int32(0), experts)
                mask = jnp.ones(u0.shape, bool)
                request = ops.Correction(x, ids, weights, u0, v0, h0, mask, jnp.int32(0))
                return ops.residual_done(ops.residual_start(request, experts, replaces=True), jnp.zeros_like(x))[0]

            for count in tokens:
                each = [tuple(random_step(case, count, seed=i).values()) for i in range(STEPS)]
                active = float(np.mean([len(np.unique(s[1])) for s in each]))
                steps = tuple(jnp.stack(a) for a in zip(*each, strict=True))
                seconds, _ = median_s(layer_step, steps, repeats, experts)
                rate = bytes_read(case, experts, active, whole) / seconds
                rows.append(row(name, count, seconds, case, rate / 1e9, rate / ceiling))
            jax.clear_caches()
            _host.close_store(experts.store)
    return rows


def row(name, tokens, seconds, case, gb_s=None, share=None) -> dict:
    """One measured line, printed."""
    giga_ops = 6 * tokens * case.top_k * case.units * case.width / seconds / 1e9
    line = f"{name:12} T={tokens:<4} {seconds * 1e3:8.3f} ms  {giga_ops:8.1f} GOP/s"
    print(line + (f"  {gb_s:6.1f} GB/s, {100 * share:5.1f} % of read bandwidth" if gb_s else ""), flush=True)
    return {"kernel": name, "tokens": tokens, "ms": seconds * 1e3, "gop_s": giga_ops, "gb_s": gb_s,
            "share_of_read_bandwidth": share}  # fmt: skip


def kt_kernel(case: Case, tokens: list[int], repeats: int, threads: int) -> list[dict]:
    """Time kt-kernel's layer in each of its formats; [] where it is not installed."""
    if importlib.util.find_spec("kt_kernel") is None or importlib.util.find_spec("torch") is None:
        print("kt-kernel is not installed: its times are left out")
        return []
    import kt_kernel
    import torch

    extension = kt_kernel.kt_kernel_ext
    pool = extension.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
    infer = extension.CPUInfer(pool)
    on_gpu = torch.zeros(case.experts, dtype=torch.bool)
    identity = torch.arange(case.experts, dtype=torch.int64)
    formats = dict(KT_FORMATS)
    if "amx" in kt_kernel.__cpu_variant__:
        formats |= {"AMXInt4": None, "AMXInt8": None}
    rows = []
    for name, block in formats.items():
        size = case.experts * case.units * case.width
        config = extension.moe.MOEConfig(case.experts, case.top_k, case.width, case.units, on_gpu.data_ptr())
        config.pool, config.max_len, config.layer_idx = infer.backend_, max(tokens), 0
        if block:
            shape = size // block[0] * block[1]
            weights = [torch.randint(0, 64, (shape,), dtype=torch.uint8) for _ in range(3)]
            kind = getattr(extension.kvcache.ggml_type, name)
            config.gate_type = config.up_type = config.down_type = kind
            config.hidden_type = extension.kvcache.ggml_type.BF16
            config.m_block, config.group_min_len, config.group_max_len = 32, 10, max(tokens)
            make = extension.moe.MOE
        else:
            weights = [torch.randn(size, dtype=torch.bfloat16) * 0.02 for _ in range(3)]
            make = getattr(extension.moe, {"AMXInt4": "AMXInt4_MOE", "AMXInt8": "AMXInt8_MOE"}[name])
        config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in weights)
        moe = make(config)
        infer.submit(moe.load_weights_task(identity.data_ptr()))
        infer.sync()
        for count in tokens:
            times = []
            for i in range(STEPS * repeats):
                step = random_step(case, count, seed=i % STEPS)
                ids = torch.from_numpy(np.array(step["expert_ids"], np.int64))
                gates = torch.from_numpy(np.array(step["expert_weights"]))
                x = torch.randn(count, case.width, dtype=torch.bfloat16)
                y = torch.empty_like(x)
                length = torch.tensor([count], dtype=torch.int32)
                begin = time.perf_counter()
                infer.submit(moe.forward_task(length.data_ptr(), case.top_k, ids.data_ptr(), gates.data_ptr(),
                                              x.data_ptr(), y.data_ptr(), False))  # fmt: skip
                infer.sync()
                times.append(time.perf_counter() - begin)
            rows.append(row(f"kt {name}", count, statistics.median(times), case))
        del moe, weights
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16, 128])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    case = published_case(args.shape)
    threads = set_threads(args.threads)
    where = machine()
    print(f"{where['cpu']}, {where['threads']} threads, {where['isa']}, jax {where['jax']}")
    print(f"{case.name}: D {case.width}, F {case.units}, E {case.experts}, k {case.top_k}; int8 activations")
    ceiling = _host.read_bandwidth(np.ones(1 << 28, np.uint8), 10)
    print(f"read bandwidth (vector sum over 256 MiB): {ceiling / 1e9:.1f} GB/s\n")
    rows = ours(case, args.tokens, args.repeats, ceiling) + kt_kernel(case, args.tokens, args.repeats, threads)
    print(json.dumps({"machine": where, "shape": case.name, "read_gb_s": ceiling / 1e9, "rows": rows}))


if __name__ == "__main__":
    main()
