import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TEST_CASES, random_experts, random_step

from rapidmoe_jax import residual
from rapidmoe_jax.config import SplitConfig
from rapidmoe_jax.host_kernels import _host, ops
from rapidmoe_jax.pallas import reference

BITS = [(2, 4), (3, 4), (4, 4), (2, 2), (3, 2), (4, 2)]


def make_request(case, experts, tokens, *, share=0.3, layer=0, seed=0) -> ops.Correction:
    step = random_step(case, tokens, seed=seed)
    u0, v0, h0 = reference.base_gate_up(step["x"], step["expert_ids"], jnp.int32(layer), experts)
    mask = np.random.default_rng(seed).random(u0.shape) < share
    return ops.Correction(**step, u0=u0, v0=v0, h0=h0, critical_mask=jnp.asarray(mask), layer=jnp.int32(layer))


def correct(request, experts, y_base=None):
    y_base = jnp.zeros_like(request.x) if y_base is None else y_base
    return residual.done(residual.start(request, experts), y_base, experts)


def delta_float64(request, weights, experts):
    """The equation in float64, from weights decoded by quant.py's rules through the C++ row reader."""
    at = _host.record_layout(experts.base_bits, experts.residual_bits, request.x.shape[1])
    records, d = np.asarray(experts.records)[int(request.layer)], request.x.shape[1]

    def rows(e, name, bits, offset=None):
        halves = lambda n: np.ascontiguousarray(records[e, :, at[n] : at[n] + d // 32]).view(np.uint16)  # noqa: E731
        codes = np.ascontiguousarray(records[e, :, at[name] : at[name] + d * bits // 8])
        return _host.dequantize_rows(bits, codes, halves(name + "_scale"), halves(offset) if offset else None)

    out = np.zeros(request.x.shape)
    for t, s in np.ndindex(*request.expert_ids.shape):
        e, g, mask = int(request.expert_ids[t, s]), float(request.expert_weights[t, s]), request.critical_mask[t, s]
        if e < 0:
            continue
        x = np.asarray(request.x[t], np.float64)
        r = experts.residual_bits
        u = np.asarray(request.u0[t, s], np.float64) + rows(e, "r1", r) @ x
        v = np.asarray(request.v0[t, s], np.float64) + rows(e, "r3", r) @ x
        h, h0 = u / (1 + np.exp(-u)) * v, np.asarray(request.h0[t, s], np.float64)
        b2 = rows(e, "b2", experts.base_bits, "b2_offset").astype(np.float64)
        w2 = b2 + rows(e, "r2", r)
        out[t] += g * ((h * np.asarray(mask)) @ w2 - (h0 * np.asarray(mask)) @ b2)
    return out


@pytest.mark.parametrize("case, bits", list(zip(TEST_CASES * 2, BITS, strict=True)), ids=str)
def test_executors_agree_with_float64(case, bits, isa, tmp_path):
    spec = SplitConfig(base_bits=bits[0], residual_bits=bits[1])
    experts, weights = random_experts(case, spec, tmp_path, layers=2)
    request = make_request(case, experts, 5, layer=1)
    wanted = delta_float64(request, weights, experts)
    size = np.abs(wanted).max()
    for executor in ("reference", "host", "callback"):
        got = correct(request, dataclasses.replace(experts, executor=executor))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * size, err_msg=executor)
    fast = correct(request, dataclasses.replace(experts, exact=False))
    # int8 rounding of x and of the coefficients, relative to the largest correction
    assert np.abs(fast - wanted).max() < 0.03 * size
    off = correct(request, dataclasses.replace(experts, executor="off"), request.x)
    assert (off == request.x).all()


def test_full_mask_gives_the_whole_split_expert(tmp_path):
    """base + delta with every unit = the expert on base + residual weights, close to the float expert."""
    case = TEST_CASES[1]
    experts, weights = random_experts(case, SplitConfig(base_bits=4), tmp_path)
    request = make_request(case, experts, 4, share=2)
    y = ops.base_down(request.h0, request.expert_ids, request.expert_weights, jnp.int32(0), experts)
    got = correct(request, experts, y)
    for t in range(4):
        wanted = np.zeros(case.width)
        for e, g in zip(request.expert_ids[t], request.expert_weights[t], strict=True):
            w = weights[0, int(e)].astype(np.float64)
            u, v = w[0] @ request.x[t], w[1] @ request.x[t]
            wanted += float(g) * ((u / (1 + np.exp(-u)) * v) @ w[2])
        assert np.linalg.norm(got[t] - wanted) < 0.02 * np.linalg.norm(wanted)
        assert np.linalg.norm(y[t] - wanted) > 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("whole_slots", [1, 3])
@pytest.mark.parametrize("tokens", [1, 10, 33])
@pytest.mark.parametrize("exact", [True, False])
def test_a_pair_with_every_unit_critical_may_replace_the_base(tokens, exact, whole_slots, isa, tmp_path):
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, exact=exact)
    request = make_request(case, experts, tokens, share=0.5)
    request = request._replace(critical_mask=request.critical_mask.at[:, :whole_slots].set(True))
    y = ops.base_down(request.h0, request.expert_ids, request.expert_weights, jnp.int32(0), experts)
    wanted = correct(request, experts, y)
    rest = request.expert_ids.at[:, :whole_slots].set(-1)
    y = ops.base_down(request.h0, rest, request.expert_weights, jnp.int32(0), experts)
    got = residual.done(residual.start(request, experts, replaces=True), y, experts)
    assert np.abs(got - wanted).max() < (1e-6 if exact else 0.02) * np.abs(wanted).max()
    with pytest.raises(ValueError, match="only the host executor gives whole experts"):
        residual.start(request, dataclasses.replace(experts, executor="reference"), replaces=True)


@pytest.mark.parametrize("executor", ["host", "callback", "reference"])
def test_jit_scan_and_vmap_give_the_same(executor, tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, layers=2, executor=executor)
    requests = [make_request(case, experts, 3, seed=s, layer=s % 2) for s in range(4)]
    plain = np.stack([correct(r, experts, r.x) for r in requests])
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *requests)

    @jax.jit
    def scanned(experts, stacked):
        return jax.lax.scan(lambda c, r: (c, correct(r, experts, r.x)), None, stacked)[1]

    np.testing.assert_array_equal(scanned(experts, stacked), plain)
    mapped = jax.jit(jax.vmap(lambda r: correct(r, experts, r.x)))(stacked)
    np.testing.assert_allclose(mapped, plain, rtol=1e-5, atol=1e-6)
    if executor == "host":
        assert _host.jobs_in_flight() == 0


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("share", [0.0, 2.0])
def test_none_and_all_critical_at_any_number_of_rows(tokens, share, isa, tmp_path):
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    request = make_request(case, experts, tokens, share=share)
    request = request._replace(expert_ids=request.expert_ids.at[1::2].set(-1) if tokens > 1 else request.expert_ids)
    y_base = request.x * 2
    got = correct(request, experts, y_base)
    wanted = y_base + residual.delta_reference(request, experts)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    if share == 0:
        np.testing.assert_array_equal(got, y_base)
    if tokens > 1:
        np.testing.assert_array_equal(got[1::2], y_base[1::2])


def test_a_unit_is_read_once_for_all_tokens(tmp_path):
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    request = make_request(case, experts, 9, share=2)
    ticket = ops.residual_start(request, experts)
    _, counts = ops.residual_done(ticket, jnp.zeros_like(request.x))
    used = len(np.unique(request.expert_ids))
    assert counts.tolist() == [used * case.units, 9 * case.top_k * case.units]


@pytest.mark.parametrize("exact", [True, False])
def test_result_does_not_depend_on_the_thread_count(exact, tmp_path):
    case = TEST_CASES[1]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, exact=exact)
    request = make_request(case, experts, 7)
    got = []
    for threads in (1, 2, 5):
        _host.set_threads(threads)
        got.append(np.asarray(correct(request, experts)))
    _host.set_threads(_host.available_cores())
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_reach_the_tokens_that_have_them_and_no_other(bad, exact, tokens, isa, tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path, exact=exact)
    request = make_request(case, experts, tokens, share=2)
    clean = correct(request, experts)
    broken = correct(request._replace(x=request.x.at[1, 7].set(bad)), experts)
    assert np.isnan(broken[1]).any()
    np.testing.assert_array_equal(np.delete(broken, 1, 0), np.delete(clean, 1, 0))


def test_bad_requests_give_readable_errors(tmp_path):
    case = TEST_CASES[0]
    experts, _ = random_experts(case, SplitConfig(), tmp_path)
    request = make_request(case, experts, 2)
    with pytest.raises(Exception, match=r"expert id 3 of token 1, slot 0 is outside \[-1, 3\)"):
        correct(request._replace(expert_ids=request.expert_ids.at[1, 0].set(3)), experts)
    with pytest.raises(Exception, match=r"residual layer 1 is outside \[0, 1\)"):
        correct(request._replace(layer=jnp.int32(1)), experts)
    with pytest.raises(Exception, match="ticket 77 is not in flight"):
        ops.residual_done(jnp.uint32(77), request.x)
    with pytest.raises(Exception, match="x has width 128"):
        wide = request._replace(x=jnp.zeros((2, 128)))
        ops.residual_start(wide, experts)
    with pytest.raises(Exception, match=r"residual_start\(expert_weights\): got shape \[2, 1\], wanted \[T, k\]"):
        ops.residual_start(request._replace(expert_weights=request.expert_weights[:, :1]), experts)
    with pytest.raises(ValueError, match="executor='fast' is unknown; use host, callback"):
        correct(request, dataclasses.replace(experts, executor="fast"))
    _host.close_store(experts.store)
    for executor in ("host", "callback"):
        with pytest.raises(Exception, match="is closed; load the model again"):
            correct(request, dataclasses.replace(experts, executor=executor))
    assert _host.jobs_in_flight() == 0
