"""Hold the measured time of a decode step to a budget, by the bytes the host may read in the next one.

    predicted(bytes) = step_us + bytes / bytes_per_us                    the cost model, of an idle machine
    log slowdown    += GAIN * clip(log(measured / (slowdown * predicted(bytes read))))
    next bytes       = what fits the budget at this slowdown

The state is carried from step to step and is a pure function of the measurements: the same times give the same bytes.
"""

import math
from typing import NamedTuple

from rapidmoe_jax.policies import BudgetBytes, BudgetTime

GAIN = 0.2  # share of a step's surprise that is taken over: noise is averaged over some ten steps
CLIP = 0.7  # of one step's surprise, log: a doubled time is believed, a stall of seconds counts as that
MAX_SLOWDOWN = 64.0


class CostModel(NamedTuple):
    """What a decode step of one row costs on this machine."""

    base_us: float  # with policy none
    round_trip_us: float  # what an empty correction adds, all layers together
    bytes_per_us: float  # unit records read a microsecond

    @property
    def step_us(self) -> float:
        """Time of a step that corrects nothing but asks."""
        return self.base_us + self.round_trip_us

    def predict_us(self, host_bytes: int | float) -> float:
        """Predict the time of a step that reads `host_bytes`."""
        return self.step_us + host_bytes / self.bytes_per_us


class ControllerState(NamedTuple):
    """State between two steps."""

    slowdown: float  # measured over predicted time, smoothed
    steps: int


START = ControllerState(1.0, 0)


def budget_policy(policy: BudgetTime, cost: CostModel, state: ControllerState, max_bytes: int) -> BudgetBytes:
    """Give the policy of the next step.

    Args:
      max_bytes: most that a step can read.
    """
    slowdown = state.slowdown if policy.adaptive else 1.0
    able = (float(policy.budget_us) / slowdown - cost.step_us) * cost.bytes_per_us
    return BudgetBytes(min(max(able, 0.0), max_bytes))


def update(state: ControllerState, cost: CostModel, measured_us: float, host_bytes: int | float) -> ControllerState:
    """Take in one step's time and the bytes it read."""
    surprise = math.log(max(measured_us, 1e-3) / (state.slowdown * cost.predict_us(host_bytes)))
    slowdown = state.slowdown * math.exp(GAIN * min(max(surprise, -CLIP), CLIP))
    return ControllerState(min(max(slowdown, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN), state.steps + 1)
