"""The demo model that ships with the package: where it is, and its split in the user's cache folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rapidmoe_jax.config import VERSION, SplitConfig
from rapidmoe_jax.resplit import split
from rapidmoe_jax.store import SplitCheckpoint


def demo_path() -> Path:
    """Give the folder of the demo model as published: 28.9 M parameters, 8 layers of 32 experts, FP8."""
    return Path(__file__).parent / "demo_model"


def demo_tokens() -> np.ndarray:
    """Give the demo model's held-out evaluation tokens, uint16."""
    return np.load(demo_path() / "eval_tokens.npy")


def cache_folder() -> Path:
    """Give the folder for things that can be made again: $XDG_CACHE_HOME/rapidmoe or ~/.cache/rapidmoe."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidmoe"


def demo_split(spec: SplitConfig, progress: Callable[[int, int], None] | None = None) -> Path:
    """Give a split of the demo model, made at first use (some seconds) and kept in cache_folder().

    Several processes may ask at once: each makes its own, the first one to finish is kept.
    """
    out = cache_folder() / f"demo-{VERSION}-b{spec.base_bits}r{spec.residual_bits}"
    if not SplitCheckpoint.is_one(out):
        own = out.with_name(f"{out.name}.{os.getpid()}")
        out.parent.mkdir(parents=True, exist_ok=True)
        split(demo_path(), own, base_bits=spec.base_bits, residual_bits=spec.residual_bits, progress=progress)
        try:
            own.rename(out)
        except OSError:  # there by now
            shutil.rmtree(own)
    return out
