"""The leases of a live job, from what its cluster and its users say.

    Ray's drains of nodes, and what it has free   \\
    `nereus drain` (signal, file, hook) -> Ray     }-> leases -> status -> the controller
    `nereus gpus`, by hand or by a scheduler      /
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from nereus_plugins.job import Lease


@dataclass(frozen=True)
class Granted:
    """GPUs that the job may use, by command. Times are of `time.monotonic`.

    gpus: how many. deadline: until which those beyond must have been left.
    own: how many of them the job keeps when those that are only lent to it go, which is at `until`
        (infinite: nobody has said), or before with `notice_s` (None: not before).
    """

    gpus: int
    deadline: float
    own: int
    until: float = math.inf
    notice_s: float | None = None

    def at(self, now: float) -> Granted:
        """As it stands: without GPUs that were lent until now."""
        return self if now < self.until else Granted(self.own, self.until, self.own)


def leases_of(
    ranks: int, free: int, leaving_s: Sequence[float], granted: Granted | None, now: float
) -> tuple[Lease, ...]:
    """The leases of a job, one GPU a rank.

    Its ranks are the first devices, those that must go first the last of them; at least one stays,
    as a job on none cannot go on. While ranks must go, no others are offered.

    Args:
        ranks: of the job. free: that could join.
        leaving_s: of ranks whose node goes, seconds until then, ascending.
        granted: None: nobody has said anything. now: by `time.monotonic`.
    """
    until_s = [math.inf] * ranks
    for i, left_s in enumerate(leaving_s[: ranks - 1]):
        until_s[ranks - 1 - i] = max(left_s, 0.0)
    notice_s: list[float | None] = [None] * ranks
    if granted is not None:
        granted = granted.at(now)
        for i in range(granted.gpus, ranks):
            until_s[i] = min(until_s[i], max(granted.deadline - now, 0.0))
    if all(math.isinf(one) for one in until_s):
        joining = free if granted is None else max(min(free, granted.gpus - ranks), 0)
        until_s += [math.inf] * joining
        notice_s += [None] * joining
    if granted is not None:
        for i in range(granted.own, len(until_s)):
            until_s[i] = min(until_s[i], granted.until - now)
            notice_s[i] = granted.notice_s
    return tuple(
        Lease(len(list(devices)), None if math.isinf(left_s) else left_s, notice)
        for (left_s, notice), devices in groupby(zip(until_s, notice_s, strict=True))
    )
