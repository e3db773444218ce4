"""On a GPU: pytest -m gpu. Elsewhere skipped; the other tests are for the CPU backend (JAX_PLATFORMS=cpu)."""

import jax
import numpy as np
import pytest

import rapidmoe_jax

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    with jax.default_matmul_precision("highest"):
        yield


def test_the_default_executor_says_that_it_is_slow(demo_cache):
    with pytest.warns(UserWarning, match="corrections go through a Python callback"):
        model = rapidmoe_jax.load("demo")
    assert model.experts.executor == "callback" and model.generate("It was a", max_new_tokens=5).tokens


def test_host_executor_is_refused(demo_cache):
    with pytest.raises(ValueError, match="executor='host' runs on the cpu backend"):
        rapidmoe_jax.load("demo", executor="host")


def test_callback_equals_reference_and_float_is_near(demo_cache):
    ids = rapidmoe_jax.demo_tokens()[:48]
    options = {"dtype": "float32", "exact": True}
    one = rapidmoe_jax.load("demo", policy="fraction=0.3", executor="callback", **options).logits(ids)
    two = rapidmoe_jax.load("demo", policy="fraction=0.3", executor="reference", **options).logits(ids)
    np.testing.assert_allclose(one, two, atol=5e-3)
    every = rapidmoe_jax.load("demo", policy="all", executor="callback", **options).logits(ids)
    float_ = rapidmoe_jax.load(rapidmoe_jax.demo_path(), dtype="float32").logits(ids)
    assert np.abs(every - float_).mean() < 0.1 < np.abs(one - float_).mean() * 2
