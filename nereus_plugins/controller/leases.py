"""What leases allow: which devices the next step may use, and which a plan may be made for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nereus_plugins.job import Lease


class Level(NamedTuple):
    """Devices 0 .. gpus-1 can be held together for so many steps; infinite: as long as needed."""

    gpus: int
    steps: float


def usable(leases: Sequence[Lease], leave_s: float) -> int:
    """How many GPUs the next step may use: those that need not be left before it ends.

    Args: leave_s: seconds before its end from which on a lease is left.
    """
    gpus = 0
    for lease in leases:
        if lease.until_s is not None and lease.until_s <= leave_s:
            break
        gpus += lease.gpus
    return gpus


def levels(
    leases: Sequence[Lease], leave_s: float, step_s: float, needed_steps: float, held: int
) -> tuple[Level, ...]:
    """What a plan may be made for: fewer GPUs for longer, or more GPUs for fewer steps.

    GPUs that can be taken back with less notice than it takes to leave them are only used where
    the job holds them already.

    Args:
        leave_s: as in `usable`. step_s: seconds of a step. held: GPUs of the plan in force.
        needed_steps: for how many steps a plan is wanted at most.
    """
    out: list[Level] = []
    gpus = 0
    for lease in leases:
        left_s = math.inf if lease.until_s is None else lease.until_s - leave_s
        if left_s <= 0:
            break
        sudden = lease.notice_s is not None and lease.notice_s <= leave_s
        more = min(lease.gpus, held - gpus) if sudden else lease.gpus
        if more <= 0:
            break
        gpus += more
        steps = math.inf
        if left_s < needed_steps * step_s:
            steps = left_s / step_s
        if out and out[-1].steps == steps:
            out.pop()
        out.append(Level(gpus, steps))
    return tuple(out)


def within(found: Sequence[Level], gpus: int) -> tuple[Level, ...]:
    """Of `levels`, the one that lasts longest, as it is, and of the others what lies within so many
    GPUs."""
    out = list(found[:1])
    for level in found[1:]:
        if out[-1].gpus >= gpus:
            break
        out.append(Level(min(level.gpus, gpus), level.steps))
    return tuple(out)
