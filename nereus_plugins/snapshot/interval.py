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
from collections.abc import Sequence

# Steps of which the usual time is the median.
_STEPS_KEPT = 20
# A snapshot that could not be begun is tried again after 1, 2, 4 ... steps, and so many at most.
_MOST_STEPS_BETWEEN_TRIES = 64


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


class Due:
    """After which steps of a job a snapshot is due. Knows nothing of ranks: who asks on several of
    them gives all the same `costs`.

    Args:
        every_steps: due after every so many steps.
        between_failures_s: instead, by `steps_between`; the first is due after the first step of
            which the time is known. Neither: never.

    Attributes:
        next_step: none is due before it.
    """

    def __init__(
        self, every_steps: int | None = None, between_failures_s: float | None = None
    ) -> None:
        self._every_steps = every_steps
        self._between_failures_s = between_failures_s
        self.next_step = 0
        self._times = StepTimes()
        self._went_on_s: float | None = None
        self._beside = False
        self._not_begun_in_a_row = 0

    def after_step(self, step: int, now_s: float) -> bool:
        """Whether one is due after `step`, which has ended. Args: now_s: of any one clock."""
        if self._went_on_s is not None:
            self._times.add(now_s - self._went_on_s, beside=self._beside)
        if self._every_steps is not None:
            return step % self._every_steps == 0 and step >= self.next_step
        if self._between_failures_s is None or self._went_on_s is None:
            return False
        return step >= self.next_step

    def goes_on(self, now_s: float, *, beside: bool) -> None:
        """The next step begins. Args: beside: a snapshot is under way."""
        self._went_on_s, self._beside = now_s, beside

    def costs(self, blocked_s: float, background_s: float) -> list[float]:
        """Of a snapshot: seconds that it costs the job, of a usual step, of its writing.

        Args: blocked_s: what training waited for it. background_s: how long the last one took.
        """
        return [blocked_s + self._times.slowed_s, self._times.usual_s or 0.0, background_s]

    def begun(self, step: int, costs: Sequence[float]) -> None:
        """One was begun after `step`. Args: costs: of `costs`, the most of all ranks."""
        cost_s, step_s, background_s = costs
        self._not_begun_in_a_row = 0
        self._times.begin()
        if self._between_failures_s is not None and step_s > 0.0:
            steps = steps_between(cost_s, self._between_failures_s, step_s, background_s)
            self.next_step = step + steps

    def not_begun(self, step: int) -> None:
        """One that was due after `step` could not be: trying costs the job time, so it is tried
        again soon, then less and less often."""
        self.next_step = step + min(1 << self._not_begun_in_a_row, _MOST_STEPS_BETWEEN_TRIES)
        self._not_begun_in_a_row += 1
