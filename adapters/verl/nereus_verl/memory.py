"""Memory of this process and its node: what is free, and getting back that of dropped engines.

Models hang together in cycles, so only a full garbage collection frees them, and in a process full
of libraries that takes near half a second: it is done once for all units of a transition.
"""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own


class Outstanding:
    """Layouts of this process that were built beside the current ones and not yet released.

    A transition releases as many as it built (the old ones after commit, the targets after an
    abort); the last of them collects the garbage of all.

    Attributes:
        later: leave the garbage until `collect_left`, when nobody waits for it.
    """

    def __init__(self) -> None:
        self.later = False
        self._count = 0
        self._left = False

    def built(self) -> None:
        self._count += 1

    def released(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._count = 0
            self._left = self.later
            if not self.later:
                collect()

    def collect_left(self) -> None:
        if self._left:
            self._left = False
            collect()


def collect() -> None:
    """Free what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    """Host memory that is left on this node, within the limit of the container if it has one."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if limit == "max":
        return free
    # The page cache counts as used, and is given up when memory is asked for.
    return min(free, max(int(limit) - used + int(cache.get("inactive_file", 0)), 0))


OUTSTANDING = Outstanding()
