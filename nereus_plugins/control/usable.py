"""Which GPUs a live job may use: its own, what its cluster has free, and what it was told."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from nereus_plugins.control.inbox import Granted
from nereus_plugins.job import Gpus


def usable_gpus(
    used: int,
    free: int,
    granted: Granted | None,
    draining: Mapping[int, float] = MappingProxyType({}),
) -> Gpus:
    """
    Args:
        used: by the plan in force. free: further ones that the job could have now.
        granted: what `nereus gpus` said last.
        draining: ranks whose node goes: until when it is there, in seconds since the epoch. One is
            always kept: a job on none cannot go on.
    """
    keep, left_s = used, math.inf
    if draining:
        keep = max(1, used - len(draining))
        left_s = max(min(draining.values()) - time.time(), 0.0)
    if granted is not None and granted.gpus < used:
        keep = min(keep, granted.gpus)
        left_s = min(left_s, max(granted.deadline - time.monotonic(), 0.0))
    if keep < used:
        return Gpus(used, used - keep, left_s)
    most = used + free
    return Gpus(most if granted is None else min(most, granted.gpus))
