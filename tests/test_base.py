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
    layer = (jnp.int32(1), experts.codes, experts.scale, experts.offset)
    wanted = reference.base_gate_up_reference(step["x"], step["expert_ids"], *layer, bits=bits)
    for exact, bound in ((True, 2e-5), (False, 0.1)):
        got = ops.base_gate_up(step["x"], step["expert_ids"], *layer, bits=bits, exact=exact)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=bound)
    args = (wanted[2], step["expert_ids"], step["expert_weights"], *layer)
    wanted = reference.base_down_reference(*args, bits=bits)
    for exact, bound in ((True, 1e-5), (False, 0.03)):
        got = ops.base_down(*args, bits=bits, exact=exact)
        np.testing.assert_allclose(got, wanted, atol=bound)
        if tokens > 1:
            assert not np.asarray(got)[0].any()


def test_int8_costs_under_one_percent(tmp_path):
    """Relative error of u0 and of y_base from int8; measured 0.0066 and 0.0030 on 2026-12-01."""
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    step = random_step(case, 16)
    args = (step["x"], step["expert_ids"], jnp.int32(0), experts.codes, experts.scale, experts.offset)
    exact = ops.base_gate_up(*args, bits=3, exact=True)[0]
    fast = ops.base_gate_up(*args, bits=3, exact=False)[0]
    assert np.linalg.norm(fast - exact) < 0.01 * np.linalg.norm(exact)
    h0 = ops.base_gate_up(*args, bits=3, exact=True)[2]
    args = (h0, step["expert_ids"], step["expert_weights"], *args[2:])
    exact, fast = (ops.base_down(*args, bits=3, exact=flag) for flag in (True, False))
    assert np.linalg.norm(fast - exact) < 0.01 * np.linalg.norm(exact)


def test_base_runs_under_vmap_and_scan(tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, layers=3)
    step = random_step(case, 4)
    x, ids = step["x"], step["expert_ids"]

    def gate_up(x, ids, layer):
        return ops.base_gate_up(x, ids, layer, experts.codes, experts.scale, experts.offset, bits=3, exact=True)[2]

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
        ops.base_gate_up(step["x"], step["expert_ids"], jnp.int32(4), experts.codes, experts.scale, experts.offset,
                         bits=3, exact=True)  # fmt: skip
