"""What a job says last: what failed, and what it can be started again from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus_plugins.control.attempt import Attempt, TransitionFailed
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.trace.record import RECORDS_FILE
from nereus_verl import resume, stamp
from nereus_verl.config import NereusConfig


def of_attempt(attempt: Attempt, config: Mapping[str, Any], run_dir: Path) -> str:
    """Where a transition failed. Args: config: verl's."""
    return (
        f"the transition after step {attempt.step} ({attempt.listed()}) failed and state was lost "
        f"with it: {attempt.reason}. The job ends here: {_restart(config)}. Records: "
        f"{run_dir / RECORDS_FILE}"
    )


@contextmanager
def if_lost(failure: str, step: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Raises: TransitionFailed, with last words, where ranks are lost meanwhile.

    Args: failure: what could not be done then, in words. step: the trainer's last. config: verl's.
    """
    try:
        yield
    except WorkersFailed as error:
        raise TransitionFailed(
            f"after step {step} {failure}: {error}. The job ends here: {_restart(config)}"
        ) from error


def _restart(config: Mapping[str, Any]) -> str:
    settings = NereusConfig.from_dict(config.get("nereus") or {}).snapshot
    if words := resume.newest_words(settings, config):
        return words
    try:
        checkpoint = stamp.latest_checkpoint(config)
    except (OSError, ValueError) as unreadable:
        return f"which checkpoint is the newest cannot be read: {unreadable}"
    return (
        f"the newest checkpoint is {checkpoint}; its {stamp.FILE} names the settings to "
        "restart with"
        if checkpoint is not None
        else "there is no checkpoint yet; start again (trainer.save_freq saves some)"
    )
