"""Shapes that tests and benchmarks share, and random experts in the packed layout to run them on."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rapidmoe_jax.config import ModelConfig, RopeConfig, SplitConfig
from rapidmoe_jax.expert_split import SplitExpert, split_expert
from rapidmoe_jax.experts import Calibration, SplitExperts
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.memory import empty, to_device
from rapidmoe_jax.models.shapes import named_shape
from rapidmoe_jax.policy import LayerStep
from rapidmoe_jax.quant import dequantize, quantize_nested, quantize_residual
from rapidmoe_jax.store import residual_header


@dataclass(frozen=True)
class Case:
    """One expert layer: sizes as in the model configuration."""

    name: str
    width: int  # D
    units: int  # F
    experts: int  # E
    top_k: int  # k
    swiglu_limit: float = 0.0


# Small, for tests: one group, an odd number of units, more experts than pairs.
TEST_CASES = (
    Case("one-group", 64, 5, 3, 2),
    Case("odd-units", 192, 33, 4, 3),
    Case("many-experts", 128, 16, 40, 2),
)


def published_case(name: str) -> Case:
    """Give the expert layer of a published model (models/shapes.py)."""
    cfg = named_shape(name)
    return Case(name, cfg.width, cfg.expert_size, cfg.num_experts, cfg.top_k, cfg.swiglu_limit)


def model_config(case: Case, layers: int = 1) -> ModelConfig:
    """A configuration with a case's experts and the smallest of everything else."""
    return ModelConfig(
        model_type="qwen3_moe",
        vocab_size=64,
        width=case.width,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_size=64,
        expert_size=case.units,
        num_experts=case.experts,
        top_k=case.top_k,
        norm_topk_prob=True,
        moe_layers=(True,) * layers,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, size=16),
        tie_embeddings=True,
        max_positions=128,
    )


def random_experts(
    case: Case,
    spec: SplitConfig,
    folder: Path,
    *,
    layers: int = 1,
    seed: int = 0,
    executor: str = "host",
    exact: bool = True,
    distinct: int | None = None,
) -> tuple[SplitExperts, np.ndarray]:
    """Make split experts of Gaussian weights, residual files in `folder`.

    Args:
      distinct: how many different experts to quantise; the others repeat them (for large benchmarks).
    Returns: the experts and their float weights [L, E, 3, F, D] (only the distinct ones if given).
    """
    rng = np.random.default_rng(seed)
    cfg = model_config(case, layers)
    count = distinct or case.experts
    weights = rng.normal(0, case.width**-0.5, (layers, count, 3, case.units, case.width)).astype(np.float32)
    base: dict[str, list[list[np.ndarray]]] = {}
    paths, records = [], []
    for layer in range(layers):
        split = [_split(w, spec) for w in weights[layer]]
        chosen = [split[e % count] for e in range(case.experts)]
        for name in split[0].arrays:
            base.setdefault(name, []).append([one.arrays[name] for one in chosen])
        paths.append(str(folder / f"{case.name}-{spec.base_bits}{spec.residual_bits}-{layer}.bin"))
        with open(paths[-1], "wb") as file:
            file.write(residual_header(cfg, spec, layer))
            for one in chosen:
                file.write(one.records.tobytes())
        records.append(np.stack([one.records for one in chosen]))
    arrays = {}
    for name, value in base.items():
        arrays[name] = empty((layers, case.experts, *value[0][0].shape), value[0][0].dtype)
        for layer, one in enumerate(value):
            np.stack(one, out=arrays[name][layer])
    arrays["norms"] = arrays["norms"].view(np.uint16)
    store = _host.open_store(paths, case.experts, case.units, case.width, spec.base_bits, spec.residual_bits)
    experts = SplitExperts(
        **{name: to_device(value) for name, value in arrays.items()},
        calibration=Calibration.none(layers),
        records=jnp.asarray(np.stack(records)) if distinct is None else None,
        base_bits=spec.base_bits,
        residual_bits=spec.residual_bits,
        record_bytes=_host.record_layout(spec.base_bits, spec.residual_bits, case.width)["bytes"],
        store=store,
        executor=executor,
        base_kernel="host" if jax.default_backend() == "cpu" and executor != "reference" else "reference",
        exact=exact,
        swiglu_limit=case.swiglu_limit,
    )
    return experts, weights


def _split(w: np.ndarray, spec: SplitConfig) -> SplitExpert:
    rows = w.reshape(-1, w.shape[-1])
    base = quantize_nested(rows, bits=spec.base_bits, residual_bits=spec.residual_bits)
    return split_expert(w, spec, base, quantize_residual(rows - dequantize(base), bits=spec.residual_bits))


def random_step(case: Case, tokens: int, *, seed: int = 0) -> dict[str, jax.Array]:
    """Random activations and routing for `tokens` tokens: x, expert_ids (distinct a token), expert_weights."""
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(case.experts)[: case.top_k] for _ in range(tokens)], np.int32)
    weights = rng.dirichlet(np.ones(case.top_k), tokens).astype(np.float32)
    x = rng.normal(size=(tokens, case.width)).astype(np.float32)
    step = {"x": x, "expert_ids": ids.reshape(tokens, case.top_k), "expert_weights": weights}
    return {name: jnp.asarray(value) for name, value in step.items()}


def make_calibration(calibrated=False, layer_weight=1.0, layers=4, units=16.0) -> Calibration:
    """One whose thresholds 2^-20 .. 2^0 pass fewer units the higher they are."""
    log2_tau = np.arange(-20, 1, dtype=np.float32)
    passing = units * np.linspace(1, 0, 21)
    later = np.stack([passing * (layers - i) for i in range(layers)])
    arrays = [np.full(layers, layer_weight), np.ones(layers), log2_tau, later, np.linspace(0, 1, 21),
              np.linspace(0.01, 1, 8), np.linspace(1, 0, 8), np.linspace(1, 0, 8)]  # fmt: skip
    return Calibration(jnp.asarray(calibrated), *(jnp.asarray(a, jnp.float32) for a in arrays))


def make_step(tokens=3, slots=2, units=8, experts=6, seed=0, **changes) -> LayerStep:
    """A random step as a policy sees it; changes: fields to set."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(np.int32)
    u, v, h = rng.normal(size=(3, tokens, slots, units)).astype(np.float32)
    fields = dict(
        expert_ids=ids,
        expert_weights=rng.dirichlet(np.ones(slots), tokens).astype(np.float32),
        u0=u,
        v0=v,
        h0=h,
        norms=rng.uniform(size=(tokens, slots, units, 4)).astype(np.float32),
        mean_square=np.ones(tokens, np.float32),
        stream_square=rng.uniform(1, 2, tokens).astype(np.float32),
        priority=np.ones(tokens, np.float32),
        x=rng.normal(size=(tokens, 4)).astype(np.float32),
        spent=np.int32(0),
        layer=np.int32(0),
    )
    calibration = changes.pop("calibration", make_calibration())
    static = dict(num_layers=4, num_experts=experts, record_bytes=10, prefill=changes.pop("prefill", False))
    arrays = {k: jnp.asarray(a) for k, a in (fields | changes).items()}
    return LayerStep(**arrays, calibration=calibration, **static)
