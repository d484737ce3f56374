"""Calls from the trainer's process into all worker processes, which never wait for ever."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nereus_verl import verl_private

POLL_S = 1.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class WorkersFailed(RuntimeError):
    """Workers died, raised, or did not answer in time; the message names ranks and phase."""


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
        phase: what is being done, for error messages.
        timeout_s: for all of them together.
        hopeless: why, after this result of one rank, the others need not be waited for; "" if not.
        each: by rank, further arguments.
        without: for a rank and how it failed, the result to go on with; it raises WorkersFailed
            where the job cannot go on without that rank (as by default, without any).
        meanwhile: called now and then while answers are waited for.

    Raises: WorkersFailed. At once when a process died; its peers notice by their own timeouts.
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


def collect(
    submitted: Mapping[Any, int],
    phase: str,
    *,
    timeout_s: float,
    hopeless: Callable[[Any], str] = lambda result: "",
    without: Callable[[int, str], Any] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """The second half of `call_all`, which `timeout_s` is for."""
    pending = dict(submitted)
    results: list[Any] = [None] * len(pending)
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
        for ref in ready:
            rank = pending.pop(ref)
            try:
                results[rank] = ray.get(ref)
            except RayError as error:
                failure = _failure(error, rank, phase)
                if without is None:
                    raise WorkersFailed(failure) from error
                results[rank] = without(rank, failure)
            if reason := hopeless(results[rank]):
                raise WorkersFailed(reason)
        if pending:
            meanwhile()
        if pending and time.monotonic() > deadline:
            ranks = ", ".join(str(r) for r in sorted(pending.values()))
            failure = (
                f"rank(s) {ranks} did not answer in {phase!r} within {timeout_s:g} s; raise "
                "nereus.timeout_s if they were only slow"
            )
            if without is None:
                raise WorkersFailed(failure)
            for rank in pending.values():
                results[rank] = without(rank, failure)
            break
    return results


def brief(error: BaseException) -> str:
    """An error in one line. Ray's carry the traceback of another process: its last line says what
    happened there."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    text = " ... ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else ""
    return f"{type(error).__name__}: {text}"


def _failure(error: RayError, rank: int, phase: str) -> str:
    if isinstance(error, RayActorError):
        return f"the worker process of rank {rank} died in {phase!r}"
    if isinstance(error, RayTaskError):
        return f"rank {rank} failed in {phase!r}: {error.cause!r}"
    return f"rank {rank} was lost in {phase!r}: {error}"
