"""The record of a job: JSON lines, one object a line, the same schema live and simulated.

A run directory holds `records.jsonl`: first a `RunRecord` (what the job is), then one `StepRecord`
per step and one `TransitionRecord` per attempted transition, in the order they happened.
Every object carries `schema` ("nereus.<kind>/<version>"); other versions are refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nereus_plugins.spec.files import owners_only
from nereus_plugins.spec.record import shown

SCHEMA_VERSION = 1
RECORDS_FILE = "records.jsonl"
TRANSITION_TIMER = "nereus_transition"  # a stage of the step at whose boundary one ran
SNAPSHOT_TIMER = "nereus_snapshot"  # likewise: what training waited for one
# OpenRLHF's timers that mean what verl's of another name do: records have verl's.
SAME_TIMER = {"generation": "gen", "step_total": "step"}
# The mean score of a step's responses, as verl and OpenRLHF log it.
_REWARDS = ("critic/score/mean", "rollout/reward_mean")


class RecordError(ValueError):
    """A record that does not follow the schema; the message names file, line and field."""


_T = TypeVar("_T", bound="Record")


@dataclass(frozen=True)
class Record:
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, `schema` first; Nones are kept so that every line has every field."""
        out: dict[str, Any] = {"schema": f"nereus.{self.kind}/{SCHEMA_VERSION}"}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = dict(value) if isinstance(value, Mapping) else value
        return out

    @classmethod
    def from_dict(cls: type[_T], data: Mapping[str, Any]) -> _T:
        """Raises: RecordError on a missing, unknown or mistyped field."""
        given = {k: v for k, v in data.items() if k != "schema"}
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise RecordError(f"{cls.kind} record: unknown field {shown(unknown[0])}")
        try:
            record = cls(**given)
        except TypeError as error:
            raise RecordError(f"{cls.kind} record: {error}") from None
        record._check_types()
        return record

    def _check_types(self) -> None:
        for f in fields(self):
            value, want = getattr(self, f.name), str(f.type)
            if value is None and want.endswith("None"):
                continue
            base = want.split("[")[0].split(" ")[0]
            kinds: tuple[type, ...] = {
                "int": (int,),
                "float": (int, float),
                "str": (str,),
                "bool": (bool,),
                "Mapping": (Mapping,),
            }[base]
            if not isinstance(value, kinds) or (isinstance(value, bool) and base != "bool"):
                raise RecordError(
                    f"{self.kind} record: field {f.name!r} must be {want}, "
                    f"got {type(value).__name__}"
                )
            inner = want.removesuffix("]").rpartition(", ")[2] if base == "Mapping" else base
            for one in value.values() if isinstance(value, Mapping) else (value,):
                if inner in ("int", "float") and not _is_number(one):
                    raise RecordError(
                        f"{self.kind} record: field {f.name!r} must hold numbers, got {shown(one)}"
                    )


def _is_number(value: Any) -> bool:
    """An integer that is too large for a float is none of a record's."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1000)


@dataclass(frozen=True)
class RunRecord(Record):
    """What the job is. `plan`: a GlobalPlan or {unit: layout} as a JSON object."""

    kind: ClassVar[str] = "run"
    run_id: str
    time_unix_s: float
    source: str  # "verl", "openrlhf", "simulator"
    versions: Mapping[str, str]
    world_size: int
    plan: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord(Record):
    """One training step as it was measured.

    stages_s: seconds by stage, by the framework's own timers (they may nest: see the adapter).
    tokens: counts over the global batch: prompt, response, total.
    memory_bytes: peaks over ranks since the last step: allocated, reserved, host_rss.
    metrics: scalar results worth replaying (reward, losses, gradient norms).
    """

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    time_unix_s: float
    step_s: float
    stages_s: Mapping[str, float]
    tokens: Mapping[str, int]
    samples: int
    memory_bytes: Mapping[str, int]
    metrics: Mapping[str, float]
    plan: Mapping[str, Any]

    @property
    def alone_s(self) -> float:
        """Its seconds without a transition and a snapshot, which the framework's timer of a step
        holds."""
        aside = (TRANSITION_TIMER, SNAPSHOT_TIMER)
        return self.step_s - sum(self.stages_s.get(timer, 0.0) for timer in aside)

    @property
    def reward(self) -> float | None:
        """The mean score of its responses; None where the framework logs none."""
        return next((self.metrics[name] for name in _REWARDS if name in self.metrics), None)


@dataclass(frozen=True)
class TransitionRecord(Record):
    """One attempted transition.

    outcome: "committed", "aborted" (old layout trains on), "failed" (the job ends), or "skipped"
        (scheduled, and not attempted: the job was paused; `epoch` is then that in force).
    units: per unit: from, to, bytes_wire, bytes_local, seconds by phase, what was verified.
    seconds: wall seconds by phase of the whole transition as the driver saw them.
    reason: why it did not commit; empty when committed.
    ranks: where the set of ranks changes: "from" and "to", how many; "joined" and "left", by name;
        "nodes", of each rank there will be.
    knobs: by unit whose knobs change: "from" and "to".
    rollout: where the rollout followed: "from" and "to"; replicas "kept", "ended" and "launched" by
        number; "fell_back", why "from" is in force ("" if "to" is); by replica its server, and the
        seconds of its launch by part; the "fingerprint" of the weights that every replica holds.
    background: where it was to be prepared while other stages ran. Prepared so: what that took,
        "prepare_s", pauses included; for "hidden_s" of them nothing waited. Prepared, or prepared
        again, while everything waited: "exposed", why. `seconds` hold what was waited for.
    limit_s: the least that any transition of these bytes takes over the links, where it is known.
    predicted: what the controller that proposed it expected: "transition_s", and of a step "step_s"
        in the plan before and "new_step_s" in this one, "saving_s", for "steps", with "confidence".
    """

    kind: ClassVar[str] = "transition"
    step: int
    epoch: int
    time_unix_s: float
    outcome: str
    reason: str
    units: Mapping[str, Any]
    seconds: Mapping[str, float]
    digest: str
    ranks: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    background: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def stall_s(self) -> float:
        """What the job waited; a phase's own parts ("prepare.build") are in it already."""
        return sum(spent for phase, spent in self.seconds.items() if "." not in phase)


KINDS: Mapping[str, type[Record]] = {
    cls.kind: cls for cls in (RunRecord, StepRecord, TransitionRecord)
}


def parse_record(data: Any) -> Record:
    """A JSON object -> its record. Raises: RecordError."""
    if not isinstance(data, dict) or not isinstance(data.get("schema"), str):
        raise RecordError("not a nereus record: no 'schema' field")
    name, _, version = data["schema"].partition("/")
    cls = KINDS.get(name.removeprefix("nereus."))
    if cls is None or version != str(SCHEMA_VERSION):
        raise RecordError(
            f"schema {shown(data['schema'])} is not known to this version "
            f"(it reads nereus.{{{','.join(KINDS)}}}/{SCHEMA_VERSION})"
        )
    return cls.from_dict(data)


def _drop_torn_line(path: Path) -> None:
    """A job that died while writing leaves half a line; a resumed one must not write behind it."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


class RecordWriter:
    """Appends to `<run_dir>/records.jsonl`, flushing each line; the file is its owner's only."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / RECORDS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        owners_only(descriptor)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record.to_dict(), separators=(",", ":"), default=float) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Records of a file or run directory, in order.

    A last line without its newline (the job died while writing) is passed over.
    Raises: RecordError naming file and line; FileNotFoundError.
    """
    return NewRecords(path).read()


class NewRecords:
    """A file or run directory whose records are read as they are written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = self._lines = 0

    def read(self) -> Iterator[Record]:
        """Those since the last call; all of them where the file has been replaced or cut.

        Raises: as `read_records`.
        """
        file = _file_of(self._path)
        with open(file, "rb") as lines:
            now = os.fstat(lines.fileno())
            if now.st_ino != self._inode or now.st_size < self._read_bytes:
                self._inode, self._read_bytes, self._lines = now.st_ino, 0, 0
            lines.seek(self._read_bytes)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._lines += 1
                self._read_bytes += len(line)
                yield _parse_line(file, self._lines, line)


def _file_of(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    return file / RECORDS_FILE if file.is_dir() else file


def _parse_line(file: Path, number: int, line: bytes) -> Record:
    try:
        return parse_record(json.loads(line.decode("utf-8", "replace")))
    except RecordError as error:
        raise RecordError(f"{file}:{number}: {error}") from None
    except (ValueError, RecursionError) as error:  # also a number too long to be one
        raise RecordError(f"{file}:{number}: not JSON: {error}") from None


def now_s() -> float:
    """Wall clock in seconds since the epoch, as records carry it."""
    return time.time()
