import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_step

import rapidmoe_jax
from rapidmoe_jax import calibration, damage, resplit, steps
from rapidmoe_jax.checkpoint import Checkpoint
from rapidmoe_jax.experts import Calibration, FloatExperts
from rapidmoe_jax.models import family
from rapidmoe_jax.policies import GlobalShare, NoCorrection
from rapidmoe_jax.policy import unit_error
from rapidmoe_jax.store import SplitCheckpoint

TOKENS = np.random.default_rng(0).integers(0, 512, 128 * 6).astype(np.int32)


@pytest.fixture(scope="module")
def calibrated(tiny_split, tmp_path_factory):
    """The tiny checkpoint split at 3+4 bits with a random calibration text."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    return rapidmoe_jax.split(tiny_split.parent / "source", out, calibration=TOKENS)


def text_run(source, folder) -> calibration.TextRun:
    checkpoint = Checkpoint(source)
    fam = family(checkpoint.config)
    return calibration.TextRun(checkpoint, fam, fam.read_config(checkpoint.config), TOKENS, folder)


def test_metadata_has_what_the_policies_need(calibrated):
    meta = SplitCheckpoint(calibrated).metadata
    known = meta["calibration"]
    assert meta["quantizer"] == "gptq" and meta["lambda_calibrated"] and len(meta["lambda"]) == 2
    assert min(meta["lambda"]) > 0 and known["tokens"] == TOKENS.size and len(known["kl"]) == 2
    assert np.sum(known["units"], axis=1) == pytest.approx([2 * 32] * 2)  # every unit of every pair, a token
    assert not (calibrated / "calibration").exists() and "histogram" not in meta["layers"][0]
    ladder = Calibration.of(known)
    later = np.asarray(ladder.later_units)
    assert (np.diff(later, axis=1) <= 1e-4).all() and later[0, 0] == pytest.approx(4 * 32, rel=0.02)
    assert (np.diff(np.asarray(ladder.left)) >= 0).all()
    for phase in (ladder.rank_decode, ladder.rank_prefill):
        assert phase[0] == pytest.approx(1) and (np.diff(np.asarray(phase)) <= 1e-6).all()


def test_share_reads_that_share_of_the_bytes(calibrated):
    model = rapidmoe_jax.load(calibrated)
    assert str(model.policy) == "share=0.15"
    for share in (0.1, 0.5):
        _, stats = steps.score_step(model.config, model.params, model.experts, TOKENS[:128], GlobalShare(share))
        assert int(stats.units) / (128 * 4 * 32) == pytest.approx(share, rel=0.15)


def test_an_interrupted_calibrated_split_resumes_to_the_same(calibrated, tiny_split, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop_before_report(file, make):
        done = make() if not file.exists() else json.loads(file.read_text())
        if file.name == "layer_002.json":
            raise Stop
        file.write_text(json.dumps(done))
        return done

    source, out = tiny_split.parent / "source", tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Stop):  # stopped between a layer's work and its report
        patch.setattr(resplit, "_once", stop_before_report)
        rapidmoe_jax.split(source, out, calibration=TOKENS)
    for at in (1, 2, 4, 5):

        def stop(done, total, at=at):
            assert total == 6
            if done == at:
                raise Stop

        with pytest.raises(Stop):
            rapidmoe_jax.split(source, out, calibration=TOKENS, progress=stop)
    original = resplit.write_json

    def fail(path, value):
        if path.name == "back_000.json":
            raise OSError("disk full")
        original(path, value)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(resplit, "write_json", fail)
        rapidmoe_jax.split(source, out, calibration=TOKENS)
    with pytest.raises(ValueError, match="other settings"):
        rapidmoe_jax.split(source, out, calibration=TOKENS[:-1])
    done = []
    rapidmoe_jax.split(source, out, calibration=TOKENS, progress=lambda i, n: done.append(i))
    a, b = (SplitCheckpoint(f).metadata for f in (out, calibrated))
    assert a["calibration"] == b["calibration"] and a["residual_files"] == b["residual_files"]


def test_text_run_is_the_float_model(tiny, tmp_path):
    """Streams forward equal the model's; the damage of a small error is the KL it does."""
    run, model = text_run(tiny, tmp_path / "run"), rapidmoe_jax.load(tiny)
    assert isinstance(model.experts, FloatExperts)
    weights = np.asarray(model.experts.weights)
    rng = np.random.default_rng(1)
    changed = weights + rng.normal(0, 0.02 * weights.std(), weights.shape).astype(np.float32)
    run.begin()
    for moe, layer in ((0, 0), (None, 1), (1, 2)):
        text = run.enter(layer)
        if moe is None:
            assert text is None
            continue
        result, error = np.zeros_like(text.x), np.zeros_like(text.x)
        seen = damage.LayerExperts(text)
        for e in range(6):
            ours = seen.see(e, weights[moe, e])
            d = damage.expert_damage(text, e, ours, weights[moe, e], changed[moe, e], np.ones((32, 4), np.float32))
            result[ours.rows] += d.result
            error[ours.rows] += d.error
        run.leave(layer, text, result, error)
    last = np.load(tmp_path / "run" / "stream_003.npy")

    def logits(experts, w):
        return steps.score_step(model.config, model.params, experts, run.tokens[w], NoCorrection())[0]

    scale = np.asarray(model.params.norm) / np.sqrt(np.square(last[0]).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(last[0] * scale @ np.asarray(model.params.head).T, logits(model.experts, 0), atol=2e-3)
    for moe, layer in ((1, 2), (None, 1), (0, 0)):
        predicted = run.back(layer)
        if moe is None:
            assert predicted == 0
            continue
        mixed = weights.copy()
        mixed[moe] = changed[moe]
        targets = jnp.zeros(128, jnp.int32)
        kl = sum(
            float(
                steps.compare_logits(logits(FloatExperts(jnp.asarray(mixed)), w), logits(model.experts, w), targets)[1]
            )
            for w in range(len(run.tokens))
        )
        if moe == 1:  # nothing after it routes
            assert predicted == pytest.approx(kl, rel=0.3)  # 768 drawn tokens
        else:  # gradients do not see that later layers route some tokens to other experts
            assert 0.2 * kl < predicted < 1.2 * kl


def test_one_layer_corrected_takes_away_about_the_kl_that_calibration_gave_it(demo, demo_float):
    """Two ways to a layer's damage: gradients on calibration text, or correcting it alone on evaluation text."""
    layer_kl = np.array(SplitCheckpoint(demo.folder).metadata["calibration"]["kl"])

    class Only:
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, step):
            return jnp.broadcast_to((step.expert_ids >= 0)[..., None] & (step.layer == self.layer), step.u0.shape)

    layers = [0, 3, 7]
    result = rapidmoe_jax.evaluate(demo, demo_float, rapidmoe_jax.demo_tokens(), fractions=[],
                                   policies=[Only(i) for i in layers], windows=2)  # fmt: skip
    base, *rows, _ = result["rows"]
    ratio = np.array([base["kl"] - r["kl"] for r in rows]) / layer_kl[layers]
    assert (ratio > 0.6).all() and (ratio < 3).all(), ratio


def test_an_expert_that_saw_no_token_has_the_pooled_moments():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 64)).astype(np.float32)
    text = calibration.LayerText(x, x, np.ones(50, np.float32), np.tile(np.int32([0, 1]), (50, 1)),
                                 np.full((50, 2), 0.5, np.float32), np.ones(50, bool))  # fmt: skip
    experts = damage.LayerExperts(text)
    w = rng.normal(size=(3, 8, 64)).astype(np.float32)
    unseen = experts.see(2, w)
    np.testing.assert_allclose(unseen.h_x, experts.pooled, rtol=1e-4, atol=1e-6)
    assert unseen.rows.size == 0 and np.trace(unseen.h_h) > 0
    gone = damage.expert_damage(text, 0, unseen, w, w, np.ones((8, 4), np.float32))
    assert gone.result.shape == (0, 64) and gone.importance == 0


def test_predicted_damage_is_the_policies_importance():
    """The numpy twin in damage.py against policy.unit_error."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9, 64)).astype(np.float32)
    w = rng.normal(size=(3, 8, 64)).astype(np.float32)
    base, norms = w + rng.normal(0, 0.1, w.shape).astype(np.float32), rng.uniform(size=(8, 4)).astype(np.float32)
    weights = rng.uniform(size=(9, 1)).astype(np.float32)
    square = rng.uniform(1, 2, 9).astype(np.float32)
    text = calibration.LayerText(x, x, square, np.zeros((9, 1), np.int32), weights, np.ones(9, bool))
    found = damage.expert_damage(text, 0, damage.LayerExperts(text).see(0, w), w, base, norms)
    u, v = (x @ base[m].T for m in (0, 1))
    step = make_step(tokens=9, slots=1, expert_ids=np.zeros((9, 1), np.int32), u0=u[:, None], v0=v[:, None],
                     h0=np.asarray(jax.nn.silu(u) * v)[:, None], norms=np.tile(norms, (9, 1, 1, 1)),
                     mean_square=np.square(x).mean(1))  # fmt: skip
    wanted = (np.asarray(unit_error(step)) * (weights**2 / square[:, None])[..., None]).sum()
    assert found.importance == pytest.approx(wanted, rel=1e-4) and found.histogram.sum() == 9 * 8


def test_calibration_text_is_read_from_text_and_ids(tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "t.txt").write_text("It was a bright morning. " * 5)
    np.save(tmp_path / "t.npy", np.arange(9))
    assert calibration.read_calibration(tmp_path / "t.txt", tiny, config, 512).size > 20
    assert calibration.read_calibration(tmp_path / "t.npy", tiny, config, 512).tolist() == list(range(9))
    np.save(tmp_path / "t.npy", np.arange(600))
    with pytest.raises(ValueError, match=r"token ids 0\.\.599, the model has 0\.\.511"):
        calibration.read_calibration(tmp_path / "t.npy", tiny, config, 512)
    with pytest.raises(ValueError, match=r"calibration: token ids -1\.\.5, the model has"):
        calibration.read_calibration([5, -1], tiny, config, 512)
    with pytest.raises(ValueError, match="cannot be read as text"):
        calibration.read_calibration(tmp_path / "gone.txt", tiny, config, 512)
    with pytest.raises(ValueError, match="a calibration text of 20 tokens is too short"):
        rapidmoe_jax.split(tiny, tmp_path / "out", calibration=np.arange(20))


def test_gptq_without_a_text_and_policies_without_calibration_say_so(tiny, tiny_split, tmp_path):
    with pytest.raises(ValueError, match="quantizer='gptq' needs a calibration text"):
        rapidmoe_jax.split(tiny, tmp_path / "out", quantizer="gptq")
    with pytest.raises(ValueError, match="was split without a calibration text"):
        rapidmoe_jax.load(tiny_split, policy="quality=0.01")
    assert str(rapidmoe_jax.load(tiny_split).policy) == "fraction=0.15"


def test_nested_codes_can_be_calibrated_too(tiny, tmp_path):
    out = rapidmoe_jax.split(tiny, tmp_path / "out", calibration=TOKENS, quantizer="nested")
    plain = rapidmoe_jax.split(tiny, tmp_path / "plain")
    a, b = (SplitCheckpoint(f) for f in (out, plain))
    assert a.calibration and not b.calibration and a.metadata["residual_files"] == b.metadata["residual_files"]
    assert not np.array_equal(a.restore_base(0)["norms"], b.restore_base(0)["norms"])  # of the text's inputs


def test_demo_text_is_divided(tiny):
    from rapidmoe_jax.demo import calibration_for, demo_calibration, demo_path

    held_out = np.load(demo_path() / "eval_tokens.npy")
    parts = np.concatenate([rapidmoe_jax.demo_tokens(), demo_calibration()])
    assert (parts == held_out).all() and demo_calibration().size > 100_000
    assert calibration_for(demo_path()).size == demo_calibration().size
    assert calibration_for(tiny).min() >= 0 and calibration_for(tiny).max() < 512
