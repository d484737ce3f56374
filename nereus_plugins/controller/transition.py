"""What a transition of this job will take: by its graph, corrected by those that were measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from nereus_plugins.cost.compute import HBM_EFFICIENCY
from nereus_plugins.cost.estimate import resolve_gpu
from nereus_plugins.cost.hardware import CPU
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.gtg.build import build_graph, changes_between
from nereus_plugins.gtg.compile import InfeasibleTransition, compile_graph
from nereus_plugins.gtg.estimate import StepCosts, estimate
from nereus_plugins.gtg.graph import Step
from nereus_plugins.gtg.planned import planned_units
from nereus_plugins.spec import Assignment, ClusterSpec, GlobalPlan, ModelStage, SpecError
from nereus_plugins.trace.conditions import Setting

# Seconds before any transition of the job was measured; the simulator's constants, whose sources
# are in docs/simulator.md.
GROUPS_S, GROUPS_RANK_S = 0.03, 0.0025
BUILD_S, DESCRIBE_S, VOTE_S = 1.0, 0.3, 0.002
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

    def __init__(self, setting: Setting) -> None:
        self.job, self.cluster = setting.job, setting.cluster
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
        seconds: dict[str, float] = {}
        rolls = ModelStage.ACTOR_GENERATE
        if rolls in new.assignments and engines_of(new.assignments[rolls]) - engines_of(
            old.assignments[rolls]
        ):
            on_cpu = self.cluster.gpu.name == CPU
            seconds["rollout"] = CPU_ENGINE_START_S if on_cpu else ENGINE_START_S
        changes = changes_between(old, new, self.units)
        if not changes:
            return TransitionEstimate(seconds, "")
        world = 1 + max(*old.devices, *new.devices)
        node_of = np.arange(world, dtype=np.int32) // self.cluster.gpus_per_node
        moves = {}
        for change in changes:
            assert change.target is not None  # predicted on both sides
            moves[change.name] = plan_moves(change.source, change.target, node_of=node_of)
        on_host = self._offloaded(old) or self._offloaded(new)
        outside = resolve_gpu(self.cluster).context_bytes
        budget = int(self.cluster.gpu.memory_bytes - outside)
        graph = build_graph(
            changes, world=world, memory_budget_bytes=None if on_host else budget, moves=moves
        )
        schedule = compile_graph(graph)
        result = estimate(schedule, self.cluster, step_costs(self.cluster, world))
        seconds |= {name: value for name, value in result.seconds_by_step.items() if value > 0}
        if on_host:  # what rests in host memory passes the GPU on both sides
            most = float(result.peak_bytes.max()) / resolve_gpu(self.cluster).host_bytes_s
            seconds["park"] = seconds.get("park", 0.0) + most
        return TransitionEstimate(seconds, schedule.digest)

    def _offloaded(self, plan: GlobalPlan) -> bool:
        return any(plan.assignments[unit.stage].knobs.offload_optimizer for unit in self.units)


def step_costs(cluster: ClusterSpec, ranks: int) -> StepCosts:
    memory = cluster.gpu.memory_bandwidth_bytes_per_s * HBM_EFFICIENCY
    return StepCosts(
        constant_s={
            Step.FORM_GROUPS: GROUPS_S + GROUPS_RANK_S * ranks,
            Step.DESCRIBE: DESCRIBE_S / 2,
            Step.BUILD: BUILD_S,
        },
        vote_s=VOTE_S,
        host_bytes_per_s=resolve_gpu(cluster).host_bytes_s,
        local_bytes_per_s=memory / 2,  # read and written
        verify_bytes_per_s=memory,
    )


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
