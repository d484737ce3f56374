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
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from nereus_plugins.emu.described.base import DescribedUnit, merge_scalars
from nereus_plugins.emu.table import ShardTable, TableError, TensorInfo, concat
from nereus_plugins.emu.tiling import CoverageError
from nereus_plugins.emu.unit import ElasticUnit
from nereus_plugins.gtg.scalars import encode
from nereus_plugins.snapshot import folder, in_memory
from nereus_plugins.snapshot.agree import tell
from nereus_plugins.snapshot.buddies import buddies, exchange, node_here
from nereus_plugins.snapshot.errors import PeerLost, SnapshotError
from nereus_plugins.snapshot.host_copy import HostCopy, HostFile
from nereus_plugins.snapshot.index import UNIT_NAME, FileRecord, Index, UnitRecord, file_record
from nereus_plugins.snapshot.interval import Due
from nereus_plugins.snapshot.parts import PartBox, parts
from nereus_plugins.snapshot.write import write_file
from nereus_plugins.spec import Layout
from nereus_plugins.transport.metadata import gather_bytes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Of the thread, against the trainer's: where a core is missing, the trainer has it.
_NICE = 19
_NOTHING: list[FileRecord] = []


@dataclass(frozen=True)
class SnapshotOptions:
    """Where snapshots go: to a folder, into the memory of the nodes, or both.

    Attributes:
        folder: on a file system that all ranks share.
        keep: how many complete ones stay there.
        memory_folder: on a memory file system of each node, such as /dev/shm/<name of the job>;
            the newest snapshot stays there, each part on two nodes (`buddies`).
        node: what goes as a whole, where it is not the machine: ranks of one name are not each
            other's buddies if there are several.
        every_steps: a snapshot after every so many steps (`Snapshots.after_step`).
        between_failures_s: instead, the mean time between failures of the whole job, from which
            and from what snapshots cost the interval follows (`interval`).
    """

    folder: Path | None = None
    keep: int = 2
    memory_folder: Path | None = None
    node: str = ""
    every_steps: int | None = None
    between_failures_s: float | None = None

    def __post_init__(self) -> None:
        if self.folder is None and self.memory_folder is None:
            raise ValueError("snapshots need a folder, a memory_folder, or both")
        if type(self.keep) is not int or self.keep < 1:
            raise ValueError(f"keep={self.keep!r}: at least one snapshot must be kept")
        if self.every_steps is not None and self.between_failures_s is not None:
            raise ValueError("every_steps and between_failures_s: give one of them for snapshots")
        if self.every_steps is not None and (
            type(self.every_steps) is not int or self.every_steps < 1
        ):
            raise ValueError(f"every_steps={self.every_steps!r}: at least 1 between snapshots")
        if self.between_failures_s is not None and not (
            0.0 < self.between_failures_s < float("inf")
        ):
            raise ValueError(
                f"between_failures_s={self.between_failures_s!r}: snapshots need a time above 0"
            )


@dataclass(frozen=True)
class Taken:
    """What became of one snapshot, on this rank.

    Attributes:
        step: after which it was taken.
        nbytes: what this rank copied.
        blocked_s: how long training waited, for the copy and for an earlier snapshot to end.
        background_s: how long the thread took.
        path: of the complete snapshot on disk; None if it failed, or none was to be there.
        in_memory: whether it is in the memory of the nodes.
        error: what failed, and why.
    """

    step: int
    nbytes: int
    blocked_s: float
    background_s: float
    path: Path | None
    in_memory: bool
    error: str


@dataclass
class _UnitCopy:
    """What is kept of a unit from snapshot to snapshot, for as long as its layout stays."""

    table: bytes
    tensors: tuple[TensorInfo, ...]
    boxes: list[PartBox]
    copy: HostCopy | None = None


@dataclass(frozen=True)
class _Seen:
    """The units as they are at a boundary, on this rank; all by name."""

    described: Mapping[str, DescribedUnit]
    tables: Mapping[str, bytes]  # this rank's rows
    layouts: Mapping[str, Layout]
    scalars: Mapping[str, str]  # JSON
    # What the other ranks have to know; "changed": the units that were others, or cut otherwise, at
    # the last snapshot.
    said: Mapping[str, Any]


@dataclass(frozen=True)
class _Work:
    """What the thread has to do."""

    step: int
    epoch: int
    plan: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    scalars: Mapping[str, str]  # JSON, by unit
    buddy: Sequence[int | None]
    blocked_s: float
    number: int = 0  # which the thread finds out


class Snapshots:
    """The snapshots of one job, on this rank. Every method is called on all ranks alike.

    Args:
        group: all ranks of the job, gloo, used for nothing else; taken over. Its timeout is how
            long ranks wait for each other, so longer than the slowest rank takes to write.

    Attributes:
        last: what became of the last snapshot that ended.
        due: after which steps `after_step` takes one.
    """

    def __init__(self, options: SnapshotOptions, group: dist.ProcessGroup) -> None:
        self.options = options
        self.last: Taken | None = None
        self._group: dist.ProcessGroup | None = group
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._units: dict[str, _UnitCopy] = {}
        self._thread: threading.Thread | None = None
        self._step = 0  # of the snapshot that the thread writes
        self._given_up = False  # that one
        self.due = Due(options.every_steps, options.between_failures_s)

    @property
    def lost(self) -> bool:
        """Whether a peer was lost, or too slow: no more are begun here. Once this is closed on all
        ranks, others can be taken over a new group."""
        return self._group is None

    def after_step(
        self,
        step: int,
        units: Mapping[str, ElasticUnit],
        *,
        epoch: int = 0,
        plan: Mapping[str, Any] | None = None,
    ) -> bool:
        """To be called after every step, on all ranks: takes a snapshot when one is due by the
        options (`Due`).

        One that cannot be begun is logged, and `last` says why: the job trains on.

        Args, Returns: as `take`.
        """
        begin = time.perf_counter()
        begun = False
        if self.due.after_step(step, begin):  # the same on all ranks: all are called as often
            try:
                begun = self.take(step, units, epoch=epoch, plan=plan)
            except SnapshotError as error:
                self._not_begun(step, begin, error)
                self.due.not_begun(step)  # on all ranks alike, as it fails so
        self.due.goes_on(time.perf_counter(), beside=not self.ended(0.0))
        return begun

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
            step: iterations done. epoch, plan: of the job; written into the index. The plan is
                JSON-able.

        Returns: whether it was begun; not where an earlier one lost a peer (`last.error`).

        Raises: SnapshotError: on all ranks alike: they say different steps, epochs, plans or
            layouts, a unit cannot be described or is held by no rank in part, there is no memory
            for the copy, or no thread can be started.
        """
        begin = time.perf_counter()
        self.wait()
        if self._group is None:
            return False
        orders: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        work = None
        try:
            work = self._agree(step, epoch, plan, units, begin, orders)
            self._step = step
        except PeerLost as lost:
            self._not_begun(step, begin, lost)
            return False
        finally:
            orders.put(work)
            if work is None:
                self.wait()
        return True

    def _start_thread(self, orders: queue.SimpleQueue[_Work | None]) -> None:
        """Before ranks agree to begin, as it may fail on one of them: the others' threads would
        wait for that one's. Raises: RuntimeError: the process can have no more threads."""
        thread = threading.Thread(
            target=self._when_told, args=(orders,), name="nereus-snapshot", daemon=True
        )
        thread.start()
        self._thread = thread

    def _not_begun(self, step: int, begin_s: float, error: SnapshotError) -> None:
        later = ", nor any later" if isinstance(error, PeerLost) else ""
        logger.error("no snapshot after step %d%s: %s", step, later, error)
        self.last = _failed(step, time.perf_counter() - begin_s, f"not begun: {error}")

    def ended(self, limit_s: float) -> bool:
        """Whether no snapshot is under way on this rank, where `take` would wait for it.

        A file system that hangs on one rank holds `take` there for as long: whoever can ask all
        ranks takes one only where all say so.

        Args: limit_s: how long it is waited for.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Taken | None:
        """Wait for the snapshot that is under way; what became of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last

    def close(self, limit_s: float | None = None) -> None:
        """At the end of a job that needs no snapshot in memory any more: finish what is under way,
        and give back memory and the group. What is on disk stays.

        Args: limit_s: what is not written by then is given up (`last.error`): without the group
            its threads end, and remove what they wrote, as they next turn to each other; one that
            the file system holds keeps its copy until then. What is in the memory of the nodes
            stays. None: wait for it.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                self._given_up = True
                self._leave()
                error = f"given up: not written {limit_s:g} s after its ranks were to part"
                self.last = _failed(self._step, 0.0, error)
                logger.error("the snapshot after step %d was %s", self._step, error)
                return
        self._units.clear()
        self._leave()
        if self.options.memory_folder is not None:
            in_memory.remove(self.options.memory_folder, self._rank)

    # -- at the boundary ----------------------------------------------------------------------

    def _agree(
        self,
        step: int,
        epoch: int,
        plan: Mapping[str, Any] | None,
        units: Mapping[str, ElasticUnit],
        begin_s: float,
        orders: queue.SimpleQueue[_Work | None],
    ) -> _Work:
        """Copy this rank's part, where all ranks can. Collective.

        Args: orders: for the thread, which is started.

        Raises: SnapshotError: on all ranks alike. PeerLost: perhaps not on all.
        """
        seen, error = _attempt(lambda: self._see(step, epoch, plan, units), None)
        heard = self._tell(seen.said if seen is not None else None, error)
        assert seen is not None
        _check_alike(heard)
        # Who copies what is decided anew where a unit has changed on any rank.
        gathered = {
            name: self._gather(seen.tables[name])
            for name in heard[0]["units"]
            if any(name in one["changed"] for one in heard)
        }
        _, error = _attempt(lambda: self._copy(seen, gathered), None)
        if not error:
            _, error = _attempt(lambda: self._start_thread(orders), None)
        last_s = self.last.background_s if self.last is not None else 0.0
        costs = self._tell(self.due.costs(time.perf_counter() - begin_s, last_s), error)
        self.due.begun(step, [max(times) for times in zip(*costs, strict=True)])  # the slowest's
        return _Work(
            step=step,
            epoch=epoch,
            plan=json.loads(heard[0]["plan"]),
            layouts=seen.layouts,
            scalars=seen.scalars,
            buddy=buddies([one["node"] for one in heard]),
            blocked_s=time.perf_counter() - begin_s,
        )

    def _see(
        self,
        step: int,
        epoch: int,
        plan: Mapping[str, Any] | None,
        units: Mapping[str, ElasticUnit],
    ) -> _Seen:
        """Raises: what keeps a unit from being described."""
        for name in units:
            if not UNIT_NAME.fullmatch(name):
                raise SnapshotError(f"unit name {name!r} cannot name a folder")
        described = {name: unit.described() for name, unit in units.items()}
        tables = {name: unit.table(self._rank).to_bytes() for name, unit in described.items()}
        layouts = {name: unit.layout() for name, unit in units.items()}
        said = {
            "step": step,
            "epoch": epoch,
            # As text: what is compared is what the index will say.
            "plan": json.dumps(dict(plan or {}), sort_keys=True),
            "units": sorted(units),
            "layouts": {name: layout.to_dict() for name, layout in layouts.items()},
            "node": self.options.node or node_here(),
            "changed": [name for name, table in tables.items() if not self._knows(name, table)],
        }
        json.dumps(said)  # fails here, or not at all
        return _Seen(
            described=described,
            tables=tables,
            layouts=layouts,
            scalars={name: encode(unit.scalars).decode() for name, unit in described.items()},
            said=said,
        )

    def _last_number(self) -> int:
        """The highest number that a snapshot has, as far as this rank can see."""
        disk, memory = self.options.folder, self.options.memory_folder
        return max(
            folder.last_number(disk) if disk is not None else 0,
            in_memory.last_number(memory) if memory is not None else 0,
        )

    def _knows(self, name: str, table: bytes) -> bool:
        return name in self._units and self._units[name].table == table

    def _gather(self, table: bytes) -> list[bytes]:
        """All ranks' rows of a unit, by rank. Collective. Raises: PeerLost."""
        return self._together(lambda group: gather_bytes(table, group))

    def _lay_out(self, name: str, tables: Sequence[bytes]) -> None:
        """Decide who copies what. Args: tables: of `_gather`. Raises: SnapshotError."""
        try:
            whole = concat([ShardTable.from_bytes(table) for table in tables])
            mine = parts(whole).get(self._rank, [])
        except (CoverageError, TableError) as error:
            raise SnapshotError(f"unit {name} cannot be copied: {error}") from None
        self._units[name] = _UnitCopy(tables[self._rank], whole.tensors, mine)

    def _copy(self, seen: _Seen, gathered: Mapping[str, Sequence[bytes]]) -> None:
        """Args: gathered: of the units that have changed.

        Raises: SnapshotError: no rank has a part of a unit. RuntimeError (torch's): no memory.
        """
        # The memory of what is not copied any more first.
        for gone in (self._units.keys() - seen.described.keys()) | gathered.keys():
            self._units.pop(gone, None)
        for name, tables in gathered.items():
            self._lay_out(name, tables)
        for name, unit in seen.described.items():
            one = self._units[name]
            if one.copy is None:
                pinned = any(shard.view.is_cuda for shard in unit.shards)
                one.copy = HostCopy(self._rank, one.boxes, pinned=pinned)
            one.copy.fill(unit)

    def _copied(self) -> Iterator[tuple[str, HostFile]]:
        """This rank's files, with the units whose they are."""
        for name, unit in self._units.items():
            assert unit.copy is not None
            for file in unit.copy.files:
                yield name, file

    # -- in the thread ------------------------------------------------------------------------

    def _when_told(self, orders: queue.SimpleQueue[_Work | None]) -> None:
        work = orders.get()
        if work is not None:
            self._run(work)

    def _run(self, work: _Work) -> None:
        _lower_priority()
        begin = time.perf_counter()
        path, remembered, errors = None, False, []
        try:
            # Here, as a file system that hangs must not hold the boundary.
            seen = self._tell(*_attempt(self._last_number, 0))
            work = replace(work, number=1 + max(seen))
        except Exception as error:
            errors.append(str(error))
        if self.options.memory_folder is not None and work.number:
            try:
                self._to_memory(work, self.options.memory_folder)
                remembered = True
            except Exception as error:
                errors.append(f"in memory: {error}")
        if self.options.folder is not None and work.number:
            try:
                path = self._to_disk(work, self.options.folder)
            except Exception as error:
                errors.append(f"on disk: {error}")
        taken = Taken(
            step=work.step,
            nbytes=sum(file.layout.data_bytes for _, file in self._copied()),
            blocked_s=work.blocked_s,
            background_s=time.perf_counter() - begin,
            path=path,
            in_memory=remembered,
            error="; ".join(errors),
        )
        if self._given_up:  # which has been said
            return
        self.last = taken
        if errors:
            later = ", and no later one can be begun" if self.lost else ""
            logger.error("the snapshot after step %d failed %s%s", work.step, taken.error, later)

    def _to_memory(self, work: _Work, root: Path) -> None:
        """Raises: SnapshotError: on all ranks alike; the snapshot before is still there."""
        mine = in_memory.holder(root, self._rank)
        writing = folder.writing_place(mine, work.number, work.step)
        _, error = _attempt(
            lambda: in_memory.begin(root, self._rank, work.number, work.step), writing
        )
        try:
            self._tell(None, error)
            index = self._written(work, writing)
            files = [file for _, file in self._copied()]
            error = self._exchange(work, files, index, writing)
            self._tell(None, error)
            _, error = _attempt(lambda: folder.complete(writing, index), writing)
            self._tell(None, error)
        except SnapshotError as error:
            # With a peer lost, others may have it whole, and it needs this rank's part then.
            folder.abandon(writing, completed=not isinstance(error, PeerLost))
            raise
        # All ranks have it: what was before is not needed any more.
        _clean_up(lambda: folder.remove_before(mine, work.number))
        _clean_up(lambda: in_memory.remove_stale(root, work.number))

    def _exchange(self, work: _Work, files: list[HostFile], index: Index, writing: Path) -> str:
        """What failed on this rank alone. Raises: PeerLost."""
        try:
            self._together(lambda group: exchange(group, work.buddy, files, index.files, writing))
        except PeerLost:
            raise
        except (OSError, SnapshotError) as error:
            return str(error)
        return ""

    def _to_disk(self, work: _Work, root: Path) -> Path:
        """Raises: SnapshotError: on all ranks alike; nothing is left then."""
        made: Path | None = None
        error = ""
        if self._rank == 0:
            made, error = _attempt(lambda: folder.begin(root, work.number, work.step), None)
        try:
            writing = root / self._tell(made.name if made is not None else "", error)[0]
            index = self._written(work, writing)
            path, error = writing, ""
            if self._rank == 0:
                path, error = _attempt(lambda: folder.complete(writing, index), writing)
            path = root / self._tell(path.name, error)[0]
        except SnapshotError as error:
            if made is not None:
                folder.abandon(made, completed=not isinstance(error, PeerLost))
            raise
        if self._rank == 0:
            _clean_up(lambda: folder.keep_last(root, self.options.keep))
        return path

    def _written(self, work: _Work, writing: Path) -> Index:
        """Write this rank's files; the index of all. Collective. Raises: SnapshotError."""
        written, error = _attempt(lambda: self._write(writing), _NOTHING)
        files = [asdict(file) for file in written]
        heard = self._tell([files, work.scalars, _now()], error)
        # The same on all ranks, so that all fail alike.
        index, error = _attempt(lambda: self._index(work, heard), None)
        if index is None:
            raise SnapshotError(error)
        return index

    def _write(self, writing: Path) -> list[FileRecord]:
        """Raises: SnapshotError, OSError."""
        if not writing.is_dir():
            raise SnapshotError(
                f"{writing.parent} is not the same folder as on rank 0: it must be on a file "
                "system that all ranks share"
            )
        return [write_file(writing, name, self._rank, file) for name, file in self._copied()]

    def _index(self, work: _Work, heard: list[Any]) -> Index:
        """Args: heard: of each rank, its files, its scalars, its clock.

        Raises: ScalarMismatch: ranks disagree about a unit.
        """
        units = {
            name: UnitRecord(
                layout=work.layouts[name],
                tensors=unit.tensors,
                scalars=merge_scalars([json.loads(scalars[name]) for _, scalars, _ in heard]),
            )
            for name, unit in self._units.items()
        }
        return Index(
            number=work.number,
            step=work.step,
            epoch=work.epoch,
            plan=work.plan,
            world=self._world,
            taken=heard[0][2],
            units=units,
            files=tuple(file_record(file) for files, _, _ in heard for file in files),
        )

    # -- with the other ranks -----------------------------------------------------------------

    def _tell(self, said: Any, error: str = "") -> list[Any]:
        """Raises: SnapshotError: on all ranks alike. PeerLost: perhaps not on all."""
        return self._together(lambda group: tell(group, said, error))

    def _together(self, do: Callable[[dist.ProcessGroup], _T]) -> _T:
        """Raises: what it raises; PeerLost where torch says that a peer is gone, or the group was
        left meanwhile."""
        if self._group is None:
            raise PeerLost("a rank was lost before, or the snapshot was given up")
        try:
            return do(self._group)
        except SnapshotError:
            raise
        except Exception as error:
            # torch's is a RuntimeError, or of a group that `close` left a ValueError.
            if not isinstance(error, RuntimeError) and not self.lost:
                raise
            self._leave()
            raise PeerLost(
                f"a rank is gone or did not answer within the group's timeout: {error}"
            ) from error

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _failed(step: int, blocked_s: float, error: str) -> Taken:
    return Taken(
        step=step,
        nbytes=0,
        blocked_s=blocked_s,
        background_s=0.0,
        path=None,
        in_memory=False,
        error=error,
    )


def _attempt(do: Callable[[], _T], otherwise: _T) -> tuple[_T, str]:
    """What it returns, or why it failed: for the other ranks to hear."""
    try:
        return do(), ""
    except Exception as error:
        return otherwise, f"{type(error).__name__}: {error}"


def _check_alike(heard: Sequence[Mapping[str, Any]]) -> None:
    """Raises: SnapshotError: ranks do not say the same of the job. Args: heard: by rank."""
    for key in ("step", "epoch", "plan", "units", "layouts"):
        if any(one[key] != heard[0][key] for one in heard):
            many = key if key.endswith("s") else f"{key}s"
            raise SnapshotError(f"ranks are at different {many}: {[o[key] for o in heard]}")


def _clean_up(do: Callable[[], None]) -> None:
    """Of what is not needed any more: the snapshot is there, whether this succeeds or not."""
    try:
        do()
    except (OSError, SnapshotError) as error:
        logger.warning("older snapshots could not be removed: %s", error)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()


def _lower_priority() -> None:
    """Of the calling thread alone; on Linux threads have priorities of their own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
