"""The split checkpoint on disk.

    OUT/metadata.json            format version, source config, bits, errors a layer, checksums; written last
    OUT/config.json, tokenizer.json, ...      copied from the source
    OUT/dense/{globals,layer_000,...}         Orbax: embeddings, norms, attention, routers, as published
    OUT/base/layer_000 ...                    Orbax: codes [E, 3, F, P] uint8, scale and offset [E, 3, F, D/64] half,
                                              norms [E, F, 4] bfloat16 (|R1|^2, |R3|^2, |R2|^2, |B2|^2 a unit)
    OUT/residual/000.bin ...                  one flat file a layer with experts: a header page, then a record a unit

The three items are decoupled: base and residual are each read without the other. The residual lies in flat files
because C++ maps them into memory and reads a unit as one contiguous record (host_kernels/layout.h). Layers of base
are numbered as in the model, residual files count the layers that have experts.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from rapidmoe_jax.checkpoint import read_json
from rapidmoe_jax.config import GROUP_SIZE, ModelConfig, SplitConfig
from rapidmoe_jax.host_kernels import _host

FORMAT_VERSION = 1
METADATA = "metadata.json"
COPIED_FILES = (  # patterns
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def save_item(path: Path, tree: Mapping[str, Any]) -> None:
    """Write one Orbax item; a name with dots becomes a nested tree."""
    ocp.PyTreeCheckpointer().save(path.absolute(), dict(tree), force=True)


def restore_item(path: Path) -> dict[str, np.ndarray]:
    """Read one Orbax item as numpy arrays. Raises ValueError with the path if it is missing or damaged."""
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        names = checkpointer.metadata(path.absolute()).item_metadata.tree  # pyrefly: ignore[missing-attribute]
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(path.absolute(), restore_args=args)
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise ValueError(f"{path}: cannot be restored ({e}); split the checkpoint again") from e


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object so that the file is either absent or whole."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)


def sha256_of(path: Path) -> str:
    """Give the sha256 of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def residual_header(cfg: ModelConfig, split: SplitConfig, layer: int) -> bytes:
    """Give the header page of a residual file; host_kernels/layout.h has the struct. layer counts MoE layers."""
    record = _host.record_layout(split.base_bits, split.residual_bits, cfg.width)["bytes"]
    fields = [
        _host.FORMAT_VERSION,
        layer,
        cfg.num_experts,
        cfg.expert_size,
        cfg.width,
        split.base_bits,
        split.residual_bits,
        GROUP_SIZE,
    ]
    head = b"RMOERES1" + np.array(fields, "<u4").tobytes() + np.array([record], "<u8").tobytes()
    return head.ljust(_host.HEADER_BYTES, b"\0")


class SplitCheckpoint:
    """A split checkpoint, opened for reading. Arrays are read only when asked for.

    Raises ValueError if it is no split checkpoint or of a newer format.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.metadata = read_json(self.folder / METADATA)
        version = self.metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{self.folder}: split format {version}, this release reads {FORMAT_VERSION}; "
                "update rapidmoe_jax or split the checkpoint again"
            )
        self.split = SplitConfig(**self.metadata["split"])

    @staticmethod
    def is_one(folder: str | Path) -> bool:
        """True if the folder holds a split checkpoint."""
        return (Path(folder) / METADATA).exists()

    @property
    def residual_paths(self) -> list[str]:
        """Residual files of the layers with experts, in order."""
        return [str(self.folder / "residual" / name) for name in sorted(self.metadata["residual_files"])]

    @property
    def calibration(self) -> dict[str, Any] | None:
        """What a calibration text showed (damage.summary); None if the split had none."""
        return self.metadata.get("calibration")

    def restore_globals(self) -> dict[str, np.ndarray]:
        """Read embedding, final norm and head."""
        return restore_item(self.folder / "dense" / "globals")

    def restore_dense(self, layer: int) -> dict[str, np.ndarray]:
        """Read one layer's attention, norms and router (or dense MLP): our path -> array."""
        return restore_item(self.folder / "dense" / f"layer_{layer:03d}")

    def restore_base(self, layer: int) -> dict[str, np.ndarray]:
        """Read one layer's base: codes, scale, offset, norms. Needs no residual."""
        return restore_item(self.folder / "base" / f"layer_{layer:03d}")

    def open_residual(self, cfg: ModelConfig) -> int:
        """Map the residual files and return a store handle for the host kernels. Needs no base.

        Raises: ValueError naming the file whose header or size is wrong.
        """
        try:
            return _host.open_store(
                self.residual_paths,
                cfg.num_experts,
                cfg.expert_size,
                cfg.width,
                self.split.base_bits,
                self.split.residual_bits,
            )
        except RuntimeError as e:
            raise ValueError(str(e)) from None

    def verify(self) -> None:
        """Read the residual files and compare their checksums. Raises ValueError listing every damaged one."""
        bad = [
            name
            for name, info in self.metadata["residual_files"].items()
            if sha256_of(self.folder / "residual" / name) != info["sha256"]
        ]
        if bad:
            raise ValueError(f"{self.folder}/residual: damaged: {', '.join(bad)}; split the checkpoint again")
