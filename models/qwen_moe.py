"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): config reader and published tensor names.

Softmax over all experts, then top-k; q and k are normalised per head; half-split rotary positions.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rapidmoe_jax.config import ModelConfig

_MATRICES = ("gate_proj", "up_proj", "down_proj")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig.

    Raises: ValueError naming the field if one is missing or asks for what this family does not have.
    """
    rope = dict(config.get("rope_parameters") or {})  # transformers 5; older configs have rope_theta on top
    scaling = config.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    unsupported = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "rope_scaling": scaling.get("rope_type", scaling.get("type", "default")) != "default",
    }
    if any(unsupported.values()):
        names = ", ".join(f"{k}={config.get(k, scaling)}" for k, bad in unsupported.items() if bad)
        raise ValueError(f"config.json (qwen3_moe): {names} is not supported; this family is read without it")

    def field(*names: str) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        raise ValueError(f"config.json (qwen3_moe): {' or '.join(names)} is missing; copy the file again")

    layers = int(field("num_hidden_layers"))
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json (qwen3_moe): rope_theta is missing; copy the file again")
    return ModelConfig(
        model_type="qwen3_moe",
        vocab_size=int(field("vocab_size")),
        width=int(field("hidden_size")),
        num_layers=layers,
        num_heads=int(field("num_attention_heads")),
        num_kv_heads=int(field("num_key_value_heads")),
        head_dim=int(field("head_dim")),
        mlp_size=int(field("intermediate_size")),
        expert_size=int(field("moe_intermediate_size")),
        num_experts=int(field("num_experts", "num_local_experts")),
        top_k=int(field("num_experts_per_tok")),
        norm_topk_prob=bool(field("norm_topk_prob")),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        rms_norm_eps=float(field("rms_norm_eps")),
        rope_theta=float(theta),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(field("max_position_embeddings")),
    )


def global_tensors(cfg: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors outside the layers: published name -> (our path, shape)."""
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("embed", (cfg.vocab_size, cfg.width)),
        "model.norm.weight": ("norm", (cfg.width,)),
    }
    if not cfg.tie_embeddings:
        table["lm_head.weight"] = ("head", (cfg.vocab_size, cfg.width))
    return table


def layer_tensors(cfg: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors of one layer but its routed experts: published name -> (our path, shape). Matrices are [out, in]."""
    d, h, j, hd = cfg.width, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("input_layernorm", "attn_norm.scale", (d,)),
        ("post_attention_layernorm", "mlp_norm.scale", (d,)),
        ("self_attn.q_proj", "attn.q_proj.weight", (h * hd, d)),
        ("self_attn.k_proj", "attn.k_proj.weight", (j * hd, d)),
        ("self_attn.v_proj", "attn.v_proj.weight", (j * hd, d)),
        ("self_attn.o_proj", "attn.o_proj.weight", (d, h * hd)),
        ("self_attn.q_norm", "attn.q_norm.scale", (hd,)),
        ("self_attn.k_norm", "attn.k_norm.scale", (hd,)),
    ]
    if cfg.moe_layers[layer]:
        rows.append(("mlp.gate", "mlp.router.weight", (cfg.num_experts, d)))
    else:
        f = cfg.mlp_size
        rows += [(f"mlp.{m}", f"mlp.{m}.weight", (d, f) if m == "down_proj" else (f, d)) for m in _MATRICES]
    return {f"model.layers.{layer}.{name}.weight": (path, shape) for name, path, shape in rows}


def expert_tensors(cfg: ModelConfig, layer: int) -> Iterator[tuple[int, int, str, tuple[int, int]]]:
    """Tensors of a layer's routed experts: (expert, matrix 0 gate 1 up 2 down, published name, shape)."""
    for e in range(cfg.num_experts):
        for m, matrix in enumerate(_MATRICES):
            shape = (cfg.width, cfg.expert_size) if m == 2 else (cfg.expert_size, cfg.width)
            yield e, m, f"model.layers.{layer}.mlp.experts.{e}.{matrix}.weight", shape
