"""OLMoE (OLMoE-1B-7B): the smallest family file.

Softmax over all experts, then top-k, not renormalised; q and k are normalised over the whole projection, then clipped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models import published
from rapidmoe_jax.models.published import ConfigReader, Table, expert_names, expert_shapes, global_tensors

__all__ = ["expert_shapes", "global_tensors", "layer_tensors", "read_config", "read_expert"]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig. Raises ValueError naming a missing or unsupported field."""
    c = ConfigReader(config)
    common = c.common()
    return ModelConfig(
        **common,
        expert_size=common["mlp_size"],
        num_experts=int(c.field("num_experts", "num_local_experts")),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layers=(True,) * common["num_layers"],
        qk_norm="full",
        qkv_bias=bool(config.get("attention_bias")),
        out_bias=bool(config.get("attention_bias")),
        clip_qkv=float(config.get("clip_qkv") or 0),
    )


def layer_tensors(cfg: ModelConfig, layer: int) -> Table:
    """Tensors of one layer but its routed experts. Matrices are [out, in]."""
    router: Table = {"mlp.gate.weight": ("mlp.router.weight", (cfg.num_experts, cfg.width))}
    return published.in_layer(layer, published.norm_rows(cfg), published.attention_rows(cfg), router)


def read_expert(checkpoint: Any, cfg: ModelConfig, layer: int, expert: int) -> np.ndarray:
    """Read one expert as [3, F, D] float32."""
    return published.stack_expert(checkpoint, expert_names(layer, expert))
