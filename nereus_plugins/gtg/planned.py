"""What a transition between two plans of a job will take, before anything of it runs.

The planner ranks plans by a byte bound and asks this of its finalists: shards predicted on both
sides, every move, the compiled schedule and its critical path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from nereus_plugins.cost.job import JobSpec
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.gtg.build import PlannedUnit, build_graph, changes_between
from nereus_plugins.gtg.compile import InfeasibleTransition, compile_graph
from nereus_plugins.gtg.estimate import StepCosts, estimate
from nereus_plugins.spec import ClusterSpec, GlobalPlan, ModelStage, OptimizerSpec

# Moving state through the predicted tables is known for these training engines.
_BACKENDS = {"megatron": "megatron", "fsdp": "fsdp2"}


def planned_units(job: JobSpec) -> tuple[PlannedUnit, ...]:
    """The units of a job whose shards can be predicted; none where its backend's cannot."""
    backend = _BACKENDS.get(job.backend)
    if backend is None:
        return ()
    # FSDP keeps fp32 parameters where it trains; Megatron bf16 ones and fp32 masters.
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
    node_of = np.arange(cluster.world_size, dtype=np.int32) // cluster.gpus_per_node

    @lru_cache(maxsize=256)
    def seconds(old: GlobalPlan, new: GlobalPlan) -> float:
        changes = changes_between(old, new, units)
        if not changes:
            return 0.0
        moves = {}
        for change in changes:
            assert change.target is not None  # predicted on both sides
            moves[change.name] = plan_moves(change.source, change.target, node_of=node_of)
        graph = build_graph(
            changes,
            world=cluster.world_size,
            memory_budget_bytes=memory_budget_bytes,
            staging_bytes=staging_bytes,
            moves=moves,
        )
        try:
            return estimate(compile_graph(graph), cluster, costs).critical_path_s
        except InfeasibleTransition:
            return float("inf")

    return seconds
