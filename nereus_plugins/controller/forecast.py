"""Where response lengths are going: exponential smoothing with a damped trend, and its uncertainty.

ETS(A,Ad,N) of Hyndman et al., *Forecasting with Exponential Smoothing* (Springer 2008), on the
logarithm of a step's mean length (growth is relative):

    y_t = l + phi b + e,   l' = l + phi b + alpha e,   b' = phi b + beta e,   e ~ (0, sigma^2)

The damping (Gardner and McKenzie, Management Science 31, 1985) keeps a trend from being carried on
for ever. sigma^2 is learned as a running mean of squared errors. An error of more than three sigma
counts as three sigma, unless a second one follows on the same side: lengths that jump are followed
after two steps, one odd batch is not.
"""

from __future__ import annotations

import dataclasses
import math

ALPHA, BETA, PHI = 0.4, 0.04, 0.98
# To begin with: the error of one step, and how much a new one counts.
SIGMA, SIGMA_RATE = 0.05, 0.05
_OUTLIER = 3.0
# An error this large (of the log) is a jump. Where lengths have jumped they are expected to jump
# back to where they were, less so with every step.
_JUMP = 0.35
_FORGET = 1.0 / 200


@dataclasses.dataclass
class LengthForecast:
    """
    Attributes:
        level, trend: of log tokens; trend a step. seen: steps observed.
        variance: of one step's error. streak: consecutive large errors on one side, signed.
        highest: log of the longest mean of late, which sinks to the level in some 200 steps.
        jumps: how often lengths have jumped.
    """

    level: float = 0.0
    trend: float = 0.0
    variance: float = SIGMA**2
    seen: int = 0
    streak: int = 0
    highest: float = 0.0
    jumps: int = 0

    def observe(self, mean_tokens: float) -> None:
        """Raises ValueError: a mean that is not positive and finite."""
        if not (math.isfinite(mean_tokens) and mean_tokens > 0):
            raise ValueError(f"mean_tokens must be positive and finite, got {mean_tokens!r}")
        value = math.log(mean_tokens)
        if not self.seen:
            self.level, self.highest, self.seen = value, value, 1
            return
        self.highest = max(value, self.highest - _FORGET * max(0.0, self.highest - self.level))
        expected = self.level + PHI * self.trend
        error = value - expected
        bound = _OUTLIER * math.sqrt(self.variance)
        clipped = max(-bound, min(bound, error))
        if abs(error) > bound:
            side = 1 if error > 0 else -1
            self.streak = self.streak + side if self.streak * side > 0 else side
            if abs(self.streak) >= 2:  # a jump: go there; it says nothing of the trend
                self.jumps += abs(error) > _JUMP
                self.level, self.streak, self.seen = value, 0, self.seen + 1
                return
        else:
            self.streak = 0
        self.level = expected + ALPHA * clipped
        self.trend = PHI * self.trend + BETA * clipped
        rate = max(SIGMA_RATE, 1.0 / (self.seen + 4.0))
        self.variance = max(1e-6, self.variance + rate * (clipped**2 - self.variance))
        self.seen += 1

    def at(self, steps: float, deviations: float = 0.0) -> float:
        """Mean tokens to expect so many steps ahead, plus so many standard deviations of it.

        Raises ValueError: nothing was observed.
        """
        if not self.seen:
            raise ValueError("no step was observed: there is nothing to forecast from")
        ahead = max(1, round(steps))
        damped, variance = 0.0, 1.0
        for j in range(1, ahead + 1):
            damped += PHI**j
            if j < ahead:
                variance += (ALPHA + BETA * damped) ** 2
        spread = math.sqrt(self.variance * variance)
        return math.exp(self.level + self.trend * damped + deviations * spread)

    def exceeded(self, most_tokens: float) -> None:
        """A step whose lengths nobody saw did not fit: they may be as long as they can be."""
        self.jumps += 1
        self.highest = max(self.highest, math.log(most_tokens))

    def high(self, steps: int, deviations: float) -> float:
        """Mean tokens that memory should suffice for: the highest of the forecast, so many standard
        deviations up, within so many steps, and of what was seen of late where lengths jump."""
        ahead = max(self.at(1, deviations), self.at(steps, deviations))
        return max(ahead, math.exp(self.highest)) if self.jumps else ahead


@dataclasses.dataclass
class Lifetime:
    """How many steps conditions last, learned: changes (of GPUs or lengths, that make another plan
    the best) are a Poisson process of unknown rate.

    With a Gamma prior that is worth one change in `PRIOR_STEPS` steps, the expected time to the
    next change is (prior + steps seen) / (1 + changes seen): conditions that have held for long
    are expected to hold for long.
    """

    steps: int = 0
    changes: int = 0

    PRIOR_STEPS = 30.0

    def expected_steps(self) -> float:
        return (self.PRIOR_STEPS + self.steps) / (1.0 + self.changes)

    def change_within(self, steps: float) -> float:
        """Probability that conditions change within so many steps."""
        return 1.0 - math.exp(-steps / self.expected_steps())
