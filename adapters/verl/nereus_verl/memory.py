"""Getting the memory of dropped engines back, once for all units of a transition.

Models hang together in cycles, so only a full garbage collection frees them, and in a process full
of libraries that takes near half a second.
"""

from __future__ import annotations

import gc

import torch


class Outstanding:
    """Layouts of this process that were built beside the current ones and not yet released.

    A transition releases as many as it built (the old ones after commit, the targets after an
    abort); the last of them collects the garbage of all.
    """

    def __init__(self) -> None:
        self._count = 0

    def built(self) -> None:
        self._count += 1

    def released(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._count = 0
            collect()


def collect() -> None:
    """Free what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


OUTSTANDING = Outstanding()
