"""Split a published checkpoint into base and residual (RESplit), layer by layer.

    W = B + R + rest,   B = base codes (device),   R = residual codes of what B lost (host)

One layer is in memory at a time. Work goes to OUT.partial and is renamed to OUT when whole; an interrupted split
resumes there at the first missing layer. The on-disk format is store.py's.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rapidmoe_jax import quant
from rapidmoe_jax.checkpoint import Checkpoint, read_json
from rapidmoe_jax.config import GROUP_SIZE, VERSION, ModelConfig, SplitConfig
from rapidmoe_jax.host_kernels import _host, threads
from rapidmoe_jax.models import family
from rapidmoe_jax.source import check_tensors, expert_names, read_dense, read_expert
from rapidmoe_jax.store import COPIED_FILES, FORMAT_VERSION, METADATA, residual_header, save_item, sha256_of, write_json

Progress = Callable[[int, int], None]  # layers done, layers in all


def split(
    source: str | Path,
    out: str | Path,
    *,
    base_bits: int = 3,
    residual_bits: int = 4,
    quantizer: str | quant.Quantizer = "nested",
    progress: Progress | None = None,
) -> Path:
    """Split a published checkpoint folder into a split checkpoint.

    Args:
      source: folder with config.json and *.safetensors.
      out: folder to create; must not exist.
      base_bits: 2, 3 or 4, kept on the device for every expert.
      residual_bits: 2 or 4, kept in host memory.
      quantizer: name in quant.QUANTIZERS or a function of that signature.
      progress: called with (layers done, layers in all).
    Returns: out.
    Raises: ValueError if the source is damaged, out exists or lies in the source, or an argument is out of range.
    """
    spec = SplitConfig(base_bits=base_bits, residual_bits=residual_bits)
    if isinstance(quantizer, str):
        if quantizer not in quant.QUANTIZERS:
            raise ValueError(f"quantizer={quantizer!r} is unknown; use one of {list(quant.QUANTIZERS)}")
        quantizer = quant.QUANTIZERS[quantizer]
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"{out}: exists already; remove it or choose another folder")
    if source.resolve() == out.resolve() or source.resolve() in out.resolve().parents:
        raise ValueError(f"{out}: lies inside the source {source}; choose a folder outside it")
    checkpoint = Checkpoint(source)
    fam = family(checkpoint.config)
    cfg: ModelConfig = fam.read_config(checkpoint.config)
    check_tensors(checkpoint, fam, cfg)

    work = out.with_name(out.name + ".partial")
    plan = {
        "format_version": FORMAT_VERSION,
        "source": str(source.resolve()),
        "source_files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in checkpoint.files},
        "split": {"base_bits": base_bits, "residual_bits": residual_bits},
        "quantizer": getattr(quantizer, "__name__", str(quantizer)),
    }
    job = _Job(checkpoint, fam, cfg, spec, quantizer, work)
    with _work_folder(work, plan):
        reports = []
        for layer in range(cfg.num_layers):
            if progress:
                progress(layer, cfg.num_layers)
            done = work / "reports" / f"layer_{layer:03d}.json"
            if not done.exists():
                write_json(done, _split_layer(job, layer))
            reports.append(read_json(done))
        save_item(work / "dense" / "globals", read_dense(checkpoint, fam.global_tensors(cfg)))
        for name in COPIED_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, work / name)
        write_json(work / METADATA, _metadata(job, plan, reports))
        work.rename(out)
        shutil.rmtree(out / "reports")
        (out / "plan.json").unlink()
    if progress:
        progress(cfg.num_layers, cfg.num_layers)
    return out


class _Job(NamedTuple):
    checkpoint: Checkpoint
    fam: Any  # module in models/
    cfg: ModelConfig
    spec: SplitConfig
    quantizer: quant.Quantizer
    work: Path


def _metadata(job: _Job, plan: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, Any]:
    residuals = sorted((job.work / "residual").glob("*.bin"))
    return {
        "format_version": FORMAT_VERSION,
        "made_by": f"rapidmoe_jax {VERSION}",
        "source": {"folder": plan["source"], "sha256": {f.name: sha256_of(f) for f in job.checkpoint.files}},
        "config": job.checkpoint.config,
        "split": plan["split"],
        "quantizer": plan["quantizer"],
        "group_size": GROUP_SIZE,
        "lambda": [1.0] * job.cfg.num_moe_layers,
        "lambda_calibrated": False,
        "layers": [r for r in reports if "base_error" in r],
        "residual_files": {f.name: {"bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in residuals},
    }


@contextmanager
def _work_folder(work: Path, plan: dict[str, Any]) -> Generator[None]:
    """Make the folder of a split under way, or go on with the one that an interrupted split of the same plan left."""
    fresh = not work.exists()
    work.mkdir(parents=True, exist_ok=True)
    with (work / "plan.json").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{work}: another process is splitting there; wait for it or choose another OUT") from None
        file.seek(0)
        text = file.read()
        if not text and (fresh or not any(p.name != "plan.json" for p in work.iterdir())):
            file.write(json.dumps(plan))
            file.flush()
        elif text != json.dumps(plan):
            raise ValueError(
                f"{work}: left by an interrupted split of another source or with other settings; remove it to start "
                "over"
            )
        for name in ("dense", "base", "residual", "reports"):
            (work / name).mkdir(exist_ok=True)
        yield


def split_expert(
    w: np.ndarray, spec: SplitConfig, quantizer: quant.Quantizer
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, float]]:
    """Split one expert [3, F, D].

    Returns: base arrays (codes [3, F, P], scale and offset [3, F, G], norms [F, 4] bfloat16), records [F, bytes] uint8,
      and the squared sums of weights, of the base's error and of the error left after the residual.
    """
    _, units, width = w.shape
    rows = w.reshape(3 * units, width)
    base = quantizer(rows, bits=spec.base_bits, residual_bits=spec.residual_bits)
    _check_codes(base, rows, spec)
    base_w = quant.dequantize(base)
    code, scale = quant.quantize_residual(rows - base_w, bits=spec.residual_bits)
    residual_w = quant.dequantize_residual(code, scale, bits=spec.residual_bits)
    norm = np.square(residual_w).sum(-1).reshape(3, units)
    arrays = {
        "codes": quant.pack(base.code, bits=spec.base_bits).reshape(3, units, -1),
        "scale": base.scale.reshape(3, units, -1),
        "offset": base.offset.reshape(3, units, -1),
        "norms": np.stack([norm[0], norm[1], norm[2], np.square(base_w[2 * units :]).sum(-1)], -1).astype(
            ml_dtypes.bfloat16
        ),
    }
    packed = quant.pack(code, bits=spec.residual_bits).reshape(3, units, -1)
    halves = scale.reshape(3, units, -1)
    records = pack_records(spec, arrays, packed, halves)
    sums = {
        "weight": float(np.square(rows).sum()),
        "base": float(np.square(rows - base_w).sum()),
        "rest": float(np.square(rows - base_w - residual_w).sum()),
    }
    return arrays, records, sums


def _check_codes(base: quant.Codes, rows: np.ndarray, spec: SplitConfig) -> None:
    """Refuse codes that do not fit the layout: a quantiser's fault, or weights beyond half-precision scales."""
    groups = (rows.shape[0], rows.shape[1] // GROUP_SIZE)
    got = (base.code.shape, base.scale.shape, base.offset.shape)
    if got != (rows.shape, groups, groups) or base.scale.dtype != np.float16 or base.offset.dtype != np.float16:
        raise ValueError(
            f"the quantiser gave codes, scales and offsets of shapes {got} and dtype {base.scale.dtype}, wanted "
            f"{(rows.shape, groups, groups)} and float16"
        )
    if base.code.max() >= 2**spec.base_bits:
        raise ValueError(f"the quantiser gave a code {base.code.max()}, wanted less than {2**spec.base_bits}")
    if not (np.isfinite(base.scale).all() and np.isfinite(base.offset).all()):
        raise ValueError(f"weights up to {np.abs(rows).max():g} do not fit half-precision scales; rescale the model")


def pack_records(
    spec: SplitConfig, base: dict[str, np.ndarray], residual: np.ndarray, residual_scale: np.ndarray
) -> np.ndarray:
    """Lay out one expert's records [F, bytes] as host_kernels/layout.h says."""
    units, width = base["scale"].shape[1], base["scale"].shape[2] * GROUP_SIZE
    at = _host.record_layout(spec.base_bits, spec.residual_bits, width)
    records = np.zeros((units, at["bytes"]), np.uint8)
    parts = {
        "r1": residual[0],
        "r3": residual[1],
        "b2": base["codes"][2],
        "r2": residual[2],
        "r1_scale": residual_scale[0].view(np.uint8),
        "r3_scale": residual_scale[1].view(np.uint8),
        "b2_scale": base["scale"][2].view(np.uint8),
        "b2_offset": base["offset"][2].view(np.uint8),
        "r2_scale": residual_scale[2].view(np.uint8),
    }
    for name, part in parts.items():
        records[:, at[name] : at[name] + part.shape[1]] = part
    return records


def _split_layer(job: _Job, layer: int) -> dict[str, Any]:
    checkpoint, fam, cfg, spec, quantizer, work = job
    save_item(work / "dense" / f"layer_{layer:03d}", read_dense(checkpoint, fam.layer_tensors(cfg, layer)))
    if not cfg.moe_layers[layer]:
        return {"layer": layer}
    moe_index = sum(cfg.moe_layers[:layer])
    base: dict[str, np.ndarray] = {}
    total = {"weight": 0.0, "base": 0.0, "rest": 0.0}

    names = expert_names(fam, cfg, layer)

    def one(expert: int):
        try:
            return split_expert(read_expert(checkpoint, names[expert]), spec, quantizer)
        except ValueError as e:
            raise ValueError(f"layer {layer}, expert {expert}: {e}") from None

    with (work / "residual" / f"{moe_index:03d}.bin").open("wb") as file, ThreadPoolExecutor(threads()) as pool:
        file.write(residual_header(cfg, spec, moe_index))
        for start in range(0, cfg.num_experts, 8):  # bounds what waits in memory
            experts = range(start, min(start + 8, cfg.num_experts))
            for expert, (arrays, records, sums) in zip(experts, pool.map(one, experts), strict=True):
                for name, value in arrays.items():
                    base.setdefault(name, np.empty((cfg.num_experts, *value.shape), value.dtype))[expert] = value
                file.write(records.tobytes())
                total = {k: total[k] + sums[k] for k in total}
    save_item(work / "base" / f"layer_{layer:03d}", base)
    count = cfg.num_experts * 3 * cfg.expert_size * cfg.width
    base_bytes = sum(base[name].nbytes for name in ("codes", "scale", "offset", "norms"))
    record = _host.record_layout(spec.base_bits, spec.residual_bits, cfg.width)["bytes"]
    return {
        "layer": layer,
        "base_error": float(np.sqrt(total["base"] / total["weight"])) if total["weight"] else 0.0,
        "corrected_error": float(np.sqrt(total["rest"] / total["weight"])) if total["weight"] else 0.0,
        "base_bits_per_weight": base_bytes * 8 / count,
        "host_bits_per_weight": record * cfg.num_experts * cfg.expert_size * 8 / count,
    }
