"""A global plan as plans of an OpenRLHF job are written, and the job's plan as a global one.

Where a global plan has its devices only says how many GPUs models and engines have: each model, and
those that share GPUs, has its own (`Capabilities.sharing_fixed`), and which ones is Ray's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.capabilities import STAGES_OF
from nereus_openrlhf.config import LAYOUT_FIELDS, ROLLOUT, TRAINED
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError

_GENERATES = ModelStage.ACTOR_GENERATE
# The planner leaves a margin for its own error. What vLLM takes is given, and OpenRLHF's default
# is beyond that margin: a larger share is planned as this one, with a little less of a cache.
MOST_SHARE = 0.9


def described(args: Any, layouts: Mapping[str, Layout], replicas: int, name: str) -> GlobalPlan:
    """The job's plan.

    Groups of GPUs are numbered one after the other, that of the engines last.

    Args: layouts: by model. replicas: of vLLM. name: the plan's.
    """
    first: dict[tuple[str, ...], int] = {}
    used = 0
    assignments = {}
    for unit, layout in layouts.items():
        together = openrlhf_private.colocated_with(args, unit)
        if together not in first:
            first[together] = used
            used += layout.world_size
        devices = range(first[together], first[together] + layout.world_size)
        for stage in STAGES_OF[unit]:
            assignments[stage] = Assignment(layout, unit_knobs(args, unit), tuple(devices))
    rollout = Layout(tp=args.vllm.tensor_parallel_size, dp=replicas)
    begin = 0 if args.train.colocate_all else used
    assignments[_GENERATES] = Assignment(
        rollout,
        Knobs(rollout_memory_fraction=min(args.vllm.gpu_memory_utilization, MOST_SHARE)),
        tuple(range(begin, begin + rollout.world_size)),
    )
    return GlobalPlan(assignments, name=name)


def unit_knobs(args: Any, unit: str) -> Knobs:
    """What of OpenRLHF's arguments no plan changes; of a model that trains, as it trains."""
    trains = unit in TRAINED
    return Knobs(
        micro_batch=args.train.micro_batch_size if trains else args.rollout.micro_batch_size,
        recompute="full" if trains and args.actor.gradient_checkpointing_enable else "none",
        offload_optimizer=trains and bool(args.ds.enable_sleep),
    )


def as_written(plan: GlobalPlan, now: GlobalPlan, where: str) -> dict[str, Any]:
    """What `config.check_plan` takes: layouts by model, and the number of engines.

    Args: now: the plan in force. where: for messages.

    Raises: SpecError: the plan changes what an OpenRLHF job cannot change.
    """
    out: dict[str, Any] = {}
    for stage, one in plan.assignments.items():
        if stage not in now.assignments:
            raise SpecError(f"{where}: this job has no {stage}")
        before = now.assignments[stage]
        if one.knobs not in (Knobs(), before.knobs):
            raise SpecError(
                f"{where}: {stage}: micro-batches, recompute, offload and vLLM's share of memory "
                "stay as the job was started with"
            )
        if stage is _GENERATES:
            _require_same(before.layout, one.layout, ("dp",), f"{where}: vLLM's engines")
            out[ROLLOUT] = {"replicas": one.layout.dp}
            continue
        _require_same(before.layout, one.layout, LAYOUT_FIELDS, f"{where}: {stage}")
        fields = {name: getattr(one.layout, name) for name in LAYOUT_FIELDS}
        if out.setdefault(stage.model, fields) != fields:
            raise SpecError(f"{where}: the stages of {stage.model} have one layout in OpenRLHF")
    if _sharing(plan, out) != _sharing(now, out):
        raise SpecError(f"{where}: which models share GPUs stays as the job was started")
    return out


def _require_same(before: Layout, after: Layout, free: Sequence[str], where: str) -> None:
    """Raises: SpecError where other fields than those in `free` differ."""
    for field in dataclasses.fields(Layout):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name not in free and old != new:
            raise SpecError(f"{where}: {field.name} stays {old} while the job runs, not {new}")


def _sharing(plan: GlobalPlan, models: Iterable[str]) -> set[frozenset[str]]:
    """Which of these share GPUs."""
    named = {stage.model if stage is not _GENERATES else ROLLOUT: one.devices
             for stage, one in plan.assignments.items()}  # fmt: skip
    return {
        frozenset(other for other in models if set(named[other]) & set(named[model]))
        for model in models
    }
