"""Failure injection: how tests and `nereus selftest` prove what a transition does when it fails.

    NEREUS_FAULT="step=<phase>,rank=<r>,kind=raise|kill|hang|corrupt[,epoch=N][,seconds=S]"

Several faults are separated by ";". Unset, `inject` does nothing. Every phase of a transition calls
it once per rank before doing its work.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

ENVIRONMENT_VARIABLE = "NEREUS_FAULT"

PHASES = (
    "free_gradients",
    "form_groups",
    "park",
    "build",
    "describe",
    "plan",
    "agree",
    "move",
    "verify",
    "commit",
    "release",
    "fetch",
)
KINDS = ("raise", "kill", "hang", "corrupt")
HANG_S = 3600.0


class InjectedFault(RuntimeError):
    """Raised by an injected fault of kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject: at `step` on `rank`, in epoch `epoch` only if that is given."""

    step: str
    rank: int
    kind: str
    epoch: int | None = None
    seconds: float = HANG_S

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault; raises ValueError naming what is wrong with it."""
        fields: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            if not equals or key not in ("step", "rank", "kind", "epoch", "seconds"):
                raise ValueError(
                    f"{ENVIRONMENT_VARIABLE}={text!r}: {part!r} is not one of step=, rank=, kind=, "
                    "epoch=, seconds="
                )
            fields[key] = value
        missing = [key for key in ("step", "rank", "kind") if key not in fields]
        if missing:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={text!r}: lacks {', '.join(missing)}")
        if fields["step"] not in PHASES:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: step must be one of {', '.join(PHASES)}")
        if fields["kind"] not in KINDS:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: kind must be one of {', '.join(KINDS)}")
        if fields["kind"] == "corrupt" and fields["step"] != "verify":
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: kind=corrupt flips a byte of the target between move and "
                "verify: set step=verify"
            )
        return cls(
            step=fields["step"],
            rank=int(fields["rank"]),
            kind=fields["kind"],
            epoch=int(fields["epoch"]) if "epoch" in fields else None,
            seconds=float(fields.get("seconds", HANG_S)),
        )


def inject(step: str, rank: int, epoch: int) -> bool:
    """Fail here if NEREUS_FAULT says so.

    Returns True where the caller must flip one byte of its target views (kind "corrupt"); False
    otherwise. Raises InjectedFault, kills this process with SIGKILL, or sleeps, by kind.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return False
    return any([_inject(Fault.parse(part), step, rank, epoch) for part in text.split(";")])


def _inject(fault: Fault, step: str, rank: int, epoch: int) -> bool:
    if fault.step != step or fault.rank != rank or fault.epoch not in (None, epoch):
        return False
    if fault.kind == "raise":
        raise InjectedFault(f"injected at {step} on rank {rank}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        time.sleep(fault.seconds)
    return fault.kind == "corrupt"
