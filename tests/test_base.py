import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TEST_CASES, random_experts, random_step

from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import ops
from rapidmoe_jax.pallas import reference


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 3, 33])
def test_host_base_equals_the_reference(case, bits, tokens, isa, tmp_path):
    experts, _ = random_experts(case, SplitConfig(base_bits=bits), tmp_path, layers=2)
    step = random_step(case, tokens)
    if tokens > 1:
        step["expert_ids"] = step["expert_ids"].at[0].set(-1)
    fast = dataclasses.replace(experts, exact=False)
    x, ids, weights, layer = step["x"], step["expert_ids"], step["expert_weights"], jnp.int32(1)
    wanted = reference.base_gate_up(x, ids, layer, experts)
    for kind, bound in ((experts, 2e-5), (fast, 0.1)):
        for a, b in zip(ops.base_gate_up(x, ids, layer, kind), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=bound)
    h0 = wanted[2]
    wanted = reference.base_down(h0, ids, weights, layer, experts)
    # 33 tokens: many an expert, so that products may be of bfloat16
    for kind, bound in ((experts, 1e-5), (fast, 1e-3 if tokens < 33 else 5e-3)):
        got = ops.base_down(h0, ids, weights, layer, kind)
        np.testing.assert_allclose(got, wanted, atol=bound)
        if tokens > 1:
            assert not np.asarray(got)[0].any()


@pytest.mark.parametrize("tokens, bound", [(2, 3e-4), (64, 4e-3)])
def test_integer_arithmetic_costs_little(tokens, bound, tmp_path):
    """Relative error of u0 from int8 activations, of y_base from 15-bit coefficients and from bfloat16 ones.

    On 2026-12-01: .0056, .00013, .0023.
    """
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    fast = dataclasses.replace(experts, exact=False)
    step, layer = random_step(case, tokens), jnp.int32(0)
    x, ids, weights = step["x"], step["expert_ids"], step["expert_weights"]
    (u, _, h0), (v, _, _) = (ops.base_gate_up(x, ids, layer, kind) for kind in (experts, fast))
    assert np.linalg.norm(v - u) < 0.01 * np.linalg.norm(u)
    y, z = (ops.base_down(h0, ids, weights, layer, kind) for kind in (experts, fast))
    assert np.linalg.norm(z - y) < bound * np.linalg.norm(y)


def test_base_runs_under_vmap_and_scan(tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, layers=3)
    step = random_step(case, 4)
    x, ids = step["x"], step["expert_ids"]

    def gate_up(x, ids, layer):
        return ops.base_gate_up(x, ids, layer, experts)[2]

    whole = gate_up(x, ids, jnp.int32(2))
    rows = jax.vmap(gate_up, in_axes=(0, 0, None))(x[:, None], ids[:, None], jnp.int32(2))
    np.testing.assert_allclose(rows[:, 0], whole, atol=1e-6)
    layers = jax.jit(lambda: jax.lax.scan(lambda c, i: (c, gate_up(x, ids, i)), None, jnp.arange(3))[1])()
    np.testing.assert_array_equal(layers[2], whole)


def test_a_wrong_layer_is_refused(tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    step = random_step(case, 1)
    with pytest.raises(Exception, match="layer 4 of 1"):
        ops.base_gate_up(step["x"], step["expert_ids"], jnp.int32(4), experts)
