"""Snapshots in the memory of nodes: a rank is killed, its node's memory is gone with it, and the
job is started again, in another layout and with another number of ranks, from its buddy's copy."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nereus_plugins.selftest.cases import cases
from nereus_plugins.selftest.compare import whole_state
from nereus_plugins.selftest.proofs import UNIT, make_job
from nereus_plugins.selftest.ranks import Bench, Ended, run_on_ranks
from nereus_plugins.selftest.snapshots import group_of_all, state_digest
from nereus_plugins.snapshot import folder, in_memory
from nereus_plugins.snapshot.buddies import buddies
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.restore import restore
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots
from nereus_plugins.transport.control import Control

WORLD, VICTIM = 4, 1
# The model whose layouts are taken, so that any of them fits any of the others.
MODEL: dict[str, dict[str, Any]] = {"megatron": {"bf16": True}, "fsdp2": {}}


def test_the_ring_puts_every_part_on_two_nodes() -> None:
    assert buddies(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert buddies(["a", "b", "a", "c"]) == [1, 3, 1, 0]
    assert buddies(["a", "a", "a", "b"]) == [3, 3, 3, 0]
    assert buddies(["a", "a", "a"]) == [1, 2, 0]
    assert buddies(["a"]) == [None]


def _case(backend: str, ranks: int) -> Any:
    return next(c for c in cases(backend, 4) if c.model == MODEL[backend] and c.ranks == ranks)


def _options(place: Path, node: str) -> SnapshotOptions:
    return SnapshotOptions(place / "disk", memory_folder=place / node, node=node)


def killed(bench: Bench, backend: str, place: str, moment: int) -> dict[int, str]:
    """On a rank: snapshots after steps 1 and 2; the victim dies in the second, before its
    `moment`-th message. A digest of the state by step."""
    job = make_job(_case(backend, WORLD), _case(backend, WORLD).source, bench, seed=1)
    snapshots = Snapshots(_options(Path(place), f"node{bench.rank}"), group_of_all())
    digests = {}
    for step in (1, 2):
        job.train_step(step)
        digests[step] = state_digest(whole_state(job.described(), bench.device))
        if step == 2 and bench.rank == VICTIM:
            _die_before(snapshots, moment)
        # All see the digests before any dies.
        dist.barrier()
        assert snapshots.take(step, {UNIT: job})
        taken = snapshots.wait()
        assert taken is not None
        assert not taken.error or step == 2, taken.error
    return digests


def _die_before(snapshots: Snapshots, moment: int) -> None:
    tell, told = snapshots._tell, -1  # the first two are at the boundary

    def until(*said: Any) -> Any:
        nonlocal told
        told += 1
        if told == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return tell(*said)

    snapshots._tell = until  # type: ignore[method-assign]


def recovered(bench: Bench, backend: str, place: str, nodes: list[str]) -> list[tuple[int, str]]:
    """On a rank of a new job, on one of `nodes`: the step restored and a digest of the state, from
    disk and from the nodes' memory; then it takes a snapshot of its own."""
    node = nodes[bench.rank]
    case = _case(backend, bench.world)
    job = make_job(case, case.target, bench, seed=9)
    group = group_of_all()
    on_disk = folder.latest(Path(place) / "disk")
    restore(on_disk, {UNIT: job.current}, group)
    of_disk = state_digest(whole_state(job.described(), bench.device))
    found = in_memory.find(Path(place) / node, group)
    in_memory.restore(found, {UNIT: job.current}, group)
    digest = state_digest(whole_state(job.described(), bench.device))
    job.train_step(found.index.step)
    snapshots = Snapshots(_options(Path(place), node), group_of_all())
    assert snapshots.take(found.index.step + 1, {UNIT: job})
    taken = snapshots.wait()
    assert taken is not None
    assert not taken.error, taken.error
    # Nothing of the job before, which had other ranks.
    assert len(in_memory.holders(Path(place) / node)) == nodes.count(node)
    Control(bench.rank, bench.world, timeout_s=60).vote("looked", True)
    snapshots.close()
    return [(on_disk.index.step, of_disk), (found.index.step, digest)]


def _run(name: str, world: int, place: Path, *args: Any) -> list[Ended]:
    return run_on_ranks(
        f"{__name__}:{name}", world, *args, device="cpu", folder=place, limit_s=240.0, timeout_s=30
    )


@pytest.mark.parametrize(
    ("backend", "moment", "ranks"),
    [("fsdp2", 5, 2), ("fsdp2", 6, 4), ("megatron", 8, 2)],
)
def test_a_lost_node_is_restored_from_its_buddy(
    tmp_path: Path, backend: str, moment: int, ranks: int
) -> None:
    ended = _run("killed", WORLD, tmp_path, backend, str(tmp_path), moment)
    assert ended[VICTIM].exitcode == -signal.SIGKILL
    survivors = [end for end in ended if end.rank != VICTIM]
    assert all(end.value is not None for end in survivors), [end.error for end in survivors]
    shutil.rmtree(tmp_path / f"node{VICTIM}")
    digests = {int(step): digest for step, digest in survivors[0].value.items()}
    nodes = ["node0", "node2", "node3", "new"] if ranks == 4 else ["node3", "node2"]
    if ranks == 2:  # one node of the old job is on another's machine now
        for held in (tmp_path / "node0").iterdir():
            shutil.copytree(held, tmp_path / "node2" / held.name)
    again = _run("recovered", ranks, tmp_path, backend, str(tmp_path), nodes)
    assert all(end.value is not None for end in again), [end.error for end in again]
    assert all(end.value == again[0].value for end in again)
    (disk_step, of_disk), (step, digest) = again[0].value
    assert digests[disk_step] == of_disk
    assert digests[step] == digest
    # Into memory first; and all there once its own part and its ward's were known to be.
    assert (disk_step, step) == (1, 2 if moment > 5 else 1)
    left = [p for node in set(nodes) for p in (tmp_path / node).glob("**/*")]
    assert not left
    found, passed_over = folder.find(tmp_path / "disk")
    assert len(found) == 2
    assert not passed_over


def lost(bench: Bench, place: str) -> str:
    """On a rank: looks for a snapshot of which no node has all."""
    try:
        in_memory.find(Path(place) / f"node{bench.rank}", group_of_all())
    except SnapshotError as error:
        return str(error)
    return "found"


def test_two_neighbouring_nodes_lost_is_said(tmp_path: Path) -> None:
    ended = _run("killed", WORLD, tmp_path, "fsdp2", str(tmp_path), 0)
    assert ended[VICTIM].exitcode == -signal.SIGKILL
    for node in ("node1", "node2"):
        shutil.rmtree(tmp_path / node)
    said = {end.value for end in _run("lost", WORLD, tmp_path, str(tmp_path))}
    assert len(said) == 1
    assert "files are lost with their nodes" in said.pop()
