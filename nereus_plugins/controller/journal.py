"""What the controller saw and decided: an append-only file that survives a crash at any byte.

Each line is a CRC-32 of its payload, a space, and the payload: one JSON object with `kind`. A line
is durable before `append` returns. A crash can only leave a damaged end, which is passed over (and
cut off by the next append); damage before the end is an error, since what follows it cannot be
trusted. Nothing but JSON is read.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_plugins.spec.files import owners_only
from nereus_plugins.spec.record import shown

FILE = "decisions.jsonl"
SCHEMA = 1
KINDS = ("start", "observation", "decision", "proof", "state")


class DecisionJournalError(RuntimeError):
    """The journal is damaged before its end, or of another schema; the message names the line."""


def line_of(entry: Mapping[str, Any]) -> bytes:
    payload = json.dumps(entry, separators=(",", ":"), sort_keys=True, default=float).encode()
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def parse(data: bytes, name: str) -> tuple[list[dict[str, Any]], int]:
    """(entries, bytes of them) of a journal's content, without a damaged last line.

    Raises: DecisionJournalError: damage before the last line, or a schema that is not known.
    """
    entries: list[dict[str, Any]] = []
    good = 0
    lines = data.split(b"\n")
    tail = lines.pop()  # after the last newline: empty, or a line that was never finished
    for number, line in enumerate(lines, start=1):
        entry = parse_line(line)
        if entry is None:
            if number == len(lines) and not tail:
                break
            raise DecisionJournalError(f"{name}:{number}: damaged line before the journal's end")
        if entry.get("schema") != SCHEMA:
            raise DecisionJournalError(
                f"{name}:{number}: schema {shown(entry.get('schema'))}, this version reads {SCHEMA}"
            )
        if entry.get("kind") not in KINDS:
            raise DecisionJournalError(
                f"{name}:{number}: kind must be one of {', '.join(KINDS)}; got "
                f"{shown(entry.get('kind'))}"
            )
        entries.append(entry)
        good += len(line) + 1
    return entries, good


def parse_line(line: bytes) -> dict[str, Any] | None:
    """An entry, None where the line is damaged or a part of one."""
    checksum, _, payload = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(payload):
        return None
    try:
        entry = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


class DecisionJournal:
    """Appends to and reads one file. One writer at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path`: the file, or the run directory that it is in."""
        path = Path(path)
        self.path = path / FILE if path.is_dir() else path
        self._file: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """All entries in order; none if there is no file. Raises: DecisionJournalError; OSError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return parse(data, str(self.path))[0]

    def append(self, kind: str, content: Mapping[str, Any]) -> None:
        """Make an entry durable; on return it survives a power cut.

        Raises: DecisionJournalError: the file is damaged before its end; OSError: it could not be
            written, and is as it was before.
        """
        assert kind in KINDS
        handle = self._open()
        start = os.fstat(handle).st_size
        line = line_of({"schema": SCHEMA, "kind": kind, **content})
        try:
            if os.pwrite(handle, line, start) != len(line):
                raise OSError(f"{self.path}: the disk took only part of a line")
            os.fsync(handle)
        except BaseException:
            os.ftruncate(handle, start)  # what was not promised must not be read back
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                owners_only(handle)
                size = os.fstat(handle).st_size
                _, good = parse(os.pread(handle, size, 0), str(self.path))
                os.ftruncate(handle, good)
                os.fsync(handle)
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            except BaseException:
                os.close(handle)
                raise
            self._file = handle
        return self._file
