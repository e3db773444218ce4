import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rapidmoe_jax
from rapidmoe_jax.checkpoint import Checkpoint, _dequantize_fp8
from rapidmoe_jax.loading import load_float
from rapidmoe_jax.memory import empty
from rapidmoe_jax.models import qwen_moe, read_config
from rapidmoe_jax.source import check_tensors

SHARD = "model-00001-of-00002.safetensors"


def check(folder):
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint, qwen_moe, read_config(checkpoint.config))
    return checkpoint


def edit(folder, change):
    """Rewrite the first shard after change(tensors)."""
    tensors = dict(load_file(folder / SHARD))
    change(tensors)
    save_file(tensors, folder / SHARD)


def test_fp8_blocks_are_multiplied_out():
    folder = rapidmoe_jax.demo_path()
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    checkpoint = Checkpoint(folder)
    got = checkpoint.read(name)
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def tensor(key, dtype):
        a, b = header[key]["data_offsets"]
        return np.frombuffer(raw[8 + length + a : 8 + length + b], dtype).reshape(header[key]["shape"])

    w, scale = tensor(name, ml_dtypes.float8_e4m3fn), tensor(name + "_scale_inv", np.float32)
    assert got.dtype == np.float32 and got.shape == (256, 128)
    for i, j in ((0, 0), (127, 5), (128, 127), (255, 64)):
        assert got[i, j] == np.float32(w[i, j]) * scale[i // 128, j // 128]
    # A block cut off by the edge: rows 128..143 belong to a second row of blocks.
    part = _dequantize_fp8(w[:144], scale)
    np.testing.assert_array_equal(part, got[:144])


def test_both_config_layouts_read_the_same():
    folder = Path(__file__).parent / "oracle" / "qwen3_moe"
    configs = [json.loads((folder / name).read_text()) for name in ("config.json", "config.v5.json")]
    assert read_config(configs[0]) == read_config(configs[1])


def test_a_good_checkpoint_passes(tiny):
    assert check(tiny).read("model.norm.weight").shape == (64,)


def test_truncated_shard(tiny):
    data = (tiny / SHARD).read_bytes()
    (tiny / SHARD).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=rf"1 problem.*\n.*{SHARD}: damaged or missing .*incomplete"):
        check(tiny)


def test_missing_shard(tiny):
    (tiny / SHARD).unlink()
    with pytest.raises(ValueError, match=f"{SHARD}: damaged or missing"):
        check(tiny)


def test_all_tensor_problems_in_one_message(tiny):
    def change(tensors):
        names = sorted(tensors)
        tensors["model.layers.9.extra.weight"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = np.zeros((512, 32), np.float32)
        del tensors[names[5]]
        change.removed = names[5]
        int8 = next(n for n in names if n.endswith("up_proj.weight") and n != names[5])
        tensors[int8] = tensors[int8].astype(np.float32).astype(np.int8)
        change.int8 = int8

    edit(tiny, change)
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    del index["weight_map"][change.removed]
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as e:
        check(tiny)
    text = str(e.value)
    assert "4 problem(s)" in text
    assert f"{change.removed}: missing, wanted shape" in text
    assert "model.layers.9.extra.weight: unknown" in text
    assert "lm_head.weight: shape [512, 32]" in text and "wanted [512, 64]" in text
    assert f"{change.int8}: dtype I8" in text


def test_tensor_not_where_the_index_puts_it(tiny):
    edit(tiny, lambda tensors: tensors.pop(sorted(tensors)[0]))
    with pytest.raises(ValueError, match=f"not in {SHARD}, where the index puts it"):
        check(tiny)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_index_may_not_leave_the_folder(tiny, name):
    path = tiny / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names files outside its folder"):
        check(tiny)


def test_missing_fp8_scale(tmp_path):
    folder = tmp_path / "demo"
    shutil.copytree(rapidmoe_jax.demo_path(), folder)
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        old = b"model.layers.0.self_attn.q_proj.weight_scale_inv"
        file.write_bytes(raw.replace(old, old[:-1] + b"_"))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj.weight_scale_inv: missing, the fp8 weight needs it"):
        check(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_named_with_its_place(tiny, bad):
    def change(tensors):
        change.name = next(n for n in tensors if "gate_proj" in n)
        tensors[change.name] = tensors[change.name].copy()
        tensors[change.name][3, 5] = bad

    edit(tiny, change)
    with pytest.raises(ValueError, match=rf"{change.name} holds {bad} at \[3, 5\]"):
        rapidmoe_jax.split(tiny, tiny.parent / "out")
    with pytest.raises(ValueError, match=change.name):
        load_float(tiny, np.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported: qwen3_moe"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": 100}, "hidden size 100 is not a multiple"),
        ({"num_experts": None}, "num_experts or num_local_experts is missing"),
        ({"num_experts_per_tok": 7}, "top_k=7 is outside 1..6"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_scaling=.*longrope.* is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling=.*yarn.* has no factor"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 heads do not divide over 2"),
        ({"mlp_only_layers": [0, 1, 2]}, "at least one must have experts"),
    ],
)
def test_config_of_another_kind_is_refused(tiny, change, message):
    config = json.loads((tiny / "config.json").read_text()) | change
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        rapidmoe_jax.load(tiny)


def test_no_folder_no_config_no_weights(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="config.json: file not found"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted a JSON object"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="weights are missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(1,), (3, 700, 65)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_large_arrays_reach_a_cpu_device_without_a_copy(shape, dtype):
    value = empty(shape, dtype)
    value[...] = 1
    assert value.shape == shape and value.flags.c_contiguous
    on_device = jax.device_put(value, jax.devices("cpu")[0], may_alias=True)
    assert on_device.unsafe_buffer_pointer() == value.ctypes.data
    assert (np.asarray(on_device) == 1).all()
