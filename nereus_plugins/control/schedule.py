"""`nereus.schedule`: which plan holds from the end of which step on. Its keys; a plan's content is
the adapter's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nereus_plugins.spec import FrozenMap
from nereus_plugins.spec.record import require, shown


def check_schedule(
    schedule: Any, check_plan: Callable[[Any, str], Mapping[str, Any]], like: str
) -> FrozenMap[int, Mapping[str, Any]]:
    """The plans by step, in order.

    Args:
        schedule: as written; a step may be text.
        check_plan: checks one plan that stands under a setting, and raises SpecError naming it.
        like: an example, for the message.

    Raises: SpecError naming the setting.
    """
    require(
        isinstance(schedule, Mapping),
        f"nereus.schedule must map steps to plans, like {like}, got {shown(schedule)}",
    )
    out: dict[int, Mapping[str, Any]] = {}
    for key, plan in schedule.items():
        step = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 19 else key
        require(
            isinstance(step, int) and not isinstance(step, bool) and step >= 1,
            f"nereus.schedule: a step is a whole number from 1, got {shown(key)}",
        )
        where = f"nereus.schedule.{step}"
        require(step not in out, f"{where}: this step is given twice")
        out[step] = check_plan(plan, where)
    return FrozenMap(sorted(out.items()))
