"""Says how far a long exchange is. Short ones say nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

SAYS_EVERY_S = 5.0


class MoveProgress:
    """`TransitionOptions.progress` of the one rank that speaks for all.

    Args:
        step: the trainer's. clock: in seconds.
    """

    def __init__(self, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step = step
        self._clock = clock
        self._done = 0
        self._said_s: float | None = None

    def __call__(self, done: int, total: int) -> None:
        """Bytes that this rank has moved, and has to move, in the exchange under way."""
        now = self._clock()
        if self._said_s is None or done < self._done:  # an exchange begins
            self._said_s = now
        self._done = done
        if now - self._said_s >= SAYS_EVERY_S:
            self._said_s = now
            print(
                f"nereus: step {self._step}: moving, {done / 2**30:.1f} of {total / 2**30:.1f} GiB "
                "of rank 0",
                flush=True,
            )
