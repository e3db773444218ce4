"""What families share in reading a published checkpoint: config fields, rotary settings, name tables.

A name table maps a published name to (our path, shape).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rapidmoe_jax.config import ModelConfig, RopeConfig

Table = dict[str, tuple[str, tuple[int, ...]]]
MATRICES = ("gate_proj", "up_proj", "down_proj")


class ConfigReader:
    """A config.json with errors that name family and field."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.where = f"config.json ({config.get('model_type')})"

    def field(self, *names: str) -> Any:
        """Give the first of the fields that is set. Raises ValueError if none is."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"{self.where}: {' or '.join(names)} is missing; copy the file again")

    def refuse(self, unsupported: Mapping[str, bool]) -> None:
        """Raise ValueError naming the fields whose setting this family's code does not have."""
        names = [f"{k}={self.config.get(k)}" for k, bad in unsupported.items() if bad]
        if names:
            raise ValueError(f"{self.where}: {', '.join(names)} is not supported; this family is read without it")

    def rope(self, size: int) -> RopeConfig:
        """Read the rotary settings: on top and in rope_scaling, or all in rope_parameters (transformers 5).

        Args:
          size: elements of a head that rotate.
        """
        given = dict(self.config.get("rope_scaling") or {}) | dict(self.config.get("rope_parameters") or {})
        theta = given.get("rope_theta", self.config.get("rope_theta"))
        if theta is None:
            raise ValueError(f"{self.where}: rope_theta is missing; copy the file again")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "linear", "dynamic", "yarn"):
            raise ValueError(
                f"{self.where}: rope_scaling={given} is not supported; use default, linear, dynamic or yarn"
            )
        if kind == "default":
            return RopeConfig(theta=float(theta), size=size)
        if "factor" not in given:
            raise ValueError(f"{self.where}: rope_scaling={given} has no factor; copy the file again")
        original = given.get("original_max_position_embeddings") or self.field("max_position_embeddings")
        return RopeConfig(
            theta=float(theta),
            size=size,
            kind=kind,
            factor=float(given["factor"]),
            original_positions=int(original),
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            mscale=float(given.get("mscale") or 0),
            mscale_all_dim=float(given.get("mscale_all_dim") or 0),
            attention_factor=float(given.get("attention_factor") or 0),
        )

    def max_positions(self, rope: RopeConfig) -> int:
        """Give the longest sequence; dynamic stretching goes beyond the published length."""
        positions = int(self.field("max_position_embeddings"))
        return int(positions * rope.factor) if rope.kind == "dynamic" else positions

    def common(self, rope_size: int | None = None, *, head_dim: int | None = None) -> dict[str, Any]:
        """Read the fields that all families write alike, as arguments of ModelConfig.

        Args:
          rope_size: None = the whole head.
          head_dim: None = as the config says, else hidden_size / heads.
        """
        act = self.config.get("hidden_act", "silu")
        self.refuse({"hidden_act": act != "silu"})
        heads, width = int(self.field("num_attention_heads")), int(self.field("hidden_size"))
        head_dim = head_dim or int(self.config.get("head_dim") or width // heads)
        rope = self.rope(rope_size or head_dim)
        return {
            "model_type": str(self.field("model_type")),
            "vocab_size": int(self.field("vocab_size")),
            "width": width,
            "num_layers": int(self.field("num_hidden_layers")),
            "num_heads": heads,
            "num_kv_heads": int(self.config.get("num_key_value_heads") or heads),
            "head_dim": head_dim,
            "mlp_size": int(self.config.get("intermediate_size") or 0),
            "rms_norm_eps": float(self.field("rms_norm_eps")),
            "rope": rope,
            "tie_embeddings": bool(self.config.get("tie_word_embeddings", False)),
            "max_positions": self.max_positions(rope),
            "top_k": int(self.field("num_experts_per_tok")),
        }


def global_tensors(cfg: ModelConfig) -> Table:
    """Give the tensors outside the layers."""
    table: Table = {
        "model.embed_tokens.weight": ("embed", (cfg.vocab_size, cfg.width)),
        "model.norm.weight": ("norm", (cfg.width,)),
    }
    if not cfg.tie_embeddings:
        table["lm_head.weight"] = ("head", (cfg.vocab_size, cfg.width))
    return table


def norm_rows(cfg: ModelConfig) -> Table:
    """Give a layer's two norms."""
    return {
        "input_layernorm.weight": ("attn_norm.scale", (cfg.width,)),
        "post_attention_layernorm.weight": ("mlp_norm.scale", (cfg.width,)),
    }


def attention_rows(cfg: ModelConfig) -> Table:
    """Give grouped-query attention."""
    d, q, kv = cfg.width, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    rows: Table = {}
    for name, outputs, inputs, bias in (("q", q, d, cfg.qkv_bias), ("k", kv, d, cfg.qkv_bias),
                                        ("v", kv, d, cfg.qkv_bias), ("o", d, q, cfg.out_bias)):  # fmt: skip
        rows[f"self_attn.{name}_proj.weight"] = (f"attn.{name}_proj.weight", (outputs, inputs))
        if bias:
            rows[f"self_attn.{name}_proj.bias"] = (f"attn.{name}_proj.bias", (outputs,))
    if cfg.qk_norm:
        full = cfg.qk_norm == "full"
        rows["self_attn.q_norm.weight"] = ("attn.q_norm.scale", (q if full else cfg.head_dim,))
        rows["self_attn.k_norm.weight"] = ("attn.k_norm.scale", (kv if full else cfg.head_dim,))
    return rows


def mlp_rows(cfg: ModelConfig, size: int, published: str = "mlp", ours: str = "mlp") -> Table:
    """Give a gated MLP of `size` hidden units."""
    shapes = ((size, cfg.width), (size, cfg.width), (cfg.width, size))
    return {f"{published}.{m}.weight": (f"{ours}.{m}.weight", s) for m, s in zip(MATRICES, shapes, strict=True)}


def in_layer(layer: int, *tables: Table) -> Table:
    """Join tables of one layer and put its prefix before the names."""
    return {f"model.layers.{layer}.{name}": entry for table in tables for name, entry in table.items()}


def expert_names(layer: int, expert: int, block: str = "mlp.experts", matrices: Sequence[str] = MATRICES) -> list[str]:
    """Name one expert's gate, up and down matrices where each is a tensor of its own."""
    return [f"model.layers.{layer}.{block}.{expert}.{m}.weight" for m in matrices]


def expert_shapes(cfg: ModelConfig, layer: int, names: Any = expert_names) -> dict[str, tuple[int, ...]]:
    """Give the shapes of all experts' matrices; names: as expert_names."""
    f, d = cfg.expert_size, cfg.width
    shapes = ((f, d), (f, d), (d, f))
    return {n: s for e in range(cfg.num_experts) for n, s in zip(names(layer, e), shapes, strict=True)}


def stack_expert(checkpoint: Any, names: Iterable[str]) -> np.ndarray:
    """Read an expert of single matrices as [3, F, D] float32, down_proj transposed to one row a unit."""
    gate, up, down = (checkpoint.read(name).astype(np.float32) for name in names)
    return np.stack([gate, up, down.T])
