"""Plans to choose from, and what they are expected to do, each estimated once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from nereus_plugins.cost.estimate import Estimate, estimate, resolve_gpu
from nereus_plugins.planner.candidates import (
    ROLLOUT_FRACTIONS,
    fewest_ranks,
    knob_choices,
    with_knobs,
    with_most_replicas,
)
from nereus_plugins.planner.search import MARGIN, Planned, plan
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
)
from nereus_plugins.trace.conditions import scaled_lengths

from .learned import KNOB_SPREAD, Expected, Learned
from .setting import JobSetting

S = ModelStage
# Lengths are estimated on a grid: conditions alike are estimated once.
GRID = math.log(1.03)
# Lengths that one search of the planner serves.
SEARCH_GRID = math.log(1.12)
NO_HURRY = 10**9
# Next best plans that a search names: what the job may try. Hidden factors of layouts reorder those
# that the model has within a few percent of each other, and these are about so many.
ALTERNATIVES = 8
# Any plan in force keeps the planner to pipeline stages of equal size, the only ones that a
# transition can reach; nothing is asked to stay near this one.
ANCHOR = GlobalPlan({S.ACTOR_GENERATE: Assignment(Layout())}, name="anchor")


class Judged(NamedTuple):
    """A plan at certain lengths.

    step_s: seconds of an iteration, calibrated; inf where it cannot run.
    stages: by model-stage, what is expected of it. predicted_s: by the model alone.
    memory: part of its GPU that the fullest stage takes; inf where the rollout engine cannot run.
    """

    step_s: float
    stages: dict[ModelStage, Expected]
    predicted_s: dict[ModelStage, float]
    memory: float


class Plans:
    """Of one job. What was learned comes from `learned`, which others feed."""

    def __init__(self, setting: JobSetting, learned: Learned) -> None:
        self.setting = setting
        self.learned = learned
        self.capabilities = setting.capabilities()
        self.everything_changes = _everything(setting)
        self._estimates: dict[tuple[object, int], Estimate | None] = {}
        self._searched: dict[tuple[object, int, int], tuple[int, Planned | None]] = {}
        self._latest: dict[tuple[object, int], Planned] = {}

    def lengths(self, mean_tokens: float) -> LengthDistribution:
        """The job's lengths with this mean, to the grid."""
        return self._on_grid(round(math.log(max(1.0, mean_tokens)) / GRID))

    def _on_grid(self, bucket: int) -> LengthDistribution:
        most = self.setting.max_response_tokens
        mean = min(math.exp(GRID * bucket), 0.98 * most)
        return scaled_lengths(self.setting.response_tokens, mean, most)

    def estimate(self, chosen: GlobalPlan, mean_tokens: float) -> Estimate | None:
        """By the model alone; None where a layout does not divide its model."""
        bucket = round(math.log(max(1.0, mean_tokens)) / GRID)
        key = (chosen.assignments, bucket)
        if key not in self._estimates:
            if len(self._estimates) > 50_000:
                self._estimates.clear()
            inner = self.setting.setting
            workload = inner.workload(self._on_grid(bucket))
            try:
                self._estimates[key] = estimate(inner.job, chosen, inner.cluster, workload)
            except SpecError:
                self._estimates[key] = None
        return self._estimates[key]

    def judge(self, chosen: GlobalPlan, mean_tokens: float) -> Judged:
        made = self.estimate(chosen, mean_tokens)
        if made is None:
            return Judged(math.inf, {}, {}, math.inf)
        stages = {
            stage: self.learned.expected(stage, one.assignment, one.seconds)
            for stage, one in made.stages.items()
        }
        predicted = {stage: one.seconds for stage, one in made.stages.items()}
        alone, together = sum(predicted.values()), sum(e.seconds for e in stages.values())
        # Exact where stages take turns; elsewhere stages are taken to stretch alike.
        step_s = made.iteration_s * together / alone * self.learned.common.factor
        return Judged(step_s, stages, predicted, self._memory(made))

    def saving(
        self, current: GlobalPlan, now: Judged, other: GlobalPlan, then: Judged
    ) -> tuple[float, float]:
        """(seconds a step that `other` saves, their standard deviation).

        What both plans have in common cancels: stages with the same layout differ by what the model
        says of knobs and devices alone.
        """
        variance = 0.0
        for stage, one in now.stages.items():
            new = then.stages[stage]
            if current.assignments[stage].layout == other.assignments[stage].layout:
                variance += (KNOB_SPREAD * (one.seconds - new.seconds)) ** 2
            else:
                variance += one.spread_s**2 + new.spread_s**2
        return now.step_s - then.step_s, math.sqrt(variance) * self.learned.common.factor

    def memory(self, chosen: GlobalPlan, mean_tokens: float) -> float:
        """Part of its GPU that the fullest stage takes at these lengths."""
        made = self.estimate(chosen, mean_tokens)
        return math.inf if made is None else self._memory(made)

    def _memory(self, made: Estimate) -> float:
        highest = 0.0
        outside = resolve_gpu(self.setting.setting.cluster).context_bytes
        for stage, one in made.stages.items():
            if any("cannot" in note for note in one.notes):
                return math.inf
            beside = sum(one.resting.values()) + outside
            own = self.learned.bytes(stage, one.assignment, one.reserved_bytes - beside)
            highest = max(highest, (own + beside) / one.capacity_bytes)
        return highest

    def searched(
        self, gpus: int, mean_tokens: float, current: GlobalPlan, version: int
    ) -> list[GlobalPlan]:
        """The planner's best on at most so many GPUs, and those next to it.

        Args:
            version: of what was learned; a search is made again when it has changed.
        """
        anchor = ANCHOR if self.everything_changes else current
        bucket = math.ceil(math.log(max(1.0, mean_tokens)) / SEARCH_GRID)
        key = (anchor.assignments, gpus, bucket)
        if key not in self._searched or self._searched[key][0] != version:
            self._searched[key] = (version, self._search(gpus, bucket, anchor))
        found = self._searched[key][1]
        if found is None:
            return []
        plans = [(found.plan, found.estimate), *found.alternatives]
        return [one for one, made in plans if made.fits]

    def _search(self, gpus: int, bucket: int, anchor: GlobalPlan) -> Planned | None:
        inner = self.setting.setting
        most = self.setting.max_response_tokens
        mean = min(math.exp(SEARCH_GRID * bucket), 0.98 * most)
        workload = inner.workload(scaled_lengths(self.setting.response_tokens, mean, most))
        latest = (anchor.assignments, gpus)
        try:
            found = plan(
                inner.job,
                inner.cluster,
                workload,
                self.learned,
                gpus=gpus,
                capabilities=self.capabilities,
                current=anchor,
                horizon_steps=NO_HURRY,
                after=self._latest.get(latest),
                alternatives=ALTERNATIVES,
            )
        except SpecError:
            return None
        self._latest[latest] = found
        return found

    def with_other_knobs(self, current: GlobalPlan, mean_tokens: float) -> Iterator[GlobalPlan]:
        """The plan with every choice of knobs that the adapter can change, layouts as they are."""
        workload = self.setting.setting.workload(self.lengths(mean_tokens))
        seen = {current.assignments}
        least = self.capabilities.least_budget_tokens
        ranks = fewest_ranks(current)
        for trained in knob_choices(workload, trains=True, ranks=ranks, least_budget=least):
            for away in (False, True):
                made = self._with_knobs(current, trained, away)
                if made is not None and made.assignments not in seen:
                    seen.add(made.assignments)
                    yield made
        for fraction in ROLLOUT_FRACTIONS:
            made = self._with_fraction(current, fraction)
            if made is not None and made.assignments not in seen:
                seen.add(made.assignments)
                yield made

    def _with_knobs(self, current: GlobalPlan, trained: Knobs, away: bool) -> GlobalPlan | None:
        made = with_knobs(current, trained, away)
        if not all(
            self._may(stage, before.knobs, made.assignments[stage].knobs)
            for stage, before in current.assignments.items()
        ):
            return None
        return dataclasses.replace(made, name=f"{current.name}, other knobs")

    def _with_fraction(self, current: GlobalPlan, fraction: float) -> GlobalPlan | None:
        rollout = current.assignments.get(S.ACTOR_GENERATE)
        if rollout is None:
            return None
        knobs = dataclasses.replace(rollout.knobs, rollout_memory_fraction=fraction)
        if not self._may(S.ACTOR_GENERATE, rollout.knobs, knobs):
            return None
        other = Assignment(rollout.layout, knobs, rollout.devices)
        name = f"{current.name}, other knobs"
        return GlobalPlan({**current.assignments, S.ACTOR_GENERATE: other}, name=name)

    def _may(self, stage: ModelStage, before: Knobs, after: Knobs) -> bool:
        can = self.capabilities.stages.get(stage)
        fields = can.knob_fields if can else frozenset()
        return all(
            getattr(before, f.name) == getattr(after, f.name) or f.name in fields
            for f in dataclasses.fields(Knobs)
        )

    def scaled(self, current: GlobalPlan, gpus: int) -> GlobalPlan | None:
        """The plan with its DP for so many GPUs; None where not one replica fits, or where parts
        of the cluster are apart."""
        if (
            self.capabilities.devices_fixed
            or len({a.devices for a in current.assignments.values()}) > 1
        ):
            return None
        made = {}
        for stage, before in current.assignments.items():
            if stage is S.ACTOR_GENERATE:
                layout = with_most_replicas(before.layout, gpus, None)
            else:
                model = self.setting.setting.job.model_of(stage)
                divides = self.capabilities.dp_divides
                layout = with_most_replicas(before.layout, gpus, model, divides)
            if layout is None:
                return None
            made[stage] = Assignment(layout, before.knobs)
        return GlobalPlan(made, name=f"{current.name} on {gpus}")


def fits(memory: float) -> bool:
    """With the planner's margin."""
    return memory <= 1.0 - MARGIN


def _everything(setting: JobSetting) -> bool:
    layout = {f.name for f in dataclasses.fields(Layout)}
    knobs = {f.name for f in dataclasses.fields(Knobs)}
    return not setting.devices_fixed and all(
        stage in setting.changes
        and layout <= set(setting.changes[stage].layout_fields)
        and knobs <= set(setting.changes[stage].knob_fields)
        for stage in setting.setting.job.stages()
    )
