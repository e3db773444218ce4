import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rapidmoe_jax
from rapidmoe_jax import steps
from rapidmoe_jax.models.decoder import abstract_layer, layer_runs
from rapidmoe_jax.policies import CorrectAll, NoCorrection

ORACLE = Path(__file__).parent / "oracle" / "qwen3_moe"
EXPECTED = np.load(ORACLE / "expected.npz")


@pytest.fixture(scope="module")
def model():
    return rapidmoe_jax.load(ORACLE)


@pytest.mark.parametrize("i", range(3))
def test_logits_equal_the_reference(model, i):
    """Against transformers 5.24 in float32; 2e-3 is the bound, 2e-5 what was measured on 2026-12-01."""
    difference = np.abs(model.logits(EXPECTED[f"ids_{i}"]) - EXPECTED[f"logits_{i}"]).max()
    assert difference < 5e-4


@pytest.mark.parametrize("i", range(2))
def test_greedy_tokens_equal_the_reference(model, i):
    sure = json.loads((ORACLE / "expected.json").read_text())["float32_atol"] * 10
    margins = EXPECTED[f"margin_{i}"]
    until = int(np.argmax(margins < sure)) if (margins < sure).any() else len(margins)
    assert until > 10
    model.codec.eos_ids = frozenset()
    got = model.generate(EXPECTED[f"ids_{i}"].tolist(), max_new_tokens=32).tokens
    assert got[:until] == EXPECTED[f"greedy_{i}"][:until].tolist()


def test_routing_equals_the_reference(model):
    """expert_ids and weights of layers 0 and 2 from the reference's own hidden states."""
    for run, layer in ((0, 0), (2, 2)):
        graphdef, _ = abstract_layer(model.config, moe=True)
        router = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], model.params.runs[run])).mlp
        logits = EXPECTED[f"router_logits_0_{layer}"].astype(np.float64)
        weight = np.asarray(router.router.weight[...], np.float64)
        x = np.linalg.lstsq(weight, logits.T, rcond=None)[0].T  # an input with just these router logits
        ids, weights = map(np.asarray, router.route(jnp.asarray(x, jnp.float32)))
        order = np.argsort(ids, -1)  # the reference lists a token's experts by id
        np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), EXPECTED[f"topk_ids_0_{layer}"])
        weights = np.take_along_axis(weights, order, -1)
        np.testing.assert_allclose(weights, EXPECTED[f"topk_w_0_{layer}"], atol=1e-5)


def test_layers_are_grouped_in_runs_of_one_kind(model):
    assert layer_runs(model.config) == [(True, 0, 1), (False, 1, 1), (True, 2, 1)]


def test_split_with_every_unit_corrected_is_close_to_float(model, tmp_path):
    out = rapidmoe_jax.split(ORACLE, tmp_path / "out", base_bits=4)
    split = rapidmoe_jax.load(out, policy="all")
    ids = EXPECTED["ids_2"]
    full, exact = split.logits(ids), rapidmoe_jax.load(out, policy="all", exact=True).logits(ids)
    split.policy = "none"
    base = split.logits(ids)

    def kl(logits):
        return float(steps.compare_logits(logits, EXPECTED["logits_2"], np.roll(ids, -1))[1]) / len(ids)

    assert kl(exact) < 1.5e-3 and kl(full) < 2e-3  # measured 2026-12-01: 1.0e-3, 1.3e-3
    assert kl(base) > 20 * kl(full)


def test_executors_give_the_same_logits(tiny_split):
    ids = np.arange(20) * 7 % 512
    logits = {
        name: rapidmoe_jax.load(tiny_split, policy="fraction=0.3", executor=name, exact=True).logits(ids)
        for name in ("host", "callback", "reference")
    }
    for name in ("callback", "reference"):
        np.testing.assert_allclose(logits[name], logits["host"], atol=2e-4)
    off = rapidmoe_jax.load(tiny_split, policy="all", executor="off", exact=True).logits(ids)
    model = rapidmoe_jax.load(tiny_split, policy="none", exact=True)
    none = model.logits(ids)
    np.testing.assert_array_equal(off, none)
    model.policy = "fraction=0"  # another program, which XLA may fuse and so round differently
    np.testing.assert_allclose(model.logits(ids), none, atol=2e-5)
    assert np.abs(logits["host"] - none).max() > 0.01


def test_a_notebooks_own_policy_is_used(tiny_split):
    seen = []

    def mine(step):
        seen.append(step.u0.shape)
        return rapidmoe_jax.importance(step) > -1

    model = rapidmoe_jax.load(tiny_split, policy=mine)
    ids = [3, 4, 5]
    everything = model.logits(ids)
    assert seen
    model.policy = "all"
    np.testing.assert_array_equal(model.logits(ids), everything)
    assert model.policy == CorrectAll()
    model.policy = None
    assert model.policy == NoCorrection()


def test_bfloat16_dense_weights_run(tiny_split):
    narrow = rapidmoe_jax.load(tiny_split, policy="all", dtype="bfloat16")
    wide = rapidmoe_jax.load(tiny_split, policy="all")
    ids = np.arange(30) * 11 % 512
    assert np.abs(narrow.logits(ids) - wide.logits(ids)).mean() < 0.1
    assert narrow.device_bytes < wide.device_bytes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "best"}, "policy='best' is not understood"),
        ({"policy": "fraction=2"}, "use none, all, share=0..1"),
        ({"executor": "gpu"}, "executor='gpu' is unknown; use one of host, callback, reference, off"),
        ({"threads": 0}, "threads=0 is outside 1.."),
        ({"threads": 4096}, "threads=4096 is outside 1.."),
        ({"dtype": "int8"}, "dtype='int8' is not supported"),
        ({"max_cache_len": 4096}, "max_cache_len=4096 is outside 1..128"),
        ({"prefill_tokens": -1}, "prefill_tokens=-1 is out of range"),
        ({"base_bits": 2}, "base_bits and residual_bits belong to 'demo'"),
    ],
)
def test_bad_options_are_refused(tiny_split, options, message):
    with pytest.raises(ValueError, match=message):
        rapidmoe_jax.load(tiny_split, **options)


@pytest.mark.parametrize("ids, message", [([], "no tokens given"), ([512], "token ids 512..512, wanted 0..511"),
                                          ([1] * 129, "129 tokens, the cache holds 128")])  # fmt: skip
def test_bad_token_ids_are_refused(tiny_split, ids, message):
    with pytest.raises(ValueError, match=message):
        rapidmoe_jax.load(tiny_split).logits(ids)
