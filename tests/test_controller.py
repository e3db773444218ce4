import numpy as np
import pytest

from rapidmoe_jax.controller import START, ControllerState, CostModel, budget_policy, update
from rapidmoe_jax.policies import BudgetTime

COST = CostModel(base_us=4000.0, round_trip_us=500.0, bytes_per_us=10_000.0)
POLICY = BudgetTime(10_000.0)


def drive(slowdown, steps, state=START, policy=POLICY, noise=0.0, seed=0):
    """Steps on a machine that takes `slowdown` times as long as the cost model says. Returns times and the state."""
    rng, times = np.random.default_rng(seed), []
    for _ in range(steps):
        host_bytes = float(budget_policy(policy, COST, state, 10**9).budget_bytes)
        times.append(slowdown * COST.predict_us(host_bytes) * np.exp(rng.normal(0, noise)))
        state = update(state, COST, times[-1], host_bytes)
    return np.array(times), state


def test_the_budget_is_met_at_once_where_the_cost_model_is_right():
    times, _ = drive(1.0, 3)
    np.testing.assert_allclose(times, 10_000.0)


@pytest.mark.parametrize("slowdown", [0.5, 1.3, 2.0])
def test_a_wrong_cost_model_is_made_up_for(slowdown):
    times, _ = drive(slowdown, 64, noise=0.03)
    assert np.percentile(np.abs(times[32:] / 10_000 - 1), 95) < 0.1
    late = times[32:] / 10_000 - 1
    assert np.corrcoef(late[:-1], late[1:])[0, 1] > -0.5  # no oscillation


def test_a_second_process_is_noticed_within_32_steps():
    _, state = drive(1.0, 40)
    loaded, state = drive(2.0, 48, state)
    assert abs(loaded[32:] / 10_000 - 1).max() < 0.05
    free, _ = drive(1.0, 48, state)
    assert abs(free[32:] / 10_000 - 1).max() < 0.05


def test_state_is_a_function_of_the_measurements():
    a, b = (drive(1.5, 20, noise=0.1, seed=3)[1] for _ in range(2))
    assert a == b and a.steps == 20


def test_frozen_follows_the_cost_model_alone():
    frozen = BudgetTime(10_000.0, adaptive=False)
    budgets = {float(budget_policy(frozen, COST, ControllerState(s, 9), 10**9).budget_bytes) for s in (0.5, 1.0, 3.0)}
    assert budgets == {55e6}


def test_bytes_stay_in_range():
    assert float(budget_policy(BudgetTime(1000.0), COST, START, 10**9).budget_bytes) == 0  # less than the base takes
    assert float(budget_policy(BudgetTime(1e9), COST, START, 10**6).budget_bytes) == 1e6
    _, state = drive(1e9, 200)
    assert 0 < state.slowdown <= 64
    assert update(START, COST, 0.0, 0.0).slowdown > 0
