import json

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax import frontier as F

TOKENS = np.random.default_rng(0).integers(0, 512, 128 * 6).astype(np.int32)


@pytest.fixture(scope="module")
def models(tiny_split, tmp_path_factory):
    source = tiny_split.parent / "source"
    out = rapidmoe_jax.split(source, tmp_path_factory.mktemp("frontier") / "out", base_bits=2, calibration=TOKENS)
    return rapidmoe_jax.load(out), rapidmoe_jax.load(source)


def test_frontier_measures_every_curve_and_goes_on_where_it_stopped(models, tmp_path, monkeypatch):
    seen = []
    original = F.compare_window
    monkeypatch.setattr(F, "compare_window", lambda m, r, t, w, p: seen.append(w) or original(m, r, t, w, p))

    def stop(done, total):
        if seen == [0, 1]:
            raise KeyboardInterrupt

    args = (*models, TOKENS, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        F.frontier(*args, window=32, windows=2, timed=False, progress=stop)
    result = F.frontier(*args, window=32, windows=2, timed=False)
    assert seen == [0, 1, 1] and result["tokens"] == 64
    assert json.loads((tmp_path / "frontier.json").read_text()) == result
    assert len(result["curves"]) == 7 and all(len(rows) >= 5 for rows in result["curves"].values())
    base, whole = result["ends"]
    assert whole["kl"] < 0.1 * base["kl"]
    for rows in result["curves"].values():
        assert rows[-1]["host_bytes_per_token"] >= rows[0]["host_bytes_per_token"] and rows[-1]["kl"] < base["kl"]
    at = {name: rows[3]["kl"] for name, rows in result["curves"].items()}
    assert at["oracle importance"] < at["random units"] and at["share (importance)"] < at["random units"]
    F.plot(result, tmp_path / "f.png", "tiny")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="holds another model's, text's or release's measurements"):
        F.frontier(*args, window=16, windows=2, timed=False)


def test_frontier_wants_a_calibrated_model(tiny_split, models, tmp_path):
    with pytest.raises(ValueError, match="split it with --calibration"):
        F.frontier(rapidmoe_jax.load(tiny_split), models[1], TOKENS, tmp_path, window=32, windows=1)


def test_oracle_knows_the_true_error(models):
    """Its error of a unit against the definition, on float weights."""
    reference = models[1]
    policy = F.curves(*models)["oracle importance"][0]
    w = np.asarray(reference.experts.weights)
    dots = np.asarray(policy.dots)
    np.testing.assert_allclose(dots[..., 0], np.square(w[:, :, 2]).sum(-1), rtol=1e-4)
    rest = dots[..., 0] - 2 * dots[..., 1] + dots[..., 2]  # |W2 - B2|^2
    assert (rest > -1e-4).all() and rest.mean() < 0.5 * dots[..., 0].mean()
