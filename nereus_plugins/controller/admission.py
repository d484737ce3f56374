"""Whether a transition is worth it: numbers in, verdict with reason out.

    P(saving * steps > transition * (1 + again)) >= confidence,  saving ~ Normal(mean, spread^2)

with `again` the probability that conditions change before the run ends, so that the plan has to be
left again; and the mean saving is at least `least_gain` of a step. The budget bounds what all of
this can cost when it is wrong: see `Books`.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from .config import ControllerConfig

_NORMAL = NormalDist()


class Verdict(NamedTuple):
    """confidence: probability that the transition pays for itself."""

    admitted: bool
    reason: str
    confidence: float


def confidence_of(saving_s: float, spread_s: float, steps: float, transition_s: float) -> float:
    """Probability that a saving a step, over so many steps, exceeds the transition.

    Args:
        spread_s: standard deviation of `saving_s`.
    """
    if steps <= 0 or math.isinf(transition_s):
        return 0.0
    margin = saving_s - transition_s / steps
    if spread_s <= 0:
        return 1.0 if margin > 0 else 0.0
    return _NORMAL.cdf(margin / spread_s)


def quantile(confidence: float) -> float:
    """Standard deviations that a Gaussian stays above with this probability, as a positive number
    of them below its mean."""
    return _NORMAL.inv_cdf(confidence)


def worth_of_trying(
    saving_s: float,
    spread_s: float,
    noise_s: float,
    steps: float,
    trial_steps: float,
    transition_s: float,
) -> float:
    """Seconds that trying a plan is expected to bring: what it saves where it turns out faster, for
    the steps left, less what the trial and the transitions there and, else, back cost (the
    knowledge gradient of Frazier, Powell and Dayanik, SIAM J. Control Optim. 47, 2008).

    Args:
        saving_s, spread_s: expected saving a step and its standard deviation.
        noise_s: standard deviation of what a trial of `trial_steps` measures of it.
    """
    if spread_s <= 0:
        return -math.inf
    learned_s = spread_s**2 / math.hypot(spread_s, noise_s)  # what the trial will move it by
    z = saving_s / learned_s
    faster = _NORMAL.cdf(z)
    gain_s = saving_s * faster + learned_s * _NORMAL.pdf(z)
    left = max(0.0, steps - trial_steps)
    return left * gain_s + trial_steps * saving_s - transition_s * (2.0 - faster)


def admit(
    config: ControllerConfig,
    *,
    step_s: float,
    saving_s: float,
    spread_s: float,
    steps: float,
    transition_s: float,
    again: float,
    regret_s: float,
    budget_s: float,
) -> Verdict:
    """The verdict on an unforced transition.

    Args:
        step_s: seconds of a step in the plan in force.
        saving_s, spread_s: expected saving a step and its standard deviation.
        steps: how many steps it is expected to last.
        transition_s: what the job waits for it.
        again: probability that another one will be needed.
        regret_s: what the run has cost so far beyond the best plan that could have been held.
        budget_s: what it may cost.
    """
    sure = confidence_of(saving_s, spread_s, steps, transition_s * (1.0 + again))
    gain = saving_s / step_s if step_s > 0 else 0.0
    if math.isinf(transition_s):
        return Verdict(False, "no order of moves fits in memory", sure)
    if saving_s <= 0:
        return Verdict(False, f"slower by {-100 * gain:.1f} % of a step", sure)
    if gain < config.least_gain:
        least = 100 * config.least_gain
        return Verdict(False, f"saves {100 * gain:.1f} % of a step, less than {least:g} %", sure)
    if sure < config.confidence:
        return Verdict(
            False,
            f"pays for itself with confidence {sure:.2f}, less than {config.confidence:g}: saves "
            f"{saving_s:.1f} s (+- {spread_s:.1f}) a step for some {steps:.0f} steps, costs "
            f"{transition_s:.1f} s, and {again:.0%} of that to leave it again",
            sure,
        )
    if regret_s + transition_s > budget_s:
        return Verdict(
            False,
            f"the budget is spent: the run has cost {regret_s:.0f} s beyond its best plan held, "
            f"this one would cost {transition_s:.0f} s, of {budget_s:.0f} s",
            sure,
        )
    return Verdict(
        True,
        f"saves {saving_s:.1f} s (+- {spread_s:.1f}) of {step_s:.1f} s a step for some "
        f"{steps:.0f} steps, costs {transition_s:.1f} s: pays with confidence {sure:.2f}",
        sure,
    )
