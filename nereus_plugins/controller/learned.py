"""What the job has taught its controller: seconds by stage and layout, and peak bytes.

The calibration of `cost.calibration`, fed so that it can compare plans which did not run at the
same time:

- What slows all stages alike (a slow rank, a throttled node) is the cluster's and not the layout's.
  The median over stages of measured / expected is taken out of a step before the calibration
  learns from it. A layout's first steps cannot tell the two apart: they take the last value.
- What was learned of a layout ages while another is in force: its uncertainty grows as the
  calibration's own random walk, up to that of a layout never tried.
- How far layouts differ beyond what the cost model says is learned from those that were tried.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from nereus_plugins.cost.calibration import LEVEL_WALK, Calibration
from nereus_plugins.cost.estimate import Estimate, Placed
from nereus_plugins.spec import Assignment, Layout, ModelStage

# Steps until a layout's own filters are trusted to tell what all stages have in common.
SETTLED = 4
_COMMON_RATE = 0.25
# Before any was tried: by how much layouts differ from what the model says (standard deviation),
# and how many observed differences that is worth.
LAYOUT_SPREAD, LAYOUT_SPREAD_WORTH = 0.06, 4.0
# What the model says of a change of knobs alone may be off by this part of it.
KNOB_SPREAD = 0.2
# Of peak bytes: the model's own error, and one observation's.
MEMORY_SPREAD, MEMORY_NOISE = 0.03, 0.01


class Expected(NamedTuple):
    """Seconds, and the standard deviation of their mean (a step's own noise left out)."""

    seconds: float
    spread_s: float


@dataclasses.dataclass
class Memory:
    """Factor of measured on predicted peak bytes: a Gaussian with the model's error as prior."""

    factor: float = 1.0
    variance: float = MEMORY_SPREAD**2

    def observe(self, predicted_bytes: float, measured_bytes: float) -> None:
        ratio = measured_bytes / predicted_bytes
        if not 0.5 < ratio < 2.0:
            return  # another quantity than was predicted
        gain = self.variance / (self.variance + MEMORY_NOISE**2)
        self.factor += gain * (ratio - self.factor)
        # Never surer than a hundred steps: knobs and layouts differ.
        self.variance = max((1.0 - gain) * self.variance, MEMORY_NOISE**2 / 100)

    def exceeded(self, predicted_bytes: float, capacity_bytes: float) -> None:
        """A step ran out of memory: what was predicted is at least this much too low."""
        self.factor = max(1.02 * self.factor, 1.01 * capacity_bytes / predicted_bytes)
        self.variance = max(self.variance, MEMORY_NOISE**2)


@dataclasses.dataclass
class Learned:
    """Implements what `cost.estimate` and the planner take as a calibration."""

    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    memory: Memory = dataclasses.field(default_factory=Memory)
    common: float = 1.0
    steps: int = 0
    last_seen: dict[tuple[ModelStage, Layout], int] = dataclasses.field(default_factory=dict)

    def observe(
        self,
        assignments: Mapping[ModelStage, Assignment],
        predicted: Estimate,
        measured_s: Mapping[ModelStage, float],
        allocated_bytes: float | None,
    ) -> None:
        """One finished step. predicted: the model's own, without calibration."""
        self.steps += 1
        predicted_s = {s: predicted.stages[s].seconds for s in measured_s if s in predicted.stages}
        ratios = []
        for stage, model_s in predicted_s.items():
            known = self.calibration.seconds_filters.get((stage, assignments[stage].layout))
            if known is not None and known.seen >= SETTLED:
                ratios.append(measured_s[stage] / known.predict(model_s)[0])
        common = self.common
        if ratios:
            common = statistics.median(ratios)
            self.common = math.exp(
                math.log(self.common) + _COMMON_RATE * math.log(common / self.common)
            )
        self.calibration.observe(
            assignments, predicted_s, {s: measured_s[s] / common for s in predicted_s}
        )
        for stage in predicted_s:
            self.last_seen[stage, assignments[stage].layout] = self.steps
        if allocated_bytes:
            top = max(predicted.stages.values(), key=lambda s: s.allocated_bytes)
            beside = sum(top.resting.values())
            if top.stage is not ModelStage.ACTOR_GENERATE and allocated_bytes > beside:
                self.memory.observe(top.allocated_bytes - beside, allocated_bytes - beside)

    def expected(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> Expected:
        """Seconds of a stage to expect where the model alone says `predicted_s`; what all stages
        have in common is left out."""
        key = (stage, assignment.layout)
        known = self.calibration.seconds_filters.get(key)
        if known is None or not known.seen:
            mean = self.calibration.seconds(stage, assignment, predicted_s)
            return Expected(mean, self.layout_spread() * mean)
        mean = known.predict(predicted_s)[0]
        age = self.steps - self.last_seen.get(key, self.steps)
        variance = known.mean_spread(predicted_s) ** 2
        aged = variance + (LEVEL_WALK * mean) ** 2 * age
        untried = max(variance, (self.layout_spread() * mean) ** 2)
        return Expected(mean, math.sqrt(min(aged, untried)))

    def layout_spread(self) -> float:
        """Standard deviation of a layout's factor on a stage, relative to its neighbours'."""
        total, worth = LAYOUT_SPREAD_WORTH * LAYOUT_SPREAD**2, LAYOUT_SPREAD_WORTH
        for stage in {stage for stage, _ in self.calibration.seconds_filters}:
            logs = [
                math.log(known.ratio)
                for (of, _), known in self.calibration.seconds_filters.items()
                if of is stage and known.seen >= SETTLED and known.ratio > 0
            ]
            if len(logs) > 1:
                # What separates two layouts is twice the variance of one.
                total += 2.0 * sum((one - statistics.fmean(logs)) ** 2 for one in logs)
                worth += len(logs) - 1
        return math.sqrt(total / worth)

    # What `estimate` and `plan` ask of a calibration.

    def seconds(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> float:
        return self.calibration.seconds(stage, assignment, predicted_s)

    def bytes(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_bytes: float
    ) -> float:
        """An engine takes the share that it is given."""
        return predicted_bytes * (1.0 if stage is ModelStage.ACTOR_GENERATE else self.memory.factor)

    def to_dict(self) -> dict[str, Any]:
        return {
            "calibration": self.calibration.to_dict(),
            "memory": dataclasses.asdict(self.memory),
            "common": self.common,
            "steps": self.steps,
            "last_seen": [
                [str(stage), layout.to_dict(), at] for (stage, layout), at in self.last_seen.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Learned:
        """Raises: SpecError, KeyError, TypeError: not what `to_dict` made."""
        return cls(
            Calibration.from_dict(data["calibration"]),
            Memory(**data["memory"]),
            float(data["common"]),
            int(data["steps"]),
            {
                (ModelStage(stage), Layout.from_dict(layout)): int(at)
                for stage, layout, at in data["last_seen"]
            },
        )
