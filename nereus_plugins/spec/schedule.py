"""A schedule of layouts, as a person writes it in the job's config:

    nereus:
      schedule:
        10:
          actor: {tp: 2, pp: 1, dp: 2}
          critic: {tp: 1, pp: 2, dp: 2}
        20:
          all: {tp: 1, pp: 1, dp: 4}

A step maps names to layouts. A name is a unit (actor, critic, ref, reward), a model-stage
(actor-train, ...) or `all`, which stands for every unit that the same plan does not name. What a
layout leaves out is 1 (or off), as everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .layout import Layout
from .plan import ModelStage
from .record import SpecError, unknown_key

UNITS = tuple(dict.fromkeys(stage.model for stage in ModelStage))
ALL = "all"
_NAMES = (ALL, *UNITS, *(stage.value for stage in ModelStage))
_LAYOUT_KEYS = {field.name for field in dataclasses.fields(Layout)}


def parse_schedule(mapping: Mapping[Any, Any]) -> dict[int, dict[str, Layout]]:
    """The layouts of each scheduled step, in ascending order of steps.

    Args:
        mapping: {step: {name: layout mapping}}; steps are integers of at least 1, or text that
            reads as one (Hydra's overrides give text).

    Raises:
        SpecError: names the step and setting that is wrong, and the nearest valid one.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(f"nereus.schedule: expected a mapping of steps to plans, got {mapping!r}")
    schedule: dict[int, dict[str, Layout]] = {}
    for key, plan in mapping.items():
        step = _step(key)
        if step in schedule:
            raise SpecError(f"nereus.schedule: step {step} is given twice")
        schedule[step] = _plan(f"nereus.schedule.{step}", plan)
    return dict(sorted(schedule.items()))


def _step(key: Any) -> int:
    if isinstance(key, str) and key.strip().isdigit():
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or key < 1:
        raise SpecError(
            f"nereus.schedule: a step must be an integer of at least 1, got {key!r}; write "
            "{10: {actor: {tp: 2}}}"
        )
    return key


def _plan(where: str, plan: Any) -> dict[str, Layout]:
    if not isinstance(plan, Mapping) or not plan:
        raise SpecError(
            f"{where}: expected names and their layouts, as in {{actor: {{tp: 2}}}}, got {plan!r}"
        )
    layouts: dict[str, Layout] = {}
    for name, layout in plan.items():
        if name in _LAYOUT_KEYS:
            raise SpecError(
                f"{where}: {name!r} is a layout setting; put it under the name it is for, as in "
                f"{{all: {{{name}: {layout}}}}}"
            )
        if name not in _NAMES:
            raise unknown_key(name, _NAMES, where)
        layouts[str(name)] = (
            layout
            if isinstance(layout, Layout)
            else Layout.from_dict(layout, where=f"{where}.{name}")
        )
    return layouts
