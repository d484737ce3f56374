"""What a transition between two plans of a job will take, before anything of it runs.

The planner ranks plans by a byte bound and asks this of its finalists: shards predicted on both
sides, every move, the compiled schedule and its critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nereus_plugins.cost.compute import HBM_EFFICIENCY
from nereus_plugins.cost.estimate import resolve_gpu
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.gtg.build import PlannedUnit, UnitChange, build_graph, changes_between
from nereus_plugins.gtg.compile import InfeasibleTransition, Schedule, compile_graph
from nereus_plugins.gtg.estimate import Estimate, StepCosts, estimate
from nereus_plugins.gtg.graph import Graph, Step
from nereus_plugins.spec import Assignment, ClusterSpec, GlobalPlan, ModelStage, OptimizerSpec

# What the tables call the training engines of a job.
_BACKENDS = {"megatron": "megatron", "fsdp": "fsdp2", "deepspeed": "deepspeed"}

# Seconds of steps that do not scale with bytes, before any was measured; sources in
# docs/simulator.md.
GROUPS_S, GROUPS_RANK_S = 0.03, 0.0025
BUILD_S, DESCRIBE_S, VOTE_S = 1.0, 0.3, 0.002


def planned_units(job: JobSpec) -> tuple[PlannedUnit, ...]:
    """The units of a job, as far as predicting their shards takes."""
    backend = _BACKENDS[job.backend]
    # FSDP keeps fp32 parameters where it trains; Megatron and DeepSpeed bf16 ones and fp32 masters.
    trained = "float32" if backend == "fsdp2" else "bfloat16"
    out = []
    for name, stage, trains in (
        ("actor", ModelStage.ACTOR_TRAIN, True),
        ("critic", ModelStage.CRITIC_TRAIN, True),
        ("ref", ModelStage.REF_LOGPROB, False),
        ("reward", ModelStage.REWARD_SCORE, False),
    ):
        if stage in job.stages():
            out.append(
                PlannedUnit(
                    name,
                    stage,
                    job.model_of(stage),
                    backend,
                    OptimizerSpec() if trains else None,
                    trained if trains else "bfloat16",
                )
            )
    return tuple(out)


def step_costs(
    cluster: ClusterSpec,
    ranks: int,
    *,
    groups_s: float = GROUPS_S,
    groups_rank_s: float = GROUPS_RANK_S,
    build_s: float = BUILD_S,
    describe_s: float = DESCRIBE_S,
    vote_s: float = VOTE_S,
) -> StepCosts:
    """A graph's constants for a transition of so many ranks on the cluster's devices."""
    memory = cluster.gpu.memory_bandwidth_bytes_per_s * HBM_EFFICIENCY
    return StepCosts(
        constant_s={
            Step.FORM_GROUPS: groups_s + groups_rank_s * ranks,
            Step.DESCRIBE: describe_s / 2,
            Step.BUILD: build_s,
        },
        vote_s=vote_s,
        host_bytes_per_s=resolve_gpu(cluster).host_bytes_s,
        local_bytes_per_s=memory / 2,  # read and written
        verify_bytes_per_s=memory,
    )


def compile_planned(
    changes: Sequence[UnitChange],
    cluster: ClusterSpec,
    world: int,
    *,
    memory_budget_bytes: int | None = None,
    staging_bytes: int = 0,
) -> tuple[Graph, Schedule]:
    """The graph of units that move, predicted on both sides, and its schedule.

    Raises: InfeasibleTransition: it does not fit even through host memory.
    """
    node_of = np.arange(world, dtype=np.int32) // cluster.gpus_per_node
    moves = {}
    for change in changes:
        assert change.target is not None  # predicted on both sides
        moves[change.name] = plan_moves(change.source, change.target, node_of=node_of)
    graph = build_graph(
        changes,
        world=world,
        memory_budget_bytes=memory_budget_bytes,
        staging_bytes=staging_bytes,
        moves=moves,
    )
    return graph, compile_graph(graph)


class PlannedTransition(NamedTuple):
    """A transition that moves state.

    on_host: whether units rest in host memory on either side.
    seconds: by step of the graph, and "park" where state passes between host and device; they add
    up to the stall.
    """

    changes: Sequence[UnitChange]
    graph: Graph
    schedule: Schedule
    result: Estimate
    on_host: bool
    seconds: Mapping[str, float]


def planned_transition(
    old: GlobalPlan,
    new: GlobalPlan,
    units: Sequence[PlannedUnit],
    cluster: ClusterSpec,
    costs: Callable[[ClusterSpec, int], StepCosts],
    memory_budget_bytes: int,
    table: Callable[[PlannedUnit, Assignment], ShardTable] = PlannedUnit.table,
) -> PlannedTransition | None:
    """The transition by its graph; None where no state moves.

    Args:
        costs: constants for the cluster and so many ranks.
        memory_budget_bytes: what the units may take on a device.
        table: as of `changes_between`.

    Raises: InfeasibleTransition; KeyError and SpecError as `changes_between`.
    """
    changes = changes_between(old, new, units, table)
    if not changes:
        return None
    world = 1 + max(*old.devices, *new.devices)
    on_host = offloaded(old, units) or offloaded(new, units)
    budget = None if on_host else memory_budget_bytes
    graph, schedule = compile_planned(changes, cluster, world, memory_budget_bytes=budget)
    result = estimate(schedule, cluster, costs(cluster, world))
    seconds = dict(result.seconds_by_step)
    if on_host:  # what rests in host memory passes the device on both sides
        most = float(result.peak_bytes.max() / resolve_gpu(cluster).host_bytes_s)
        seconds["park"] = seconds.get("park", 0.0) + most
    above = {name: spent for name, spent in seconds.items() if spent > 0}
    return PlannedTransition(changes, graph, schedule, result, on_host, above)


def offloaded(plan: GlobalPlan, units: Sequence[PlannedUnit]) -> bool:
    """Whether optimizer state of a unit rests in host memory."""
    return any(plan.assignments[unit.stage].knobs.offload_optimizer for unit in units)


def transition_seconds(
    job: JobSpec,
    cluster: ClusterSpec,
    costs: StepCosts,
    *,
    memory_budget_bytes: int | None = None,
    staging_bytes: int = 0,
) -> Callable[[GlobalPlan, GlobalPlan], float]:
    """A function of (old plan, new plan): critical path in seconds, 0 where no state moves.

    Args:
        costs: constants of the steps, calibrated where a job has run transitions.
        memory_budget_bytes: what the units may take on a device; a transition that does not fit
            even through host memory takes forever.
    """
    units = planned_units(job)

    @lru_cache(maxsize=256)
    def seconds(old: GlobalPlan, new: GlobalPlan) -> float:
        changes = changes_between(old, new, units)
        if not changes:
            return 0.0
        try:
            _, schedule = compile_planned(
                changes,
                cluster,
                cluster.world_size,
                memory_budget_bytes=memory_budget_bytes,
                staging_bytes=staging_bytes,
            )
            return estimate(schedule, cluster, costs).critical_path_s
        except InfeasibleTransition:
            return float("inf")

    return seconds
