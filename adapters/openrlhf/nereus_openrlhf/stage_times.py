"""Seconds of each model-stage, by when the model's ranks have answered.

OpenRLHF's own timers hold what several models do at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

# What groups are asked to do, by model, as verl's timers call it; but for a reward model: verl's
# `reward` is not a model's alone.
_FIT = ("fit", "reload_states", "offload_states")
TIMERS: Mapping[tuple[str, str], str] = {
    ("actor", "forward"): "old_log_prob",
    ("critic", "forward"): "values",
    ("ref", "forward"): "ref",
    ("reward", "forward"): "reward_score",
    **{("actor", method): "update_actor" for method in _FIT},
    **{("critic", method): "update_critic" for method in _FIT},
}


class StageTimes:
    """Of one step at a time. Not safe for use by several threads at once."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._waiting: list[threading.Thread] = []
        self._lock = threading.Lock()

    def watch(self, unit: str, method: str, answers: Sequence[Any]) -> None:
        """A group was asked, and these are Ray's references to what its ranks will answer. Does not
        wait."""
        timer = TIMERS.get((unit, method))
        if timer is None:
            return
        thread = threading.Thread(
            target=self._wait, args=(timer, list(answers), time.perf_counter()), daemon=True
        )
        self._waiting.append(thread)
        thread.start()

    def _wait(self, timer: str, answers: list[Any], begin_s: float) -> None:
        ray.wait(answers, num_returns=len(answers), fetch_local=False)
        spent_s = time.perf_counter() - begin_s
        with self._lock:
            self._seconds[timer] = self._seconds.get(timer, 0.0) + spent_s

    def take(self) -> dict[str, float]:
        """Seconds by timer since the last call; to be called once all has been answered."""
        for thread in self._waiting:
            thread.join()
        self._waiting = []
        seconds, self._seconds = self._seconds, {}
        return seconds
