"""What a transition of this job will take: by its graph, corrected by those that were measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from nereus_plugins.cost.estimate import resolve_gpu
from nereus_plugins.cost.hardware import CPU
from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.gtg.planned import planned_transition, planned_units, step_costs
from nereus_plugins.spec import Assignment, GlobalPlan, ModelStage, SpecError
from nereus_plugins.trace.conditions import Setting

# Seconds before any transition of the job was measured; sources in docs/simulator.md.
ENGINE_START_S = 30.0
CPU_ENGINE_START_S = 3.0  # of a Hugging Face model in a process of its own
# How much a measured transition counts against those before.
_RATE = 0.5


class TransitionEstimate(NamedTuple):
    """seconds: by phase; they add up to what the job waits. digest: of the compiled schedule, ""
    where no state moves."""

    seconds: Mapping[str, float]
    digest: str

    @property
    def stall_s(self) -> float:
        return sum(self.seconds.values())


class Estimator(Protocol):
    """What a transition takes from one plan to another; None where none is possible in memory, or
    nothing can be said of it."""

    def __call__(self, old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate | None: ...


@functools.lru_cache(maxsize=1024)
def engines_of(assignment: Assignment) -> frozenset[tuple[object, ...]]:
    """The rollout engines of an assignment: those of two plans that are equal need no start."""
    size = assignment.layout.tp * assignment.layout.pp
    devices, fraction = assignment.devices, assignment.knobs.rollout_memory_fraction
    return frozenset(
        (assignment.layout.tp, fraction, *devices[at : at + size])
        for at in range(0, len(devices), size)
    )


class GraphEstimator:
    """An `Estimator` by the transition's own graph, its answers kept."""

    def __init__(self, setting: Setting, *, sharing_fixed: bool = False) -> None:
        """Args: sharing_fixed: as in `Capabilities`."""
        self.job, self.cluster = setting.job, setting.cluster
        self.sharing_fixed = sharing_fixed
        self.units = planned_units(self.job)
        self._known: dict[tuple[object, object], TransitionEstimate | None] = {}

    def __call__(self, old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate | None:
        key = (old.assignments, new.assignments)
        if key not in self._known:
            try:
                self._known[key] = self._estimated(old, new)
            except (InfeasibleTransition, SpecError):  # or a state that cannot be predicted
                self._known[key] = None
        return self._known[key]

    def _estimated(self, old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate:
        if self.sharing_fixed:
            old, new = apart(old, new)
        seconds: dict[str, float] = {}
        rolls = ModelStage.ACTOR_GENERATE
        if rolls in new.assignments and engines_of(new.assignments[rolls]) - engines_of(
            old.assignments[rolls]
        ):
            on_cpu = self.cluster.gpu.name == CPU
            seconds["rollout"] = CPU_ENGINE_START_S if on_cpu else ENGINE_START_S
        budget = int(self.cluster.gpu.memory_bytes - resolve_gpu(self.cluster).context_bytes)
        moved = planned_transition(old, new, self.units, self.cluster, step_costs, budget)
        if moved is None:
            return TransitionEstimate(seconds, "")
        return TransitionEstimate(seconds | dict(moved.seconds), moved.schedule.digest)


def apart(old: GlobalPlan, new: GlobalPlan) -> tuple[GlobalPlan, GlobalPlan]:
    """The two plans with the devices of each group of stages that share them where they lie while
    it changes: its first ranks stay, further ones are beside all other groups."""
    groups: dict[tuple[int, ...], list[ModelStage]] = {}
    for stage in sorted(old.assignments, key=lambda s: min(old.assignments[s].devices)):
        groups.setdefault(old.assignments[stage].devices, []).append(stage)
    moved: tuple[dict[ModelStage, Assignment], ...] = ({}, {})
    first = 0
    for stages in groups.values():
        widest = 0
        for plan, into in zip((old, new), moved, strict=True):
            for stage in stages:
                one = plan.assignments[stage]
                size = one.layout.world_size
                devices = tuple(range(first, first + size))
                into[stage] = Assignment(one.layout, one.knobs, devices)
                widest = max(widest, size)
        first += widest
    return GlobalPlan(moved[0], name=old.name), GlobalPlan(moved[1], name=new.name)


@dataclasses.dataclass
class Corrected:
    """An estimate times what this job's own transitions took over theirs.

    Attributes:
        factor: measured over estimated, recent ones more. measured: how many.
    """

    factor: float = 1.0
    measured: int = 0

    def observe(self, estimated_s: float, measured_s: float) -> None:
        if estimated_s <= 0 or measured_s <= 0:
            return
        ratio = measured_s / estimated_s
        rate = _RATE if self.measured else 1.0
        self.factor *= (ratio / self.factor) ** rate
        self.measured += 1

    def seconds(self, estimate_: TransitionEstimate) -> dict[str, float]:
        return {name: value * self.factor for name, value in estimate_.seconds.items()}
