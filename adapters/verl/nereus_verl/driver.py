"""Calls from the trainer's process into all worker processes, which never wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nereus_plugins.control.workers import collect
from nereus_verl import verl_private


def call_all(
    workers: Sequence[Any],
    phase: str,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    hopeless: Callable[[Any], str] = lambda result: "",
    each: Sequence[tuple[Any, ...]] | None = None,
    without: Callable[[int, str], Any] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run `function(worker, *args)` in every worker process; results by rank.

    Args:
        workers: Ray handles by rank.
        each: by rank, further arguments.
        phase, timeout_s, hopeless, without, meanwhile: as in `collect`.

    Raises: WorkersFailed.
    """
    pending = submit(workers, function, *args, each=each)
    return collect(
        pending,
        phase,
        timeout_s=timeout_s,
        hopeless=hopeless,
        without=without,
        meanwhile=meanwhile,
    )


def submit(
    workers: Sequence[Any],
    function: Callable[..., Any],
    *args: Any,
    each: Sequence[tuple[Any, ...]] | None = None,
) -> dict[Any, int]:
    """The first half of `call_all`: what to give to `collect`. Does not wait.

    Whatever is called in these workers meanwhile waits behind it.
    """
    return {
        verl_private.call_worker(worker, function, *args, *(each[rank] if each else ())): rank
        for rank, worker in enumerate(workers)
    }
