import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_calibration, make_step

from rapidmoe_jax import policies as named
from rapidmoe_jax import policy as P
from rapidmoe_jax import rank
from rapidmoe_jax.moe import critical_mask


def test_unit_error_is_the_formula():
    step = make_step()
    u, v, h = np.asarray(step.u0), np.asarray(step.v0), np.asarray(step.h0)
    r1, r3, r2, b2 = np.moveaxis(np.asarray(step.norms), -1, 0)
    s = 1 / (1 + np.exp(-u))
    wanted = h**2 * r2 + b2 * ((s * (1 + u * (1 - s)) * v) ** 2 * r1 + (u * s) ** 2 * r3)
    np.testing.assert_allclose(P.unit_error(step), wanted, rtol=1e-5)
    weighted = wanted * np.asarray(step.expert_weights)[..., None] ** 2
    np.testing.assert_allclose(P.importance(step), weighted, rtol=1e-5)
    calibrated = make_step(calibration=make_calibration(True, 3.0))
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
    mask = np.asarray(jax.jit(named.Fraction(share))(step))
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
    mask = np.asarray(named.Fraction(1.0)(step))
    assert not mask[1:].any() and not mask[0, 0, 0] and mask[0].sum() == 15
    assert np.asarray(named.CorrectAll()(step)).sum() == 32  # "all" means all routed pairs, prompt tokens too
    assert not np.asarray(named.NoCorrection()(step)).any()


def test_ties_go_to_the_lower_unit():
    ones = np.ones((1, 2, 8), np.float32)
    step = make_step(tokens=1, u0=ones, v0=ones, h0=ones, norms=np.ones((1, 2, 8, 4), np.float32),
                     expert_weights=np.full((1, 2), 0.5, np.float32))  # fmt: skip
    mask = np.asarray(named.Fraction(5 / 16)(step)).reshape(-1)
    assert mask.tolist() == [True] * 5 + [False] * 11


def test_rank_takes_whole_experts_by_weight():
    weights = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], np.float32)
    step = make_step(tokens=2, slots=3, expert_weights=weights)
    mask = np.asarray(rank.FixedRank(2)(step))
    assert mask.all(-1).tolist() == [[False, True, True], [True, True, False]]
    assert not np.asarray(rank.FixedRank(0)(step)).any()
    # mean of the i-th largest: .55, .3, .15
    assert np.asarray(rank.PaperRank(1.0, 0.2)(step)).all(-1).sum() == 4
    assert np.asarray(rank.PaperRank(2.0, 0.2)(step)).all(-1).sum() == 6
    assert not np.asarray(rank.PaperRank(1.0, 0.6)(step)).any()


def test_policies_agree_under_jit_vmap_and_scan():
    step = make_step(tokens=4)
    for policy in (named.Fraction(0.3), rank.FixedRank(1), named.CorrectAll(), rank.PaperRank(1.0, 0.3)):
        whole = critical_mask(step, policy, per_token=False)
        assert (jax.jit(policy)(step) == whole).all()
        each = critical_mask(dataclasses.replace(step, spent=jnp.zeros(4, jnp.int32)), policy, per_token=True)

        def one(_, t, policy=policy):
            rows = {n: jax.lax.dynamic_slice_in_dim(getattr(step, n), t, 1) for n in P.TOKEN_FIELDS}
            return None, policy(dataclasses.replace(step, **rows))[0]

        assert (jax.lax.scan(one, None, jnp.arange(4))[1] == each).all()


def test_changing_the_fraction_compiles_nothing():
    traces = []

    @jax.jit
    def run(policy, step):
        traces.append(1)
        return policy(step)

    step = make_step()
    for share in (0.1, 0.2, 0.9):
        run(named.Fraction(share), step)
    assert len(traces) == 1


def test_make_policy_reads_every_form():
    assert isinstance(named.make_policy("none"), named.NoCorrection)
    assert named.make_policy(None) == named.NoCorrection()
    assert named.make_policy("all") == named.CorrectAll()
    assert named.make_policy("fraction=0.15") == named.Fraction(0.15)
    assert named.make_policy("rank=2") == rank.FixedRank(2)
    assert named.make_policy("rank=1.5,0.3") == rank.PaperRank(1.5, 0.3)
    assert named.make_policy(named.Fraction(0.5)) == named.Fraction(0.5)
    assert named.make_policy(lambda step: step)(3) == 3


@pytest.mark.parametrize(
    "bad", ["fraction=1.5", "fraction=-0.1", "fraction=nan", "fraction", "rank=1.5", "some", "all=1", ""]
)
def test_bad_policies_are_refused_with_the_accepted_forms(bad):
    with pytest.raises(ValueError, match="use none, all, share="):
        named.make_policy(bad)


def test_a_users_policy_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"returned float32 \[3, 2\], wanted bool \[3, 2, 8\]"):
        critical_mask(make_step(), lambda step: step.expert_weights, per_token=False)


def flat_values(step):
    return np.asarray(P.importance(step))


@pytest.mark.parametrize("tokens", [1, 3])
def test_budget_bytes_is_never_passed_and_used_up_by_the_last_layer(tokens):
    step = make_step(tokens=tokens, calibration=make_calibration(True))
    for spent, layer in ((0, 0), (5, 1), (9, 3), (30, 3)):
        at = dataclasses.replace(step, spent=jnp.int32(spent), layer=jnp.int32(layer))
        mask = jax.jit(named.BudgetBytes(125.0))(at)  # 12 records of 10 bytes
        units = int(P.count_units(mask, at.expert_ids, 6))
        assert units <= max(12 - spent, 0)
        if layer == 3:
            assert units == max(12 - spent, 0)


def test_budget_bytes_keeps_something_for_layers_that_need_it():
    """A layer whose units all lie under the threshold gets nothing, though there is budget."""
    calibration = make_calibration(True, layer_weight=1e-12)
    step = make_step(tokens=1, calibration=calibration)
    assert not named.BudgetBytes(200.0)(step).any()  # 20 of the 64 units of 4 layers: the others are worth more
    assert named.BudgetBytes(200.0)(dataclasses.replace(step, layer=jnp.int32(3))).sum() == 16  # the last one may
    assert named.BudgetBytes(640.0)(step).all()  # enough for all


def test_budget_bytes_without_calibration_shares_equally():
    step = make_step(tokens=1)
    for layer, wanted in ((0, 3), (2, 6), (3, 12)):
        mask = named.BudgetBytes(120.0)(dataclasses.replace(step, layer=jnp.int32(layer)))
        assert int(mask.sum()) == wanted
    everything = named.BudgetBytes(640.0)(step)
    assert everything.all()


def test_thresholds_pass_what_calibration_says():
    step = make_step(tokens=1, calibration=make_calibration(True))
    tau = float(named.GlobalShare(0.5).threshold(step))
    assert tau == pytest.approx(2.0**-10)  # half of 64 units lie above it
    assert (np.asarray(named.GlobalShare(0.5)(step)) == (flat_values(step) >= tau)).all()
    assert named.GlobalShare(1.0)(step).all() and named.Quality(0.0)(step).all()
    above = flat_values(step) >= 2.0**-15  # where a quarter of the importance lies below
    assert (np.asarray(named.Quality(0.25)(step)) == above).all()


@pytest.mark.parametrize("values", [np.nan, 0.0, 1.0])
def test_policies_live_with_importances_that_tell_nothing(values):
    u = np.full((2, 2, 8), values, np.float32)
    for calibrated in (False, True):
        step = make_step(tokens=2, u0=u, v0=u, h0=u, calibration=make_calibration(calibrated))
        for policy in (named.Fraction(0.5), named.GlobalShare(0.3), named.BudgetBytes(100.0), named.Quality(0.1)):
            mask = np.asarray(jax.jit(policy)(step))
            assert not mask.any() if np.isnan(values) else mask.sum() <= mask.size


def test_rank_share_takes_the_tau_of_the_phase():
    calibration = make_calibration(True)._replace(rank_prefill=jnp.linspace(0.4, 0, 8))
    weights = np.array([[0.6, 0.4]], np.float32)
    for share, experts in ((0.0, 0), (0.5, 1), (0.7, 2)):  # tau 1, about .5, about .3
        step = make_step(tokens=1, expert_weights=weights, calibration=calibration)
        assert int(rank.RankShare(share)(step).all(-1).sum()) == experts
        in_prefill = rank.RankShare(share)(dataclasses.replace(step, prefill=True)).all(-1).sum()
        assert int(in_prefill) == (2 if share else 0)  # its lowest tau gives 0.4


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("share=0.1", named.GlobalShare(0.1)),
        ("quality=0.01", named.Quality(0.01)),
        ("budget_bytes=1000", named.BudgetBytes(1000.0)),
        ("budget_bytes=1.5MiB", named.BudgetBytes(1.5 * 2**20)),
        ("budget_us=5000", named.BudgetTime(5000.0, True)),
        ("budget_us=5000,frozen", named.BudgetTime(5000.0, False)),
        ("rank_share=0.25", rank.RankShare(0.25)),
    ],
)
def test_make_policy_reads_budgets(text, wanted):
    assert named.make_policy(text) == wanted
    assert named.make_policy(named.policy_name(wanted)) == wanted


@pytest.mark.parametrize(
    "bad", ["share=2", "quality=-1", "budget_us=0", "budget_bytes=5GB", "rank_share=x", "all,frozen"]
)
def test_bad_budgets_are_refused(bad):
    with pytest.raises(ValueError, match="use none, all, share="):
        named.make_policy(bad)
