"""The demo model that ships with the package: where it is, and its split in the user's cache folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rapidmoe_jax.checkpoint import read_json
from rapidmoe_jax.config import VERSION, SplitConfig
from rapidmoe_jax.machine import cache_folder
from rapidmoe_jax.resplit import split
from rapidmoe_jax.store import SplitCheckpoint
from rapidmoe_jax.text import TextCodec

_FIRST_CALIBRATION = 256 * 1024  # the token from which the held-out text is calibration text


def demo_path() -> Path:
    """Give the folder of the demo model as published: 28.9 M parameters, 8 layers of 32 experts, FP8."""
    return Path(__file__).parent / "demo_model"


def demo_tokens() -> np.ndarray:
    """Give the demo model's evaluation tokens, uint16: windows 0 to 255 of its held-out text."""
    return _held_out()[: _FIRST_CALIBRATION + 1]


def demo_calibration() -> np.ndarray:
    """Give the demo model's calibration tokens, uint16: the held-out text from window 256 on, never evaluated on."""
    return _held_out()[_FIRST_CALIBRATION + 1 :]


def calibration_for(source: Path) -> np.ndarray:
    """Give the demo's calibration text as token ids of another checkpoint: decoded, and encoded by its tokenizer."""
    if source.resolve() == demo_path().resolve():
        return demo_calibration()
    config, own = (read_json(folder / "config.json") for folder in (demo_path(), source))
    text = TextCodec(demo_path(), config, config["vocab_size"]).decode(demo_calibration().tolist())
    return np.array(TextCodec(source, own, own["vocab_size"]).encode(text))


def _held_out() -> np.ndarray:
    return np.load(demo_path() / "eval_tokens.npy")


def demo_split(spec: SplitConfig, progress: Callable[[int, int], None] | None = None) -> Path:
    """Give a calibrated split of the demo model, made at first use (a minute or two) and kept in cache_folder().

    Several processes may ask at once: each makes its own, the first one to finish is kept.
    """
    out = cache_folder() / f"demo-{VERSION}-b{spec.base_bits}r{spec.residual_bits}-calibrated"
    if not SplitCheckpoint.is_one(out):
        own = out.with_name(f"{out.name}.{os.getpid()}")
        out.parent.mkdir(parents=True, exist_ok=True)
        split(
            demo_path(),
            own,
            base_bits=spec.base_bits,
            residual_bits=spec.residual_bits,
            calibration=demo_calibration(),
            progress=progress,
        )
        try:
            own.rename(out)
        except OSError:  # there by now
            shutil.rmtree(own)
    return out
