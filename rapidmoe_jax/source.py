"""A published checkpoint as our layers: a family's name table applied to the files of a Checkpoint."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.config import ModelConfig


def check_tensors(checkpoint: Checkpoint, fam: Any, cfg: ModelConfig) -> None:
    """Compare all tensors of a checkpoint with the config. Raises ValueError listing every difference."""
    wanted = {name: shape for name, (_, shape) in fam.global_tensors(cfg).items()}
    for layer in range(cfg.num_layers):
        wanted |= {name: shape for name, (_, shape) in fam.layer_tensors(cfg, layer).items()}
        if cfg.moe_layers[layer]:
            wanted |= {name: shape for _, _, name, shape in fam.expert_tensors(cfg, layer)}
    checkpoint.validate(wanted)


def read_dense(
    checkpoint: Checkpoint, table: dict[str, tuple[str, tuple[int, ...]]], *, keep_float: bool = False
) -> dict[str, np.ndarray]:
    """Read unsplit tensors by our path, in their published precision.

    Args:
      keep_float: False rounds fp8 weights, dequantised, to bfloat16; True leaves them float32.
    """
    tensors = {}
    for name, (path, _) in table.items():
        value = checkpoint.read(name)
        narrow = checkpoint.stored_dtype(name).startswith("F8") and not keep_float
        tensors[path] = value.astype(ml_dtypes.bfloat16) if narrow else value
    return tensors


def expert_names(fam: Any, cfg: ModelConfig, layer: int) -> list[list[str]]:
    """Give the published names of each expert's gate_proj, up_proj and down_proj."""
    names: list[list[str]] = [[] for _ in range(cfg.num_experts)]
    for expert, _, name, _ in fam.expert_tensors(cfg, layer):
        names[expert].append(name)
    return names


def read_expert(checkpoint: Checkpoint, names: Sequence[str]) -> np.ndarray:
    """Read one expert as [3, F, D] float32: gate_proj, up_proj, and down_proj transposed to one row a unit.

    Args:
      names: published names of the three, in that order.
    """
    gate, up, down = (checkpoint.read(name).astype(np.float32) for name in names)
    return np.stack([gate, up, down.T])
