"""Time prefill and decode of a published model's layers at full width, random weights, and project the whole model.

    python tests/bench/bench_model.py [--shape qwen3-30b-a3b] [--layers 2 4] [--base-bits 2] [--residual-bits 2]
        [--policy none fraction=0.15 all] [--prompt-tokens 256] [--new-tokens 16] [--executor host]

Two depths tell a layer with experts from the rest (embedding, head, one layer without experts, dispatch); a third run
with a second layer without experts tells that layer's time, where the model has such. The whole model's time is then a
projection: rest + layers x their time. The ceiling is reading each byte of a token's experts once at this machine's
read bandwidth (on a GPU: host bytes only). The last line is one JSON object.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from slices import random_model, slice_config

from rapidmoe_jax.bench import bench
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, set_threads
from rapidmoe_jax.machine import machine
from rapidmoe_jax.models.shapes import SHAPES, named_shape


def measure(args: argparse.Namespace, spec: SplitConfig, layers: int, dense: int) -> dict[str, dict[str, float]]:
    """Times of a slice by policy, "ttft_s" and "tpot_s", and what a token's step reads of the host."""
    cfg = slice_config(args.shape, layers=layers, dense=dense)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model, _ = random_model(
            cfg, spec, Path(folder), distinct=1, executor=args.executor, exact=False, dtype=args.dtype
        )
        first, *others = args.policy
        model.policy = first
        result = bench(model, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, repeats=args.repeats,
                       policies=others)  # fmt: skip
        print(f"{layers} layers with experts, {cfg.num_layers - layers} without: {model.device_bytes / 1e9:.1f} GB "
              f"of weights on {jax.default_backend()}", flush=True)  # fmt: skip
        times = {first: {k: result[k] for k in ("ttft_s", "tpot_s")}} | result["compared"]
        _host.close_store(model.experts.store)
    del model
    gc.collect()
    return times


def project(args: argparse.Namespace, spec: SplitConfig) -> list[dict[str, float | str]]:
    """Rows by policy: a layer's times, the rest, and the whole model's by projection."""
    few, many = args.layers
    whole = named_shape(args.shape)
    dense = whole.num_layers - whole.num_moe_layers
    runs = [measure(args, spec, few, 1), measure(args, spec, many, 1)]
    if dense > 1:
        runs.append(measure(args, spec, few, 2))
    rows: list[dict[str, float | str]] = []
    for policy in args.policy:
        row: dict[str, float | str] = {"policy": policy}
        for phase, key in (("prefill", "ttft_s"), ("decode", "tpot_s")):
            t = [run[policy][key] for run in runs]
            layer = (t[1] - t[0]) / (many - few)
            without = t[2] - t[0] if dense > 1 else 0.0
            total = t[0] - few * layer + max(dense - 1, 0) * without + whole.num_moe_layers * layer
            row |= {f"{phase}_layer_ms": layer * 1e3, f"{phase}_rest_ms": (t[0] - few * layer) * 1e3,
                    f"projected_{phase}_tok_s": (args.prompt_tokens if phase == "prefill" else 1) / total}  # fmt: skip
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 4], help="two depths, layers with experts")
    parser.add_argument("--base-bits", type=int, default=2)
    parser.add_argument("--residual-bits", type=int, default=2)
    parser.add_argument("--policy", nargs="+", default=["none", "fraction=0.15", "all"])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--executor", default="host" if jax.default_backend() == "cpu" else "callback")
    parser.add_argument("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", help="for the residual files; default: the system's temporary folder")
    args = parser.parse_args()
    set_threads(args.threads)
    spec = SplitConfig(base_bits=args.base_bits, residual_bits=args.residual_bits)
    where, cfg = machine(), named_shape(args.shape)
    print(f"{where['cpu']}, {where['threads']} threads, {where['isa']}, jax {where['jax']} on {where['device']}")
    print(f"{args.shape}: {cfg.num_moe_layers} layers of {cfg.num_experts} experts; base {spec.base_bits} bits, "
          f"residual {spec.residual_bits}; {args.prompt_tokens} prompt tokens, {args.new_tokens} new")  # fmt: skip
    ceiling = _host.read_bandwidth(np.ones(1 << 28, np.uint8), 10)
    weights = 3 * cfg.expert_size * cfg.width * cfg.top_k
    layout = _host.record_layout(spec.base_bits, spec.residual_bits, cfg.width)
    base = weights * (spec.base_bits + 0.5) / 8  # a half scale and a half offset a group of 64
    all_units = base * 2 / 3 + layout["bytes"] * cfg.expert_size * cfg.top_k  # W2's base is in the records
    print(f"read bandwidth {ceiling / 1e9:.1f} GB/s: a layer's experts in decode take at least "
          f"{base / ceiling * 1e3:.2f} ms (base), {all_units / ceiling * 1e3:.2f} ms (all corrected)\n")  # fmt: skip
    rows = project(args, spec)
    print(f"\n{'policy':16} {'prefill ms a layer':>18} {'decode ms a layer':>18} {'projected prefill':>18} "
          f"{'projected decode tok/s':>23}")  # fmt: skip
    for r in rows:
        print(f"{r['policy']:16} {r['prefill_layer_ms']:18.2f} {r['decode_layer_ms']:18.3f} "
              f"{r['projected_prefill_tok_s']:18.1f} {r['projected_decode_tok_s']:23.2f}")  # fmt: skip
    floor = {"base_ms": base / ceiling * 1e3, "all_ms": all_units / ceiling * 1e3}
    print(json.dumps({"machine": where, "shape": args.shape, "base_bits": spec.base_bits, "floor": floor,
                      "residual_bits": spec.residual_bits, "read_gb_s": ceiling / 1e9, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
