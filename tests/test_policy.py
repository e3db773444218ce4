import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rapidmoe_jax import policy as P
from rapidmoe_jax.moe import critical_mask


def make_step(tokens=3, slots=2, units=8, experts=6, seed=0, **changes) -> P.LayerStep:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(np.int32)
    u, v, h = rng.normal(size=(3, tokens, slots, units)).astype(np.float32)
    fields = dict(
        expert_ids=ids,
        expert_weights=rng.dirichlet(np.ones(slots), tokens).astype(np.float32),
        u0=u,
        v0=v,
        h0=h,
        norms=rng.uniform(size=(tokens, slots, units, 4)).astype(np.float32),
        mean_square=np.ones(tokens, np.float32),
        stream_square=rng.uniform(1, 2, tokens).astype(np.float32),
        priority=np.ones(tokens, np.float32),
        layer_weight=np.float32(1),
        calibrated=np.array(False),
    )
    return P.LayerStep(**{k: jnp.asarray(a) for k, a in (fields | changes).items()}, num_experts=experts)


def test_unit_error_is_the_formula():
    step = make_step()
    u, v, h = np.asarray(step.u0), np.asarray(step.v0), np.asarray(step.h0)
    r1, r3, r2, b2 = np.moveaxis(np.asarray(step.norms), -1, 0)
    s = 1 / (1 + np.exp(-u))
    wanted = h**2 * r2 + b2 * ((s * (1 + u * (1 - s)) * v) ** 2 * r1 + (u * s) ** 2 * r3)
    np.testing.assert_allclose(P.unit_error(step), wanted, rtol=1e-5)
    weighted = wanted * np.asarray(step.expert_weights)[..., None] ** 2
    np.testing.assert_allclose(P.importance(step), weighted, rtol=1e-5)
    calibrated = make_step(calibrated=np.array(True), layer_weight=np.float32(3))
    per_token = 3 / np.asarray(step.stream_square)[:, None, None]
    np.testing.assert_allclose(P.importance(calibrated), weighted * per_token, rtol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 7, 50, 64, 99])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "negative", "nan"])
def test_largest_mask_equals_a_stable_sort(count, kind):
    rng = np.random.default_rng(count)
    values = rng.normal(size=64).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "equal":
        values[:] = 0.0
    if kind == "negative":
        values = -np.abs(values) * 1e-30
    if kind == "nan":
        values[::3], values[1::7] = np.nan, -np.inf
    able = np.isfinite(values)
    order = np.argsort(np.where(able, -values, np.inf), kind="stable")[: min(count, able.sum())]
    wanted = np.zeros(64, bool)
    wanted[order] = True
    assert (np.asarray(jax.jit(P.largest_mask)(values, count)) == wanted).all()
    both = jax.vmap(P.largest_mask, in_axes=(0, None))(jnp.stack([values, values[::-1]]), count)
    assert (np.asarray(both[0]) == wanted).all()


@pytest.mark.parametrize("tokens", [1, 2, 9])  # 9 * 2 pairs > 6 experts: the scatter form
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_fraction_keeps_the_share_and_shares_units(tokens, share):
    step = make_step(tokens=tokens)
    mask = np.asarray(jax.jit(P.Fraction(share))(step))
    ids = np.asarray(step.expert_ids)
    value, units = {}, {}
    for t, e in np.ndindex(tokens, 2):
        for j in range(8):
            key = (ids[t, e], j)
            value[key] = value.get(key, 0) + float(P.importance(step)[t, e, j])
            units.setdefault(key, set()).add(bool(mask[t, e, j]))
    assert all(len(s) == 1 for s in units.values())  # a unit read once serves every token that routes to it
    chosen = {key for key, s in units.items() if True in s}
    assert len(chosen) == int(share * len(value) + 1e-3)
    rest = [v for k, v in value.items() if k not in chosen]
    assert not chosen or not rest or min(value[k] for k in chosen) >= max(rest) - 1e-6
    assert int(P.count_units(jnp.asarray(mask), step.expert_ids, 6)) == len(chosen)


def test_fraction_leaves_out_dead_tokens_priority_zero_and_nan():
    ids = np.array([[0, 1], [2, 3], [-1, -1]], np.int32)
    u = np.ones((3, 2, 8), np.float32)
    u[0, 0, 0] = np.nan
    step = make_step(expert_ids=ids, priority=np.array([1, 0, 1], np.float32), u0=u)
    mask = np.asarray(P.Fraction(1.0)(step))
    assert not mask[1:].any() and not mask[0, 0, 0] and mask[0].sum() == 15
    assert np.asarray(P.CorrectAll()(step)).sum() == 32  # "all" means all routed pairs, prompt tokens too
    assert not np.asarray(P.NoCorrection()(step)).any()


def test_ties_go_to_the_lower_unit():
    ones = np.ones((1, 2, 8), np.float32)
    step = make_step(tokens=1, u0=ones, v0=ones, h0=ones, norms=np.ones((1, 2, 8, 4), np.float32),
                     expert_weights=np.full((1, 2), 0.5, np.float32))  # fmt: skip
    mask = np.asarray(P.Fraction(5 / 16)(step)).reshape(-1)
    assert mask.tolist() == [True] * 5 + [False] * 11


def test_rank_takes_whole_experts_by_weight():
    weights = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], np.float32)
    step = make_step(tokens=2, slots=3, expert_weights=weights)
    mask = np.asarray(P.FixedRank(2)(step))
    assert mask.all(-1).tolist() == [[False, True, True], [True, True, False]]
    assert not np.asarray(P.FixedRank(0)(step)).any()
    # mean of the i-th largest: .55, .3, .15
    assert np.asarray(P.PaperRank(1.0, 0.2)(step)).all(-1).sum() == 4
    assert np.asarray(P.PaperRank(2.0, 0.2)(step)).all(-1).sum() == 6
    assert not np.asarray(P.PaperRank(1.0, 0.6)(step)).any()


def test_policies_agree_under_jit_vmap_and_scan():
    step = make_step(tokens=4)
    for policy in (P.Fraction(0.3), P.FixedRank(1), P.CorrectAll(), P.PaperRank(1.0, 0.3)):
        whole = critical_mask(step, policy, per_token=False)
        assert (jax.jit(policy)(step) == whole).all()
        each = critical_mask(step, policy, per_token=True)

        def one(_, t, policy=policy):
            row = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, t, 1) if a.ndim else a, step)
            return None, policy(row)[0]

        assert (jax.lax.scan(one, None, jnp.arange(4))[1] == each).all()


def test_changing_the_fraction_compiles_nothing():
    traces = []

    @jax.jit
    def run(policy, step):
        traces.append(1)
        return policy(step)

    step = make_step()
    for share in (0.1, 0.2, 0.9):
        run(P.Fraction(share), step)
    assert len(traces) == 1


def test_make_policy_reads_every_form():
    assert isinstance(P.make_policy("none"), P.NoCorrection)
    assert P.make_policy(None) == P.NoCorrection()
    assert P.make_policy("all") == P.CorrectAll()
    assert P.make_policy("fraction=0.15") == P.Fraction(0.15)
    assert P.make_policy("rank=2") == P.FixedRank(2)
    assert P.make_policy("rank=1.5,0.3") == P.PaperRank(1.5, 0.3)
    assert P.make_policy(P.Fraction(0.5)) == P.Fraction(0.5)
    assert P.make_policy(lambda step: step)(3) == 3


@pytest.mark.parametrize(
    "bad", ["fraction=1.5", "fraction=-0.1", "fraction=nan", "fraction", "rank=1.5", "some", "all=1", ""]
)
def test_bad_policies_are_refused_with_the_accepted_forms(bad):
    with pytest.raises(ValueError, match="use none, all, fraction="):
        P.make_policy(bad)


def test_a_users_policy_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"returned float32 \[3, 2\], wanted bool \[3, 2, 8\]"):
        critical_mask(make_step(), lambda step: step.expert_weights, per_token=False)
