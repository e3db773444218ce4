"""Mixtral (8x7B, 8x22B): softmax over all experts, then top-k, always renormalised; w1, w3, w2 a tensor each."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models import published
from rapidmoe_jax.models.published import ConfigReader, Table, global_tensors

__all__ = ["expert_shapes", "global_tensors", "layer_tensors", "read_config", "read_expert"]

_expert_names = partial(published.expert_names, block="block_sparse_moe.experts", matrices=("w1", "w3", "w2"))
expert_shapes = partial(published.expert_shapes, names=_expert_names)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig. Raises ValueError naming a missing or unsupported field."""
    c = ConfigReader(config)
    common = c.common()
    window = int(config.get("sliding_window") or 0)
    return ModelConfig(
        **common,
        expert_size=common["mlp_size"],
        num_experts=int(c.field("num_local_experts", "num_experts")),
        norm_topk_prob=True,
        moe_layers=(True,) * common["num_layers"],
        windows=(window,) * common["num_layers"] if window else (),
    )


def layer_tensors(cfg: ModelConfig, layer: int) -> Table:
    """Tensors of one layer but its routed experts. Matrices are [out, in]."""
    router: Table = {"block_sparse_moe.gate.weight": ("mlp.router.weight", (cfg.num_experts, cfg.width))}
    return published.in_layer(layer, published.norm_rows(cfg), published.attention_rows(cfg), router)


def read_expert(checkpoint: Any, cfg: ModelConfig, layer: int, expert: int) -> np.ndarray:
    """Read one expert as [3, F, D] float32."""
    return published.stack_expert(checkpoint, _expert_names(layer, expert))
