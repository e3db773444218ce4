"""The command line: rapidmoe split | info | generate | chat | eval | frontier | bench | demo."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import rapidmoe_jax
from rapidmoe_jax import commands
from rapidmoe_jax.config import BASE_BITS, RESIDUAL_BITS
from rapidmoe_jax.evaluation import FRACTIONS
from rapidmoe_jax.host_kernels import select_isa
from rapidmoe_jax.model import DEFAULT_POLICY
from rapidmoe_jax.policies import FORMS
from rapidmoe_jax.quant import QUANTIZERS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or 1 after an error message, 130 after an interrupt."""
    args = _parser().parse_args(argv)

    def show_warning(message: Warning | str, *_: Any) -> None:
        print(f"rapidmoe {args.command}: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        # Without the line of code it came from.
        warnings.showwarning = show_warning  # pyrefly: ignore[bad-assignment]
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if isa := os.environ.get("RAPIDMOE_ISA"):
            select_isa(isa)
        args.run(args)
    except (ValueError, RuntimeError, OSError) as e:
        print(f"rapidmoe {args.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rapidmoe", description=rapidmoe_jax.__doc__)
    parser.add_argument("--version", action="version", version=rapidmoe_jax.__version__)
    subparsers = parser.add_subparsers(dest="command", required=True)

    def command(name, run, text):
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    p = command("split", commands.run_split, "split a published checkpoint into base and residual")
    p.add_argument("source", help="folder with config.json and *.safetensors, or demo")
    p.add_argument("out", help="folder to create")
    p.add_argument("--base-bits", type=int, choices=BASE_BITS, default=3)
    p.add_argument("--residual-bits", type=int, choices=RESIDUAL_BITS, default=4)
    p.add_argument("--calibration", help="text or token ids (.npy, JSON) to measure the model on, for a better base "
                   "and policies that know what errors cost; demo = a text that comes along")  # fmt: skip
    p.add_argument("--quantizer", choices=["gptq", *QUANTIZERS], help="default: gptq with --calibration, else nested")

    p = command("info", commands.run_info, "show what is in a split checkpoint, or a model's architecture")
    p.add_argument("model", help="split checkpoint, published folder, demo, or a published model's name: deepseek-v3")
    p.add_argument("--verify", action="store_true", help="also compare the residual files' checksums")

    p = command("generate", commands.run_generate, "continue a prompt")
    _model_options(p)
    p.add_argument("prompt", help="text to continue; - reads standard input")
    _sampling_options(p)
    p.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")

    p = command("chat", commands.run_chat, "talk to a model; an empty line or end of input ends")
    _model_options(p)
    _sampling_options(p)
    p.add_argument("--system", help="instructions put before the conversation")
    p.add_argument("--tools", help="JSON list of function schemas the model is told of; calls are printed, not made")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                   help="of the chat template, e.g. enable_thinking=false; may be repeated")  # fmt: skip

    p = command("eval", commands.run_eval, "loss and KL against the float model, for several budgets")
    _model_options(p, policy=False)
    _text_options(p, windows=8)
    p.add_argument("--fractions", default=",".join(map(str, FRACTIONS)), help="shares of unit bytes, with commas")
    p.add_argument("--policy", action="append", default=[], help="a further policy as a row; may be repeated")
    p.add_argument("--json", action="store_true")

    p = command(
        "frontier",
        commands.run_frontier,
        "loss and KL against host bytes and time, by policy: table, JSON, plot",
    )
    _model_options(p, policy=False)
    p.add_argument("--out", default="frontier", help="folder to write; an interrupted run goes on there")
    _text_options(p, windows=4)

    p = command("bench", commands.run_bench, "time prefill and decode")
    _model_options(p)
    p.add_argument("--prompt-tokens", type=int, default=256)
    p.add_argument("--new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--json", action="store_true")

    p = command("demo", commands.run_demo, "split the demo model, generate from two prompts, measure the loss")
    p.add_argument("--threads", type=int)
    return parser


def _model_options(p: argparse.ArgumentParser, policy: bool = True) -> None:
    p.add_argument("model", help="split checkpoint, published folder (float model), or demo")
    if policy:
        p.add_argument("--policy", default=DEFAULT_POLICY, help=f"{FORMS}; default share=0.15, see README")
    p.add_argument("--executor", help="host, callback, reference or off (default: the best of this machine)")
    p.add_argument("--threads", type=int, help="host threads (default: RAPIDMOE_THREADS or all cores)")
    p.add_argument("--base-bits", type=int, choices=BASE_BITS, help="of demo only (default 3)")
    p.add_argument("--residual-bits", type=int, choices=RESIDUAL_BITS, help="of demo only (default 4)")
    p.add_argument("--exact", action="store_true", help="float32 instead of int8 activations in the host kernels")


def _text_options(p: argparse.ArgumentParser, windows: int) -> None:
    p.add_argument("--tokens", help="token ids: .npy or a JSON list (demo brings its own)")
    p.add_argument("--reference", help="published folder of the float model; default: where the split was made from")
    p.add_argument("--window", type=int, help="tokens a window (default 1024)")
    p.add_argument("--windows", type=int, default=windows)


def _sampling_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
