"""Answers of worker processes to a trainer's driver, which never waits for ever for them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

POLL_S = 1.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class WorkersFailed(RuntimeError):
    """Workers died, raised, or did not answer in time; the message names ranks and phase."""


def collect(
    submitted: Mapping[Any, int],
    phase: str,
    *,
    timeout_s: float,
    hopeless: Callable[[Any], str] = lambda result: "",
    without: Callable[[int, str], Any] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """What worker processes answer, by rank.

    Args:
        submitted: Ray's reference to each answer, and whose it is.
        phase: what is being done, for error messages.
        timeout_s: for all of them together.
        hopeless: why, after this result of one rank, the others need not be waited for; "" if not.
        without: for a rank and how it failed, the result to go on with; it raises WorkersFailed
            where the job cannot go on without that rank (as by default, without any).
        meanwhile: called now and then while answers are waited for.

    Raises: WorkersFailed. At once when a process died; its peers notice by their own timeouts.
    """
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
