"""What was asked of a job and what became of it: written by commands, pulled by the driver.

At most one plan is pending. Pausing is a state of the inbox too: while it lasts, no plan is
accepted, a pending one is refused, and the driver skips what its schedule says.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus_plugins.control.lent import Granted
from nereus_plugins.control.messages import (
    ACCEPTED,
    EXECUTING,
    FAILED,
    FINAL,
    OK,
    REFUSED,
)

KEPT = 16  # answered plans that can still be asked about
MOST_REASON = 4000  # characters


class Refused(RuntimeError):
    """A command was not taken; the text says why, and what to do.

    by_plan: the plan cannot be run by this job, whenever it comes.
    """

    by_plan = False


@dataclass
class Submitted:
    """A plan that was submitted.

    number: from 1, in the job. epoch: that it was made for. plan: as written, see
    `messages.check_plan`. what: what it changes, in words. step: after which it is or was executed,
    None before. state: see `messages`. phase: of the transition that is being executed. reason: why
    it ended so. by_plan: refused because the job cannot run it, whenever it comes. predicted: what
    its controller expects of it; empty: a person's plan.
    """

    number: int
    epoch: int
    plan: Mapping[str, Any]
    what: str
    state: str = ACCEPTED
    reason: str = ""
    step: int | None = None
    phase: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    by_plan: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "epoch": self.epoch,
            "what": self.what,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "phase": self.phase,
            "predicted": dict(self.predicted),
            "by_plan": self.by_plan,
        }


class Inbox:
    """Thread-safe; the driver never waits in it for a command.

    Args:
        check: says in words what a plan changes in the job as it is now; raises ValueError naming
            the setting if it cannot be run. Called from a thread of the server: it may only read.
        adapt: makes a controller's plan one that the job can run; raises as `check`.
        more: further fields of the status as they are when it is asked for; as `check`.
        takes_gpus: why commands cannot say which GPUs the job may use; "": they can.
        fewest_gpus: how many it cannot go on without.
    """

    def __init__(
        self,
        check: Callable[[Mapping[str, Any]], str],
        *,
        adapt: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda plan: plan,
        more: Callable[[], Mapping[str, Any]] = dict,
        takes_gpus: str = "this job has no controller",
        fewest_gpus: int = 1,
    ) -> None:
        self._check = check
        self._adapt = adapt
        self._more = more
        self._takes_gpus = takes_gpus
        self._fewest_gpus = fewest_gpus
        self._granted: Granted | None = None
        self._changed = threading.Condition()
        self._job: dict[str, Any] = {"epoch": 0}
        self._pending: Submitted | None = None
        self._answered: deque[Submitted] = deque(maxlen=KEPT)
        self._count = 0
        self._paused = False
        self._closed = False
        self._doing = ""

    # -- commands ---------------------------------------------------------------------------------

    def submit(
        self, epoch: int, plan: Mapping[str, Any], predicted: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Args: predicted: of a controller's plan. Raises: Refused."""
        with self._changed:
            self._require_free(epoch)
        try:
            plan = plan if predicted is None else self._adapt(plan)
            what = self._check(plan)
        except ValueError as error:
            refused = Refused(str(error))
            refused.by_plan = True
            raise refused from None
        with self._changed:
            self._require_free(epoch)
            self._count += 1
            self._pending = Submitted(self._count, epoch, plan, what, predicted=predicted or {})
            self._changed.notify_all()
            return self._pending.to_dict()

    def wait(self, number: int, seen: str, timeout_s: float, phase: str = "") -> dict[str, Any]:
        """A submitted plan once its state is no longer `seen` or its phase no longer `phase`, or as
        it is after `timeout_s`.

        Raises: Refused if it is not known (any more).
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._find(number)
                left_s = deadline - time.monotonic()
                changed = found.state != seen or found.phase != phase
                if changed or found.state in FINAL or left_s <= 0:
                    return found.to_dict()
                self._changed.wait(left_s)

    def pause(self, epoch: int) -> dict[str, Any]:
        """Raises: Refused."""
        with self._changed:
            self._require_epoch(epoch)
            self._paused = True
            if self._pending is not None and self._pending.state == ACCEPTED:
                self._end(self._pending, REFUSED, "the job was paused before its next boundary")
            return self._status()

    def resume(self, epoch: int) -> dict[str, Any]:
        """Raises: Refused."""
        with self._changed:
            self._require_epoch(epoch)
            self._paused = False
            return self._status()

    def status(self) -> dict[str, Any]:
        with self._changed:
            status = self._status()
        # Afterwards: a plan that is newer than the epoch is asked for again, an older one is not.
        return {**status, **self._more()}

    def grant(
        self,
        epoch: int,
        gpus: int,
        notice_s: float,
        lent_s: float | None = None,
        spot_s: float | None = None,
    ) -> dict[str, Any]:
        """The job may use so many GPUs from now on; others it must have left after `notice_s`.

        Args:
            lent_s: after which those beyond its own have to be left again: its own are those that
                it uses now, without what was lent to it before.
            spot_s: notice with which these may be taken back before; None: they are firm.

        Raises: Refused.
        """
        with self._changed:
            self._require_epoch(epoch)
            if self._takes_gpus:
                raise Refused(self._takes_gpus)
            if gpus < self._fewest_gpus:
                raise Refused(
                    f"gpus: this job cannot go on with fewer than {self._fewest_gpus} GPUs"
                )
            now = time.monotonic()
            own, until = gpus, math.inf
            if lent_s is not None or spot_s is not None:
                own = self._job["gpus"]
                if self._granted is not None:
                    own = min(own, self._granted.at(now).own)
                if own >= gpus:
                    raise Refused(
                        f"gpus: {own} are the job's own: of {gpus}, none would be lent to it"
                    )
                until = now + lent_s if lent_s is not None else math.inf
            self._granted = Granted(gpus, now + notice_s, own, until, spot_s)
        return self.status()

    def granted(self) -> Granted | None:
        """What was said last of GPUs, None if nothing was."""
        with self._changed:
            return self._granted

    # -- the driver's side ------------------------------------------------------------------------

    def inform(self, *, epoch: int, **job: Any) -> None:
        """How the job is now; a pending plan for another epoch is refused.

        Args: job: further fields of the status, JSON.
        """
        with self._changed:
            self._job = {"epoch": epoch, **job}
            pending = self._pending
            if pending is not None and pending.state == ACCEPTED and pending.epoch != epoch:
                self._end(pending, REFUSED, self._stale(pending.epoch))

    @property
    def paused(self) -> bool:
        with self._changed:
            return self._paused

    def waiting(self) -> bool:
        """Whether a plan is pending."""
        with self._changed:
            return self._pending is not None

    def pending_plan(self) -> Mapping[str, Any] | None:
        """The plan that `pull` would give now; it may be gone by then."""
        with self._changed:
            return None if self._pending is None else self._pending.plan

    def pull(self, step: int) -> Submitted | None:
        """The pending plan, which the caller executes now, after `step`, and answers."""
        with self._changed:
            if self._pending is not None:
                self._pending.state = EXECUTING
                self._pending.step = step
                self._changed.notify_all()
            return self._pending

    def doing(self, phase: str, step: int = 0) -> None:
        """The transition after `step`, submitted or not, is in this phase; "": it is over."""
        with self._changed:
            self._doing = phase and f"transition after step {step}: {phase}"
            if phase and self._pending is not None and self._pending.state == EXECUTING:
                self._pending.phase = phase
            self._changed.notify_all()

    def answer(self, state: str, reason: str = "", *, by_plan: bool = False) -> None:
        """How the plan that was pulled ended."""
        with self._changed:
            if self._pending is not None:
                self._pending.by_plan = by_plan
                self._end(self._pending, state, reason)

    def close(self) -> None:
        """The job ends: what is pending is answered, nothing is accepted any more."""
        with self._changed:
            self._closed = True
            if self._pending is not None and self._pending.state == ACCEPTED:
                self._end(self._pending, REFUSED, "the job ended before its next boundary")
            elif self._pending is not None:
                self._end(self._pending, FAILED, "the job ended in this transition; see its log")
            self._changed.notify_all()

    # -- under the lock ---------------------------------------------------------------------------

    def _require_epoch(self, epoch: int) -> None:
        if self._closed:
            raise Refused("the job is ending")
        if epoch != self._job["epoch"]:
            raise Refused(self._stale(epoch))

    def _require_free(self, epoch: int) -> None:
        self._require_epoch(epoch)
        if self._paused:
            raise Refused("the job is paused: it executes no transition; `nereus resume` first")
        if self._pending is not None:
            raise Refused(
                f"another plan is pending (number {self._pending.number}, {self._pending.state}: "
                f"{self._pending.what}); wait for its end, or `nereus pause` to have it refused"
            )

    def _stale(self, epoch: int) -> str:
        return (
            f"stale: made for epoch {epoch}, the job is in epoch {self._job['epoch']}; look at "
            "`nereus status`, and submit again what still holds"
        )

    def _find(self, number: int) -> Submitted:
        for one in (*self._answered, *([self._pending] if self._pending is not None else [])):
            if one.number == number:
                return one
        raise Refused(f"this job knows no plan number {number} (any more)")

    def _end(self, submitted: Submitted, state: str, reason: str) -> None:
        submitted.state, submitted.reason = state, reason[:MOST_REASON]
        self._answered.append(submitted)
        self._pending = None
        self._changed.notify_all()

    def _status(self) -> dict[str, Any]:
        return {
            "state": OK,
            "reason": "",
            "job": self._job,
            "paused": self._paused,
            "doing": self._doing,
            "pending": None if self._pending is None else self._pending.to_dict(),
            "answered": [one.to_dict() for one in self._answered],
        }
