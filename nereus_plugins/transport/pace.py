"""Slows an exchange down to a share of its speed, for as long as other work needs the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

# How often `hurry` is asked, and how soon after it a pause ends.
_POLL_S = 0.02


class Pace:
    """Pauses after each piece of work, so that the work takes a share of the time.

    Args:
        share: above 0, at most 1 (no pauses).
        hurry: asked during pauses; once true, there are no more of them.
        sleep: as `time.sleep`.
    """

    def __init__(
        self,
        share: float,
        hurry: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: must be above 0 and at most 1")
        self.paused_s = 0.0
        self._share = share
        self._hurry = hurry
        self._sleep = sleep
        self._hurried = False
        self._asked_s = -_POLL_S
        self._best_s = float("inf")  # a byte, with a peer that did not keep this rank waiting

    @property
    def on(self) -> bool:
        return self._share < 1.0 and not self._hurried

    def worked(self, seconds: float) -> None:
        """This rank alone was busy for so long."""
        left_s = seconds * (1.0 / self._share - 1.0)
        while left_s > 0.0 and self.on:
            if time.monotonic() - self._asked_s >= _POLL_S:
                self._hurried = self._hurry()
                self._asked_s = time.monotonic()
                continue
            nap_s = min(left_s, _POLL_S)
            self._sleep(nap_s)
            self.paused_s += nap_s
            left_s -= nap_s

    def moved(self, nbytes: int, seconds: float) -> None:
        """Messages of `nbytes` took so long, in which this rank may have waited for peers that
        paused: the fastest messages so far tell what they would have taken without. Pauses that
        answered each other's would grow."""
        if nbytes:
            self._best_s = min(self._best_s, seconds / nbytes)
            self.worked(nbytes * self._best_s)
