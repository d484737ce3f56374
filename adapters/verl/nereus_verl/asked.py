"""What a plan asks of the job, whoever gave it: the schedule, a command, a caller of the job port.

What a plan leaves out stays as it is in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus_plugins.control.attempt import Changes
from nereus_plugins.control.driver import SUBMITTED
from nereus_plugins.spec import GlobalPlan, Layout
from nereus_verl import knobs
from nereus_verl.config import check_plan, global_plan_layouts
from nereus_verl.knobs import UnitKnobs
from nereus_verl.preflight import Preflight, plan_targets
from nereus_verl.rollout import RolloutPlan, global_plan_rollout, plan_rollout


@dataclass(frozen=True)
class InForce:
    """What the job works with; layouts and knobs by unit."""

    layouts: Mapping[str, Layout]
    knobs: Mapping[str, UnitKnobs]
    rollout: RolloutPlan


@dataclass(frozen=True)
class Asked:
    """
    Attributes:
        targets: layouts by unit; others stay. where: what asked for it, for messages.
        leave: ranks that must leave; others join for them, or follow them out, as the layouts take
            more or fewer ranks than stay.
        knobs: by unit; others stay. rollout: after it.
    """

    targets: Mapping[str, Layout]
    where: str
    leave: Sequence[int]
    knobs: Mapping[str, UnitKnobs]
    rollout: RolloutPlan

    def changes(self, now: InForce) -> Changes:
        """In words, all that differs from what is in force."""
        differ = {n: t for n, t in self.targets.items() if t != now.layouts[n]}
        return changes(now, differ, self.knobs, self.rollout, self.leave)


def scheduled(checked: Preflight, now: InForce, step: int) -> Asked:
    """By what is scheduled after `step`. Submitted plans may have changed what it leaves out since
    the schedule was checked, or a rollout may not have followed. Raises: SpecError."""
    where, plan = f"nereus.schedule.{step}", checked.nereus.schedule[step]
    targets = checked.targets[step]
    unit_knobs = knobs.plan_knobs(
        plan, config=checked.config, units=checked.units, current=now.knobs, where=where
    )
    rollout = _rollout(checked, now, plan, targets, where)
    return Asked(targets, where, checked.leave[step], unit_knobs, rollout)


def would_change(checked: Preflight, now: InForce, step: int) -> Changes:
    """By what is scheduled after `step`, as it was checked before the job started."""
    targets, unit_knobs = checked.targets[step], checked.knob_targets[step]
    return changes(now, targets, unit_knobs, checked.rollout_targets[step])


def submitted(checked: Preflight, now: InForce, plan: Mapping[str, object]) -> Asked:
    """By a command. Args: plan: as written. Raises: SpecError if it cannot be run."""
    plan = check_plan(plan, SUBMITTED)
    targets, leave, unit_knobs = plan_targets(
        checked.config, checked.models, plan, now.layouts, now.knobs, SUBMITTED
    )
    rollout = _rollout(checked, now, plan, targets, SUBMITTED)
    return Asked(targets, SUBMITTED, leave, unit_knobs, rollout)


def proposed(checked: Preflight, now: InForce, plan: GlobalPlan) -> Asked:
    """By a caller of the job port. Raises: SpecError."""
    where = f"plan {plan.name!r}"
    targets = global_plan_layouts(plan, now.layouts, where)
    unit_knobs = knobs.global_plan_knobs(
        plan, config=checked.config, units=checked.units, current=now.knobs, where=where
    )
    rollout = global_plan_rollout(
        plan,
        config=checked.config,
        current=now.rollout,
        world=_world(now, targets),
        where=where,
    )
    return Asked(targets, where, (), unit_knobs, rollout)


def changes(
    now: InForce,
    targets: Mapping[str, Layout],
    unit_knobs: Mapping[str, UnitKnobs],
    rollout: RolloutPlan,
    leave: Sequence[int] = (),
) -> Changes:
    """Args: as of `Asked`."""
    switched = {name: (now.knobs[name], new) for name, new in unit_knobs.items()}
    others = [
        f"{name} {change}"
        for name, (old, new) in switched.items()
        for change in old.changes_to(new)
    ]
    others += [f"ranks {', '.join(map(str, leave))} leave"] if leave else []
    others += [f"rollout {now.rollout} -> {rollout}"] if rollout != now.rollout else []
    return Changes(
        {name: (now.layouts[name], layout) for name, layout in targets.items()},
        {n: {"from": old.to_dict(), "to": new.to_dict()} for n, (old, new) in switched.items()},
        others,
    )


def _rollout(
    checked: Preflight,
    now: InForce,
    plan: Mapping[str, object],
    targets: Mapping[str, Layout],
    where: str,
) -> RolloutPlan:
    """Of a plan as it is written. Raises: SpecError."""
    return plan_rollout(
        plan,
        config=checked.config,
        current=now.rollout,
        world=_world(now, targets),
        where=where,
    )


def _world(now: InForce, targets: Mapping[str, Layout]) -> int:
    """The ranks that the job will have: all units take the job's."""
    return next(iter({**now.layouts, **targets}.values())).world_size
