"""What the driver of a live job keeps and does in the same way in every framework.

    records.jsonl    what the job is, its steps, its transitions, in the order they happened
    journal.jsonl    what was committed, before any rank switched
    control.json     where the job is commanded (`inbox`, `server`)

An adapter executes transitions, in its framework's way; each is an `Attempt` for an epoch of its
own:

    attempt -> .. prepare .. -> commit: the journal -> .. ranks switch .. -> finished: its record
                                   '---------> take_back ---------------------'
    and where the job cannot go on:  failed: its record, and what the journal still promises
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nereus_plugins.control import by_ray, messages
from nereus_plugins.control.attempt import Attempt, Changes, TransitionFailed
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.server import Server
from nereus_plugins.gtg.journal import EpochError, Journal, JournalError
from nereus_plugins.job import Proposal, StaleProposal
from nereus_plugins.spec import SpecError
from nereus_plugins.trace import installed
from nereus_plugins.trace.record import (
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
    now_s,
)

JOURNAL_FILE = "journal.jsonl"
SUBMITTED = "plan"  # what messages call a submitted plan
_NOT_JOURNALED = (OSError, JournalError, EpochError)


class Scheduled(NamedTuple):
    """What is scheduled after a step.

    changes: for its record, where it is not run. run: it; raises SpecError where the plan does not
    fit what is in force.
    """

    changes: Changes
    run: Callable[[], TransitionRecord]


def make_folder(setting: str, folder: Path) -> None:
    """Make a directory that a job will write into, its owner's only.

    Raises: SpecError naming `setting`, where it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            f"{setting}: {folder} cannot be written to ({why}); set {setting} to a directory of "
            "yours"
        ) from error


def check_run_dir(folder: Path) -> Path:
    """Make the run directory, and see that the job can go on in it: before anything is started.

    Returns: `folder`. Raises: SpecError naming `nereus.run_dir` where it cannot be made or written
    to, or where the journal of an earlier run in it is damaged.
    """
    make_folder("nereus.run_dir", folder)
    try:
        Journal(folder / JOURNAL_FILE).read()
    except JournalError as error:
        raise SpecError(
            f"nereus.run_dir: the journal of an earlier run is damaged: {error}; move that file "
            "away, or set nereus.run_dir to another directory"
        ) from error
    except OSError as error:
        raise SpecError(
            f"nereus.run_dir: {folder / JOURNAL_FILE} cannot be read ({error.strerror}); set "
            "nereus.run_dir to a directory of yours"
        ) from error
    return folder


class Driver:
    """
    Args:
        run_dir: of the job.
        inbox: what commands are written into.
        state: what those who command the job see of it besides epoch and step: "world_size",
            "gpus", how many the plan in force uses, "nodes" and "plan", as they are now.

    Attributes:
        epoch: in force. step: the trainer's last. last: its record, None before the first.

    Raises: OSError; JournalError where the journal of an earlier run is damaged.
    """

    def __init__(self, run_dir: Path, inbox: Inbox, state: Callable[[], Mapping[str, Any]]) -> None:
        self.inbox = inbox
        self.records = RecordWriter(run_dir)
        self.journal = Journal(run_dir / JOURNAL_FILE)
        self.run_id = uuid.uuid4().hex
        self._run_dir = run_dir
        self._state = state
        # Epochs go on from an earlier run of the same job; each attempt takes one.
        self._attempts = max((record.epoch for record in self.journal.read()), default=0)
        self.epoch = self._attempts
        self.step = 0
        self.last: StepRecord | None = None
        self._server: Server | None = None
        self._sign: Any = None

    def begin(
        self,
        *,
        source: str,
        packages: Sequence[str],
        world_size: int,
        plan: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Write what the job is. Args: as in `RunRecord`; packages: whose versions it names."""
        self.records.write(
            RunRecord(
                run_id=self.run_id,
                time_unix_s=now_s(),
                source=source,
                versions=installed.versions(packages),
                world_size=world_size,
                plan=plan,
                config=config,
            )
        )

    def listen(self, name: str) -> None:
        """Take commands; where that cannot be, the job runs without them.

        Args: name: that the job is found by in Ray.
        """
        self.inform()
        try:
            self._server = Server(self._run_dir, self.inbox, self.run_id, self.epoch)
        except OSError as error:
            say(f"takes no commands while it runs (nereus.control): {error}")
            return
        self._sign = by_ray.publish(self._run_dir, self.run_id, name)
        say(f"takes commands: nereus status {self._run_dir}")

    def close(self) -> None:
        """Take no more commands."""
        self._sign = None
        if self._server is not None:
            self._server.close()

    # -- at a boundary --------------------------------------------------------------------------

    def at_boundary(
        self,
        step: int,
        scheduled: Scheduled | None,
        submitted: Callable[[Submitted], TransitionRecord],
    ) -> TransitionRecord | None:
        """Run what is due at the end of `step`, one transition at most; None if nothing is.

        What is scheduled goes first; a submitted plan then waits for the next boundary, and is
        refused if the epoch has changed.

        Args:
            scheduled: None: nothing is.
            submitted: runs a plan; raises SpecError where the job cannot.

        Raises: TransitionFailed: the job must end.
        """
        self.step = step
        if scheduled is not None:
            return self._run_scheduled(scheduled)
        return self._run_submitted(step, submitted)

    def _run_scheduled(self, scheduled: Scheduled) -> TransitionRecord:
        """The schedule was checked before the job started; where an earlier transition was aborted
        or skipped since, a plan may not fit what is in force, and is aborted too."""
        if self.inbox.paused:
            attempt = Attempt(self.epoch, self.step, scheduled.changes)
            why = "the job was paused; `nereus transition` can submit the plan"
            attempt.ended("skipped", why)
            return self.finished(attempt)
        try:
            return scheduled.run()
        except SpecError as error:
            attempt = Attempt(self.next_attempt(), self.step, scheduled.changes)
            attempt.ended("aborted", str(error))
            return self.finished(attempt)

    def _run_submitted(
        self, step: int, run: Callable[[Submitted], TransitionRecord]
    ) -> TransitionRecord | None:
        plan = self.inbox.pull(step)
        if plan is None:
            return None
        try:
            record = run(plan)
        except SpecError as error:
            self.inbox.answer(messages.REFUSED, str(error), by_plan=True)
            return None
        except TransitionFailed as error:
            self.inbox.answer(messages.FAILED, str(error))
            raise
        self.inbox.answer(record.outcome, record.reason)
        return record

    # -- an attempt -----------------------------------------------------------------------------

    def require_epoch(self, proposal: Proposal) -> None:
        """Raises: StaleProposal."""
        if proposal.epoch != self.epoch:
            raise StaleProposal(
                f"proposed for epoch {proposal.epoch}, the job is in epoch {self.epoch}"
            )

    def next_attempt(self) -> int:
        """The epoch that the next attempt is for."""
        self._attempts += 1
        return self._attempts

    def attempt(
        self,
        changes: Changes,
        *,
        epoch: int | None = None,
        predicted: Mapping[str, float] = MappingProxyType({}),
    ) -> Attempt:
        """One at the boundary of the current step.

        Args: epoch: None: the next. predicted: what its controller expects, for the record.
        """
        epoch = self.next_attempt() if epoch is None else epoch
        return Attempt(epoch, self.step, changes, self.inbox.doing, predicted)

    def commit(self, attempt: Attempt, plan: Mapping[str, Any], ranks: Sequence[str]) -> bool:
        """Write the commit into the journal. Where that cannot be, the attempt is aborted, and
        False the answer.

        Args: as of `Journal.commit`.
        """
        try:
            with attempt.timed("journal"):
                self.journal.commit(
                    epoch=attempt.epoch,
                    plan=plan,
                    digest=attempt.digest,
                    step=attempt.step,
                    ranks=ranks,
                )
        except _NOT_JOURNALED as error:
            attempt.ended("aborted", f"the journal was not written: {error}")
            return False
        attempt.journaled = True
        return True

    def take_back(self, attempt: Attempt) -> None:
        """Take back the commit in the journal, for the attempt's reason, which says so where that
        cannot be."""
        try:
            self._abort_in_journal(attempt)
        except _NOT_JOURNALED as error:
            attempt.reason += f"; the journal still says that it was committed: {error}"

    def finished(self, attempt: Attempt) -> TransitionRecord:
        """The job goes on; whether the attempt is in force, its outcome says."""
        self.inbox.doing("")
        record = attempt.record()
        say(f"step {self.step}: {attempt.summary()}")
        self.record(record)
        self.inform()
        return record

    def failed(self, attempt: Attempt) -> str:
        """The job ends in this attempt: take back a commit that is not in force, and write its
        record. Returns: what the job's last words say of that, "" if it was done."""
        undone = ""
        if attempt.journaled and self.epoch != attempt.epoch:
            try:
                self._abort_in_journal(attempt)
            except _NOT_JOURNALED as error:
                undone += f" (the journal still says that it was committed: {error})"
        try:
            self.records.write(attempt.record())
        except OSError as error:
            undone += f" (the records lack this: {error})"
        return undone

    def _abort_in_journal(self, attempt: Attempt) -> None:
        """Raises: OSError, JournalError, EpochError."""
        self.journal.abort(epoch=attempt.epoch, reason=attempt.reason)
        attempt.journaled = False

    # -- what others see ------------------------------------------------------------------------

    def write_step(self, record: StepRecord) -> None:
        self.last = record
        self.step = record.step
        self.record(record)
        self.inform()

    def record(self, record: TransitionRecord | StepRecord) -> None:
        """Write a record of a job that goes on; where it cannot be written, say so."""
        try:
            self.records.write(record)
        except OSError as error:
            say(f"step {record.step}: not in the records, which could not be written: {error}")

    def inform(self) -> None:
        """Tell those who command the job how it is now."""
        self.inbox.inform(epoch=self.epoch, step=self.step, **self._state())
        if self._server is not None:
            try:
                self._server.moved_to(self.epoch)
            except OSError as error:
                say(f"step {self.step}: {messages.ENDPOINT_FILE} could not be written: {error}")


def say(text: str) -> None:
    """One line on the job's console."""
    print(f"nereus: {text}", file=sys.stdout, flush=True)
