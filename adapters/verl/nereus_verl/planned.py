"""A plan of the controller's as this job can run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage
from nereus_verl import jobconfig
from nereus_verl.config import OF_TRAINING
from nereus_verl.jobconfig import UnitConfig

_TRAINS = (ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN)


def executable(plan: GlobalPlan, config: Mapping[str, Any]) -> GlobalPlan:
    """`plan` with what the planner leaves to the framework.

    The planner has one assignment for all stages of a unit, and assumes what engines usually do:
    sequence parallelism with tp, an optimizer that is sharded. Here that is as verl's
    configuration has it, and stages that do not train have no knobs of training.

    Args: config: verl's.
    """
    units = jobconfig.units(config)
    assignments = {}
    for stage, one in plan.assignments.items():
        if stage is not ModelStage.ACTOR_GENERATE and stage.model in units:
            layout = _layout(one.layout, config, units[stage.model])
            one = Assignment(layout, _knobs(stage, one.knobs), one.devices)
        assignments[stage] = one
    return GlobalPlan(assignments, name=plan.name)


def _layout(layout: Layout, config: Mapping[str, Any], unit: UnitConfig) -> Layout:
    if unit.strategy != "megatron":
        return layout
    defaults = jobconfig.engine_defaults(config, unit)
    return dataclasses.replace(
        layout,
        sequence_parallel=layout.tp > 1 and defaults.sequence_parallel,
        sharding="zero1" if defaults.optimizer_sharded else "none",
    )


def _knobs(stage: ModelStage, knobs: Knobs) -> Knobs:
    if stage in _TRAINS:
        return knobs
    usual = Knobs()
    return dataclasses.replace(knobs, **{name: getattr(usual, name) for name in OF_TRAINING})
