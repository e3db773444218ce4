"""Tables and progress bars of the command line. Text goes to standard output, progress to standard error."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.generate import Generation
from rapidmoe_jax.model import Model
from rapidmoe_jax.models import count_parameters, read_config
from rapidmoe_jax.store import SplitCheckpoint


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int], None]]:
    """Show a bar while the block runs; gives a function of (done, total). Silent where stderr is no terminal."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def human_bytes(count: int | float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def human_count(count: int | float) -> str:
    """Write a count with a decimal unit."""
    for unit in ("", " k", " M", " G"):
        if count < 1000 or unit == " G":
            return f"{count:.3g}{unit}" if count < 1000 else f"{count:.0f}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=max(console.width, 100)).print(table)


def placement(model: Model) -> None:
    """Print where a loaded model's weights are."""
    dense = sum(a.nbytes for a in jax.tree.leaves(model.params))
    rows = [["dense weights (attention, router, embedding)", "device", human_bytes(dense)]]
    if model.is_split:
        e: Any = model.experts
        rows += [
            [f"base, {e.base_bits} bits, all experts", "device", human_bytes(model.device_bytes - dense)],
            [f"residual, {e.residual_bits} bits (W2 with its base)", "host", human_bytes(model.host_bytes)],
        ]
    else:
        rows += [["experts, float32", "device", human_bytes(model.device_bytes - dense)]]
    print_table("Placement", ["weights", "where", "bytes"], rows)


def evaluation(result: dict[str, Any]) -> None:
    """Print the table of evaluate()."""
    base_kl = result["rows"][0]["kl"]
    rows = [["float", f"{result['float']['nll']:.4f}", f"{result['float']['perplexity']:.3f}", "", "", "", ""]]
    for row in result["rows"]:
        recovered = 1 - row["kl"] / base_kl if base_kl else 0.0
        rows.append(
            [
                row["policy"],
                f"{row['nll']:.4f}",
                f"{row['perplexity']:.3f}",
                f"{row['kl']:.5f}",
                f"{100 * recovered:.1f} %",
                f"{100 * row['top1_agreement']:.1f} %",
                human_bytes(row["host_bytes_per_token"]),
            ]
        )
    header = ["policy", "nll", "perplexity", "KL", "recovered", "top-1 agrees", "host bytes/token"]
    print_table(f"Loss over {result['tokens']} tokens, against the float model", header, rows)


def generation(result: Generation) -> None:
    """Print a line on standard error: tokens, speed, what the residual did."""
    r = result.residual
    print(
        f"[{len(result.tokens)} tokens, {result.finish_reason}; first after {result.ttft_s:.2f} s, then "
        f"{result.tok_per_s:.1f} tok/s; residual: {human_bytes(r.host_bytes_per_token)} a token, "
        f"{100 * r.error_share:.0f} % of the predicted error corrected]",
        file=sys.stderr,
    )


def timing(result: dict[str, Any]) -> None:
    """Print the table of bench()."""
    m = result["machine"]
    print(f"{m['cpu']}, {m['threads']} threads, {m['isa']}, jax {m['jax']} on {m['device']}")
    rows = [[result["policy"], f"{result['ttft_s'] * 1e3:.1f}", f"{result['tpot_s'] * 1e3:.2f}",
             f"{result['decode_tok_per_s']:.1f}", "1"]]  # fmt: skip
    for name, c in result["compared"].items():
        rows.append([name, f"{c['ttft_s'] * 1e3:.1f}", f"{c['tpot_s'] * 1e3:.2f}",
                     f"{c['decode_tok_per_s']:.1f}", f"{1 / c['tpot_ratio']:.2f}"])  # fmt: skip
    title = f"{result['prompt_tokens']} prompt tokens, {result['new_tokens']} new, one row"
    print_table(title, ["policy", "first token ms", "ms a token", "tok/s", "ratio"], rows)


def frontier(result: dict[str, Any]) -> None:
    """Print the table of frontier()."""
    base, whole = result["ends"]
    rows = []
    for name, points in [("", [base]), *result["curves"].items(), ("", [whole])]:
        if name:
            rows.append([name, *[""] * 6])
        for point in points:
            recovered = (base["kl"] - point["kl"]) / (base["kl"] - whole["kl"]) if base["kl"] > whole["kl"] else 0.0
            took = f"{point['tpot_s'] * 1e3:.2f}" if point["tpot_s"] else ""
            rows.append([f"  {point['policy']}", f"{100 * point['fraction']:.1f} %",
                         human_bytes(point["host_bytes_per_token"]), f"{point['kl']:.5f}", f"{100 * recovered:.1f} %",
                         f"{point['nll']:.4f}", took])  # fmt: skip
    header = ["policy", "bytes", "host bytes/token", "KL", "of none to all", "nll", "ms/token"]
    print_table(f"Over {result['tokens']} tokens, against the float model", header, rows)


def architecture(cfg: ModelConfig, title: str) -> None:
    """Print a model's sizes: layers, attention, experts, parameters, and what a token keeps in the cache."""
    experts, other = count_parameters(cfg)
    if c := cfg.latent:
        attention = f"{cfg.num_heads} heads over one latent of {c.rank} and a rotated key of {c.rope_size}"
    else:
        attention = f"{cfg.num_heads} heads of {cfg.head_dim} over {cfg.num_kv_heads} of keys and values"
    if cfg.windows:
        attention += f"; {sum(w > 0 for w in cfg.windows)} layers see {max(cfg.windows)} tokens"
    shared = f", and one of {cfg.shared_size} for every token" if cfg.shared_size else ""
    cached = cfg.cache_elements
    rows = [
        ["family", cfg.model_type],
        ["layers", f"{cfg.num_layers}, {cfg.num_moe_layers} with experts; width {cfg.width}"],
        ["attention", attention],
        ["experts", f"{cfg.num_experts} of {cfg.expert_size} units, {cfg.top_k} a token{shared}"],
        ["parameters", f"{human_count(experts)} in routed experts, {human_count(other)} in all else"],
        [
            "cache",
            f"{cached} numbers a token: {human_bytes(2 * cached)} in bfloat16, {human_bytes(4 * cached)} in float32",
        ],
        ["longest", f"{cfg.max_positions} tokens: {human_bytes(2 * cached * cfg.max_positions)} of cache in bfloat16"],
    ]
    print_table(title, ["", ""], rows)


def checkpoint_info(checkpoint: SplitCheckpoint) -> None:
    """Print what is in a split checkpoint."""
    architecture(read_config(checkpoint.metadata["config"]), str(checkpoint.folder))
    meta = checkpoint.metadata
    layers = meta["layers"]
    folder = checkpoint.folder
    tiers = {tier: sum(f.stat().st_size for f in (folder / tier).rglob("*") if f.is_file()) for tier in
             ("dense", "base", "residual")}  # fmt: skip
    rows = [
        ["source", meta["source"]["folder"]],
        ["format", str(meta["format_version"])],
        ["quantiser", f"{meta['quantizer']}, groups of {meta['group_size']}"],
        ["base", f"{meta['split']['base_bits']} bits, {layers[0]['base_bits_per_weight']:.3f} a weight with scales"],
        [
            "residual",
            f"{meta['split']['residual_bits']} bits, {layers[0]['host_bits_per_weight']:.3f} a weight on the host "
            "(scales and W2's base included)",
        ],
        ["calibration", f"{known['tokens']} tokens" if (known := checkpoint.calibration) else "none (lambda 1)"],
        *[[f"{tier} on disk", human_bytes(size)] for tier, size in tiers.items()],
    ]
    print_table("Split", ["", ""], rows)
    header = ["layer", "base", "base + residual", "KL of its base alone", "lambda"]
    table = [[str(r["layer"]), f"{r['base_error']:.4f}", f"{r['corrected_error']:.5f}"] for r in layers]
    if known:
        for row, kl, weight in zip(table, known["kl"], known["lambda"], strict=True):
            row += [f"{kl:.5f}", f"{weight:.3f}"]
    print_table("Relative error of the expert weights" + ("; damage in nats" if known else ""),
                header[: len(table[0])], table)  # fmt: skip
