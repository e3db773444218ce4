from pathlib import Path

import numpy as np
import pytest

import rapidmoe_jax
from rapidmoe_jax.models.decoder import layer_runs
from rapidmoe_jax.policies import CorrectAll, NoCorrection

ORACLE = Path(__file__).parent / "oracle" / "qwen3_moe"
EXPECTED = np.load(ORACLE / "expected.npz")


@pytest.fixture(scope="module")
def model():
    return rapidmoe_jax.load(ORACLE)


def test_layers_are_grouped_in_runs_of_one_kind(model):
    assert layer_runs(model.config) == [(True, 0, 1), (False, 1, 1), (True, 2, 1)]


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
