"""Copies in the host memory of nodes: a folder on a memory file system (tmpfs), so that they
outlive the processes of a job, and go with the node.

    <memory folder>/rank-00002/000007-step340/index.json    the whole index
                                              <unit>/...    rank 2's own files, and those of the
                                                            ranks whose buddy it is

The newest snapshot is there, and while the next is copied, both. After the loss of nodes, what is
left together is a snapshot if each of its files is on some node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.emu.moves import MoveTable, plan_moves
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.agree import tell
from nereus_plugins.snapshot.blocks import BLOCK_BYTES, of_block
from nereus_plugins.snapshot.errors import DamagedSnapshot, SnapshotError
from nereus_plugins.snapshot.host_copy import entry_views
from nereus_plugins.snapshot.index import FileRecord, Index, read_index
from nereus_plugins.snapshot.read import read_layout
from nereus_plugins.snapshot.restore import agree_done, check_model, load_scalars
from nereus_plugins.transport.metadata import gather_tables
from nereus_plugins.transport.torch_transport import TorchTransport

_HOLDER = re.compile(r"rank-\d{5,}")


def holder(root: Path, rank: int) -> Path:
    """Where a rank keeps what it holds."""
    return root / f"rank-{rank:05d}"


def holders(root: Path) -> list[Path]:
    """What ranks on this node hold, or held in a job before."""
    return sorted(p for p in folder.inside(root) if _HOLDER.fullmatch(p.name) and p.is_dir())


def last_number(root: Path) -> int:
    """The highest number of a snapshot on this node, 0 if there is none."""
    return max((folder.last_number(place) for place in holders(root)), default=0)


def begin(root: Path, rank: int, number: int, step: int) -> Path:
    """Make the folder into which a rank writes what it will hold of a new snapshot.

    Raises: OSError; SnapshotError: others could write in the memory folder.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owned(root)
    return folder.begin(holder(root, rank), number, step)


def check_owned(root: Path) -> None:
    """A memory file system is everybody's: what is there must be this user's own.

    Raises: SnapshotError: it is not. OSError: it is not there.
    """
    link, found = root.lstat(), root.stat()
    if {link.st_uid, found.st_uid} != {os.geteuid()}:
        raise SnapshotError(f"{root} is another user's: choose another memory folder")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SnapshotError(
            f"{root} is writable by other users (mode {stat.S_IMODE(found.st_mode):04o}): make it "
            "0700, or choose another memory folder"
        )


def remove(root: Path, rank: int) -> None:
    """Give back the memory of a rank's copies."""
    shutil.rmtree(holder(root, rank), ignore_errors=True)
    with contextlib.suppress(OSError):  # others hold something
        root.rmdir()


def remove_stale(root: Path, number: int) -> None:
    """Give back the memory of ranks of an earlier job: they have no snapshot of this number."""
    for place in holders(root):
        if folder.last_number(place) < number:
            shutil.rmtree(place, ignore_errors=True)  # perhaps another rank is at it


@dataclass(frozen=True)
class InMemory:
    """A snapshot in the memory of the nodes.

    Attributes:
        index: of all of it.
        mine: the files that this rank provides, and where it finds them.
    """

    index: Index
    mine: tuple[tuple[Path, FileRecord], ...]


def find(root: Path, group: dist.ProcessGroup) -> InMemory:
    """The newest snapshot of which every file is on some node of the job. Collective.

    Args: root: the memory folder, which need not exist. group: all ranks, gloo.

    Raises: SnapshotError: on all ranks alike: there is none, or a rank cannot read its folder, or
        others could write there.
    """
    me, here, error = dist.get_rank(group), {}, ""
    try:
        here = _here(root)
    except Exception as caught:
        error = str(caught)
    said = {digest: [one.index.number, sorted(one.held)] for digest, one in here.items()}
    heard = tell(group, said, error)
    numbers = {digest: one[0] for ranks in heard for digest, one in ranks.items()}
    lacking = ""
    for digest in sorted(numbers, key=lambda d: (-numbers[d], d)):
        first = next(rank for rank, ranks in enumerate(heard) if digest in ranks)
        text = tell(group, here[digest].index.to_json() if me == first else "")[first]
        index = read_index(text, f"the index of rank {first}")
        held = [set(ranks[digest][1]) if digest in ranks else set() for ranks in heard]
        lost = {file.path for file in index.files}.difference(*held)
        if not lost:
            mine = _dealt(index, held)[me]
            return InMemory(index, tuple((here[digest].held[f.path], f) for f in mine))
        lacking += f"; of that after step {index.step} {len(lost)} files are lost with their nodes"
    raise SnapshotError(f"no snapshot in the memory folders of the nodes{lacking}")


def restore(found: InMemory, units: Mapping[str, BuiltUnit], group: dist.ProcessGroup) -> int:
    """Fill units, in any layout, from what the nodes hold; returns the bytes that this rank
    received. Collective.

    Args: found: of `find`. units: as `restore.restore`. group: all ranks, gloo; taken over: it is
        destroyed at the end, however that comes.

    Raises:
        OtherModel, DamagedSnapshot, SnapshotError, TransportError: as `restore.restore`.
    """
    transport = TorchTransport(group)
    try:
        received = _restore(found, units, group, transport)
    except BaseException:
        with contextlib.suppress(ValueError):  # the transport has done so where it failed
            dist.destroy_process_group(group)
        raise
    transport.close()
    return received


def _restore(
    found: InMemory,
    units: Mapping[str, BuiltUnit],
    group: dist.ProcessGroup,
    transport: TorchTransport,
) -> int:
    described = check_model(found.index, units, group)
    rank, error, received = dist.get_rank(group), None, 0
    sources: dict[str, list[LocalShard]] = {name: [] for name in units}
    tables: dict[str, tuple[ShardTable, ShardTable]] = {}  # of this rank, source and target
    try:
        for path, file in found.mine:
            if file.unit in sources:
                sources[file.unit] += _shards(path, file, found.index)
        for name in sorted(described):
            tables[name] = DescribedUnit(sources[name]).table(rank), described[name].table(rank)
    except Exception as caught:
        error = caught
    agree_done(group, error)
    moves_of: dict[str, MoveTable] = {}
    for name, (source, target) in tables.items():
        whole = gather_tables(source, group), gather_tables(target, group)
        try:
            moves_of[name] = plan_moves(*whole, rank=rank)
        except Exception as caught:
            error = error or caught
    agree_done(group, error)
    for name, moves in moves_of.items():
        received += transport.exchange(moves, sources[name], described[name].shards).bytes_received
        transport.verify()
    try:
        load_scalars(found.index, units)
    except Exception as caught:
        error = caught
    agree_done(group, error)
    return received


@dataclass(frozen=True)
class _Held:
    """What this node has of one snapshot: where each file is, by its path in the snapshot."""

    index: Index
    held: dict[str, Path]


def _here(root: Path) -> dict[str, _Held]:
    """By digest of the index. What is torn is passed over.

    Raises: OSError, SnapshotError: it cannot be read, or is not this user's own.
    """
    out: dict[str, _Held] = {}
    if not root.exists():
        return out
    check_owned(root)
    for place in holders(root):
        for _, path in folder.numbered(place):
            try:
                index = folder.open_index(path)
            except DamagedSnapshot:
                continue
            one = out.setdefault(index.digest, _Held(index, {}))
            for file in index.files:
                with contextlib.suppress(DamagedSnapshot):
                    folder.check_size(path, file)
                    one.held.setdefault(file.path, path / file.path)
    return out


def _dealt(index: Index, held: Sequence[set[str]]) -> list[list[FileRecord]]:
    """By rank, the files that it provides: each by one rank that has it, the bytes spread."""
    out: list[list[FileRecord]] = [[] for _ in held]
    load = [0] * len(held)
    for file in sorted(index.files, key=lambda f: (-f.nbytes, f.path)):
        rank = min((r for r, paths in enumerate(held) if file.path in paths), key=load.__getitem__)
        out[rank].append(file)
        load[rank] += file.nbytes
    return out


def _shards(path: Path, file: FileRecord, index: Index) -> list[LocalShard]:
    """The boxes of a file as views of it where it lies, checked. Raises: DamagedSnapshot."""
    shapes = {t.name: t.shape for t in index.units[file.unit].tensors}
    layout = read_layout(path, file, shapes)
    if not layout.data_bytes:
        return []
    # Copy on write: nothing can change what another rank may have to read.
    mapped = np.memmap(path, dtype=np.uint8, mode="c", offset=file.header_bytes)
    data = torch.from_numpy(mapped)
    for number, said in enumerate(file.blocks):
        begin = number * BLOCK_BYTES
        if of_block(data[begin : begin + BLOCK_BYTES]) != said:
            raise DamagedSnapshot(f"{path}: has changed since it was written")
    return entry_views(layout, data)
