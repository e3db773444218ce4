import json

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax.calibration import read_tokens
from rapidmoe_jax.evaluation import evaluate


@pytest.fixture(scope="module")
def result(demo, demo_float):
    return evaluate(demo, demo_float, rapidmoe_jax.demo_tokens(), windows=2, policies=["rank=1"])


def test_loss_falls_with_the_budget(result):
    rows = {r["policy"]: r for r in result["rows"]}
    shares = [f"share={s}" for s in (0.05, 0.1, 0.15, 0.25, 0.5)]
    assert list(rows) == ["none", *shares, "rank=1", "all"]
    kl = [r["kl"] for r in result["rows"] if r["policy"] != "rank=1"]
    assert kl == sorted(kl, reverse=True)
    assert rows["share=0.15"]["kl"] < rows["rank=1"]["kl"]  # at less than two thirds of the bytes
    assert rows["share=0.15"]["host_bytes_per_token"] < 0.66 * rows["rank=1"]["host_bytes_per_token"]
    assert rows["share=0.05"]["fraction"] == pytest.approx(0.05, rel=0.15)  # the threshold comes from other text


def test_figures_at_3_and_4_bits_are_pinned(result):
    """Two windows of 1024; measured 2026-12-01: KL .0468, .0044, .0010; a worse split or policy shows here."""
    rows = {r["policy"]: r for r in result["rows"]}
    assert rows["none"]["kl"] < 0.050 and rows["share=0.15"]["kl"] < 0.0048 and rows["all"]["kl"] < 0.0012
    assert abs(rows["all"]["perplexity"] / result["float"]["perplexity"] - 1) < 0.004
    assert result["float"]["nll"] == pytest.approx(3.3001, abs=2e-3)
    assert rows["all"]["top1_agreement"] > 0.97 > rows["none"]["top1_agreement"]
    assert rows["none"]["host_bytes_per_token"] == 0 and rows["none"]["fraction"] == 0 and rows["all"]["fraction"] == 1


def test_calibration_free_float_model_agrees_with_its_own_readme(demo_float):
    """README of the demo model: 2.737 nats over 352 windows; single windows differ, so the mean of some is near."""
    tokens = rapidmoe_jax.demo_tokens().astype(np.int32)
    losses = []
    for w in range(0, 255, 50):
        logits = demo_float.logits(tokens[w * 1024 : w * 1024 + 1024]).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        target = tokens[w * 1024 + 1 : w * 1024 + 1025]
        losses.append(np.mean(np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, target[:, None], 1)[:, 0]))
    assert abs(np.mean(losses) - 2.737) < 2 * 0.6 / len(losses) ** 0.5


def test_bad_requests_are_refused(demo, demo_float, tmp_path):
    tokens = rapidmoe_jax.demo_tokens()
    with pytest.raises(ValueError, match="8 window.s. of 1024 need 8193 tokens, got 500"):
        evaluate(demo, demo_float, tokens[:500])
    with pytest.raises(ValueError, match="window=2000 is outside 1..1024"):
        evaluate(demo, demo_float, tokens, window=2000)
    with pytest.raises(ValueError, match="wanted a split model and the float model"):
        evaluate(demo_float, demo_float, tokens)
    with pytest.raises(ValueError, match="token ids up to 60000, the model has 8192"):
        evaluate(demo, demo_float, np.array([60000, 1, 1]), window=2, windows=1)
    (tmp_path / "t.json").write_text(json.dumps([1, 2, 3]))
    assert read_tokens(tmp_path / "t.json").tolist() == [1, 2, 3]
    (tmp_path / "t.json").write_text("[[1, 2], [3, 4]]")
    with pytest.raises(ValueError, match="wanted a list of integers"):
        read_tokens(tmp_path / "t.json")
    (tmp_path / "t.npy").write_text("no")
    with pytest.raises(ValueError, match="cannot be read as token ids"):
        read_tokens(tmp_path / "t.npy")
