"""What can go wrong as a snapshot is taken, on gloo ranks with a small unit: the job trains on."""

from __future__ import annotations

import datetime
import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.snapshot import folder, in_memory, snapshots
from nereus_plugins.snapshot.errors import DamagedSnapshot, OtherModel, SnapshotError
from nereus_plugins.snapshot.restore import restore
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots
from nereus_plugins.spec import Layout

from .spawn import run_ranks, run_ranks_outcomes

ROWS, WORLD = 10, 2


class Rows:
    """A unit whose one tensor is cut by rows; also what it has built."""

    name = "rows"

    def __init__(self, rank: int, world: int, value: float, width: int = 4) -> None:
        self.scalars: dict[str, Any] = {"steps": {"w": value}}
        self._layout = Layout(dp=world, sharding="fsdp")
        low, high = ROWS * rank // world, ROWS * (rank + 1) // world
        self._box = Box((low, 0), (high - low, width))
        self.data = torch.full((high - low, width), value) + torch.arange(low, high)[:, None]

    def layout(self) -> Layout:
        return self._layout

    def described(self) -> DescribedUnit:
        width = self._box.shape[1]
        return DescribedUnit(
            [LocalShard("weight/w", self._box, (ROWS, width), self.data)], self.scalars
        )

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.scalars = dict(scalars)


def _group(timeout_s: float = 120.0) -> dist.ProcessGroup:
    ranks, limit = list(range(dist.get_world_size())), datetime.timedelta(seconds=timeout_s)
    group = dist.new_group(ranks, limit, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _take(them: Snapshots, step: int, unit: Any) -> Any:
    assert them.take(step, {"rows": unit}, epoch=7, plan={"actor": 1})
    return them.wait()


def several(rank: int, world: int, place: str) -> None:
    root = Path(place)
    them = Snapshots(SnapshotOptions(root / "disk", 2, root / f"memory{rank}"), _group())
    for step in (1, 2, 3):
        unit = Rows(rank, world, float(step))
        assert them.take(step, {"rows": unit}, epoch=7, plan={"actor": 1})
        unit.data.zero_()  # it trains on at once
        taken = them.wait()
        assert taken.path is not None
        assert taken.in_memory
        assert not taken.error
        assert taken.nbytes == ROWS // world * 16
        assert stat.S_IMODE((root / f"memory{rank}").stat().st_mode) == 0o700
        dist.barrier()
    found, passed_over = folder.find(root / "disk")
    assert [s.index.step for s in found] == [2, 3]
    assert not passed_over
    index = found[-1].index
    assert (index.epoch, index.plan, index.world) == (7, {"actor": 1}, world)
    assert index.units["rows"].layout == Layout(dp=world, sharding="fsdp")
    for at in ("disk", "memory"):
        unit = Rows(rank, world, 0.0)
        if at == "disk":
            restore(found[-1], {"rows": unit}, _group())  # type: ignore[dict-item]
        else:
            group = _group()
            held = in_memory.find(root / f"memory{rank}", group)
            assert held.index.step == 3
            in_memory.restore(held, {"rows": unit}, group)  # type: ignore[dict-item]
        assert torch.equal(unit.data, Rows(rank, world, 3.0).data)
        assert unit.scalars == {"steps": {"w": 3.0}}
    dist.barrier()
    them.close()
    assert not (root / f"memory{rank}").exists()
    dist.barrier()
    # A job that is started again counts on.
    them = Snapshots(SnapshotOptions(root / "disk"), _group())
    assert _take(them, 1, Rows(rank, world, 1.0)).path.name == "000004-step1"
    them.close()


def test_snapshots_follow_each_other_on_disk_and_in_memory(tmp_path: Path) -> None:
    run_ranks(several, WORLD, str(tmp_path))


def full_disk(rank: int, world: int, place: str) -> None:
    root = Path(place)
    them = Snapshots(SnapshotOptions(root / "disk", 1, root / f"memory{rank}"), _group())
    assert not _take(them, 1, Rows(rank, world, 1.0)).error
    dist.barrier()
    write = snapshots.write_file
    for where in ("disk", "memory"):

        def fails(writing: Path, *rest: Any, where: str = where) -> Any:
            if rank == 1 and where in str(writing.relative_to(root)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(writing, *rest)

        snapshots.write_file = fails  # type: ignore[assignment]
        taken = _take(them, 2, Rows(rank, world, 2.0))
        assert f"{'on disk' if where == 'disk' else 'in memory'}: rank 1" in taken.error
        assert "No space left" in taken.error
        assert taken.in_memory == (where == "disk")
        assert (taken.path is None) == (where == "disk")
        dist.barrier()
        found, passed_over = folder.find(root / "disk")
        assert [s.index.step for s in found] == [1 if where == "disk" else 2]
        assert not passed_over  # nothing half written is left
        held = in_memory.find(root / f"memory{rank}", _group())
        assert held.index.step == 2
        assert not list((root / f"memory{rank}").glob("*/.writing-*"))
        dist.barrier()
    them.close()


def test_a_full_disk_costs_the_snapshot_only(tmp_path: Path) -> None:
    run_ranks(full_disk, WORLD, str(tmp_path))


def refused(rank: int, world: int, place: str) -> None:
    root = Path(place)
    them = Snapshots(SnapshotOptions(root / "disk"), _group())
    with pytest.raises(SnapshotError, match=r"different steps: \[0, 1\]"):
        them.take(rank, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="cannot name a folder"):
        them.take(1, {"../rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="unit rows cannot be copied"):
        them.take(1, {"rows": Rows(rank, world + 1, 1.0)})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="different units"):
        them.take(1, {f"rows{rank}": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    rows = {"rows": Rows(rank, world, 1.0)}
    with pytest.raises(SnapshotError, match=r"different epochs: \[0, 1\]"):
        them.take(1, rows, epoch=rank)  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match="different plans"):
        them.take(1, rows, plan={"actor": rank})  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match="rank 1: TypeError"):
        them.take(1, rows, plan={"actor": {rank} if rank else 0})  # type: ignore[arg-type]
    other_layout = Rows(rank, world, 1.0)
    other_layout._layout = Layout(dp=world, sharding="fsdp" if rank else "none")
    with pytest.raises(SnapshotError, match="different layouts"):
        them.take(1, {"rows": other_layout})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="rank 1: AttributeError"):
        them.take(1, {"rows": Rows(rank, world, 1.0) if rank == 0 else None})  # type: ignore[dict-item]
    unit = Rows(rank, world, 1.0)
    unit.scalars = {"steps": {"w": rank}}
    assert "disagree about steps/w" in _take(them, 1, unit).error
    dist.barrier()
    assert folder.find(root / "disk") == ([], [])
    dist.barrier()
    _take(them, 1, Rows(rank, world, 1.0))
    snapshot = folder.latest(root / "disk")
    wider = Rows(rank, world, 1.0, width=5)
    with pytest.raises(OtherModel, match=r"weight/w is float32 \[10, 5\] in this job"):
        restore(snapshot, {"rows": wider}, _group())  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="it has no unit 'critic'"):
        restore(snapshot, {"critic": wider}, _group())  # type: ignore[dict-item]
    dist.barrier()
    if rank == 1:
        file = snapshot.path / snapshot.index.files[1].path
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    # Rank 1 alone reads it, both refuse what they have.
    kind = DamagedSnapshot if rank == 1 else SnapshotError
    with pytest.raises(kind, match=r"shard-00002.*have changed"):
        restore(snapshot, {"rows": Rows(rank, world, 0.0)}, _group())  # type: ignore[dict-item]
    them.close()
    other = Snapshots(SnapshotOptions(root / f"own{rank}"), _group())
    assert (
        "must be on a file system that all ranks share"
        in _take(other, 1, Rows(rank, world, 1.0)).error
    )
    other.close()


def no_memory(rank: int, world: int, place: str) -> None:
    them = Snapshots(SnapshotOptions(Path(place)), _group())
    allocate = snapshots.HostCopy

    def fails(*said: Any, **more: Any) -> Any:
        if rank == 1:
            raise RuntimeError("not enough memory")
        return allocate(*said, **more)

    snapshots.HostCopy = fails  # type: ignore[assignment,misc]
    with pytest.raises(SnapshotError, match="rank 1: RuntimeError: not enough memory"):
        them.take(1, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    snapshots.HostCopy = allocate  # type: ignore[misc]
    assert not _take(them, 2, Rows(rank, world, 2.0)).error
    them.close()


def test_a_rank_without_memory_for_the_copy_is_named(tmp_path: Path) -> None:
    run_ranks(no_memory, WORLD, str(tmp_path))


def looks_nowhere(rank: int, world: int, place: str) -> None:
    """Rank 1 may not look into its folders."""
    root = Path(place)
    them = Snapshots(SnapshotOptions(root / "disk", 1, root / f"memory{rank}"), _group())
    assert not _take(them, 1, Rows(rank, world, 1.0)).error

    def refuses(_: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    kept = folder.last_number, in_memory._here
    if rank == 1:
        folder.last_number, in_memory._here = refuses, refuses  # type: ignore[assignment]
    assert "rank 1: PermissionError" in _take(them, 2, Rows(rank, world, 2.0)).error
    with pytest.raises(SnapshotError, match=r"rank 1: .*Permission denied"):
        in_memory.find(root / f"memory{rank}", _group())
    folder.last_number, in_memory._here = kept  # type: ignore[assignment]
    assert not _take(them, 2, Rows(rank, world, 2.0)).error
    them.close()


def test_a_rank_that_cannot_look_into_its_folders_is_named(tmp_path: Path) -> None:
    run_ranks(looks_nowhere, WORLD, str(tmp_path))


def trains_on(rank: int, world: int, place: str) -> None:
    """A snapshot that cannot be begun costs no step; nor does one after which a rank is lost."""
    them = Snapshots(SnapshotOptions(Path(place), every_steps=1), _group())
    allocate = snapshots.HostCopy

    def fails(*said: Any, **more: Any) -> Any:
        raise RuntimeError("not enough memory")

    unit: Any = {"rows": Rows(rank, world, 1.0)}
    if rank == 1:
        snapshots.HostCopy = fails  # type: ignore[assignment,misc]
    assert not them.after_step(1, unit)
    assert them.last is not None
    assert them.last.step == 1
    assert "rank 1: RuntimeError: not enough memory" in them.last.error
    snapshots.HostCopy = allocate  # type: ignore[misc]
    assert them.after_step(2, unit)
    taken = them.wait()
    assert taken is not None
    assert not taken.error
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert not them.after_step(3, unit)
    assert them.last.step == 3
    assert "a rank is gone" in them.last.error
    assert not them.after_step(4, unit)
    assert them.last.step == 3


def test_a_job_trains_on_without_a_snapshot(tmp_path: Path) -> None:
    zero, one = run_ranks_outcomes(trains_on, WORLD, str(tmp_path))
    assert zero.ok, zero.error
    assert one.exitcode == -signal.SIGKILL


def no_thread(rank: int, world: int, place: str) -> None:
    """Rank 1 can have no more threads: the other does not wait for that one's."""
    them = Snapshots(SnapshotOptions(Path(place)), _group())
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if rank == 1:
        threading.Thread.start = fails  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(SnapshotError, match="rank 1: RuntimeError: can't start new thread"):
        them.take(1, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    assert time.monotonic() - begin < 60.0
    threading.Thread.start = start  # type: ignore[method-assign]
    assert not [t for t in threading.enumerate() if t.name == "nereus-snapshot"]
    assert not _take(them, 2, Rows(rank, world, 2.0)).error
    them.close()


def test_a_rank_without_a_thread_holds_nobody(tmp_path: Path) -> None:
    run_ranks(no_thread, WORLD, str(tmp_path))


def backs_off(rank: int, world: int, place: str) -> list[int]:
    """The steps after which it is tried to begin a snapshot, while rank 1 has no memory for it."""
    them = Snapshots(SnapshotOptions(Path(place), between_failures_s=1e-3), _group())
    allocate, tried = snapshots.HostCopy, []

    def fails(*said: Any, **more: Any) -> Any:
        raise RuntimeError("not enough memory")

    if rank == 1:
        snapshots.HostCopy = fails  # type: ignore[assignment,misc]
    for step in range(1, 41):
        them.last = None
        assert not them.after_step(step, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
        if them.last is not None:
            tried.append(step)
    snapshots.HostCopy = allocate  # type: ignore[misc]
    step = them.due.next_step
    assert them.after_step(step, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
    assert not them.wait().error  # type: ignore[union-attr]
    them.close()
    return tried


def test_what_cannot_be_begun_is_tried_less_and_less_often(tmp_path: Path) -> None:
    tried = run_ranks(backs_off, WORLD, str(tmp_path))
    assert tried == [[2, 3, 5, 9, 17, 33]] * WORLD


def no_table(rank: int, world: int, place: str) -> None:
    """Rank 1 cannot say what it holds, when a snapshot in memory is to be restored."""
    root = Path(place)
    them = Snapshots(SnapshotOptions(memory_folder=root / f"memory{rank}"), _group())
    assert not _take(them, 1, Rows(rank, world, 1.0)).error
    unit = Rows(rank, world, 0.0)
    described = unit.described

    def fails() -> DescribedUnit:
        found = described()
        if rank == 1:
            found.table = _no_table  # type: ignore[method-assign]
        return found

    unit.described = fails  # type: ignore[method-assign]
    group = _group()
    held = in_memory.find(root / f"memory{rank}", group)
    begin = time.monotonic()
    with pytest.raises((SnapshotError, RuntimeError), match="no table"):
        in_memory.restore(held, {"rows": unit}, group)  # type: ignore[dict-item]
    assert time.monotonic() - begin < 60.0
    dist.barrier()
    them.close()


def _no_table(_: int) -> Any:
    raise RuntimeError("no table")


def test_a_rank_that_cannot_say_what_it_holds_is_named(tmp_path: Path) -> None:
    run_ranks(no_table, WORLD, str(tmp_path))


def half_done(rank: int, world: int, place: str) -> None:
    """Rank 1 cannot begin in memory, then not complete: what was before stays, on all ranks."""
    memory = Path(place) / f"memory{rank}"
    them = Snapshots(SnapshotOptions(memory_folder=memory), _group())
    assert not _take(them, 1, Rows(rank, world, 1.0)).error

    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step, name in enumerate(("begin", "complete"), start=2):
        works = getattr(folder, name)
        if rank == 1:
            setattr(folder, name, fails)
        taken = _take(them, step, Rows(rank, world, float(step)))
        setattr(folder, name, works)
        assert "in memory: rank 1: OSError" in taken.error
        assert [p.name for p in in_memory.holder(memory, rank).iterdir()] == ["000001-step1"]
        assert in_memory.find(memory, _group()).index.step == 1
    them.close()


def test_what_some_ranks_have_of_a_failed_snapshot_is_removed(tmp_path: Path) -> None:
    run_ranks(half_done, WORLD, str(tmp_path))


def not_removed(rank: int, world: int, place: str) -> None:
    """Older ones cannot be removed: the new one is there all the same."""
    root = Path(place)
    them = Snapshots(SnapshotOptions(root / "disk", 1, root / f"memory{rank}"), _group())

    def fails(*_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    folder.remove_before = fails
    in_memory.remove_stale = fails
    for step in (1, 2):
        taken = _take(them, step, Rows(rank, world, float(step)))
        assert not taken.error
        assert taken.in_memory
        assert taken.path is not None
    dist.barrier()
    assert [s.index.step for s in folder.find(root / "disk")[0]] == [1, 2]
    dist.barrier()
    them.close()


def test_older_ones_that_stay_fail_no_snapshot(tmp_path: Path) -> None:
    run_ranks(not_removed, WORLD, str(tmp_path))


def in_any_order(rank: int, world: int, place: str) -> None:
    """Ranks name their units in different orders; a restore that fails keeps no group."""
    memory = Path(place) / f"memory{rank}"
    them = Snapshots(SnapshotOptions(memory_folder=memory), _group())
    for back in (False, True):
        order = sorted(("actor", "critic"), reverse=(rank == 1) != back)
        widths = {"actor": 4, "critic": 6}
        units: Any = {name: Rows(rank, world, float(back), widths[name]) for name in order}
        if not back:
            assert them.take(1, units)
            taken = them.wait()
            assert taken is not None
            assert not taken.error
        else:
            group = _group()
            found = in_memory.find(memory, group)
            in_memory.restore(found, units, group)
            for name, width in widths.items():
                assert torch.equal(units[name].data, Rows(rank, world, 0.0, width).data)
    group = _group()
    found = in_memory.find(memory, group)
    with pytest.raises(OtherModel):
        in_memory.restore(found, {"actor": Rows(rank, world, 0.0, 5)}, group)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    dist.barrier()
    them.close()


def test_ranks_may_name_units_in_any_order(tmp_path: Path) -> None:
    run_ranks(in_any_order, WORLD, str(tmp_path))


def held_up(rank: int, world: int, place: str, given_up: bool, begins: bool) -> None:
    """A rank's disk takes longer than ranks wait: as they part, or for each other's message.

    Args: begins: as the folder is made, and not as files are written.
    """
    root, go_on = Path(place), threading.Event()
    begin_folder, write = folder.begin, snapshots.write_file

    def waits(do: Any, where: int) -> Any:
        def do_late(*args: Any) -> Any:
            if rank == where:
                assert go_on.wait(60)
            return do(*args)

        return do_late

    if begins:
        folder.begin = waits(begin_folder, 0)
    else:
        snapshots.write_file = waits(write, 1)
    them = Snapshots(SnapshotOptions(root), _group(60.0 if given_up else 1.0))
    assert them.take(1, {"rows": Rows(rank, world, 1.0)})
    (thread,) = (t for t in threading.enumerate() if t.name == "nereus-snapshot")
    if given_up:
        begin = time.monotonic()
        them.close(limit_s=0.5)
        assert time.monotonic() - begin < 20
        assert them.last is not None
        assert them.last.error.startswith("given up: not written 0.5 s after")
    elif rank == 0:
        taken = them.wait()
        assert taken is not None
        assert "did not answer within the group's timeout" in taken.error
    dist.barrier()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    dist.barrier()
    assert not list(root.iterdir())  # nor anything half written
    if not given_up:
        assert not them.take(2, {"rows": Rows(rank, world, 2.0)})
        assert them.lost
        them.close()
    # Ranks that part at the limit, or were too slow once, take others over a new group.
    dist.barrier()
    them = Snapshots(SnapshotOptions(root), _group())
    assert not _take(them, 3, Rows(rank, world, 3.0)).error
    assert not them.lost
    them.close()


@pytest.mark.parametrize(("given_up", "begins"), [(True, False), (False, False), (True, True)])
def test_a_slow_disk_costs_the_snapshot_only(tmp_path: Path, given_up: bool, begins: bool) -> None:
    run_ranks(held_up, WORLD, str(tmp_path), given_up, begins)


def hangs(rank: int, world: int, place: str) -> None:
    """Rank 1's file system hangs, as it is looked into and as it is written to."""
    root, go_on = Path(place), threading.Event()
    looks, write = folder.last_number, snapshots.write_file

    def held(do: Any) -> Any:
        def waits(*args: Any) -> Any:
            if rank == 1:
                assert go_on.wait(60)
            return do(*args)

        return waits

    them = Snapshots(SnapshotOptions(root), _group())
    for step in (1, 2):
        go_on.clear()
        if step == 1:
            folder.last_number = held(looks)
        else:
            snapshots.write_file = held(write)
        begin = time.monotonic()
        assert them.take(step, {"rows": Rows(rank, world, 1.0)})  # type: ignore[dict-item]
        assert not them.ended(0.2)
        assert time.monotonic() - begin < 20
        dist.barrier()
        go_on.set()
        assert them.ended(60)
        assert them.last is not None
        assert (them.last.step, them.last.error) == (step, "")
        folder.last_number, snapshots.write_file = looks, write
        dist.barrier()
    them.close()


def test_a_hung_disk_does_not_hold_the_boundary(tmp_path: Path) -> None:
    run_ranks(hangs, WORLD, str(tmp_path))


def test_what_cannot_be_taken_or_restored_is_said_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(refused, WORLD, str(tmp_path))


def beside(rank: int, world: int, place: str) -> None:
    """The trainer's group is used all the time that a snapshot is under way."""
    them = Snapshots(SnapshotOptions(Path(place)), _group())
    unit = Rows(rank, world, 1.0, width=200_000)
    rounds = 0
    for step in range(3):
        assert them.take(step, {"rows": unit})  # type: ignore[dict-item]
        assert them._thread is not None
        running = torch.tensor([them._thread.is_alive()], dtype=torch.int32)
        while running.item():
            one = torch.ones(1)
            dist.all_reduce(one)
            assert one.item() == world
            rounds += 1
            running.fill_(them._thread.is_alive())
            dist.all_reduce(running)
    assert rounds > 3
    assert not them.wait().error  # type: ignore[union-attr]
    them.close()


def test_the_trainers_group_is_not_held(tmp_path: Path) -> None:
    run_ranks(beside, WORLD, str(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"folder": Path("x"), "keep": 0},
        {"folder": Path("x"), "every_steps": 0},
        {"folder": Path("x"), "between_failures_s": 0.0},
        {"folder": Path("x"), "between_failures_s": 1.0, "every_steps": 1},
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        SnapshotOptions(**wrong)


def paced(rank: int, world: int, place: str) -> list[list[int]]:
    """Steps after which snapshots were begun, at a fixed interval and at one that follows."""
    out = []
    for options in (
        SnapshotOptions(Path(place) / "fixed", every_steps=4),
        SnapshotOptions(Path(place) / "follows", between_failures_s=50.0),
    ):
        them = Snapshots(options, _group())
        unit = Rows(rank, world, 1.0)
        begun = []
        for step in range(1, 13):
            time.sleep(0.01 * (1 + rank))
            if them.after_step(step, {"rows": unit}):  # type: ignore[dict-item]
                begun.append(step)
                if options.between_failures_s is not None:
                    assert them.due.next_step > step
        assert not them.wait().error  # type: ignore[union-attr]
        out.append([*begun, them.due.next_step])
        them.close()
    return out


def test_snapshots_are_taken_when_due_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run_ranks(paced, WORLD, str(tmp_path))
    assert first == second
    assert first[0] == [4, 8, 12, 0]
    assert first[1][0] == 2  # the first step of which the time is known
    assert first[1] == sorted(set(first[1]))
