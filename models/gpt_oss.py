"""gpt-oss (20b, 120b): softmax over the chosen experts, biases everywhere, sinks, a window in every other layer.

The experts are published fused: gate_up_proj [E, D, 2F] with gate and up interleaved and down_proj [E, F, D], or as
MXFP4 blocks [E, 2F, D / 32, 16] with an exponent a block of 32.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rapidmoe_jax.activation import CLAMPED_ALPHA
from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models import published
from rapidmoe_jax.models.published import ConfigReader, Table, global_tensors

__all__ = ["expert_shapes", "global_tensors", "layer_tensors", "read_config", "read_expert"]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK = 32


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig. Raises ValueError naming a missing or unsupported field."""
    c = ConfigReader(config)
    method = (config.get("quantization_config") or {}).get("quant_method")
    c.refuse({
        "swiglu_alpha": config.get("swiglu_alpha", CLAMPED_ALPHA) != CLAMPED_ALPHA,
        "quantization_config": method not in (None, "mxfp4"),
    })  # fmt: skip
    common = c.common()
    kinds, window = c.field("layer_types"), int(c.field("sliding_window"))
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"{c.where}: layer_types has {', '.join(unknown)}; wanted sliding_attention, full_attention")
    return ModelConfig(
        **common,
        expert_size=common["mlp_size"],
        num_experts=int(c.field("num_local_experts", "num_experts")),
        norm_topk_prob=True,
        moe_layers=(True,) * common["num_layers"],
        qkv_bias=bool(config.get("attention_bias", True)),
        out_bias=bool(config.get("attention_bias", True)),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        sinks=True,
        router_score="topk_softmax",
        router_bias=True,
        expert_bias=True,
        swiglu_limit=float(config.get("swiglu_limit", 7.0)),
        expert_storage="mxfp4" if method else "fused",
    )


def layer_tensors(cfg: ModelConfig, layer: int) -> Table:
    """Tensors of one layer but its routed experts' matrices; their biases are among the dense ones."""
    e, f, d = cfg.num_experts, cfg.expert_size, cfg.width
    block: Table = {
        "self_attn.sinks": ("attn.sinks", (cfg.num_heads,)),
        "mlp.router.weight": ("mlp.router.weight", (e, d)),
        "mlp.router.bias": ("mlp.router.bias", (e,)),
        "mlp.experts.gate_up_proj_bias": ("mlp.gate_up_bias", (e, 2 * f)),  # interleaved: (gate 0, up 0, gate 1, ...)
        "mlp.experts.down_proj_bias": ("mlp.down_bias", (e, d)),
    }
    return published.in_layer(layer, published.norm_rows(cfg), published.attention_rows(cfg), block)


def _names(layer: int) -> tuple[str, str]:
    return f"model.layers.{layer}.mlp.experts.gate_up_proj", f"model.layers.{layer}.mlp.experts.down_proj"


def expert_shapes(cfg: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Give the shapes of the tensors that hold all experts' matrices."""
    (gate_up, down), e, f, d = _names(layer), cfg.num_experts, cfg.expert_size, cfg.width
    if cfg.expert_storage == "fused":
        return {gate_up: (e, d, 2 * f), down: (e, f, d)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in ((gate_up, 2 * f, d), (down, d, f)):
        shapes[f"{name}_blocks"] = (e, rows, columns // _BLOCK, _BLOCK // 2)
        shapes[f"{name}_scales"] = (e, rows, columns // _BLOCK)
    return shapes


def read_expert(checkpoint: Any, cfg: ModelConfig, layer: int, expert: int) -> np.ndarray:
    """Read one expert as [3, F, D] float32."""
    names = _names(layer)
    if cfg.expert_storage == "fused":
        gate_up, down = (checkpoint.read(name, expert).astype(np.float32) for name in names)
        gate_up = gate_up.T  # [2F, D]
    else:
        parts = [(checkpoint.read(f"{n}_blocks", expert), checkpoint.read(f"{n}_scales", expert)) for n in names]
        gate_up, down = (dequantize_mxfp4(*part) for part in parts)
        down = down.T  # [F, D]
    return np.stack([gate_up[::2], gate_up[1::2], down])


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Turn MXFP4 blocks [rows, G, 16] uint8, low nibble first, with exponents [rows, G] into [rows, 32 G] float32."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:2], _BLOCK)
    return np.ldexp(_E2M1[codes], scales[..., None].astype(np.int32) - 127).reshape(blocks.shape[0], -1)
