"""The durable record of what was committed: JSON lines, one a decision, written by the driver.

The driver appends a `commit` record after every rank has prepared and before any rank switches. If
the ranks then cannot switch and go back to the old layout, it appends an `abort` record for that
epoch. `Journal.current()` is the last commit that no abort took back: the layout that the job was
in last. A restarted job loads a checkpoint, whose own stamp says in which layout it was saved.
"""

from __future__ import annotations

import dataclasses
import datetime
import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_plugins.spec.files import owners_only
from nereus_plugins.spec.record import shown

SCHEMA_VERSION = 1
KINDS = ("commit", "abort")
# What JSON makes of the fields of a record.
_TYPES: Mapping[str, type] = {
    "epoch": int, "plan": dict, "digest": str, "step": int, "who": str, "when": str,
    "reason": str, "ranks": list,
}  # fmt: skip


class JournalError(RuntimeError):
    """The journal cannot be read: damaged before its last line, or of a newer schema."""


class EpochError(RuntimeError):
    """A record was refused because its epoch is not newer than what the journal already holds."""


@dataclass(frozen=True)
class JournalRecord:
    """One line.

    plan: the global plan as a dict (`GlobalPlan.to_dict()`), or layouts by unit.
    digest: the digest of the schedule that all ranks agreed on.
    step: the trainer's iteration after which the transition happened.
    ranks: names of the processes of the epoch, by rank, where the job names them.
    who: user@host:pid of the writer. when: UTC, ISO 8601.
    """

    kind: str
    epoch: int
    plan: Mapping[str, Any]
    digest: str
    step: int
    who: str
    when: str
    reason: str = ""
    ranks: Sequence[str] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class Journal:
    """Appends to and reads one journal file. One writer at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def commit(
        self,
        *,
        epoch: int,
        plan: Mapping[str, Any],
        digest: str,
        step: int,
        ranks: Sequence[str] = (),
    ) -> None:
        """Record durably that `epoch` is committed; on return it survives a power cut.

        Raises EpochError if the journal already holds this epoch or a later one; OSError if the
        record could not be made durable: then it is not in the journal.
        """
        last = max((record.epoch for record in self.read()), default=None)
        if last is not None and epoch <= last:
            raise EpochError(
                f"{self.path}: epoch {epoch} is stale, the journal already holds epoch {last}; "
                "another driver may be writing it, or the job was restarted with an old plan"
            )
        self._append("commit", epoch, plan, digest, step, "", ranks)

    def abort(self, *, epoch: int, reason: str) -> None:
        """Take back the commit of `epoch`, which must be the last one; raises EpochError if not."""
        current = self.current()
        if current is None or current.epoch != epoch:
            held = "none" if current is None else current.epoch
            raise EpochError(f"{self.path}: epoch {epoch} is not the current one ({held})")
        last = current
        self._append("abort", epoch, last.plan, last.digest, last.step, reason, last.ranks)

    def read(self) -> list[JournalRecord]:
        """All records in order. A torn last line (a crash while writing) is left out.

        Raises JournalError on any other damage and on a schema this version does not know.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        records: list[JournalRecord] = []
        lines = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if number == len(lines):
                break  # after the last newline: empty, or a line that was never finished
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                raise JournalError(f"{self.path}:{number}: damaged line: {error}") from None
            version = fields.get("schema_version")
            if version != SCHEMA_VERSION:
                raise JournalError(
                    f"{self.path}:{number}: schema version {shown(version)}, this version of "
                    f"Nereus reads {SCHEMA_VERSION}"
                )
            try:
                record = JournalRecord(**fields)
            except TypeError as error:
                raise JournalError(f"{self.path}:{number}: {error}") from None
            if record.kind not in KINDS:
                raise JournalError(f"{self.path}:{number}: unknown kind {shown(record.kind)}")
            for name, kind in _TYPES.items():
                value = fields.get(name, kind())  # a line may lack what has a default
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise JournalError(f"{self.path}:{number}: {name} cannot be {shown(value)}")
            records.append(record)
        return records

    def current(self) -> JournalRecord | None:
        """The last commit that was not taken back, or None."""
        commits: list[JournalRecord] = []
        for record in self.read():
            if record.kind == "commit":
                commits.append(record)
            elif commits and commits[-1].epoch == record.epoch:
                commits.pop()
        return commits[-1] if commits else None

    def _append(
        self,
        kind: str,
        epoch: int,
        plan: Mapping[str, Any],
        digest: str,
        step: int,
        reason: str,
        ranks: Sequence[str],
    ) -> None:
        record = JournalRecord(
            kind=kind,
            epoch=epoch,
            plan=plan,
            digest=digest,
            step=step,
            who=f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}",
            when=datetime.datetime.now(datetime.timezone.utc).isoformat(),
            reason=reason,
            ranks=ranks,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            owners_only(handle)
            # A torn line from a crash would swallow the new record: cut it off first.
            size = os.fstat(handle).st_size
            data = os.pread(handle, size, 0)
            keep = data.rfind(b"\n") + 1
            if keep != size:
                os.ftruncate(handle, keep)
            line = record.to_json().encode() + b"\n"
            try:
                written = os.pwrite(handle, line, keep)
                if written != len(line):
                    raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes")
                os.fsync(handle)
                directory = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
            except BaseException:
                os.ftruncate(handle, keep)  # what was not promised must not be read back
                raise
        finally:
            os.close(handle)
