"""Bring a checkpoint into memory: a published folder as the float model, or a split one as base and residual."""

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.config import ModelConfig
from rapidmoe_jax.experts import EXECUTORS, Calibration, FloatExperts, SplitExperts
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.memory import empty, to_device
from rapidmoe_jax.models import family, read_config
from rapidmoe_jax.models.decoder import DecoderParams, abstract_layer, fill_state, layer_runs
from rapidmoe_jax.source import check_tensors, read_dense
from rapidmoe_jax.store import SplitCheckpoint


def load_params(
    cfg: ModelConfig, read_globals: Callable[[], dict], read_layer: Callable[[int], dict], dtype: Any
) -> DecoderParams:
    """Build the dense parameters from two readers of (our path -> array), one layer in memory beside the result."""
    shared = {path: jnp.asarray(value, dtype) for path, value in read_globals().items()}
    runs = []
    for moe, first, count in layer_runs(cfg):
        _, state = abstract_layer(cfg, moe=moe)
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        stacked = {path: empty((count, *leaf.shape), np.dtype(_kind(path, dtype))) for path, leaf in flat.items()}
        for i in range(count):
            layer = read_layer(first + i)
            for path, into in stacked.items():
                into[i] = layer[path].reshape(into.shape[1:])
        runs.append(fill_state(state, {path: to_device(value) for path, value in stacked.items()}))
    return DecoderParams(embed=shared["embed"], norm=shared["norm"], head=shared.get("head"), runs=runs)


def _kind(path: str, dtype: Any) -> Any:
    return np.float32 if path.endswith("correction_bias") else dtype  # small differences between scores choose experts


def load_float(folder: Path, dtype: Any) -> tuple[ModelConfig, DecoderParams, FloatExperts]:
    """Load a published folder unsplit, experts in float32."""
    checkpoint = Checkpoint(folder)
    fam = family(checkpoint.config)
    cfg = fam.read_config(checkpoint.config)
    check_tensors(checkpoint, fam, cfg)
    params = load_params(
        cfg,
        lambda: read_dense(checkpoint, fam.global_tensors(cfg), keep_float=True),
        lambda layer: read_dense(checkpoint, fam.layer_tensors(cfg, layer), keep_float=True),
        dtype,
    )
    weights = empty((cfg.num_moe_layers, cfg.num_experts, 3, cfg.expert_size, cfg.width), np.float32)
    for i, layer in enumerate(_moe_layers(cfg)):
        for expert in range(cfg.num_experts):
            weights[i, expert] = fam.read_expert(checkpoint, cfg, layer, expert)
    return cfg, params, FloatExperts(to_device(weights), cfg.swiglu_limit)


def _moe_layers(cfg: ModelConfig) -> list[int]:
    return [layer for layer, moe in enumerate(cfg.moe_layers) if moe]


def load_split(
    folder: Path, dtype: Any, *, executor: str, exact: bool, verify: bool
) -> tuple[ModelConfig, DecoderParams, SplitExperts]:
    """Load a split checkpoint: base to the device, residual mapped for the host kernels.

    Peak memory: the payload and one layer. executor "off" does not touch the residual files.
    """
    checkpoint = SplitCheckpoint(folder)
    if verify:
        checkpoint.verify()
    cfg = read_config(checkpoint.metadata["config"])
    params = load_params(cfg, checkpoint.restore_globals, checkpoint.restore_dense, dtype)
    base: dict[str, np.ndarray] = {}
    for i, layer in enumerate(_moe_layers(cfg)):
        for name, value in checkpoint.restore_base(layer).items():
            if name not in base:
                base[name] = empty((cfg.num_moe_layers, *value.shape), value.dtype)
            base[name][i] = value
    base["norms"] = base["norms"].view(np.uint16)
    split = checkpoint.split
    record_bytes = _host.record_layout(split.base_bits, split.residual_bits, cfg.width)["bytes"]
    known = checkpoint.calibration
    experts = SplitExperts(
        **{name: to_device(value) for name, value in base.items()},
        calibration=Calibration.of(known) if known else Calibration.none(cfg.num_moe_layers),
        records=_read_records(checkpoint, cfg, record_bytes) if executor == "reference" else None,
        base_bits=split.base_bits,
        residual_bits=split.residual_bits,
        record_bytes=record_bytes,
        store=checkpoint.open_residual(cfg) if executor in ("host", "callback") else -1,
        executor=executor,
        base_kernel="host" if jax.default_backend() == "cpu" and executor != "reference" else "reference",
        exact=exact,
        swiglu_limit=cfg.swiglu_limit,
    )
    if experts.store >= 0:
        weakref.finalize(experts, _host.close_store, experts.store)
    return cfg, params, experts


def _read_records(checkpoint: SplitCheckpoint, cfg: ModelConfig, record: int) -> jax.Array:
    _host.close_store(checkpoint.open_residual(cfg))  # checks headers and sizes
    files = [np.fromfile(path, np.uint8, offset=_host.HEADER_BYTES) for path in checkpoint.residual_paths]
    return jnp.asarray(np.stack(files).reshape(len(files), cfg.num_experts, cfg.expert_size, record))


def choose_executor(executor: str | None) -> str:
    """Pick the executor: the asked one or the best of this backend.

    Raises: ValueError if it is unknown or cannot run here.
    """
    cpu = jax.default_backend() == "cpu"
    if executor is None and not cpu:
        warnings.warn(
            f"on {jax.default_backend()} the base runs in plain XLA and corrections go through a Python callback: "
            "right, but slow (executor='callback')",
            stacklevel=3,
        )
    if executor is None:
        return "host" if cpu else "callback"
    if executor not in EXECUTORS:
        raise ValueError(f"executor={executor!r} is unknown; use one of {', '.join(EXECUTORS)}")
    if executor == "host" and not cpu:
        raise ValueError(f"executor='host' runs on the cpu backend, not on {jax.default_backend()}; use 'callback'")
    return executor
