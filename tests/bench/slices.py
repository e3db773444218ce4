"""Models of published shapes cut to a few layers, weights at random, widths as published: for tests and benchmarks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cases import Case, random_experts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rapidmoe_jax.config import ModelConfig, SplitConfig
from rapidmoe_jax.loading import load_params
from rapidmoe_jax.model import Model
from rapidmoe_jax.models import FAMILIES, read_config
from rapidmoe_jax.models.shapes import SHAPES


def slice_config(name: str, *, layers: int, dense: int = 1, vocab_size: int | None = None) -> ModelConfig:
    """Cut a published shape to `layers` layers with experts, behind `dense` without where the model has such.

    Args:
      vocab_size: of a smaller embedding and head; None = as published.
    """
    config = dict(SHAPES[name])
    if config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = dense
        layers += dense
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return read_config(config | {"num_hidden_layers": layers, "vocab_size": vocab_size or config["vocab_size"]})


def random_table(table: dict[str, tuple[str, tuple[int, ...]]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the tensors of a family's name table: matrices that keep a vector's size, norms near 1, small biases."""
    return {path: _draw(path, shape, rng) for path, shape in table.values()}


def _draw(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    value = rng.standard_normal(shape, np.float32) * (0.1 if len(shape) == 1 or "bias" in path else shape[-1] ** -0.5)
    return (value + path.endswith(("scale", "norm"))).astype(ml_dtypes.bfloat16)


def random_model(
    cfg: ModelConfig,
    spec: SplitConfig,
    folder: Path,
    *,
    distinct: int = 2,
    executor: str = "host",
    dtype: str = "bfloat16",
    **options: Any,
) -> tuple[Model, np.ndarray]:
    """Make a split model of random weights; expert e of each layer is number e % distinct.

    Args:
      folder: for the residual files and a tokenizer without words.
      options: of random_experts.
    Returns: the model, and the float weights [1, distinct, 3, F, D] of its experts, the same in every layer.
    """
    fam, rng = FAMILIES[cfg.model_type], np.random.default_rng(1)
    read: Callable[[int], dict[str, np.ndarray]] = lambda layer: random_table(fam.layer_tensors(cfg, layer), rng)  # noqa: E731
    params = load_params(cfg, lambda: random_table(fam.global_tensors(cfg), rng), read, jnp.dtype(dtype))
    case = Case(cfg.model_type, cfg.width, cfg.expert_size, cfg.num_experts, cfg.top_k, cfg.swiglu_limit)
    experts, weights = random_experts(
        case, spec, folder, layers=cfg.num_moe_layers, executor=executor, distinct=distinct, **options
    )
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))  # no text: generate ids
    (folder / "config.json").write_text("{}")
    return Model(folder, cfg, params, experts, "none", min(cfg.max_positions, 8192), 16), weights
