"""What slows all stages alike: a slow rank, a throttled node, a stall. It is the cluster's, not the
layout's, and has to be kept apart from what a layout takes.

Where layouts are known, the median over stages of measured / expected tells. A layout's first steps
cannot tell the two apart; what does is when it changes:

- what slows a job ends some time. Where a new layout's first step is nearer to the usual than to
  what slowed the steps before, it has ended;
- what begins with a layout is taken to be the layout's. Where as much ends while the layout stays,
  or stays when the layout is left, it was not: what was learned of the layout is forgotten.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

RATE = 0.1
# The usual is what it is over some fifty steps.
_USUAL_RATE = 0.02
_SURE = 3.0
# Standard error of a median over that of a mean.
_MEDIAN = 1.25


@dataclasses.dataclass
class Common:
    """A factor on all stages' seconds. It follows slowly, but at once where two steps in a row are
    off by three standard deviations on one side.

    Attributes:
        log_factor: now. usual: what it is most of the time, as a logarithm.
        streak: signed count of such steps.
        blamed: what layouts took beyond what was expected of them in their first step, all stages
            alike (logarithm).
    """

    log_factor: float = 0.0
    usual: float = 0.0
    streak: int = 0
    blamed: float = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.log_factor)

    def observe(self, ratios: Sequence[float], spread: float, rate: float = RATE) -> bool:
        """A step of layouts that are known; returns whether the blamed ones were not to blame.

        Args:
            ratios: measured over expected, this factor left out, by stage.
            spread: standard deviation of one of them, relative.
            rate: at which errors that are noise are followed.
        """
        error = math.log(statistics.median(ratios)) - self.log_factor
        if abs(error) > _SURE * _MEDIAN * spread / math.sqrt(len(ratios)):
            side = 1 if error > 0 else -1
            self.streak = self.streak + side if self.streak * side > 0 else side
            return abs(self.streak) >= 2 and self._jumped(error)
        self.streak = 0
        self.log_factor += rate * error
        self.usual += _USUAL_RATE * (self.log_factor - self.usual)
        return False

    def _jumped(self, error: float) -> bool:
        self.streak = 0
        wronged = self.blamed > 0 and abs(abs(error) - self.blamed) < 0.5 * self.blamed
        if wronged:
            self.blamed = 0.0
        if error > 0 or not wronged:
            self.log_factor += error
        return wronged

    def entered(self, ratios: Sequence[float]) -> None:
        """The first step of layouts never tried. ratios: against what was expected of them."""
        found = math.log(statistics.median(ratios))
        if abs(found - self.usual) < abs(found - self.log_factor):
            self.log_factor = self.usual
        self.streak = 0
        self.blamed = found - self.log_factor
