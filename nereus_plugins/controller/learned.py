"""What the job has taught its controller: seconds by stage and layout, and peak bytes.

The calibration of `cost.calibration`, fed so that it can compare plans which did not run at the
same time:

- What slows all stages alike is not the layout's: it is taken out of a step before
  the calibration learns from it (`common`).
- Its filters average over more steps than a forecast of the next one would: no drift gain.
- What was learned of a layout ages while another is in force: its uncertainty grows as the
  calibration's own random walk, up to that of a layout never tried.
- How far layouts differ beyond what the cost model says is learned from those that were tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nereus_plugins.cost.calibration import LEVEL_WALK, Calibration
from nereus_plugins.cost.estimate import Estimate, Placed
from nereus_plugins.spec import Assignment, Layout, ModelStage

from .common import RATE, Common

# Steps until a layout's own filters are trusted to tell what all stages have in common.
SETTLED = 4
# Noise of a step before any was seen; and an error beyond which it is something else.
NOISE, _MOST_NOISE = 0.03, 0.3
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

    calibration: Calibration = dataclasses.field(
        default_factory=lambda: Calibration(drift_gain=0.0)
    )
    memory: Memory = dataclasses.field(default_factory=Memory)
    common: Common = dataclasses.field(default_factory=Common)
    steps: int = 0
    last_seen: dict[tuple[ModelStage, Layout], int] = dataclasses.field(default_factory=dict)
    # Variance of a stage's seconds in one step (of their log).
    variance: float = NOISE**2
    # Of layouts tried since the first: what was expected of them, as a factor on the model's.
    before: dict[tuple[ModelStage, Layout], float] = dataclasses.field(default_factory=dict)
    # What `common` would blame.
    blamed: tuple[tuple[ModelStage, Layout], ...] = ()
    # Squares of the log errors of these, and how many.
    surprise: tuple[float, float] = (LAYOUT_SPREAD_WORTH * LAYOUT_SPREAD**2, LAYOUT_SPREAD_WORTH)

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
        keys = {stage: (stage, assignments[stage].layout) for stage in predicted_s}
        if self._apart_from_common(assignments, keys, predicted_s, measured_s):
            self._learn_seconds(assignments, keys, predicted_s, measured_s)
        if allocated_bytes:
            top = max(predicted.stages.values(), key=lambda s: s.allocated_bytes)
            beside = sum(top.resting.values())
            if top.stage is not ModelStage.ACTOR_GENERATE and allocated_bytes > beside:
                self.memory.observe(top.allocated_bytes - beside, allocated_bytes - beside)

    def _apart_from_common(
        self,
        assignments: Mapping[ModelStage, Assignment],
        keys: Mapping[ModelStage, tuple[ModelStage, Layout]],
        predicted_s: Mapping[ModelStage, float],
        measured_s: Mapping[ModelStage, float],
    ) -> bool:
        """Learn what all stages have in common; whether the rest of the step says something of the
        layouts: one that is off alone, all stages alike, does not."""
        filters = self.calibration.seconds_filters
        tried = {stage for stage, _ in filters}
        ratios, seen, new = {}, {}, []
        for stage, key in keys.items():
            known = filters.get(key)
            if known is not None and known.seen:
                expected_s = known.predict(predicted_s[stage])[0]
                ratios[stage] = measured_s[stage] / expected_s
                seen[stage] = known.seen
            elif stage in tried:
                expected_s = self.calibration.seconds(stage, assignments[stage], predicted_s[stage])
                new.append(measured_s[stage] / expected_s)
        if len(ratios) > 1:
            self._learn_noise([math.log(ratio) for ratio in ratios.values()])
        settled = [ratio for stage, ratio in ratios.items() if seen[stage] >= SETTLED]
        wronged = False
        if settled:
            wronged = self.common.observe(settled, self.noise(), RATE)
        elif ratios:
            young = self.noise() * math.sqrt(1.0 + 1.0 / min(seen.values()))
            wronged = self.common.observe(list(ratios.values()), young, 0.0)
        elif new:
            self.common.entered(new)
            self.blamed = tuple(keys.values())
        if wronged:
            for key in self.blamed:
                filters.pop(key, None)
                self.before.pop(key, None)
        return not self.common.streak

    def _learn_seconds(
        self,
        assignments: Mapping[ModelStage, Assignment],
        keys: Mapping[ModelStage, tuple[ModelStage, Layout]],
        predicted_s: Mapping[ModelStage, float],
        measured_s: Mapping[ModelStage, float],
    ) -> None:
        tried = {stage for stage, _ in self.calibration.seconds_filters}
        for stage, key in keys.items():
            if stage in tried and key not in self.calibration.seconds_filters:
                model_s = predicted_s[stage]
                expected_s = self.calibration.seconds(stage, assignments[stage], model_s)
                self.before[key] = expected_s / model_s
        common = self.common.factor
        self.calibration.observe(
            assignments, predicted_s, {s: measured_s[s] / common for s in predicted_s}
        )
        for stage, key in keys.items():
            self.last_seen[key] = self.steps
            known = self.calibration.seconds_filters[key]
            if key in self.before and known.seen == SETTLED:
                expected_s = self.before.pop(key) * predicted_s[stage]
                error = math.log(known.predict(predicted_s[stage])[0] / expected_s)
                self.surprise = (self.surprise[0] + error**2, self.surprise[1] + 1.0)

    def _learn_noise(self, errors: Sequence[float]) -> None:
        """From how far stages of one step are apart: what they have in common is not theirs. What
        is not known of a young layout yet counts as noise."""
        middle = sum(errors) / len(errors)
        squares = sum(min(abs(e - middle), _MOST_NOISE) ** 2 for e in errors) / (len(errors) - 1)
        rate = max(0.02, 1.0 / (self.steps + 4.0))
        self.variance += rate * (squares - self.variance)

    def noise(self) -> float:
        """Standard deviation, relative, of a stage's seconds in one step."""
        return math.sqrt(self.variance)

    def most_noise(self) -> float:
        """The same, two standard errors up: few steps say little of their own noise."""
        return math.sqrt(self.variance * (1.0 + 2.0 / math.sqrt(max(1, min(self.steps, 50)))))

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
        # A young filter does not know yet how noisy its steps are.
        memory = max(1.0, min(known.seen, self.noise() / LEVEL_WALK))
        variance = max(known.mean_spread(predicted_s) ** 2, (self.noise() * mean) ** 2 / memory)
        aged = variance + (LEVEL_WALK * mean) ** 2 * age
        untried = max(variance, (self.layout_spread() * mean) ** 2)
        return Expected(mean, math.sqrt(min(aged, untried)))

    def stage_factors(self) -> dict[ModelStage, float]:
        """Measured over predicted seconds of each stage, the mean over its layouts: what a search
        goes by where it looks at others."""
        ratios: dict[ModelStage, list[float]] = {}
        for (stage, _), known in self.calibration.seconds_filters.items():
            if known.seen >= SETTLED:
                ratios.setdefault(stage, []).append(known.ratio)
        return {stage: sum(of) / len(of) for stage, of in ratios.items()}

    def layout_spread(self) -> float:
        """Standard deviation, relative, of what an untried layout takes of what is expected."""
        return math.sqrt(self.surprise[0] / self.surprise[1])

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
            "common": dataclasses.asdict(self.common),
            "steps": self.steps,
            "last_seen": [
                [str(stage), layout.to_dict(), at] for (stage, layout), at in self.last_seen.items()
            ],
            "before": [
                [str(stage), layout.to_dict(), of] for (stage, layout), of in self.before.items()
            ],
            "blamed": [[str(stage), layout.to_dict()] for stage, layout in self.blamed],
            "variance": self.variance,
            "surprise": list(self.surprise),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Learned:
        """Raises: SpecError, KeyError, TypeError: not what `to_dict` made."""
        return cls(
            Calibration.from_dict(data["calibration"]),
            Memory(**data["memory"]),
            Common(**data["common"]),
            int(data["steps"]),
            {
                (ModelStage(stage), Layout.from_dict(layout)): int(at)
                for stage, layout, at in data["last_seen"]
            },
            float(data["variance"]),
            {
                (ModelStage(stage), Layout.from_dict(layout)): float(of)
                for stage, layout, of in data["before"]
            },
            tuple(
                (ModelStage(stage), Layout.from_dict(layout)) for stage, layout in data["blamed"]
            ),
            (float(data["surprise"][0]), float(data["surprise"][1])),
        )
