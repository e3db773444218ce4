"""Flax model definitions. `family(model_type)` is the only registry: model_type -> the family's module."""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.models import deepseek, gpt_oss, mixtral, olmoe, qwen_moe

FAMILIES: dict[str, ModuleType] = {
    "qwen3_moe": qwen_moe,
    "qwen2_moe": qwen_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "glm4_moe": deepseek,
    "gpt_oss": gpt_oss,
}


def family(config: Mapping[str, Any]) -> ModuleType:
    """Give the module of a config.json's family. Raises ValueError if it is unknown."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"config.json: model_type {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Count a model's numbers: in the matrices of the routed experts, and in all else."""
    fam = FAMILIES[cfg.model_type]
    tables = [fam.global_tensors(cfg), *(fam.layer_tensors(cfg, layer) for layer in range(cfg.num_layers))]
    experts = cfg.num_moe_layers * cfg.num_experts * 3 * cfg.expert_size * cfg.width
    return experts, sum(math.prod(shape) for table in tables for _, shape in table.values())


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Turn a published config.json into a ModelConfig. Raises ValueError as the family does."""
    return family(config).read_config(config)
