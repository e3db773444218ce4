import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rapidmoe_jax.sampling import Sampling, nucleus_mask, sample_token

LOGITS = jnp.asarray(np.random.default_rng(0).normal(0, 2, (1, 50)).astype(np.float32))
PROBABILITY = np.asarray(jax.nn.softmax(LOGITS[0]))


def draws(count=4000, logits=LOGITS, **options):
    sampling = Sampling.make(**({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5} | options))
    run = jax.jit(jax.vmap(lambda i: sample_token(logits, sampling, i[None])))
    return np.asarray(run(jnp.arange(count)))[:, 0]


def test_greedy_takes_the_largest_and_the_lower_id_of_equals():
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0]])
    assert sample_token(logits, Sampling.make(0.0, 0, 1.0, 0), jnp.zeros(1, jnp.int32)).tolist() == [1]


def test_frequencies_follow_the_softmax():
    counts = np.bincount(draws(), minlength=50) / 4000
    assert np.abs(counts - PROBABILITY).max() < 0.03
    hot = np.bincount(draws(temperature=3.0), minlength=50) / 4000
    assert np.abs(hot - np.asarray(jax.nn.softmax(LOGITS[0] / 3))).max() < 0.03


@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_keeps_the_k_largest(k):
    assert set(draws(top_k=k)) <= set(np.argsort(-PROBABILITY)[:k].tolist())
    assert len(set(draws(top_k=k))) == k


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set(p):
    order = np.argsort(-PROBABILITY)
    kept = order[: int(np.searchsorted(np.cumsum(PROBABILITY[order]), p - 1e-7)) + 1]
    mask = np.asarray(nucleus_mask(jnp.asarray(PROBABILITY), p))
    assert set(np.flatnonzero(mask).tolist()) == (set(range(50)) if p == 1 else set(kept.tolist()))
    assert set(draws(top_p=p)) <= set(np.flatnonzero(mask).tolist())


def test_a_draw_depends_on_seed_row_and_count_alone():
    two = jnp.concatenate([LOGITS, LOGITS])
    sampling = Sampling.make(1.0, 0, 1.0, 7)
    pair = sample_token(two, sampling, jnp.asarray([3, 3]))
    assert pair[0] == sample_token(LOGITS, sampling, jnp.asarray([3]))[0]
    assert (draws(50, seed=1) != draws(50, seed=2)).any()


@pytest.mark.parametrize(
    "options, name",
    [
        ((-1.0, 0, 1.0, 0), "temperature=-1"),
        ((float("nan"), 0, 1.0, 0), "temperature=nan"),
        ((1.0, -1, 1.0, 0), "top_k=-1"),
        ((1.0, 0, 0.0, 0), "top_p=0"),
        ((1.0, 0, 1.1, 0), "top_p=1.1"),
        ((1.0, 0, 1.0, -1), "seed=-1"),
    ],
)
def test_numbers_out_of_range_are_named(options, name):
    with pytest.raises(ValueError, match=f"{name}.* is out of range"):
        Sampling.make(*options)
