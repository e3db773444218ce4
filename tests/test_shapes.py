"""Published architectures: sizes, tensor names, config fields; families that share a layout, on tiny checkpoints."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rapidmoe_jax
from rapidmoe_jax.models import count_parameters, family, read_config
from rapidmoe_jax.models.shapes import SHAPES, named_shape

# Parameters as the model cards give them, multi-token prediction not counted.
PUBLISHED = {
    "deepseek-v3": 671.0e9,
    "deepseek-r1": 671.0e9,
    "kimi-k2": 1026.4e9,
    "glm-4.5": 352.8e9,
    "qwen3-235b-a22b": 235.1e9,
    "qwen3-30b-a3b": 30.5e9,
    "mixtral-8x7b": 46.7e9,
    "qwen1.5-moe-a2.7b": 14.3e9,
    "olmoe-1b-7b": 6.92e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_as_published(name):
    assert sum(count_parameters(named_shape(name))) == pytest.approx(PUBLISHED[name], rel=2e-3)
    assert named_shape(name, layers=4).num_layers == 4


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="shape 'gpt-5' is unknown; known: deepseek-v3"):
        named_shape("gpt-5")


def wanted_shapes(config):
    """All tensors a checkpoint of this config must have."""
    fam, cfg = family(config), read_config(config)
    shapes = {name: shape for name, (_, shape) in fam.global_tensors(cfg).items()}
    for layer in range(cfg.num_layers):
        shapes |= {name: shape for name, (_, shape) in fam.layer_tensors(cfg, layer).items()}
        if cfg.moe_layers[layer]:
            shapes |= fam.expert_shapes(cfg, layer)
    return shapes


def test_qwen3_235b_has_just_the_published_tensors():
    """Names of all 94 layers and 128 experts, written out here from the published index's pattern."""
    got = wanted_shapes(SHAPES["qwen3-235b-a22b"])
    published = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(94):
        layer = f"model.layers.{i}"
        published |= {f"{layer}.self_attn.{m}.weight" for m in
                      ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}  # fmt: skip
        published |= {f"{layer}.{m}.weight" for m in ("input_layernorm", "post_attention_layernorm", "mlp.gate")}
        for e in range(128):
            published |= {f"{layer}.mlp.experts.{e}.{m}.weight" for m in ("gate_proj", "up_proj", "down_proj")}
    assert set(got) == published and len(published) == 36945
    assert 2 * sum(int(np.prod(s)) for s in got.values()) == 470_187_269_120  # the index's total_size, bfloat16


def edit_shards(folder, change):
    """Apply a change to the tensors of the second shard and write it, and the index, anew."""
    shard = "model-00002-of-00002.safetensors"
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rest = {n: f for n, f in index["weight_map"].items() if f != shard}
    index["weight_map"] = rest | dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_missing_and_an_extra_expert_are_named(tiny, tmp_path):
    def change(tensors):
        gone = [n for n in tensors if ".2.mlp.experts.5." in n]
        for name in gone:
            value = tensors.pop(name)
            tensors[name.replace("experts.5", "experts.6")] = value

    edit_shards(tiny, change)
    for read in (rapidmoe_jax.load, lambda f: rapidmoe_jax.split(f, tmp_path / "out")):
        with pytest.raises(ValueError) as e:
            read(tiny)
        assert "model.layers.2.mlp.experts.5.gate_proj.weight: missing, wanted shape [32, 64]" in str(e.value)
        assert "model.layers.2.mlp.experts.6.gate_proj.weight: unknown, the model has no such tensor" in str(e.value)
    assert not (tmp_path / "out").exists()


def test_which_layers_have_experts(tiny):
    qwen = SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 6}
    assert read_config(qwen).moe_layers == (True,) * 6
    assert read_config(qwen | {"decoder_sparse_step": 2}).moe_layers == (False, True) * 3
    assert read_config(qwen | {"decoder_sparse_step": 3, "mlp_only_layers": [2]}).moe_layers == (False,) * 5 + (True,)
    assert named_shape("deepseek-v3").moe_layers == (False,) * 3 + (True,) * 58
    assert named_shape("kimi-k2", layers=3).moe_layers == (False, True, True)


def test_windows_rotations_and_biases_of_published_configs():
    assert named_shape("gpt-oss-20b").windows == (128, 0) * 12
    assert named_shape("mixtral-8x7b").windows == ()
    assert read_config(SHAPES["mixtral-8x7b"] | {"sliding_window": 4096}).windows == (4096,) * 32
    assert named_shape("glm-4.5").rope.size == 64 and named_shape("qwen3-30b-a3b").rope.size == 128
    assert named_shape("glm-4.5").qkv_bias and not named_shape("glm-4.5").out_bias
    for name in ("qwen3-30b-a3b", "olmoe-1b-7b"):
        biased = SHAPES[name] | {"attention_bias": True}
        assert {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.o_proj.bias"} <= set(
            family(biased).layer_tensors(read_config(biased), 0)
        )
    assert "model.layers.0.self_attn.q_proj.bias" not in wanted_shapes(SHAPES["olmoe-1b-7b"])


def test_a_tied_head_is_the_embedding(write_checkpoint, tmp_path):
    tied = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    untied = write_checkpoint(tmp_path / "untied")
    embed = {}
    for file in tied.glob("*.safetensors"):
        embed |= {n: a for n, a in load_file(file).items() if n == "model.embed_tokens.weight"}
    for file in untied.glob("*.safetensors"):  # the tied one's tensors, and its embedding once more as the head
        tensors = load_file(file)
        for other in tied.glob("*.safetensors"):
            tensors |= {n: a for n, a in load_file(other).items() if n in tensors}
        save_file({n: embed.get("model.embed_tokens.weight") if n == "lm_head.weight" else a
                   for n, a in tensors.items()}, file)  # fmt: skip
    ids = np.arange(12) * 17 % 512
    one, two = rapidmoe_jax.load(tied), rapidmoe_jax.load(untied)
    assert one.params.head is None and two.params.head is not None
    np.testing.assert_allclose(one.logits(ids), two.logits(ids), atol=1e-5)


GLM = {  # GLM-4.5's layout: half of a head rotated, biases, norms of heads, a dense layer, a layer to leave out
    "model_type": "glm4_moe", "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.5,
    "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI = {  # Kimi-K2's: DeepSeek-V3 with one group of experts and yarn of its own
    "model_type": "kimi_k2", "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 1,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("config", [GLM, KIMI], ids=["glm4_moe", "kimi_k2"])
def test_a_family_in_deepseeks_layout_works_by_config(config, write_checkpoint, tmp_path):
    source = write_checkpoint(tmp_path / "source", **config)

    def predicts_several(tensors):
        tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)

    edit_shards(source, predicts_several)
    with pytest.warns(UserWarning, match=r"1 tensors model.layers.3.\* are left out: they predict several tokens"):
        out = rapidmoe_jax.split(source, tmp_path / "out", base_bits=4)
    with pytest.warns(UserWarning, match="predict several tokens"):
        reference = rapidmoe_jax.load(source)
    model = rapidmoe_jax.load(out, policy="all", exact=True)
    assert model.config.moe_layers == (False, True, True)
    ids = np.arange(40) * 13 % 512
    wanted, corrected = reference.logits(ids), model.logits(ids)
    model.policy = "none"
    assert np.abs(corrected - wanted).mean() < 0.1 * np.abs(model.logits(ids) - wanted).mean()
    assert len(model.generate(ids.tolist(), max_new_tokens=4).tokens) == 4
