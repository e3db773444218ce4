"""A published checkpoint as our layers: a family's name table applied to the files of a Checkpoint."""

import warnings
from typing import Any

import ml_dtypes
import numpy as np

from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.config import ModelConfig


def check_tensors(checkpoint: Checkpoint, fam: Any, cfg: ModelConfig) -> None:
    """Compare all tensors of a checkpoint with the config. Raises ValueError listing every difference.

    Warns of tensors that are known and left out (multi-token prediction).
    """
    wanted = {name: shape for name, (_, shape) in fam.global_tensors(cfg).items()}
    for layer in range(cfg.num_layers):
        wanted |= {name: shape for name, (_, shape) in fam.layer_tensors(cfg, layer).items()}
        if cfg.moe_layers[layer]:
            wanted |= fam.expert_shapes(cfg, layer)
    prefix = fam.left_out(cfg) if hasattr(fam, "left_out") else None
    if count := checkpoint.validate(wanted, prefix):
        warnings.warn(
            f"{checkpoint.folder}: {count} tensors {prefix}* are left out: they predict several tokens at once, "
            "which generation here does not use",
            stacklevel=2,
        )


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
