"""Split a published checkpoint into base and residual (RESplit), layer by layer.

    W = B + R + rest,   B = base codes (device),   R = residual codes of what B lost (host)

One layer is in memory at a time. Work goes to OUT.partial and is renamed to OUT when whole; an interrupted split
resumes there at the first missing layer. The on-disk format is store.py's. With a calibration text the float model
runs over it while the layers are split (calibration.py), and the checkpoint gets lambda and its kin (damage.py).
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rapidmoe_jax import quant
from rapidmoe_jax.calibration import TextRun, read_calibration
from rapidmoe_jax.checkpoint import Checkpoint, read_json
from rapidmoe_jax.config import GROUP_SIZE, VERSION, ModelConfig, SplitConfig
from rapidmoe_jax.damage import LayerExperts, expert_damage, summary
from rapidmoe_jax.expert_split import check_codes, split_expert, split_nested
from rapidmoe_jax.gptq import quantize_gptq, residual_gptq
from rapidmoe_jax.host_kernels import _host, threads
from rapidmoe_jax.models import family
from rapidmoe_jax.source import check_tensors, read_dense
from rapidmoe_jax.store import COPIED_FILES, FORMAT_VERSION, METADATA, residual_header, save_item, sha256_of, write_json

Progress = Callable[[int, int], None]  # steps done, steps in all: a layer, with calibration also a layer back


def split(
    source: str | Path,
    out: str | Path,
    *,
    base_bits: int = 3,
    residual_bits: int = 4,
    quantizer: str | quant.Quantizer | None = None,
    calibration: str | Path | Sequence[int] | np.ndarray | None = None,
    progress: Progress | None = None,
) -> Path:
    """Split a published checkpoint folder into a split checkpoint.

    Args:
      source: folder with config.json and *.safetensors.
      out: folder to create; must not exist.
      base_bits: 2, 3 or 4, kept on the device for every expert.
      residual_bits: 2 or 4, kept in host memory.
      quantizer: of the base: "gptq" (needs calibration), a name in quant.QUANTIZERS, or a function of that
        signature. None = gptq with calibration, nested without.
      calibration: text the model is measured on: a file of text, .npy or JSON token ids, or the ids. Gives a better
        base, and lambda, so that the policies know what a unit's error costs. Tens of thousands of tokens; not those
        you evaluate on.
      progress: called with (steps done, steps in all).
    Returns: out.
    Raises: ValueError if the source is damaged, out exists or lies in the source, or an argument is out of range.
    """
    spec = SplitConfig(base_bits=base_bits, residual_bits=residual_bits)
    name, chosen = _choose_quantizer(quantizer, calibration is not None)
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"{out}: exists already; remove it or choose another folder")
    if source.resolve() == out.resolve() or source.resolve() in out.resolve().parents:
        raise ValueError(f"{out}: lies inside the source {source}; choose a folder outside it")
    checkpoint = Checkpoint(source)
    fam = family(checkpoint.config)
    cfg: ModelConfig = fam.read_config(checkpoint.config)
    check_tensors(checkpoint, fam, cfg)
    tokens = None
    if calibration is not None:
        tokens = read_calibration(calibration, source, checkpoint.config, cfg.vocab_size)

    work = out.with_name(out.name + ".partial")
    plan = {
        "format_version": FORMAT_VERSION,
        "source": str(source.resolve()),
        "source_files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in checkpoint.files},
        "split": {"base_bits": base_bits, "residual_bits": residual_bits},
        "quantizer": name,
        "calibration": None if tokens is None else hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    text = None if tokens is None else TextRun(checkpoint, fam, cfg, tokens, work / "calibration")
    job = _Job(checkpoint, fam, cfg, spec, chosen, work, text)
    total = cfg.num_layers * (1 if text is None else 2)
    with _work_folder(work, plan):
        reports = []
        if text:
            text.begin()
        for layer in range(cfg.num_layers):
            if progress:
                progress(layer, total)
            reports.append(_once(work / "reports" / f"layer_{layer:03d}.json", lambda at=layer: _split_layer(job, at)))
        for layer in reversed(range(cfg.num_layers if text else 0)):
            if progress:
                progress(2 * cfg.num_layers - layer - 1, total)
            assert text is not None
            back = _once(work / "reports" / f"back_{layer:03d}.json", lambda at=layer: {"damage": text.back(at)})
            reports[layer] |= back
        save_item(work / "dense" / "globals", read_dense(checkpoint, fam.global_tensors(cfg)))
        for path in (path for pattern in COPIED_FILES for path in source.glob(pattern)):
            into = work / path.relative_to(source)
            into.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, into)
        write_json(work / METADATA, _metadata(job, plan, reports))
        work.rename(out)
        for name in ("reports", "calibration"):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / "plan.json").unlink()
    if progress:
        progress(total, total)
    return out


def _choose_quantizer(quantizer: str | quant.Quantizer | None, calibrated: bool) -> tuple[str, quant.Quantizer | None]:
    """Give a quantiser's name and function; None stands for GPTQ."""
    quantizer = quantizer or ("gptq" if calibrated else "nested")
    if not isinstance(quantizer, str):
        return getattr(quantizer, "__name__", str(quantizer)), quantizer
    if quantizer == "gptq" and not calibrated:
        raise ValueError("quantizer='gptq' needs a calibration text: give one, or use quantizer='nested'")
    if quantizer != "gptq" and quantizer not in quant.QUANTIZERS:
        raise ValueError(f"quantizer={quantizer!r} is unknown; use one of {['gptq', *quant.QUANTIZERS]}")
    return quantizer, quant.QUANTIZERS.get(quantizer)


def _once(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Make a report unless an interrupted split left it."""
    if not file.exists():
        write_json(file, make())
    return read_json(file)


class _Job(NamedTuple):
    checkpoint: Checkpoint
    fam: Any  # module in models/
    cfg: ModelConfig
    spec: SplitConfig
    quantizer: quant.Quantizer | None  # None: GPTQ
    work: Path
    text: TextRun | None


_RAW = ("histogram", "importance", "damage")  # of a layer's report: they go into the calibration record


def _metadata(job: _Job, plan: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, Any]:
    residuals = sorted((job.work / "residual").glob("*.bin"))
    moe, calibration, text = [r for r in reports if "base_error" in r], None, job.text
    if text:
        routing = [text.routing(r["layer"]) for r in moe]
        calibration = summary(moe, [r["damage"] for r in moe], routing, len(routing[0]))
        calibration |= {"tokens": text.tokens.size, "tokens_sha256": plan["calibration"]}
    return {
        "format_version": FORMAT_VERSION,
        "made_by": f"rapidmoe_jax {VERSION}",
        "source": {"folder": plan["source"], "sha256": {f.name: sha256_of(f) for f in job.checkpoint.files}},
        "config": job.checkpoint.config,
        "split": plan["split"],
        "quantizer": plan["quantizer"],
        "group_size": GROUP_SIZE,
        "lambda": calibration["lambda"] if calibration else [1.0] * job.cfg.num_moe_layers,
        "lambda_calibrated": calibration is not None,
        "calibration": calibration,
        "layers": [{k: v for k, v in r.items() if k not in _RAW} for r in moe],
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


def _split_layer(job: _Job, layer: int) -> dict[str, Any]:
    checkpoint, fam, cfg, spec, _, work, run = job
    save_item(work / "dense" / f"layer_{layer:03d}", read_dense(checkpoint, fam.layer_tensors(cfg, layer)))
    text = run.enter(layer) if run else None
    if not cfg.moe_layers[layer]:
        return {"layer": layer}
    layer_experts = LayerExperts(text) if text else None
    moe_index = sum(cfg.moe_layers[:layer])
    base: dict[str, np.ndarray] = {}
    total = {"weight": 0.0, "base": 0.0, "rest": 0.0, "histogram": 0.0, "importance": 0.0}
    result, error = (np.zeros_like(text.x if text else ()) for _ in range(2))

    def one(expert: int):
        try:
            w = fam.read_expert(checkpoint, cfg, layer, expert)
            if job.quantizer is quant.quantize_nested and layer_experts is None:
                return split_nested(w, spec), None
            seen = layer_experts.see(expert, w) if layer_experts else None
            rows = w.reshape(-1, cfg.width)
            if job.quantizer is None:
                assert seen is not None
                codes = quantize_gptq(w, seen.h_x, seen.h_h, bits=spec.base_bits)
                rest = w - quant.dequantize(codes).reshape(w.shape)
                residual = residual_gptq(rest, seen.h_x, seen.h_h, bits=spec.residual_bits)
            else:
                codes = job.quantizer(rows, bits=spec.base_bits, residual_bits=spec.residual_bits)
                check_codes(codes, rows, spec)
                residual = quant.quantize_residual(rows - quant.dequantize(codes), bits=spec.residual_bits)
            done = split_expert(w, spec, codes, residual, seen.h_x if seen else None)
            if text is None or seen is None or done.base is None:
                return done, None
            return done, (seen.rows, expert_damage(text, expert, seen, w, done.base, done.arrays["norms"]))
        except ValueError as e:
            raise ValueError(f"layer {layer}, expert {expert}: {e}") from None

    with (work / "residual" / f"{moe_index:03d}.bin").open("wb") as file, ThreadPoolExecutor(threads()) as pool:
        file.write(residual_header(cfg, spec, moe_index))
        for start in range(0, cfg.num_experts, 8):  # bounds what waits in memory
            experts = range(start, min(start + 8, cfg.num_experts))
            for expert, (done, compared) in zip(experts, pool.map(one, experts), strict=True):
                for name, value in done.arrays.items():
                    base.setdefault(name, np.empty((cfg.num_experts, *value.shape), value.dtype))[expert] = value
                file.write(done.records.tobytes())
                sums: dict[str, Any] = dict(done.sums)
                if compared:
                    rows, damage = compared
                    result[rows] += damage.result
                    error[rows] += damage.error
                    sums |= {"histogram": damage.histogram, "importance": damage.importance}
                total |= {k: total[k] + v for k, v in sums.items()}
    save_item(work / "base" / f"layer_{layer:03d}", base)
    if run and text:
        run.leave(layer, text, result, error)
    count = cfg.num_experts * 3 * cfg.expert_size * cfg.width
    base_bytes = sum(base[name].nbytes for name in ("codes", "scale", "offset", "norms"))
    record = _host.record_layout(spec.base_bits, spec.residual_bits, cfg.width)["bytes"]
    report = {
        "layer": layer,
        "base_error": float(np.sqrt(total["base"] / total["weight"])) if total["weight"] else 0.0,
        "corrected_error": float(np.sqrt(total["rest"] / total["weight"])) if total["weight"] else 0.0,
        "base_bits_per_weight": base_bytes * 8 / count,
        "host_bits_per_weight": record * cfg.num_experts * cfg.expert_size * 8 / count,
    }
    if text:
        report |= {"histogram": np.asarray(total["histogram"]).tolist(), "importance": total["importance"]}
    return report
