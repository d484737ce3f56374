"""Boxes read from a snapshot's files into live shards: only the blocks that are needed, each
checked before anything of it is used.

The files are the source shards of planned moves, so the layout and the number of ranks that a
snapshot was taken in do not matter.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.emu.moves import MoveTable, plan_moves
from nereus_plugins.emu.table import ShardTable, StorageInfo, TableError, concat
from nereus_plugins.emu.tiling import CoverageError
from nereus_plugins.snapshot.blocks import BLOCK_BYTES, of_block, of_bytes
from nereus_plugins.snapshot.errors import DamagedSnapshot, OtherModel, unreadable
from nereus_plugins.snapshot.folder import Snapshot
from nereus_plugins.snapshot.index import FileRecord
from nereus_plugins.snapshot.shard_file import Entry, FileLayout, parse

# What is read at once for one piece of a box, and the checked blocks that are kept.
SPAN_BYTES = 4 * BLOCK_BYTES
BLOCKS_KEPT = 6


def read_unit(snapshot: Snapshot, name: str, target: DescribedUnit) -> int:
    """Fill this process's shards of a unit from the files of a snapshot; returns bytes read.

    Local: each process reads what it needs, one file at a time: a unit has as many files as its job
    had ranks, or more. After a failure the target's content is undefined.

    Args:
        name: of a unit of the snapshot. target: live shards, in any layout.

    Raises:
        DamagedSnapshot: a file is missing or changed. OtherModel: a tensor is not of this shape
        and type in the snapshot. SnapshotError: this process can open no more files.
    """
    files = [file for file in snapshot.index.files if file.unit == name]
    shapes = {t.name: t.shape for t in snapshot.index.units[name].tensors}
    layouts = [read_layout(snapshot.path / f.path, f, shapes) for f in files]
    moves, read = _plan(layouts, target), 0
    for number, (record, layout) in enumerate(zip(files, layouts, strict=True)):
        pieces = sorted(_pieces(moves, number, layout, target.shards), key=lambda p: p[:2])
        if not pieces:
            continue
        with contextlib.closing(DataFile(snapshot.path / record.path, record)) as file:
            for begin, end, source, view in pieces:
                read += file.copy(begin, end, source, view)
    return read


def read_layout(path: Path, record: FileRecord, shapes: Mapping[str, Sequence[int]]) -> FileLayout:
    """What stands where in a data file, from its header.

    Args: shapes: of the unit's whole tensors, by name.

    Raises: DamagedSnapshot, SnapshotError: as `DataFile`.
    """
    with contextlib.closing(DataFile(path, record)) as file:
        return parse(file.header(), shapes, str(path))


def _plan(layouts: Sequence[FileLayout], target: DescribedUnit) -> MoveTable:
    """Moves whose source ranks are numbers of files; the one target rank is 0."""
    sources = [
        ShardTable.from_shards(
            number,
            [(e.info, e.box, 0) for e in layout.entries],
            [StorageInfo(number, 0, layout.data_bytes, "file")],
        )
        for number, layout in enumerate(layouts)
    ]
    try:
        return plan_moves(concat(sources), target.table(0))
    except (TableError, CoverageError) as error:
        raise OtherModel(
            f"the snapshot does not fit the unit: {error}; it is of another model or optimizer"
        ) from None


def _pieces(
    moves: MoveTable, number: int, layout: FileLayout, targets: Sequence[LocalShard]
) -> Iterator[tuple[int, int, tuple[Entry, Box], torch.Tensor]]:
    """Of one file: (first byte, one past the last, (entry, box), where it goes), each small."""
    for row in (moves.src_rank == number).nonzero()[0].tolist():
        entry = layout.entries[int(moves.src_local[row])]
        shard = targets[int(moves.dst_local[row])]
        for box in _cut(moves.box(row), entry):
            begin, end = _span(box, entry)
            yield begin, end, (entry, box), shard.view[box.slices_in(shard.box)]


def _span(box: Box, entry: Entry) -> tuple[int, int]:
    """Bytes of the data from the first element of a box to its last, in a row-major entry."""
    strides = _strides(entry.box.shape)
    at = [o - base for o, base in zip(box.offset, entry.box.offset, strict=True)]
    first = sum(o * s for o, s in zip(at, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
    size = entry.info.itemsize
    return entry.begin + first * size, entry.begin + (last + 1) * size


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _cut(box: Box, entry: Entry) -> Iterator[Box]:
    """The box in parts that each lie within `SPAN_BYTES`."""
    begin, end = _span(box, entry)
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if end - begin <= SPAN_BYTES or dim is None:
        yield box
        return
    n = box.shape[dim]
    parts = min(n, -(-(end - begin) // SPAN_BYTES))
    for i in range(parts):
        low, high = n * i // parts, n * (i + 1) // parts
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = box.offset[dim] + low, high - low
        yield from _cut(Box(tuple(offset), tuple(shape)), entry)


class DataFile:
    """An open data file; blocks are checked as they are read.

    Raises: DamagedSnapshot: it is missing or changed. SnapshotError: no more files can be opened.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path = path
        self._record = record
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from None

    def close(self) -> None:
        os.close(self._handle)

    def header(self) -> bytes:
        """Everything before the data, checked."""
        header = self._read(0, self._record.header_bytes)
        if of_bytes(header) != self._record.header_digest:
            raise DamagedSnapshot(f"{self._path}: its header has changed since it was written")
        return header

    def copy(self, begin: int, end: int, source: tuple[Entry, Box], view: torch.Tensor) -> int:
        """Copy a box, which lies in bytes ``begin:end`` of the data, into `view`."""
        entry, box = source
        span = torch.empty(end - begin, dtype=torch.uint8)
        first = begin // BLOCK_BYTES
        for number in range(first, -(-end // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            block = self._block(number)
            low, high = max(begin - start, 0), min(end - start, len(block))
            span[start + low - begin : start + high - begin] = block[low:high]
        typed = span.view(getattr(torch, entry.info.dtype))
        with torch.no_grad():
            view.copy_(typed.as_strided(box.shape, _strides(entry.box.shape)))
        return box.numel * entry.info.itemsize

    def _block(self, number: int) -> torch.Tensor:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        start = self._record.header_bytes + number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._record.nbytes - start)
        block = torch.frombuffer(bytearray(self._read(start, size)), dtype=torch.uint8)
        if of_block(block) != self._record.blocks[number]:
            raise DamagedSnapshot(
                f"{self._path}: bytes {start} to {start + size} have changed since they were "
                "written; restore an older snapshot"
            )
        self._blocks[number] = block
        if len(self._blocks) > BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return block

    def _read(self, start: int, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.pread(self._handle, size, start)
            except OSError as error:
                raise DamagedSnapshot(f"{self._path}: {error.strerror}") from None
            if not part:
                raise DamagedSnapshot(f"{self._path}: cut off at byte {start}")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)
