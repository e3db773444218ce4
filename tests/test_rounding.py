"""The integer kernels against float64, within bounds that follow from their rounding, on inputs meant to break them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, random_experts

from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops

CASE = Case("rounding", 320, 37, 3, 2)  # five groups, a remainder in every block of rows
FLOAT = 4e-6  # relative error of float32 sums, scales and exp


def activations(kind: str, tokens: int, rng) -> np.ndarray:
    x = rng.normal(size=(tokens, CASE.width)).astype(np.float32)
    match kind:
        case "outliers":
            x[:, ::64] *= 1e4
        case "zero groups":
            x[:, 64:192] = 0
        case "denormals":
            x[:, :128] *= 1e-41
        case "huge":
            x *= 1e18
        case "one value":
            x[:] = 0.37
    return x


def weights_of(experts, matrix: int) -> np.ndarray:
    """Dequantised base rows [E, F, D] of one matrix, in float64."""
    codes, scale, offset = (np.asarray(a)[0, :, matrix] for a in (experts.codes, experts.scale, experts.offset))
    flat = [np.ascontiguousarray(a.reshape(-1, a.shape[-1])) for a in (codes, scale, offset)]
    rows = _host.dequantize_rows(experts.base_bits, flat[0], flat[1].view(np.uint16), flat[2].view(np.uint16))
    return rows.reshape(CASE.experts, CASE.units, CASE.width).astype(np.float64)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize("kind", ["normal", "outliers", "zero groups", "denormals", "huge", "one value"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_dot_products_stay_within_the_rounding_of_x(tokens, kind, saturated, bits, isa, tmp_path):
    """A product is off by at most half a step of x, 1/254 of its group's largest value, times |w|; bfloat16: 2^-7."""
    experts, _ = random_experts(CASE, SplitConfig(base_bits=bits), tmp_path, exact=False)
    if saturated:
        experts = dataclasses.replace(experts, codes=jnp.full_like(experts.codes, 255))
    rng = np.random.default_rng(tokens)
    x = activations(kind, tokens, rng)
    ids = np.stack([rng.permutation(CASE.experts)[: CASE.top_k] for _ in range(tokens)]).astype(np.int32)
    got = ops.base_gate_up(jnp.asarray(x), jnp.asarray(ids), jnp.int32(0), experts)
    step = np.abs(x.reshape(tokens, -1, 64)).max(-1).repeat(64, -1).astype(np.float64) / 127
    for matrix in (0, 1):
        w = weights_of(experts, matrix)[ids]  # [T, k, F, D]
        wanted = np.einsum("tkfd,td->tkf", w, x.astype(np.float64))
        # below 1e-37 a step has no inverse in float32: the whole group counts as zero
        error = np.where(step < 1e-37, 127 * step, step / 2)
        if isa == "amx" and tokens == 40:
            error = (2.0**-7 + 2.0**-16) * np.abs(x).astype(np.float64)
        bound = np.einsum("tkfd,td->tkf", np.abs(w), error + FLOAT * np.abs(x)) + 1e-30
        assert (np.abs(np.asarray(got[matrix]) - wanted) <= bound).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", ["normal", "huge weights", "one unit", "zero"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_sums_stay_within_the_rounding_of_the_coefficients(tokens, kind, bits, isa, tmp_path):
    """Few tokens: half a step, 1/16256 of the block's largest product, a row and code; many: 2^-7 of every product."""
    experts, _ = random_experts(CASE, SplitConfig(base_bits=bits), tmp_path, exact=False)
    rng = np.random.default_rng(tokens)
    h = rng.normal(size=(tokens, CASE.top_k, CASE.units)).astype(np.float32)
    g = rng.dirichlet(np.ones(CASE.top_k), tokens).astype(np.float32)
    match kind:
        case "huge weights":
            g *= 1e12
        case "one unit":
            h[..., 5] *= 1e4
        case "zero":
            h[:] = 0
    ids = np.stack([rng.permutation(CASE.experts)[: CASE.top_k] for _ in range(tokens)]).astype(np.int32)
    got = ops.base_down(jnp.asarray(h), jnp.asarray(ids), jnp.asarray(g), jnp.int32(0), experts)
    w = weights_of(experts, 2)[ids]  # [T, k, F, D]
    factors = g[..., None].astype(np.float64) * h
    wanted = np.einsum("tkf,tkfd->td", factors, w)
    scale = np.abs(np.asarray(experts.scale)[0, :, 2].astype(np.float64))[ids]  # [T, k, F, G]
    largest = np.abs(factors[..., None] * scale).max(2)  # [T, k, G], over a superset of each block
    blocks = -(-CASE.units // 16)
    coarse = blocks * 16 * (2**bits - 1) * (largest / (127 * 128) / 2).sum(1).repeat(64, -1)
    products = np.einsum("tkf,tkfd->td", np.abs(factors), np.abs(w))
    size = np.einsum("tkf,tkfg->tg", np.abs(factors), scale * 2**bits).repeat(64, -1)
    bound = coarse + (2.0**-7 + 2.0**-16) * products + FLOAT * size + 1e-30
    assert (np.abs(np.asarray(got) - wanted) <= bound).all()
    if tokens < 40:  # no bfloat16: without its share of the bound
        assert (np.abs(np.asarray(got) - wanted) <= coarse + FLOAT * size + 1e-30).all()
