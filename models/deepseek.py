"""DeepSeek-V3 and R1, and what is published in their layout: Kimi-K2 (kimi_k2), GLM-4.5-MoE (glm4_moe).

Sigmoid router in groups with a correction bias, shared experts, leading dense layers. DeepSeek and Kimi: latent
attention, rotary pairs. GLM: grouped-query attention with biases, half of a head rotated. The layers after the last are
for predicting several tokens at once; they are left out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rapidmoe_jax.config import LatentConfig, ModelConfig
from rapidmoe_jax.models import published
from rapidmoe_jax.models.published import ConfigReader, Table, expert_names, expert_shapes, global_tensors

__all__ = ["expert_shapes", "global_tensors", "layer_tensors", "left_out", "read_config", "read_expert"]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig. Raises ValueError naming a missing or unsupported field."""
    c = ConfigReader(config)
    glm = config["model_type"] == "glm4_moe"
    c.refuse({
        "attention_bias": bool(config.get("attention_bias")) and not glm,
        "scoring_func": config.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": config.get("topk_method", "noaux_tc") != "noaux_tc",
        "moe_layer_freq": config.get("moe_layer_freq", 1) != 1,
        "rope_interleave": config.get("rope_interleave", True) is False,
    })  # fmt: skip
    attention: dict[str, Any]
    if glm:
        head_dim = int(c.field("head_dim"))
        rope = config.get("rope_parameters") or {}
        rotated = int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5)))
        attention = c.common(rotated) | {
            "qkv_bias": bool(config.get("attention_bias", False)),
            "qk_norm": "head" if config.get("use_qk_norm") else "",
        }
    else:
        latent = LatentConfig(
            query_rank=int(config.get("q_lora_rank") or 0),
            rank=int(c.field("kv_lora_rank")),
            nope_size=int(c.field("qk_nope_head_dim")),
            rope_size=int(c.field("qk_rope_head_dim")),
            value_size=int(c.field("v_head_dim")),
        )
        attention = c.common(latent.rope_size, head_dim=latent.nope_size + latent.rope_size) | {"latent": latent}
    layers, dense = attention["num_layers"], int(config.get("first_k_dense_replace", 0))
    size = int(c.field("moe_intermediate_size"))
    return ModelConfig(
        **attention,
        expert_size=size,
        num_experts=int(c.field("n_routed_experts", "num_local_experts")),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        moe_layers=tuple(i >= dense for i in range(layers)),
        router_score="sigmoid",
        correction_bias=True,
        num_groups=int(config.get("n_group") or 1),
        kept_groups=int(config.get("topk_group") or 1),
        routed_scaling=float(config.get("routed_scaling_factor", 1.0)),
        shared_size=size * int(config.get("n_shared_experts") or 0),
    )


def _latent_rows(cfg: ModelConfig, c: LatentConfig) -> Table:
    d, h = cfg.width, cfg.num_heads
    query = h * (c.nope_size + c.rope_size)
    rows: Table = {
        "self_attn.kv_a_proj_with_mqa.weight": ("attn.kv_a_proj.weight", (c.rank + c.rope_size, d)),
        "self_attn.kv_a_layernorm.weight": ("attn.kv_a_norm.scale", (c.rank,)),
        "self_attn.kv_b_proj.weight": ("attn.kv_b_proj.weight", (h * (c.nope_size + c.value_size), c.rank)),
        "self_attn.o_proj.weight": ("attn.o_proj.weight", (d, h * c.value_size)),
    }
    if not c.query_rank:
        return rows | {"self_attn.q_proj.weight": ("attn.q_proj.weight", (query, d))}
    return rows | {
        "self_attn.q_a_proj.weight": ("attn.q_a_proj.weight", (c.query_rank, d)),
        "self_attn.q_a_layernorm.weight": ("attn.q_a_norm.scale", (c.query_rank,)),
        "self_attn.q_b_proj.weight": ("attn.q_b_proj.weight", (query, c.query_rank)),
    }


def layer_tensors(cfg: ModelConfig, layer: int) -> Table:
    """Tensors of one layer but its routed experts. Matrices are [out, in]."""
    attention = _latent_rows(cfg, cfg.latent) if cfg.latent else published.attention_rows(cfg)
    if not cfg.moe_layers[layer]:
        block = published.mlp_rows(cfg, cfg.mlp_size)
    else:
        block: Table = {
            "mlp.gate.weight": ("mlp.router.weight", (cfg.num_experts, cfg.width)),
            "mlp.gate.e_score_correction_bias": ("mlp.router.correction_bias", (cfg.num_experts,)),
        }
        if cfg.shared_size:
            block |= published.mlp_rows(cfg, cfg.shared_size, "mlp.shared_experts", "mlp.shared")
    return published.in_layer(layer, published.norm_rows(cfg), attention, block)


def read_expert(checkpoint: Any, cfg: ModelConfig, layer: int, expert: int) -> np.ndarray:
    """Read one expert as [3, F, D] float32."""
    return published.stack_expert(checkpoint, expert_names(layer, expert))


def left_out(cfg: ModelConfig) -> str:
    """Give the prefix of tensors that are no part of the decoder: multi-token prediction, after the last layer."""
    return f"model.layers.{cfg.num_layers}."
