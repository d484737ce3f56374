"""Taking snapshots of a job's units while it trains.

    at a boundary, every rank        agree on the step, copy its part to host memory
    in a thread, while it trains     write the files; all ranks: done? then the index, the name

The thread's messages go over a group that is nothing else's, so the trainer's groups are never
held. One snapshot is under way at a time: the next one waits for it. A snapshot that fails (a full
disk) is reported, and the job trains on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from nereus_plugins.emu.described.base import DescribedUnit, merge_scalars
from nereus_plugins.emu.table import ShardTable, TableError, TensorInfo
from nereus_plugins.emu.tiling import CoverageError
from nereus_plugins.emu.unit import ElasticUnit
from nereus_plugins.gtg.scalars import encode
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.agree import tell
from nereus_plugins.snapshot.errors import PeerLost, SnapshotError
from nereus_plugins.snapshot.host_copy import HostCopy
from nereus_plugins.snapshot.index import UNIT_NAME, FileRecord, Index, UnitRecord, file_record
from nereus_plugins.snapshot.parts import parts
from nereus_plugins.snapshot.write import write_file
from nereus_plugins.spec import Layout
from nereus_plugins.transport.metadata import gather_tables

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Of the thread, against the trainer's: where a core is missing, the trainer has it.
_NICE = 19
_NOTHING: list[FileRecord] = []


@dataclass(frozen=True)
class SnapshotOptions:
    """Where snapshots go.

    Attributes:
        folder: on a file system that all ranks share.
        keep: how many complete ones stay there.
    """

    folder: Path
    keep: int = 2

    def __post_init__(self) -> None:
        if type(self.keep) is not int or self.keep < 1:
            raise ValueError(f"keep={self.keep!r}: at least one snapshot must be kept")


@dataclass(frozen=True)
class Taken:
    """What became of one snapshot, on this rank.

    Attributes:
        step: after which it was taken.
        nbytes: what this rank copied.
        blocked_s: how long training waited, for the copy and for an earlier snapshot to end.
        background_s: how long the thread took.
        path: of the complete snapshot on disk; None if it failed.
        error: why.
    """

    step: int
    nbytes: int
    blocked_s: float
    background_s: float
    path: Path | None
    error: str = ""


@dataclass
class _UnitCopy:
    """What is kept of a unit from snapshot to snapshot, for as long as its layout stays."""

    table: bytes
    tensors: tuple[TensorInfo, ...]
    copy: HostCopy


@dataclass(frozen=True)
class _Work:
    """What the thread has to do."""

    number: int
    step: int
    epoch: int
    plan: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    scalars: Mapping[str, str]  # JSON, by unit
    blocked_s: float


class Snapshots:
    """The snapshots of one job, on this rank. Every method is called on all ranks alike.

    Args:
        group: all ranks of the job, gloo, used for nothing else; taken over. Its timeout is how
            long ranks wait for each other, so longer than the slowest rank takes to write.
    """

    def __init__(self, options: SnapshotOptions, group: dist.ProcessGroup) -> None:
        self.options = options
        self.last: Taken | None = None
        self._group: dist.ProcessGroup | None = group
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._units: dict[str, _UnitCopy] = {}
        self._thread: threading.Thread | None = None

    def take(
        self,
        step: int,
        units: Mapping[str, ElasticUnit],
        *,
        epoch: int = 0,
        plan: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a snapshot of the units as they are now; training may go on when this returns.

        Args:
            step: iterations done. epoch, plan: of the job; written into the index.

        Returns: whether it was begun; not where an earlier one lost a peer (`last.error`).

        Raises: SnapshotError: on all ranks alike: they are at different steps, or a unit cannot be
            described or is held by no rank in part.
        """
        begin = time.perf_counter()
        self.wait()
        if self._group is None:
            return False
        described, error = _described(units)
        tables = {name: unit.table(self._rank) for name, unit in described.items()}
        said = {
            "step": step,
            "number": folder.last_number(self.options.folder),
            "changed": [name for name, table in tables.items() if not self._knows(name, table)],
        }
        try:
            heard = self._tell(said, error)
            if any(one["step"] != step for one in heard):
                steps = [one["step"] for one in heard]
                raise SnapshotError(f"ranks are at different steps: {steps}")
            for name in described:
                if any(name in one["changed"] for one in heard):
                    self._lay_out(name, tables[name], described[name])
        except PeerLost as lost:
            logger.error("no snapshot after step %d, nor any later: %s", step, lost)
            return False
        for gone in self._units.keys() - described.keys():
            del self._units[gone]
        for name, unit in described.items():
            self._units[name].copy.fill(unit)
        work = _Work(
            number=1 + max(one["number"] for one in heard),
            step=step,
            epoch=epoch,
            plan=dict(plan or {}),
            layouts={name: unit.layout() for name, unit in units.items()},
            scalars={name: encode(unit.scalars).decode() for name, unit in described.items()},
            blocked_s=time.perf_counter() - begin,
        )
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="nereus-snapshot", daemon=True
        )
        self._thread.start()
        return True

    def wait(self) -> Taken | None:
        """Wait for the snapshot that is under way; what became of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last

    def close(self) -> None:
        """Finish what is under way, and give back memory and the group."""
        self.wait()
        self._units.clear()
        self._leave()

    # -- at the boundary ----------------------------------------------------------------------

    def _knows(self, name: str, table: ShardTable) -> bool:
        return name in self._units and self._units[name].table == table.to_bytes()

    def _lay_out(self, name: str, table: ShardTable, unit: DescribedUnit) -> None:
        """Decide who copies what, and allocate for it. Collective. Raises: SnapshotError."""
        self._units.pop(name, None)  # its memory first
        try:
            whole = self._together(lambda group: gather_tables(table, group))
            mine = parts(whole).get(self._rank, [])
        except (CoverageError, TableError) as error:
            raise SnapshotError(f"unit {name} cannot be copied: {error}") from None
        pinned = any(shard.view.is_cuda for shard in unit.shards)
        copy = HostCopy(self._rank, mine, pinned=pinned)
        self._units[name] = _UnitCopy(table.to_bytes(), whole.tensors, copy)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self, work: _Work) -> None:
        _lower_priority()
        begin = time.perf_counter()
        path, error = None, ""
        try:
            path = self._to_disk(work)
        except Exception as caught:
            error = str(caught)
            logger.error("the snapshot after step %d failed: %s", work.step, error)
        self.last = Taken(
            step=work.step,
            nbytes=sum(unit.copy.nbytes for unit in self._units.values()),
            blocked_s=work.blocked_s,
            background_s=time.perf_counter() - begin,
            path=path,
            error=error,
        )

    def _to_disk(self, work: _Work) -> Path:
        """Raises: SnapshotError: on all ranks alike; nothing is left then."""
        root = self.options.folder
        made, error = "", ""
        if self._rank == 0:
            made, error = _attempt(lambda: folder.begin(root, work.number, work.step).name, "")
        writing = root / self._tell(made, error)[0]
        try:
            written, error = _attempt(lambda: self._write(writing), _NOTHING)
            files = [asdict(file) for file in written]
            heard = self._tell([files, work.scalars, _now()], error)
            path = writing
            if self._rank == 0:
                path, error = _attempt(lambda: self._complete(writing, work, heard), writing)
            name = self._tell(path.name, error)[0]
        except SnapshotError:
            if self._rank == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise
        return root / name

    def _write(self, writing: Path) -> list[FileRecord]:
        """Raises: SnapshotError, OSError."""
        if not writing.is_dir():
            raise SnapshotError(
                f"{writing.parent} is not the same folder as on rank 0: it must be on a file "
                "system that all ranks share"
            )
        return [
            write_file(writing, name, self._rank, file)
            for name, unit in self._units.items()
            for file in unit.copy.files
        ]

    def _complete(self, writing: Path, work: _Work, heard: list[Any]) -> Path:
        """Raises: ScalarMismatch: ranks disagree about a unit. OSError."""
        units = {
            name: UnitRecord(
                layout=work.layouts[name],
                tensors=unit.tensors,
                scalars=merge_scalars([json.loads(scalars[name]) for _, scalars, _ in heard]),
            )
            for name, unit in self._units.items()
        }
        index = Index(
            number=work.number,
            step=work.step,
            epoch=work.epoch,
            plan=work.plan,
            world=self._world,
            taken=heard[0][2],
            units=units,
            files=tuple(file_record(file) for files, _, _ in heard for file in files),
        )
        path = folder.complete(writing, index)
        folder.keep_last(self.options.folder, self.options.keep)
        return path

    # -- with the other ranks -----------------------------------------------------------------

    def _tell(self, said: Any, error: str = "") -> list[Any]:
        """Raises: SnapshotError: on all ranks alike. PeerLost: perhaps not on all."""
        return self._together(lambda group: tell(group, said, error))

    def _together(self, do: Callable[[dist.ProcessGroup], _T]) -> _T:
        if self._group is None:
            raise PeerLost("a rank was lost before")
        try:
            return do(self._group)
        except SnapshotError:
            raise
        except RuntimeError as error:  # torch's
            self._leave()
            raise PeerLost(
                f"a rank is gone or did not answer within the group's timeout: {error}"
            ) from error

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _described(units: Mapping[str, ElasticUnit]) -> tuple[dict[str, DescribedUnit], str]:
    """What the units report, or why they do not."""
    for name in units:
        if not UNIT_NAME.fullmatch(name):
            return {}, f"unit name {name!r} cannot name a folder"
    return _attempt(lambda: {name: unit.described() for name, unit in units.items()}, {})


def _attempt(do: Callable[[], _T], otherwise: _T) -> tuple[_T, str]:
    """What it returns, or why it failed: for the other ranks to hear."""
    try:
        return do(), ""
    except Exception as error:
        return otherwise, f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()


def _lower_priority() -> None:
    """Of the calling thread alone; on Linux threads have priorities of their own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
