"""The controller of a live job: follows its records, plans while the step runs, proposes.

Everything it learns comes from the records, and everything it wants goes through the job's
commands: in mode act it submits a plan as a user would, in mode advise it leaves that to
`nereus approve`. The job checks what it is given, and refuses what is stale or cannot be run.

    python -m nereus_plugins.control.live <run-dir>
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus_plugins.control.beside import Launch
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import FINAL, REFUSED, MessageError
from nereus_plugins.control.offered import Offered
from nereus_plugins.controller.controller import Controller
from nereus_plugins.controller.decision import Decision
from nereus_plugins.controller.journal import FILE, DecisionJournal, DecisionJournalError
from nereus_plugins.job import Lease
from nereus_plugins.spec import GlobalPlan
from nereus_plugins.spec.files import owners_only
from nereus_plugins.trace.record import (
    NewRecords,
    Record,
    RunRecord,
    StepRecord,
    TransitionRecord,
    now_s,
)

LOCK_FILE = "controller.lock"
POLL_S = 0.2
EARLIER_S = 1.0  # that a lease ends earlier than it did is news
NICE = 5  # behind the ranks, and not starved where cores are few


class Live:
    """One controller beside one job.

    Args: run_dir: the job's. parent: pid of its driver.

    Raises: OSError, SpecError: the run directory has not what the driver writes.
    """

    def __init__(self, run_dir: Path, parent: int) -> None:
        self._run_dir = run_dir
        self._parent = parent
        self._launch = Launch.read(run_dir)
        self._records = NewRecords(run_dir)
        self._controller, self._seen = _begin(run_dir, self._launch)
        self._step = 0
        # For which step, and until when (by `time.monotonic`) its GPUs were there.
        self._decided: tuple[int, tuple[Lease, ...], list[float]] | None = None
        self._offered = _offered(run_dir)
        self._submitted: int | None = None  # number of the plan that the job has from here

    def run(self) -> None:
        """Until the driver is gone."""
        while os.getppid() == self._parent:
            self.look()
            time.sleep(POLL_S)

    def look(self) -> None:
        """Learn what is new; decide, where something is.

        Raises: OSError, RecordError, DecisionJournalError.
        """
        self._learn()
        job = self._ask("status")
        if job is None or job["state"] == REFUSED:
            return
        self._follow(job)
        said = job.get("leases")
        if said is None or self._submitted is not None or not self._step:
            return
        leases = tuple(Lease.from_dict(one) for one in said)
        if not self._is_news(leases):
            return
        decision = self._controller.decide(leases, self._step)
        # Planning takes time: a job that was started again meanwhile is not this one's.
        if decision.plan is not None and os.getppid() == self._parent:
            self._offer(decision)

    def _is_news(self, leases: tuple[Lease, ...]) -> bool:
        """Whether a step has ended since the last decision, or other GPUs are there, or they have
        to be left earlier than they had to: a notice that runs is the same notice."""
        now_s = time.monotonic()
        ends = [now_s + one.until_s for one in leases if one.until_s is not None]
        same = tuple(replace(one, until_s=one.until_s and 0.0) for one in leases)
        if self._decided is not None and self._decided[:2] == (self._step, same):
            before = self._decided[2]
            if all(end > was - EARLIER_S for end, was in zip(ends, before, strict=True)):
                return False
        self._decided = (self._step, same, ends)
        return True

    # -- learning ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        try:
            new = list(self._records.read())
        except FileNotFoundError:
            return
        for record in new:
            if isinstance(record, RunRecord):  # started again, from an earlier step maybe
                self._step = 0
            if isinstance(record, StepRecord):
                self._step = record.step
            if not isinstance(record, (StepRecord, TransitionRecord)):
                continue
            if self._seen:  # before this process began
                self._seen -= 1
                continue
            self._controller.observe(record)

    def _follow(self, job: dict[str, Any]) -> None:
        """What the job's answer says of a plan that was submitted, and of its plan in force."""
        if self._submitted is not None:
            answered = {one["number"]: one for one in job["answered"]}.get(self._submitted)
            pending = job["pending"]
            if answered is not None or pending is None or pending["number"] != self._submitted:
                self._submitted = None
                if answered is not None and answered["state"] == REFUSED:
                    self._refused(answered["reason"], by_plan=answered.get("by_plan", False))
                self._learn()  # a transition is recorded before it is answered
        plan, epoch = job.get("global_plan"), int(job["job"]["epoch"])
        if plan is None or epoch == self._controller.epoch or self._submitted is not None:
            return
        self._learn()  # an approved proposal is taken up by its record; others' plans as they are
        if epoch != self._controller.epoch:
            self._controller.adopt(GlobalPlan.from_dict(plan), epoch)

    # -- proposing --------------------------------------------------------------------------------

    def _offer(self, decision: Decision) -> None:
        assert decision.plan is not None
        last = self._offered
        again = last is not None and (last.epoch, last.plan.assignments) == (
            decision.epoch, decision.plan.assignments,
        )  # fmt: skip
        offered = Offered(
            number=(0 if last is None else last.number) + (not again),
            epoch=decision.epoch,
            plan=decision.plan,
            digest=decision.digest,
            reason=decision.reason,
            predicted=decision.predicted(),
            forced=decision.forced,
        )
        self._offered = offered
        print(f"step {decision.step}: proposal {offered.number}: {offered.reason}", flush=True)
        if self._launch.config.mode == "observe":
            return
        offered.write(self._run_dir)
        if self._launch.config.mode != "act":
            return
        reply = self._ask("submit", **offered.fields())
        if reply is None:
            return
        if reply["state"] == REFUSED:
            self._refused(reply["reason"], by_plan=bool(reply.get("by_plan")))
        elif reply["state"] not in FINAL:
            self._submitted = int(reply["number"])

    def _refused(self, reason: str, *, by_plan: bool) -> None:
        """The job did not take the last proposal. by_plan: it cannot run it, whenever."""
        print(f"step {self._step}: refused: {reason}", flush=True)
        self._controller.observe(
            TransitionRecord(
                step=self._step,
                epoch=self._controller.epoch,
                time_unix_s=now_s(),
                outcome="aborted" if by_plan else "skipped",
                reason=f"refused: {reason}",
                units={},
                seconds={},
                digest="",
                predicted={} if self._offered is None else self._offered.predicted,
            )
        )

    def _ask(self, command: str, **fields: Any) -> dict[str, Any] | None:
        """The job's reply, None while it cannot be reached: it starts, ends, or is busy."""
        try:
            return Client(self._run_dir).call(command, **fields)
        except (NoLiveJob, MessageError):
            return None


def _begin(run_dir: Path, launch: Launch) -> tuple[Controller, int]:
    """The controller, and how many of the records it passes over: those that it knows, as its
    journal says, where there is one of the same job and settings; else those of earlier runs."""
    journal = DecisionJournal(run_dir)
    try:
        entries = journal.read()
        starts = [entry for entry in entries if entry["kind"] == "start"]
        start = starts[-1] if starts else {}
        if (start.get("setting"), start.get("config")) == (
            _plain(launch.setting), _plain(launch.config),
        ):  # fmt: skip
            controller = Controller.resume(journal)
            if launch.epoch == controller.epoch:
                # A job that is started again is in the plan of its configuration.
                controller.adopt(launch.plan, launch.epoch)
            observed = [e["record"] for e in entries if e["kind"] == "observation"]
            return controller, _known(run_dir, observed)
    except DecisionJournalError as error:
        print(f"not resumed: {error}", flush=True)
    if journal.path.exists():
        journal.close()
        aside = next(
            path
            for path in (run_dir / f"{FILE}.{n}" for n in range(1, 1 << 30))
            if not path.exists()
        )
        os.replace(journal.path, aside)
        journal = DecisionJournal(run_dir)
    controller = Controller(launch.setting, launch.config, launch.plan, launch.epoch, journal)
    return controller, _of_earlier_runs(run_dir)


def _of_earlier_runs(run_dir: Path) -> int:
    """How many step and transition records come before the run that goes on, which may be of
    another job."""
    count = before = 0
    for record in _all(run_dir):
        if isinstance(record, RunRecord):
            before = count
        count += isinstance(record, (StepRecord, TransitionRecord))
    return before


def _all(run_dir: Path) -> Iterator[Record]:
    """Those that are there."""
    with contextlib.suppress(FileNotFoundError):
        yield from NewRecords(run_dir).read()


def _known(run_dir: Path, observed: list[dict[str, Any]]) -> int:
    """How many of the run's step and transition records were observed."""
    times = {(one["schema"], one["time_unix_s"]) for one in observed}
    count = known = 0
    for record in _all(run_dir):
        if isinstance(record, (StepRecord, TransitionRecord)):
            count += 1
            if _identity(record) in times:
                known = count
    return known


def _identity(record: Record) -> tuple[str, float]:
    fields = record.to_dict()
    return fields["schema"], fields["time_unix_s"]


def _offered(run_dir: Path) -> Offered | None:
    """The last proposal."""
    try:
        return Offered.read(run_dir)
    except (OSError, ValueError):
        return None


def _plain(record: Any) -> Any:
    """As a journal gives it back."""
    return json.loads(json.dumps(record.to_dict()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="nereus_plugins.control.live", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="ends when it is gone")
    args = parser.parse_args()
    os.nice(NICE)
    with only_one(args.run_dir, args.parent) as alone:
        if alone:
            Live(args.run_dir, args.parent).run()


@contextlib.contextmanager
def only_one(run_dir: Path, parent: int) -> Iterator[bool]:
    """Waits until no other controller has the run directory, whose journal has one writer: that of
    a driver that was killed may be planning still. False: the driver went first.

    Raises: OSError.
    """
    # The kernel takes the lock back from a process that is gone, however it went.
    lock = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        owners_only(lock)
        said = False
        while os.getppid() == parent:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not said:
                    print("an earlier controller is still in this run directory", flush=True)
                said = True
                time.sleep(POLL_S)
            else:
                yield True
                return
        yield False
    finally:
        os.close(lock)


if __name__ == "__main__":
    main()
