import json
import subprocess
import sys

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax import quant, resplit
from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.host_kernels import _host
from rapidmoe_jax.models import qwen_moe, read_config
from rapidmoe_jax.store import SplitCheckpoint, restore_item


def contents(folder):
    """Everything a split means: arrays of all items and the residual's bytes."""
    s = SplitCheckpoint(folder)
    out = {"globals": s.restore_globals()}
    for layer in range(3):
        out[f"dense{layer}"] = s.restore_dense(layer)
        if layer != 1:
            out[f"base{layer}"] = s.restore_base(layer)
    arrays = {f"{k}.{n}": a for k, tree in out.items() for n, a in tree.items()}
    return arrays | {p.name: np.fromfile(p, np.uint8) for p in (folder / "residual").iterdir()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("base_bits, residual_bits", [(2, 2), (3, 4)])
def test_base_plus_residual_gives_the_weights(tiny, tmp_path, base_bits, residual_bits):
    out = rapidmoe_jax.split(tiny, tmp_path / "out", base_bits=base_bits, residual_bits=residual_bits)
    s, source = SplitCheckpoint(out), Checkpoint(tiny)
    cfg = read_config(source.config)
    at = _host.record_layout(base_bits, residual_bits, cfg.width)
    for moe, layer in enumerate((0, 2)):
        base = s.restore_base(layer)
        records = np.fromfile(s.residual_paths[moe], np.uint8, offset=4096).reshape(6, 32, at["bytes"])
        for e in (0, 5):
            w = qwen_moe.read_expert(source, cfg, layer, e)
            for m, name in enumerate(("r1", "r3", "r2")):
                codes = quant.unpack(base["codes"][e, m], bits=base_bits)
                b = quant.dequantize(quant.Codes(codes, base["scale"][e, m], base["offset"][e, m]))
                part = records[e, :, at[name] : at[name] + cfg.width * residual_bits // 8]
                scale = np.ascontiguousarray(records[e, :, at[name + "_scale"] :][:, :2]).view(np.float16)
                r = quant.dequantize_residual(quant.unpack(part, bits=residual_bits), scale, bits=residual_bits)
                error = np.linalg.norm(w[m] - b - r) / np.linalg.norm(w[m])
                assert error < (0.12 if residual_bits == 2 else 0.015)
                assert error < 0.35 * np.linalg.norm(w[m] - b) / np.linalg.norm(w[m])
                norms = base["norms"][e, :, m].astype(np.float32)
                np.testing.assert_allclose(norms, np.square(r).sum(-1), rtol=0.01)
    report = s.metadata["layers"]
    assert [r["layer"] for r in report] == [0, 2] and report[0]["corrected_error"] < report[0]["base_error"]
    bytes_a_unit = 3 * (64 * base_bits // 8 + 4) + 8
    assert report[0]["base_bits_per_weight"] == pytest.approx(bytes_a_unit * 8 / (3 * 64))


def test_metadata_says_where_it_came_from(tiny_split):
    meta = json.loads((tiny_split / "metadata.json").read_text())
    assert meta["format_version"] == 1 and meta["group_size"] == 64
    assert meta["split"] == {"base_bits": 4, "residual_bits": 4}
    assert meta["lambda"] == [1.0, 1.0] and meta["config"]["model_type"] == "qwen3_moe"
    assert all(len(v) == 64 for v in meta["source"]["sha256"].values()) and len(meta["source"]["sha256"]) == 2
    SplitCheckpoint(tiny_split).verify()


def test_an_interrupted_split_resumes_to_the_same(tiny, tmp_path, monkeypatch):
    whole = rapidmoe_jax.split(tiny, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop_at(layer, total):
        if layer == 2:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        rapidmoe_jax.split(tiny, out, progress=stop_at)
    assert not out.exists() and (tmp_path / "out.partial").exists()
    with pytest.raises(ValueError, match="left by an interrupted split of another source or with other settings"):
        rapidmoe_jax.split(tiny, out, base_bits=2)
    done = []
    original = resplit._split_layer
    monkeypatch.setattr(resplit, "_split_layer", lambda *a: done.append(a[1]) or original(*a))
    rapidmoe_jax.split(tiny, out)
    assert done == [2] and not (tmp_path / "out.partial").exists()
    assert_same(contents(out), contents(whole))


def test_a_split_killed_in_the_middle_leaves_no_out(tiny, tmp_path):
    code = (
        "import os, sys, rapidmoe_jax\n"
        "from rapidmoe_jax import resplit as s\n"
        "original, n = s.save_item, [0]\n"
        "def save(*a):\n"
        "    n[0] += 1\n"
        "    if n[0] == 4: os.kill(os.getpid(), 9)\n"
        "    original(*a)\n"
        "s.save_item = save\n"
        "rapidmoe_jax.split(sys.argv[1], sys.argv[2])\n"
    )
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", code, tiny, out], capture_output=True).returncode == -9
    assert not out.exists()
    rapidmoe_jax.split(tiny, out)
    assert_same(contents(out), contents(rapidmoe_jax.split(tiny, tmp_path / "whole")))


def test_two_splits_to_one_place_do_not_mix(tiny, tmp_path):
    def again(layer, total):
        with pytest.raises(ValueError, match="another process is splitting there"):
            rapidmoe_jax.split(tiny, tmp_path / "out")

    rapidmoe_jax.split(tiny, tmp_path / "out", progress=lambda layer, total: layer == 1 and again(layer, total))
    SplitCheckpoint(tmp_path / "out").verify()


def test_out_must_be_new_and_outside_the_source(tiny, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        rapidmoe_jax.split(tiny, tmp_path / "there")
    with pytest.raises(ValueError, match="lies inside the source"):
        rapidmoe_jax.split(tiny, tiny / "sub" / "out")


@pytest.mark.parametrize("options, message", [
    ({"base_bits": 5}, r"base_bits=5 is not supported; use one of \(2, 3, 4\)"),
    ({"residual_bits": 3}, "residual_bits=3 is not supported"),
    ({"quantizer": "best"}, "quantizer='best' is unknown; use one of"),
])  # fmt: skip
def test_bad_settings(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        rapidmoe_jax.split(tiny, tmp_path / "out", **options)


def test_a_users_quantizer_is_used(tiny, tmp_path):
    calls = []

    def mine(w, *, bits, residual_bits):
        calls.append(w.shape)
        return quant.quantize_minmax(w, bits=bits, residual_bits=residual_bits)

    out = rapidmoe_jax.split(tiny, tmp_path / "out", quantizer=mine)
    assert len(calls) == 12 and calls[0] == (96, 64)
    assert SplitCheckpoint(out).metadata["quantizer"] == "mine"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c._replace(code=c.code + 8), "layer 0, expert 0: the quantiser gave a code .*, wanted less than 8"),
        (lambda c: c._replace(scale=c.scale[:, :0]), "layer 0, expert 0: the quantiser gave codes, scales and offsets"),
        (lambda c: c._replace(scale=c.scale * np.float16(np.inf)), "do not fit half-precision scales"),
    ],
)
def test_a_quantizer_that_breaks_the_layout_is_refused(tiny, tmp_path, change, message):
    def broken(w, *, bits, residual_bits):
        return change(quant.quantize_nested(w, bits=bits, residual_bits=residual_bits))

    with pytest.raises(ValueError, match=message):
        rapidmoe_jax.split(tiny, tmp_path / "out", quantizer=broken)


def test_base_and_residual_are_read_without_each_other(tiny, tmp_path):
    import shutil

    out = rapidmoe_jax.split(tiny, tmp_path / "out")
    cfg = read_config(SplitCheckpoint(out).metadata["config"])
    shutil.move(out / "base", tmp_path / "base")
    _host.close_store(SplitCheckpoint(out).open_residual(cfg))
    with pytest.raises(ValueError, match="cannot be restored"):
        SplitCheckpoint(out).restore_base(0)
    assert restore_item(tmp_path / "base" / "layer_000")["codes"].shape == (6, 3, 32, 24)
    shutil.move(tmp_path / "base", out / "base")
    for file in (out / "residual").iterdir():
        file.write_bytes(b"")
    model = rapidmoe_jax.load(out, executor="off", policy="none")
    assert np.isfinite(model.logits([1, 2, 3])).all()


def test_newer_format_truncated_and_damaged_residual_are_refused(tiny, tmp_path):
    out = rapidmoe_jax.split(tiny, tmp_path / "out")
    path = out / "residual" / "001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(ValueError, match=rf"001.bin: has {len(whole) - 64} bytes, wanted {len(whole)}"):
        rapidmoe_jax.load(out)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged: 001.bin; split the checkpoint again"):
        rapidmoe_jax.load(out, verify=True)
    path.write_bytes(b"X" + whole[1:])
    with pytest.raises(ValueError, match="not a residual file"):
        rapidmoe_jax.load(out)
    path.write_bytes(whole[:8] + (2).to_bytes(4, "little") + whole[12:])
    with pytest.raises(ValueError, match="residual format 2, this build reads 1; update rapidmoe_jax"):
        rapidmoe_jax.load(out)
    path.write_bytes(whole[:12] + (0).to_bytes(4, "little") + whole[16:])
    with pytest.raises(ValueError, match="layer is 0, wanted 1"):
        rapidmoe_jax.load(out)
    path.unlink()
    with pytest.raises(ValueError, match="001.bin: cannot be opened .No such file"):
        rapidmoe_jax.load(out)
    path.write_bytes(b"RMOERES1")
    with pytest.raises(ValueError, match="001.bin: shorter than a header"):
        rapidmoe_jax.load(out)
    meta = json.loads((out / "metadata.json").read_text())
    (out / "metadata.json").write_text(json.dumps(meta | {"format_version": 2}))
    with pytest.raises(ValueError, match="split format 2, this release reads 1; update"):
        rapidmoe_jax.load(out)


def test_loading_needs_the_payload_and_little_more(tmp_path, write_checkpoint):
    """Peak resident memory of a base-only load over that of the import: payload + a layer + 60 MB."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 6,
             "mlp_only_layers": []}  # fmt: skip
    source = write_checkpoint(tmp_path / "big", **sizes)
    out = rapidmoe_jax.split(source, tmp_path / "out", base_bits=4)
    code = (
        "import resource, sys, rapidmoe_jax\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "import jax; jax.numpy.zeros(3).block_until_ready(); before = peak()\n"
        "m = rapidmoe_jax.load(sys.argv[1], executor='off')\n"
        "print(peak() - before, m.device_bytes)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True, check=True)
    grown, payload = map(int, run.stdout.split())
    assert payload > 70e6
    assert grown < payload * (1 + 1 / 6) + 60e6
