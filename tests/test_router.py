"""Which experts a token goes to and with what weights, against a plain definition in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, model_config
from flax import nnx

from rapidmoe_jax.models.decoder import MoE
from rapidmoe_jax.models.router import Router

BASE = model_config(Case("router", 64, 8, 12, 3))
X = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)


def router(bias=None, correction=None, **options):
    """Make a router with a random matrix; returns it, its logits of X, and what it chooses."""
    cfg = dataclasses.replace(BASE, router_bias=bias is not None, correction_bias=correction is not None, **options)
    made = Router(cfg, rngs=nnx.Rngs(1))
    if bias is not None:
        made.bias[...] = jnp.asarray(bias)
    if correction is not None:
        made.correction_bias[...] = jnp.asarray(correction)
    logits = X.astype(np.float64) @ np.float64(made.weight[...]).T + (0 if bias is None else bias)
    ids, weights = made.route(jnp.asarray(X))
    return logits, np.asarray(ids), np.asarray(weights)


def softmax(a):
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(a, k):
    return np.argsort(-a, -1)[:, :k]


@pytest.mark.parametrize("norm", [True, False])
def test_softmax_over_all_then_the_best(norm):
    logits, ids, weights = router(norm_topk_prob=norm)
    np.testing.assert_array_equal(ids, best(logits, 3))
    wanted = np.take_along_axis(softmax(logits), ids, -1)
    if norm:
        wanted /= wanted.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    else:
        assert (weights.sum(-1) < 0.95).all()
    np.testing.assert_allclose(weights, wanted, rtol=1e-4)


def test_the_best_then_softmax_over_those():
    bias = np.linspace(-1, 1, 12)
    logits, ids, weights = router(bias=bias, router_score="topk_softmax", norm_topk_prob=False)
    np.testing.assert_array_equal(ids, best(logits, 3))
    np.testing.assert_allclose(weights, softmax(np.take_along_axis(logits, ids, -1)), rtol=1e-4)


def test_the_correction_bias_chooses_and_does_not_weigh():
    correction = np.array([3.0, -3.0] * 6)  # larger than any difference of scores: even experts only
    logits, ids, weights = router(correction=correction, router_score="sigmoid", routed_scaling=2.5)
    assert (ids % 2 == 0).all()
    scores = 1 / (1 + np.exp(-logits))
    np.testing.assert_array_equal(ids, best(scores + correction, 3))
    wanted = np.take_along_axis(scores, ids, -1)
    np.testing.assert_allclose(weights, 2.5 * wanted / wanted.sum(-1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize("shift", [0.0, -5.0])
def test_experts_come_from_the_groups_whose_two_best_sum_highest(shift):
    """Negative biased scores too: an expert of a dropped group must not win by being set to 0."""
    correction = np.random.default_rng(2).normal(shift, 0.3, 12)
    options = dict(router_score="sigmoid", num_groups=4, kept_groups=2)
    logits, ids, _ = router(correction=correction, **options)
    scores = 1 / (1 + np.exp(-logits)) + correction
    groups = np.sort(scores.reshape(-1, 4, 3), -1)[..., 1:].sum(-1)
    kept = best(groups, 2)
    for token in range(len(X)):
        allowed = np.where(np.isin(np.arange(12) // 3, kept[token]), scores[token], -np.inf)
        np.testing.assert_array_equal(ids[token], best(allowed[None], 3)[0])


def test_the_shared_expert_is_weighted_by_a_sigmoid_of_its_own():
    for gate in (False, True):
        moe = MoE(dataclasses.replace(BASE, shared_size=16, shared_gate=gate), rngs=nnx.Rngs(0))
        ids, weights = moe.router.route(jnp.asarray(X))
        got = moe.rest(jnp.asarray(X), ids, weights)
        wanted = np.asarray(moe.shared(jnp.asarray(X)))
        if gate:
            wanted = wanted / (1 + np.exp(-X @ np.asarray(moe.shared_gate.weight[...]).T))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
