"""What each command of the command line does, from its parsed arguments (cli.py)."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rapidmoe_jax
from rapidmoe_jax import report
from rapidmoe_jax.bench import bench
from rapidmoe_jax.calibration import read_tokens
from rapidmoe_jax.chat import assistant_message
from rapidmoe_jax.checkpoint import read_json
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.demo import calibration_for, demo_path, demo_split, demo_tokens
from rapidmoe_jax.evaluation import evaluate
from rapidmoe_jax.frontier import frontier, plot
from rapidmoe_jax.model import Model
from rapidmoe_jax.models import read_config
from rapidmoe_jax.models.shapes import SHAPES, named_shape
from rapidmoe_jax.policies import make_policy, policy_name
from rapidmoe_jax.store import SplitCheckpoint

DEMO_PROMPTS = ("It was a bright morning, and the old man", "The function returns a list of")


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


def run_split(args: argparse.Namespace) -> None:
    """Split a published folder and show the result."""
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


def run_info(args: argparse.Namespace) -> None:
    """Show a split checkpoint; of a published folder or a named shape, the architecture."""
    folder = demo_split(SplitConfig()) if args.model == "demo" else Path(args.model)
    if SplitCheckpoint.is_one(folder):
        checkpoint = SplitCheckpoint(folder)
        if args.verify:
            checkpoint.verify()
        report.checkpoint_info(checkpoint)
        return
    if args.verify:
        raise ValueError(f"--verify: {folder} is no split checkpoint, there are no checksums to compare")
    if folder.is_dir():
        cfg = read_config(read_json(folder / "config.json"))
    elif args.model in SHAPES:
        cfg = named_shape(args.model)
    else:
        raise ValueError(f"{folder}: no such folder, nor a named shape ({', '.join(SHAPES)})")
    report.architecture(cfg, args.model)


def run_generate(args: argparse.Namespace) -> None:
    """Continue a prompt."""
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


def run_chat(args: argparse.Namespace) -> None:
    """Talk, turn by turn."""
    options = _chat_options(args)
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
        prompt = model.codec.encode_chat(messages, **options)
        result = model.generate(prompt, stop=stop, callback=_show, **_sampling(args))
        print()
        messages.append(assistant_message(result.text))


def _chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """Read what the chat template is told besides the conversation; a value is JSON, else text."""
    options: dict[str, Any] = {}
    for given in args.option:
        name, equals, value = given.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option {given}: wanted NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    if args.tools:
        try:
            options["tools"] = json.loads(Path(args.tools).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ValueError(f"--tools {args.tools}: cannot be read as JSON ({e})") from None
        if not isinstance(options["tools"], list):
            raise ValueError(f"--tools {args.tools}: wanted a JSON list of function schemas")
    return options


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


def run_eval(args: argparse.Namespace) -> None:
    """Compare budgets with the float model."""
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


def run_frontier(args: argparse.Namespace) -> None:
    """Measure every policy over its budgets; table, JSON, plot."""
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


def run_bench(args: argparse.Namespace) -> None:
    """Time a model."""
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


def run_demo(args: argparse.Namespace) -> None:
    """Run the main job on the demo model."""
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
