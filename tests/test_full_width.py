"""A layer of every published shape at its full width, against float experts. Minutes and gigabytes: pytest -m slow."""

import numpy as np
import pytest
from slices import random_model, slice_config

from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.experts import FloatExperts
from rapidmoe_jax.memory import empty, to_device
from rapidmoe_jax.models.router import Router
from rapidmoe_jax.models.shapes import SHAPES

pytestmark = pytest.mark.slow
DISTINCT = 2
LARGE = {"deepseek-v3": 2, "deepseek-r1": 2, "kimi-k2": 2, "glm-4.5": 4, "qwen3-235b-a22b": 4}


@pytest.mark.parametrize("name", SHAPES)
def test_one_layer_with_experts(name, tmp_path, monkeypatch):
    """Prefill and decode; with every unit corrected nearer to the float experts than the base, by the bits."""
    bits = LARGE.get(name, 4)
    cfg = slice_config(name, layers=1, vocab_size=1024)
    model, weights = random_model(cfg, SplitConfig(base_bits=bits, residual_bits=bits), tmp_path, distinct=DISTINCT)
    ids = np.random.default_rng(0).integers(0, 1024, 24)
    logits = {}
    for policy in ("none", "all"):
        model.policy = policy
        logits[policy] = model.logits(ids)
    assert len(model.generate(ids.tolist(), max_new_tokens=3).tokens) == 3
    if cfg.expert_bias:  # of each expert its own: the float experts must be as many
        whole = empty((1, cfg.num_experts, *weights.shape[2:]), np.float32)
        for e in range(cfg.num_experts):
            whole[0, e] = weights[0, e % DISTINCT]
        weights = whole
    else:
        original = Router.route

        def the_distinct_ones(self, x):
            chosen, weights = original(self, x)
            return chosen % DISTINCT, weights

        monkeypatch.setattr(Router, "route", the_distinct_ones)
    model.experts = FloatExperts(to_device(weights), cfg.swiglu_limit)
    wanted = model.logits(ids)
    error = {policy: np.abs(value - wanted).mean() for policy, value in logits.items()}
    assert np.isfinite(wanted).all() and error["none"] > 0
    assert error["all"] < (0.12 if bits == 4 else 0.5) * error["none"]
