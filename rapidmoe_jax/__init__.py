"""Run mixture-of-experts language models larger than the GPU: low-bit base on the device, residual on the host."""

from rapidmoe_jax.config import VERSION
from rapidmoe_jax.demo import demo_calibration, demo_path, demo_tokens
from rapidmoe_jax.evaluation import evaluate
from rapidmoe_jax.generate import Generation, Piece
from rapidmoe_jax.model import Model, load
from rapidmoe_jax.policy import LayerStep, choose_units, importance
from rapidmoe_jax.resplit import split

__version__ = VERSION
__all__ = [
    "Generation",
    "LayerStep",
    "Model",
    "Piece",
    "choose_units",
    "demo_calibration",
    "demo_path",
    "demo_tokens",
    "evaluate",
    "importance",
    "load",
    "split",
]
