"""How often to take a snapshot: from what one costs the job and how often the job fails.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006) 303-312; its first term is J. W. Young's, "A
first order approximation to the optimum checkpoint interval", CACM 17 (1974) 530-531. Failures come
at random, independently, at a constant rate.

The cost in these formulas is time that the job loses. A snapshot that is written in the background
costs what training waits for at the boundary and what it is slowed down by meanwhile, not the time
that the writing takes. That is a lower bound of the interval, as one is under way at a time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Steps of which the usual time is the median.
_STEPS_KEPT = 20


def best_interval_s(cost_s: float, between_failures_s: float) -> float:
    """Seconds of work between two snapshots that cost least in all.

    Args:
        cost_s: of one snapshot, to the job. between_failures_s: mean time between failures of the
            whole job.

    Raises: ValueError: one of them is not positive.
    """
    if not (cost_s > 0.0 and between_failures_s > 0.0):
        raise ValueError(
            f"a cost of {cost_s!r} s and {between_failures_s!r} s between failures: both must be "
            "above 0"
        )
    if cost_s >= 2.0 * between_failures_s:
        return between_failures_s
    ratio = cost_s / (2.0 * between_failures_s)
    young_s = math.sqrt(2.0 * cost_s * between_failures_s)
    return young_s * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def steps_between(
    cost_s: float, between_failures_s: float, step_s: float, background_s: float
) -> int:
    """As `best_interval_s`, in whole steps, and not before the last snapshot will have ended.

    Args: step_s: a step without a snapshot beside it. background_s: how long the last one took.
    """
    interval_s = max(best_interval_s(cost_s, between_failures_s), background_s)
    return max(1, math.ceil(interval_s / step_s))


class StepTimes:
    """The seconds of a job's steps, with a snapshot under way and without.

    Attributes:
        slowed_s: by how much longer the steps beside the last snapshot took together.
    """

    def __init__(self) -> None:
        self.slowed_s = 0.0
        self._alone: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._beside: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._fresh = False

    def add(self, step_s: float, *, beside: bool) -> None:
        """Args: beside: a snapshot was under way as the step began."""
        (self._beside if beside else self._alone).append(step_s)
        if beside and self._alone:
            if self._fresh:
                self.slowed_s, self._fresh = 0.0, False
            self.slowed_s = max(0.0, self.slowed_s + step_s - statistics.median(self._alone))

    def begin(self) -> None:
        """A snapshot begins; until a step went by beside it, `slowed_s` is that of the last."""
        self._fresh = True

    @property
    def usual_s(self) -> float | None:
        """A step without a snapshot; of those beside one where there is no other."""
        times = self._alone or self._beside
        return statistics.median(times) if times else None
