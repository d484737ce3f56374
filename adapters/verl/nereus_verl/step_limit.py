"""A job of which a step never ends is ended, so that it can be started again.

Within a step verl waits without a limit for ranks and rollout servers. A process that died is
noticed at once; one that is stopped, or hangs with its machine, neither answers nor dies.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from nereus_plugins.control.driver import say

# Last words may hang too, with a file system; then what was said goes from here to the job's log.
_WORDS_S = 5.0
_FLUSHED_S = 3.0


class StepLimit:
    """Ends this process, the job's driver, with status 1 where a step takes longer; the job's
    command ends with it, as where the driver is killed.

    Args:
        limit_s: of a step with its transition, checkpoint and validation; None: no limit.
        last_words: says what the job can be started again from.
    """

    def __init__(self, limit_s: float | None, last_words: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._last_words = last_words
        self._changed = threading.Condition()
        self._step: int | None = None  # None: over
        self._deadline_s = 0.0
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """A step begins, and with it the one before has ended."""
        if self._limit_s is None:
            return
        with self._changed:
            self._step, self._deadline_s = step, time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, daemon=True, name="nereus-step-limit"
                )
                self._thread.start()

    def close(self) -> None:
        """No step is under way any more."""
        with self._changed:
            self._step = None
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._step is not None:
                left_s = self._deadline_s - time.monotonic()
                if left_s <= 0.0:
                    break
                self._changed.wait(left_s)
            step = self._step
        if step is not None:
            self._end(step)

    def _end(self, step: int) -> None:
        say(
            f"step {step} has not ended within {self._limit_s:g} s (nereus.step_timeout_s): a "
            "rank, a rollout server or a file system hangs. The job ends here"
        )
        words = threading.Thread(target=self._last_words, daemon=True)
        words.start()
        words.join(_WORDS_S)
        sys.stdout.flush()
        time.sleep(_FLUSHED_S)
        os._exit(1)  # whatever the driver waits for cannot be interrupted
