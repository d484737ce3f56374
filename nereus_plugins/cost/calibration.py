"""What the running job teaches the cost model: one recursive, robust estimator for each stage.

A stage's measured seconds are modelled as

    measured / first measured = slope * (predicted / first predicted) + level

with `predicted` the cost model's seconds for that step (or anything proportional to its work, such
as its tokens). The first observation sets the factor; after it two numbers suffice: what scales
with the work goes into `slope`, what does not into `level`. They are the state of a Kalman filter
whose random walk is the stated rate of forgetting: LEVEL_WALK and SLOPE_WALK a step, and more while
successive errors agree in sign (the level is drifting: errors of a well-tuned filter do not).
Three rules keep it safe:

- an observation z standard deviations off counts with weight (nu + 1) / (nu + z^2), Student's t
  with nu = 10, and next to nothing beyond six: a stall of hours moves nothing;
- two such observations in a row on the same side are a change, not outliers: the level's
  uncertainty is opened and the filter follows;
- the first steps after a transition count for a tenth.

Peak memory is a factor on the predicted bytes, by the same filter, and its spread a safety margin.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereus_plugins.spec import Assignment, Layout, ModelStage, SpecError
from nereus_plugins.spec.record import (
    load_json,
    read_text,
    require,
    require_int,
    require_number,
    shown,
    unknown_key,
)

if TYPE_CHECKING:
    from .estimate import Placed

# Random walk of one step, relative to the stage's seconds: the filter's memory of the level is some
# NOISE / WALK steps, of the slope several times that.
LEVEL_WALK = 0.006
SLOPE_WALK = 0.002
# Before anything was seen: the share of a stage's seconds that scales with its work, how sure that
# is, and how far the very first step may be from what follows.
SLOPE, SLOPE_PRIOR = 0.8, 0.3
FIRST_STEP = 0.1
# How far the model alone may be off, relative, and the noise of a step to begin with.
UNSEEN = 0.5
NOISE = 0.02
_DRIFT_RATE = 0.15
_DRIFT_GAIN = 4.0
_NU = 10.0
_OUTLIER = 3.0
_CHANGE_AFTER = 2
SETTLING_STEPS = 2
_SETTLING_WEIGHT = 0.1
SCHEMA = 1


@dataclasses.dataclass
class Filter:
    """The estimator of one quantity.

    Attributes:
        slope, level: the state, in units of `measured` for work of `predicted`.
        cov: its covariance, (slope^2, slope*level, level^2).
        noise: standard deviation of an observation, learned; in units of `measured`.
        predicted, measured: the first observation, which sets the units; 0 before.
        latest: `predicted` of the last observation; 0 before.
        drift: smoothed product of successive errors; what the level's walk gets in addition.
        last: the last error.
        factor: measured over predicted to assume before anything was seen.
        spread: its relative standard deviation.
        seen: observations that counted.
        streak: signed count of consecutive outliers on one side.
        outliers: observations that hardly counted.
        drift_gain: how much a drift opens the level. 0 follows slower and averages over more
            steps: for comparing layouts rather than for forecasting the next step.
    """

    slope: float = SLOPE
    level: float = 1.0 - SLOPE
    cov: tuple[float, float, float] = (
        SLOPE_PRIOR**2,
        -(SLOPE_PRIOR**2),
        SLOPE_PRIOR**2 + FIRST_STEP**2,
    )
    noise: float = NOISE
    predicted: float = 0.0
    measured: float = 0.0
    latest: float = 0.0
    drift: float = 0.0
    last: float = 0.0
    factor: float = 1.0
    spread: float = UNSEEN
    seen: int = 0
    streak: int = 0
    outliers: int = 0
    drift_gain: float = _DRIFT_GAIN

    def predict(self, predicted: float) -> tuple[float, float]:
        """(expected value, standard deviation) for a step whose model prediction is this."""
        if not self.measured:
            mean = self.factor * predicted
            return mean, self.spread * mean
        x = predicted / self.predicted
        mean = (self.slope * x + self.level) * self.measured
        deviation = math.sqrt(max(0.0, self._variance(x) + self.noise**2)) * self.measured
        return max(mean, 0.05 * x * self.measured), deviation

    def mean_spread(self, predicted: float) -> float:
        """Standard deviation of `predict`'s expected value: a step's own noise is not in it."""
        if not self.measured:
            return self.spread * self.factor * predicted
        variance = max(0.0, self._variance(predicted / self.predicted))
        return math.sqrt(variance) * self.measured

    @property
    def ratio(self) -> float:
        """Measured over predicted at the last observation's work: far from it, the line says
        little."""
        if not self.measured:
            return self.factor
        work = self.latest or self.predicted
        return self.predict(work)[0] / work

    def _variance(self, x: float) -> float:
        a, b, c = self.cov
        return a * x * x + 2 * b * x + c

    def observe(self, predicted: float, measured: float, *, weight: float = 1.0) -> bool:
        """Learn from one step; returns whether it was an outlier.

        Raises ValueError: a value that is not positive and finite.
        """
        for name, value in (("predicted", predicted), ("measured", measured)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        self.latest = predicted
        if not self.measured:
            self.predicted, self.measured, self.seen = predicted, measured, 1
            return False
        x, y = predicted / self.predicted, measured / self.measured
        a, b, c = self.cov
        a, c = a + SLOPE_WALK**2, c + LEVEL_WALK**2 + self.drift_gain * max(0.0, self.drift)
        self.cov = (a, b, c)
        innovation = y - (self.slope * x + self.level)
        spread = self._variance(x) + self.noise**2
        z = innovation / math.sqrt(spread)
        outlier = abs(z) > _OUTLIER
        if outlier:
            side = 1 if z > 0 else -1
            self.streak = self.streak + side if self.streak * side > 0 else side
            self.outliers += 1
            if abs(self.streak) >= _CHANGE_AFTER:
                # A lasting change: open the level by what is missing, and take the observation.
                self.cov = (a, b, c + innovation**2)
                self.streak = 0
                spread = self._variance(x) + self.noise**2
                z = innovation / math.sqrt(spread)
        else:
            self.streak = 0
        weight *= min(1.0, (_NU + 1.0) / (_NU + z * z))
        if abs(z) > 2 * _OUTLIER:
            weight *= 1e-3
        bound = 3.0 * math.sqrt(spread)
        clipped = max(-bound, min(bound, innovation))
        self.drift += _DRIFT_RATE * (clipped * self.last - self.drift)
        self.last = clipped
        self._update(x, innovation, weight)
        if not outlier:
            self.seen += 1
            # Learn the noise from what was not an outlier, over some twenty steps.
            rate = max(1.0 / (self.seen + 4.0), 0.05) * min(1.0, weight)
            target = min(innovation**2, (3 * self.noise) ** 2)
            # What the state's own uncertainty explains is not noise.
            target *= max(0.2, 1.0 - self._variance(x) / spread)
            self.noise = max(0.002, math.sqrt((1 - rate) * self.noise**2 + rate * target))
        return outlier

    def _update(self, x: float, innovation: float, weight: float) -> None:
        a, b, c = self.cov
        noise = self.noise**2 / max(weight, 1e-12)
        gain_slope, gain_level = a * x + b, b * x + c
        total = gain_slope * x + gain_level + noise
        k_slope, k_level = gain_slope / total, gain_level / total
        self.slope += k_slope * innovation
        self.level += k_level * innovation
        self.cov = (
            a - k_slope * gain_slope,
            b - k_slope * gain_level,
            c - k_level * gain_level,
        )


# Of a new step's work, how much its level and its trend take over; and of a new error, its memory.
WORK_GAIN, TREND_GAIN = 0.8, 0.2
_ERROR_GAIN = 0.1
_LARGEST_ERROR = 0.3


@dataclasses.dataclass
class NextStep:
    """Seconds of the next step when its work (lengths, tokens) is not known yet.

    Two forecasts are combined: the filter's, of the work that level and trend of past work point
    to, and the last step's seconds, which know what tokens do not tell (the longest response). Each
    counts by the inverse square of its recent error; a last step that was an outlier does not.

    Attributes:
        known: seconds by work.
        work, trend: level and growth a step of the work; level 0 before anything was seen.
        last_s: seconds of the last step, 0 where it was an outlier.
        errors: recent relative error of both forecasts.
    """

    known: Filter = dataclasses.field(default_factory=Filter)
    work: float = 0.0
    trend: float = 0.0
    last_s: float = 0.0
    errors: tuple[float, float] = (NOISE, NOISE)

    def predict(self) -> float:
        """Raises ValueError: no step was observed."""
        if not self.work:
            raise ValueError("nothing was observed yet: there is no work to predict from")
        forecast = self._forecast_s()
        if not self.last_s:
            return forecast
        mine, last = (1.0 / max(error, 1e-4) ** 2 for error in self.errors)
        return (mine * forecast + last * self.last_s) / (mine + last)

    def _forecast_s(self) -> float:
        return self.known.predict(max(0.1 * self.work, self.work + self.trend))[0]

    def observe(self, work: float, measured_s: float) -> None:
        """Learn from one finished step. Raises ValueError: a value that is not positive."""
        forecast, last = (self._forecast_s() if self.work else 0.0), self.last_s
        outlier = self.known.observe(work, measured_s)
        if not self.work:
            self.work = work
        else:
            expected = self.work + self.trend
            self.work = expected + WORK_GAIN * (work - expected)
            self.trend += TREND_GAIN * (work - expected)
            if last and not outlier:
                self.errors = (
                    self._error(0, forecast / measured_s),
                    self._error(1, last / measured_s),
                )
        self.last_s = 0.0 if outlier else measured_s

    def _error(self, index: int, ratio: float) -> float:
        new = min(_LARGEST_ERROR, abs(ratio - 1.0))
        return self.errors[index] + _ERROR_GAIN * (new - self.errors[index])


def layout_distance(a: Layout, b: Layout) -> float:
    """How far two layouts are apart: doublings of each dimension, and 2 where state is sharded
    in another way."""
    total = 2.0 * (a.sharding != b.sharding)
    for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "ulysses"):
        total += abs(math.log2(getattr(a, name) / getattr(b, name)))
    return total


@dataclasses.dataclass
class Calibration:
    """Filters by stage and layout. `estimate` takes it; the job's controller feeds it.

    drift_gain: of filters that are begun.
    """

    seconds_filters: dict[tuple[ModelStage, Layout], Filter] = dataclasses.field(
        default_factory=dict
    )
    memory_filters: dict[tuple[ModelStage, Layout], Filter] = dataclasses.field(
        default_factory=dict
    )
    settling: int = 0
    drift_gain: float = _DRIFT_GAIN

    def after_transition(self) -> None:
        """The next steps warm caches and allocators up: they count for little."""
        self.settling = SETTLING_STEPS

    def observe(
        self,
        assignments: Mapping[ModelStage, Assignment],
        predicted_s: Mapping[ModelStage, float],
        measured_s: Mapping[ModelStage, float],
        *,
        predicted_bytes: Mapping[ModelStage, float] | None = None,
        measured_bytes: Mapping[ModelStage, float] | None = None,
    ) -> set[ModelStage]:
        """Learn from one finished step; returns the stages whose time was an outlier."""
        weight = _SETTLING_WEIGHT if self.settling else 1.0
        self.settling = max(0, self.settling - 1)
        outliers = set()
        for stage, measured in measured_s.items():
            if stage in predicted_s:
                layout = assignments[stage].layout
                known = self._filter(self.seconds_filters, stage, layout, keep=True)
                if known.observe(predicted_s[stage], measured, weight=weight):
                    outliers.add(stage)
        for stage, measured in (measured_bytes or {}).items():
            if predicted_bytes and stage in predicted_bytes:
                layout = assignments[stage].layout
                known = self._filter(self.memory_filters, stage, layout, keep=True)
                known.observe(predicted_bytes[stage], measured, weight=weight)
        return outliers

    def seconds(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> float:
        """Seconds to expect where the model alone says `predicted_s`."""
        return self.with_spread(stage, assignment, predicted_s)[0]

    def with_spread(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> tuple[float, float]:
        """(seconds, their standard deviation)."""
        return self._filter(self.seconds_filters, stage, assignment.layout).predict(predicted_s)

    def bytes(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_bytes: float
    ) -> float:
        """Peak bytes to plan for: the expected peak and twice its standard deviation."""
        if not any(key[0] is stage for key in self.memory_filters):
            return predicted_bytes
        known = self._filter(self.memory_filters, stage, assignment.layout)
        mean, spread = known.predict(predicted_bytes)
        return mean + 2.0 * spread

    def _filter(
        self,
        filters: dict[tuple[ModelStage, Layout], Filter],
        stage: ModelStage,
        layout: Layout,
        *,
        keep: bool = False,
    ) -> Filter:
        """The filter of a stage and layout; for one never tried, what its neighbours taught.

        Factors of the nearest layouts, weighted by 1 / (1 + distance)^2, with uncertainty that
        grows with the nearest one's distance.
        """
        if (stage, layout) in filters:
            return filters[stage, layout]
        made = Filter(drift_gain=self.drift_gain)
        near = [(layout_distance(layout, k[1]), f) for k, f in filters.items() if k[0] is stage]
        near = [(d, f) for d, f in near if f.seen]
        if near:
            weights = [1.0 / (1.0 + d) ** 2 for d, _ in near]
            ratios = [f.ratio for _, f in near]
            made = Filter(
                factor=sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights),
                spread=min(UNSEEN, 0.03 + 0.04 * min(d for d, _ in near)),
                noise=max(f.noise for _, f in near),
                drift_gain=self.drift_gain,
            )
        if keep:
            filters[stage, layout] = made
        return made

    def to_dict(self) -> dict[str, Any]:
        def rows(filters: Mapping[tuple[ModelStage, Layout], Filter]) -> list[dict[str, Any]]:
            return [
                {"stage": str(stage), "layout": layout.to_dict(), **dataclasses.asdict(known)}
                for (stage, layout), known in filters.items()
            ]

        return {
            "schema": SCHEMA,
            "settling": self.settling,
            "drift_gain": self.drift_gain,
            "seconds": rows(self.seconds_filters),
            "memory": rows(self.memory_filters),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Raises SpecError: another schema, or an entry that is missing or not known."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != SCHEMA:
            raise SpecError(
                f"calibration: schema {shown(schema)} is not {SCHEMA}: not saved by this version "
                "of nereus calibrate"
            )

        def filters(name: str) -> dict[tuple[ModelStage, Layout], Filter]:
            where = f"calibration.{name}"
            rows = data.get(name, ())
            require(isinstance(rows, (list, tuple)), f"{where} must be a list, got {shown(rows)}")
            return dict(_filter_of(row, f"{where}[{i}]") for i, row in enumerate(rows))

        settling, drift_gain = data.get("settling", 0), data.get("drift_gain", _DRIFT_GAIN)
        require_int("calibration", "settling", settling, minimum=0)
        require_number("calibration", "drift_gain", drift_gain, minimum=0)
        return cls(filters("seconds"), filters("memory"), settling, float(drift_gain))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises: SpecError naming the file; OSError."""
        try:
            return cls.from_dict(load_json(read_text(path), "calibration"))
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None


_MOST = 1e30  # of any number of a filter: its square is still one


def _filter_of(row: Any, where: str) -> tuple[tuple[ModelStage, Layout], Filter]:
    """One row of `Calibration.to_dict`. Raises: SpecError naming the field."""
    require(isinstance(row, Mapping), f"{where} must be an object, got {shown(row)}")
    fields = {field.name: field for field in dataclasses.fields(Filter)}
    stages = [stage.value for stage in ModelStage]
    for name in ("stage", "layout", "cov"):
        require(name in row, f"{where}: required key {name!r} is missing")
    for name in row:
        if name not in fields and name not in ("stage", "layout"):
            raise unknown_key(name, (*fields, "stage", "layout"), where)
    if row["stage"] not in stages:
        raise unknown_key(row["stage"], stages, f"{where}.stage")
    layout = Layout.from_dict(row["layout"], where=f"{where}.layout")
    values = {name: value for name, value in row.items() if name in fields}
    for name, value in values.items():
        if name == "cov":
            require(
                isinstance(value, (list, tuple)) and len(value) == 3,
                f"{where}.cov must be three numbers, got {shown(value)}",
            )
            for one in value:
                require_number(where, "cov", one, minimum=-_MOST, maximum=_MOST)
        elif name in ("seen", "outliers"):
            require_int(where, name, value, minimum=0)
        elif name == "streak":
            require_int(where, name, value, minimum=-1000)
        else:
            least = -_MOST if name in ("slope", "level", "drift", "last") else 0.0
            require_number(where, name, value, minimum=least, maximum=_MOST)
    values["cov"] = tuple(float(one) for one in values["cov"])
    made = Filter(**values)
    require(
        (made.predicted > 0) == (made.measured > 0),
        f"{where}: predicted and measured are of one observation: both are 0, or neither",
    )
    require(made.factor > 0, f"{where}.factor must be above 0")
    return (ModelStage(row["stage"]), layout), made
