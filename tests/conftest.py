"""Fixtures: a tiny published checkpoint, the demo model split once, and a clean choice of instruction set."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import rapidmoe_jax
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.models import family

ORACLE = Path(__file__).parent / "oracle"
TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def write_tiny(folder: Path, seed: int = 0, **changes) -> Path:
    """Write a random checkpoint in the published layout, two shards with an index; returns the folder."""
    config = TINY | changes
    fam = family(config)
    cfg = fam.read_config(config)
    shapes = {name: shape for name, (_, shape) in fam.global_tensors(cfg).items()}
    for layer in range(cfg.num_layers):
        shapes |= {name: shape for name, (_, shape) in fam.layer_tensors(cfg, layer).items()}
        if cfg.moe_layers[layer]:
            shapes |= fam.expert_shapes(cfg, layer)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = rng.normal(1, 0.1, shape) if "norm" in name else rng.normal(0, shape[-1] ** -0.5, shape)
        tensors[name] = value.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((ORACLE / "qwen3_moe" / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def write_checkpoint():
    return write_tiny


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write_tiny(tmp_path / "tiny")


@pytest.fixture(scope="session")
def tiny_split(tmp_path_factory) -> Path:
    """A tiny checkpoint split at 4+4 bits; its source lies beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    source = write_tiny(folder / "source")
    return rapidmoe_jax.split(source, folder / "split", base_bits=4)


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory):
    """Keep the demo's split in a temporary folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def demo(demo_cache) -> rapidmoe_jax.Model:
    return rapidmoe_jax.load("demo")


@pytest.fixture(scope="session")
def demo_float() -> rapidmoe_jax.Model:
    return rapidmoe_jax.load(rapidmoe_jax.demo_path())


@pytest.fixture(params=[name for name in ("scalar", "avx2", "avx512", "avx512_bf16", "amx") if _host.has_isa(name)])
def isa(request):
    """Run a test once an instruction set that this machine has."""
    _host.select_isa(request.param)
    yield request.param
    _host.select_isa("auto")
