"""What a transition between two plans costs on the simulated cluster.

The graph is the one that a live job would compile and execute: shards predicted on both sides,
moves, schedule, memory; its critical path under links, memory and the constants is the stall.
Compiled once for each pair of plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nereus_plugins.controller.transition import engines_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.memory import OUTSIDE_TORCH_BYTES
from nereus_plugins.cost.models import as_shape
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.gtg.build import PlannedUnit, UnitChange
from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.gtg.estimate import Estimate, byte_bound_s, link_loads
from nereus_plugins.gtg.graph import Graph, Step
from nereus_plugins.gtg.planned import offloaded, planned_transition, planned_units
from nereus_plugins.spec import Assignment, ClusterSpec, GlobalPlan, ModelStage, SpecError

from .constants import Constants


@dataclasses.dataclass(frozen=True)
class TransitionCost:
    """One transition.

    Attributes:
        mode: "intact", "staged", or "unchanged" where no state moves.
        seconds: by phase; they add up to the stall.
        bound_s: the least that any transition of these bytes takes: the largest of a rank's bytes
            over its link.
        units: by unit that moves, what a record says of it.
        digest: of the compiled schedule.
    """

    mode: str
    seconds: Mapping[str, float]
    bound_s: float
    units: Mapping[str, Any]
    digest: str

    @property
    def stall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def limit_s(self) -> float:
        """`bound_s`, and groups, build and engines, which nothing hides."""
        inevitable = (Step.FORM_GROUPS.value, Step.BUILD.value, "rollout")
        return self.bound_s + sum(self.seconds.get(phase, 0.0) for phase in inevitable)


class Transitions:
    """Costs of transitions of one job; `cost` is cached by pair of plans."""

    def __init__(self, job: JobSpec, cluster: ClusterSpec, constants: Constants) -> None:
        self.job = job
        self.cluster = cluster
        self.constants = constants
        self.units = planned_units(job)
        self._state_bytes: dict[object, float] = {}
        self._tables: dict[tuple[str, Assignment], ShardTable] = {}
        self._known: dict[tuple[object, object], TransitionCost | InfeasibleTransition] = {}
        self._moved: dict[tuple[object, ...], TransitionCost | InfeasibleTransition] = {}

    def cost(self, old: GlobalPlan, new: GlobalPlan) -> TransitionCost:
        """Raises: InfeasibleTransition: the target does not fit beside what cannot be parked.
        SpecError: shards that cannot be predicted (pipeline stages of unequal size)."""
        key = (old.assignments, new.assignments)
        if key not in self._known:
            try:
                self._known[key] = self._compiled(old, new)
            except InfeasibleTransition as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, InfeasibleTransition):
            raise known
        return known

    def state_bytes_on_node(self, plan: GlobalPlan) -> float:
        """Bytes of trained state on the fullest node: what a checkpoint writes and reads there."""
        key = tuple(  # knobs change nothing
            (a.layout, a.devices)
            for stage in (ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN)
            if (a := plan.assignments.get(stage)) is not None
        )
        if key not in self._state_bytes:
            try:
                self._state_bytes[key] = self._predicted_state_bytes(plan)
            except SpecError:  # pipeline stages of unequal size
                self._state_bytes[key] = self._counted_state_bytes(plan)
        return self._state_bytes[key]

    def _predicted_state_bytes(self, plan: GlobalPlan) -> float:
        """Raises: SpecError."""
        nodes = np.zeros(self.cluster.nodes)
        for unit in self.units:
            if unit.optimizer is not None:
                storages = self._table(unit, plan.assignments[unit.stage]).storages
                np.add.at(nodes, storages.rank // self.cluster.gpus_per_node, storages.nbytes)
        return float(nodes.max())

    def _counted_state_bytes(self, plan: GlobalPlan) -> float:
        """Where no table says it: a node's share of bf16 weights as its ranks are cut, and of fp32
        masters and moments over all ranks."""
        nbytes = 0.0
        for stage in (ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN):
            if stage in plan.assignments:
                layout = plan.assignments[stage].layout
                per_node = min(self.cluster.gpus_per_node, layout.world_size)
                whole = layout.tp * layout.pp
                cut = whole if layout.sharding in ("none", "zero1", "zero2") else layout.world_size
                parameters = as_shape(self.job.model_of(stage)).num_parameters()
                nbytes += parameters * (
                    2.0 * min(1.0, per_node / cut) + 12.0 * per_node / layout.world_size
                )
        return nbytes

    def _table(self, unit: PlannedUnit, assignment: Assignment) -> ShardTable:
        # Knobs move nothing.
        key = (unit.name, Assignment(assignment.layout, devices=assignment.devices))
        if key not in self._tables:
            if len(self._tables) > 16:  # a table of 1,024 ranks takes tens of megabytes
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = unit.table(assignment)
        return self._tables[key]

    def _compiled(self, old: GlobalPlan, new: GlobalPlan) -> TransitionCost:
        moved = self._of_state(old, new)
        if (started_s := self._rollout_s(old, new)) > 0:
            seconds = {**moved.seconds, "rollout": started_s}
            moved = dataclasses.replace(moved, seconds=seconds)
        return moved

    def _of_state(self, old: GlobalPlan, new: GlobalPlan) -> TransitionCost:
        """Without engines. Plans that differ in knobs only share it."""
        world = 1 + max(*old.devices, *new.devices)
        on_host = offloaded(old, self.units) or offloaded(new, self.units)
        sides = [
            (a.layout, a.devices)
            for plan in (old, new)
            for a in (plan.assignments[unit.stage] for unit in self.units)
        ]
        key = (world, on_host, *sides)
        if key not in self._moved:
            try:
                self._moved[key] = self._graph(old, new)
            except InfeasibleTransition as error:
                self._moved[key] = error
        known = self._moved[key]
        if isinstance(known, InfeasibleTransition):
            raise known
        return known

    def _graph(self, old: GlobalPlan, new: GlobalPlan) -> TransitionCost:
        moved = planned_transition(
            old, new, self.units, self.cluster, self.constants.step_costs, self._budget_bytes(),
            self._table,
        )  # fmt: skip
        if moved is None:
            return TransitionCost("unchanged", {}, 0.0, {}, "")
        graph = moved.graph
        return TransitionCost(
            mode="staged" if moved.on_host else moved.schedule.mode,
            seconds=moved.seconds,
            bound_s=byte_bound_s(graph.traffic, graph.world, self.cluster),
            units=_units(graph, moved.changes, moved.result),
            digest=moved.schedule.digest,
        )

    def least_s(self, old: GlobalPlan, new: GlobalPlan) -> float:
        """A bound from below on the stall that takes no compiling: engines, groups, and what every
        change of state does."""
        least = self._rollout_s(old, new)
        if any(
            (a.layout, a.devices) != (b.layout, b.devices)
            for a, b in (
                (old.assignments[unit.stage], new.assignments[unit.stage]) for unit in self.units
            )
        ):
            world = 1 + max(*old.devices, *new.devices)
            constants = self.constants
            least += constants.groups_s + constants.groups_rank_s * world
            least += constants.describe_s / 2 + constants.build_s
        return least

    def _budget_bytes(self) -> int:
        return int(self.cluster.gpu.memory_bytes - OUTSIDE_TORCH_BYTES)

    def _rollout_s(self, old: GlobalPlan, new: GlobalPlan) -> float:
        """Engines that the old plan has not are started, all at once; others stay."""
        stage = ModelStage.ACTOR_GENERATE
        if stage not in new.assignments:
            return 0.0
        started = engines_of(new.assignments[stage]) - engines_of(old.assignments[stage])
        return self.constants.engine_start_s if started else 0.0


def _units(graph: Graph, changes: Sequence[UnitChange], result: Estimate) -> dict[str, Any]:
    """What a live transition's record says of each unit, as far as a graph knows it."""
    traffic = {
        graph.units[node.unit]: graph.traffic[node.id]
        for node in graph.nodes
        if node.step is Step.MOVE and node.id in graph.traffic
    }
    one_node = np.zeros(graph.world, np.int32)
    out = {}
    for change in changes:
        loads = link_loads(traffic[change.name], one_node, graph.world)
        out[change.name] = {
            "from": str(change.source_layout),
            "to": str(change.target_layout),
            "bytes_wire": int(loads.received_intra.sum() + loads.received_inter.sum()),
            "bytes_local": int(loads.local.sum()),
            "seconds": dict(result.seconds_by_unit[change.name]),
        }
    return out
