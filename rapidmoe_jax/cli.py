"""The command line: rapidmoe split | info | generate | chat | eval | frontier | bench | demo."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import rapidmoe_jax
from rapidmoe_jax import report
from rapidmoe_jax.bench import bench
from rapidmoe_jax.calibration import read_tokens
from rapidmoe_jax.config import BASE_BITS, RESIDUAL_BITS, SplitConfig
from rapidmoe_jax.demo import calibration_for, demo_path, demo_split, demo_tokens
from rapidmoe_jax.evaluation import FRACTIONS, evaluate
from rapidmoe_jax.frontier import frontier, plot
from rapidmoe_jax.host_kernels import select_isa
from rapidmoe_jax.model import DEFAULT_POLICY, Model
from rapidmoe_jax.policies import FORMS, make_policy, policy_name
from rapidmoe_jax.quant import QUANTIZERS
from rapidmoe_jax.store import SplitCheckpoint

DEMO_PROMPTS = ("It was a bright morning, and the old man", "The function returns a list of")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, or 1 after an error message, 130 after an interrupt."""
    args = _parser().parse_args(argv)
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
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    p = command("split", _split, "split a published checkpoint into base and residual")
    p.add_argument("source", help="folder with config.json and *.safetensors, or demo")
    p.add_argument("out", help="folder to create")
    p.add_argument("--base-bits", type=int, choices=BASE_BITS, default=3)
    p.add_argument("--residual-bits", type=int, choices=RESIDUAL_BITS, default=4)
    p.add_argument("--calibration", help="text or token ids (.npy, JSON) to measure the model on, for a better base "
                   "and policies that know what errors cost; demo = a text that comes along")  # fmt: skip
    p.add_argument("--quantizer", choices=["gptq", *QUANTIZERS], help="default: gptq with --calibration, else nested")

    p = command("info", _info, "show what is in a split checkpoint")
    p.add_argument("model", help="split checkpoint, or demo")
    p.add_argument("--verify", action="store_true", help="also compare the residual files' checksums")

    p = command("generate", _generate, "continue a prompt")
    _model_options(p)
    p.add_argument("prompt", help="text to continue; - reads standard input")
    _sampling_options(p)
    p.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")

    p = command("chat", _chat, "talk to a model; an empty line or end of input ends")
    _model_options(p)
    _sampling_options(p)
    p.add_argument("--system", help="instructions put before the conversation")

    p = command("eval", _eval, "loss and KL against the float model, for several budgets")
    _model_options(p, policy=False)
    _text_options(p, windows=8)
    p.add_argument("--fractions", default=",".join(map(str, FRACTIONS)), help="shares of unit bytes, with commas")
    p.add_argument("--policy", action="append", default=[], help="a further policy as a row; may be repeated")
    p.add_argument("--json", action="store_true")

    p = command("frontier", _frontier, "loss and KL against host bytes and time, policy by policy: table, JSON, plot")
    _model_options(p, policy=False)
    p.add_argument("--out", default="frontier", help="folder to write; an interrupted run goes on there")
    _text_options(p, windows=4)

    p = command("bench", _bench, "time prefill and decode")
    _model_options(p)
    p.add_argument("--prompt-tokens", type=int, default=256)
    p.add_argument("--new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--json", action="store_true")

    p = command("demo", _demo, "split the demo model, generate from two prompts, measure the loss")
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


def _load(args: argparse.Namespace, policy: str) -> Model:
    if args.model == "demo":
        spec = SplitConfig(base_bits=args.base_bits or 3, residual_bits=args.residual_bits or 4)
        with report.progress_bar("splitting the demo model") as progress:
            demo_split(spec, progress)
    return rapidmoe_jax.load(
        args.model,
        policy=policy,
        executor=args.executor,
        threads=args.threads,
        exact=args.exact,
        base_bits=args.base_bits,
        residual_bits=args.residual_bits,
    )


def _sampling(args: argparse.Namespace) -> dict:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    return {name: getattr(args, name) for name in names}


def _split(args: argparse.Namespace) -> None:
    source = demo_path() if args.source == "demo" else Path(args.source)
    calibration = calibration_for(source) if args.calibration == "demo" else args.calibration
    with report.progress_bar("splitting") as progress:
        rapidmoe_jax.split(
            source,
            args.out,
            base_bits=args.base_bits,
            residual_bits=args.residual_bits,
            quantizer=args.quantizer,
            calibration=calibration,
            progress=progress,
        )
    report.checkpoint_info(SplitCheckpoint(args.out))


def _info(args: argparse.Namespace) -> None:
    checkpoint = SplitCheckpoint(demo_split(SplitConfig()) if args.model == "demo" else args.model)
    if args.verify:
        checkpoint.verify()
    report.checkpoint_info(checkpoint)


def _generate(args: argparse.Namespace) -> None:
    model = _load(args, args.policy)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    result = model.generate(prompt, stop=args.stop, callback=None if args.json else _show, **_sampling(args))
    if args.json:
        print(json.dumps({**vars(result), "residual": vars(result.residual), "policy": policy_name(model.policy)}))
        return
    print()
    report.generation(result)


def _show(piece: rapidmoe_jax.Piece) -> None:
    print(piece.text, end="", flush=True)


def _chat(args: argparse.Namespace) -> None:
    model = _load(args, args.policy)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    stop = [] if model.codec.template else ["\nUser:"]
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        prompt = model.codec.render_chat(messages)
        result = model.generate(prompt, stop=stop, callback=_show, **_sampling(args))
        print()
        messages.append({"role": "assistant", "content": result.text})


def _compared(args: argparse.Namespace) -> tuple[Model, Model, np.ndarray]:
    """Load a split model, its float model and the text to compare them on."""
    model = _load(args, "none")
    if not model.is_split:
        raise ValueError(f"{args.model} is not split; make a split with: rapidmoe split {args.model} OUT")
    if args.model == "demo":
        source = demo_path()
    else:
        source = Path(args.reference or SplitCheckpoint(model.folder).metadata["source"]["folder"])
        if not source.is_dir():
            raise ValueError(f"{source}, the float model that {args.model} was split from, is gone; give --reference")
    if not args.tokens and args.model != "demo":
        raise ValueError("--tokens FILE is needed: .npy or a JSON list of token ids")
    tokens = read_tokens(args.tokens) if args.tokens else demo_tokens()
    return model, rapidmoe_jax.load(source, threads=args.threads), tokens


def _eval(args: argparse.Namespace) -> None:
    try:
        fractions = [float(f) for f in args.fractions.split(",")] if args.fractions else []
    except ValueError:
        raise ValueError(f"--fractions {args.fractions}: wanted numbers between 0 and 1 with commas") from None
    for fraction in fractions:
        make_policy(f"fraction={fraction}")
    model, reference, tokens = _compared(args)
    with report.progress_bar("evaluating") as progress:
        result = evaluate(
            model,
            reference,
            tokens,
            fractions=fractions,
            policies=args.policy,
            window=args.window,
            windows=args.windows,
            progress=progress,
        )
    if args.json:
        print(json.dumps(result))
    else:
        report.evaluation(result)


def _frontier(args: argparse.Namespace) -> None:
    model, reference, tokens = _compared(args)
    out = Path(args.out)
    with report.progress_bar("measuring") as progress:
        result = frontier(model, reference, tokens, out, window=args.window, windows=args.windows, progress=progress)
    report.frontier(result)
    bits = SplitCheckpoint(model.folder).split
    try:
        plot(
            result, out / "frontier.png", f"{args.model}, {bits.base_bits}-bit base + {bits.residual_bits}-bit residual"
        )
    except ImportError:
        print("no plot: matplotlib is missing; pip install 'rapidmoe_jax[plot]' and run again", file=sys.stderr)
    print(f"written to {out}/")


def _bench(args: argparse.Namespace) -> None:
    model = _load(args, args.policy)
    with report.progress_bar("timing") as progress:
        result = bench(
            model,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            repeats=args.repeats,
            progress=progress,
        )
    if not args.json:
        report.timing(result)
    print(json.dumps(result))


def _demo(args: argparse.Namespace) -> None:
    with report.progress_bar("splitting the demo model") as progress:
        demo_split(SplitConfig(), progress)
    model = rapidmoe_jax.load("demo", threads=args.threads)
    report.placement(model)
    sampling = {"temperature": 0.7, "top_p": 0.95, "seed": 1}
    with report.progress_bar("compiling"):
        model.generate(DEMO_PROMPTS[0], max_new_tokens=2, **sampling)
    for prompt in DEMO_PROMPTS:
        print(f"\n{prompt}", end="", flush=True)
        result = model.generate(prompt, max_new_tokens=60, callback=_show, **sampling)
        print()
        report.generation(result)
    print()
    with report.progress_bar("measuring the loss") as progress:
        reference = rapidmoe_jax.load(demo_path(), threads=args.threads)
        result = evaluate(model, reference, demo_tokens(), fractions=[0.15], windows=4, progress=progress)
    report.evaluation(result)
    print("\nNext: rapidmoe chat demo | rapidmoe eval demo | rapidmoe split FOLDER OUT")
