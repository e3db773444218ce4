"""Qwen3-MoE (30B-A3B, 235B-A22B) and Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B).

Softmax over all experts, then top-k. Qwen3: q and k are normalised per head. Qwen2: biases on q, k and v, and a shared
expert under a sigmoid of its own.
"""

from collections.abc import Mapping
from typing import Any

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models import published
from rapidmoe_jax.models.published import ConfigReader, Table, expert_names, expert_shapes, global_tensors

__all__ = ["expert_shapes", "global_tensors", "layer_tensors", "read_config", "read_expert"]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig.

    Raises: ValueError naming the field if one is missing or asks for what this family does not have.
    """
    c = ConfigReader(config)
    qwen2 = config["model_type"] == "qwen2_moe"
    c.refuse({"use_sliding_window": bool(config.get("use_sliding_window"))})
    common = c.common()
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    return ModelConfig(
        **common,
        expert_size=int(c.field("moe_intermediate_size")),
        num_experts=int(c.field("num_experts", "num_local_experts")),
        norm_topk_prob=bool(c.field("norm_topk_prob")),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(common["num_layers"])),
        qk_norm="" if qwen2 else "head",
        qkv_bias=bool(config.get("qkv_bias", True) if qwen2 else config.get("attention_bias")),
        out_bias=not qwen2 and bool(config.get("attention_bias")),
        shared_size=int(c.field("shared_expert_intermediate_size")) if qwen2 else 0,
        shared_gate=qwen2,
    )


def layer_tensors(cfg: ModelConfig, layer: int) -> Table:
    """Tensors of one layer but its routed experts. Matrices are [out, in]."""
    if not cfg.moe_layers[layer]:
        block = published.mlp_rows(cfg, cfg.mlp_size)
    else:
        block: Table = {"mlp.gate.weight": ("mlp.router.weight", (cfg.num_experts, cfg.width))}
        if cfg.shared_size:
            block |= published.mlp_rows(cfg, cfg.shared_size, "mlp.shared_expert", "mlp.shared")
            block["mlp.shared_expert_gate.weight"] = ("mlp.shared_gate.weight", (1, cfg.width))
    return published.in_layer(layer, published.norm_rows(cfg), published.attention_rows(cfg), block)


def read_expert(checkpoint: Any, cfg: ModelConfig, layer: int, expert: int) -> Any:
    """Read one expert as [3, F, D] float32."""
    return published.stack_expert(checkpoint, expert_names(layer, expert))
