"""Moves: who sends which box of which tensor to whom, from two shard tables.

Planning is geometry on unique boxes (see `tiling`), then a choice of the sending replica for each
receiving shard. The choice is a rule that each rank applies alone to the two tables, with the same
result on all: take the own copy; else one on the same node; else spread the receivers of a box
over its holders by bytes.

A `MovePlanner` does the geometry once; `moves(rank)` then costs a rank only its own part, and is
exactly the rows of the full table in which the rank sends or receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.emu.boxes import Box, Int64Array
from nereus_plugins.emu.table import (
    Int32Array,
    ShardTable,
    TableError,
    TensorInfo,
    itemsizes,
    row_box,
    table_dims,
)
from nereus_plugins.emu.tiling import (
    CoverageError,
    FlatSpace,
    UniqueBoxes,
    disjoint,
    first_missing,
    overlaps,
    repeat_ranges,
    unique_boxes,
)


@dataclass(frozen=True, eq=False)
class MoveTable:
    """Moves in columns, ascending by (dst_rank, src_rank, tensor, offset, dst_local).

    Row i: the box `offset[i]`, `shape[i]` (coordinates of the global tensor, dims padded as in
    `ShardTable`) of `tensors[tensor[i]]` is copied from shard `src_local[i]` of rank `src_rank[i]`
    into shard `dst_local[i]` of rank `dst_rank[i]`. Both may be one rank: a local copy.

    Attributes:
        tensors: the tensors of the target table.
        tensor, src_rank, dst_rank, src_local, dst_local: int32[n].
        offset, shape: int64[n, D].
        nbytes: int64[n].
    """

    tensors: tuple[TensorInfo, ...]
    tensor: Int32Array
    src_rank: Int32Array
    dst_rank: Int32Array
    src_local: Int32Array
    dst_local: Int32Array
    offset: Int64Array
    shape: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    def columns(self) -> tuple[NDArray[np.int32] | NDArray[np.int64], ...]:
        """The arrays, in the order of the attributes."""
        return (
            self.tensor,
            self.src_rank,
            self.dst_rank,
            self.src_local,
            self.dst_local,
            self.offset,
            self.shape,
            self.nbytes,
        )

    def box(self, row: int) -> Box:
        """The box of one row, in the tensor's own number of dims."""
        return row_box(self.tensors, self.tensor, self.offset, self.shape, row)

    def of_rank(self, rank: int) -> MoveTable:
        """The rows in which `rank` sends or receives."""
        keep = (self.src_rank == rank) | (self.dst_rank == rank)
        return MoveTable(self.tensors, *(column[keep] for column in self.columns()))

    def equals(self, other: MoveTable) -> bool:
        """Same tensors and same rows."""
        pairs = zip(self.columns(), other.columns(), strict=True)
        return self.tensors == other.tensors and all(np.array_equal(a, b) for a, b in pairs)

    def pair_bytes(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(source rank, target rank, bytes), one entry for each pair of ranks that has moves,
        ascending by target, then source; a rank's copies to itself are included."""
        if not len(self):
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        pair = (self.dst_rank.astype(np.int64) << 32) | self.src_rank
        begins = np.flatnonzero(np.concatenate(([True], pair[1:] != pair[:-1])))
        pair = pair[begins]
        return pair & 0xFFFFFFFF, pair >> 32, np.add.reduceat(self.nbytes, begins)


def plan_moves(
    source: ShardTable,
    target: ShardTable,
    *,
    node_of: Int32Array | Sequence[int] | None = None,
    rank: int | None = None,
) -> MoveTable:
    """The moves that fill every shard of `target` from shards of `source`.

    Args:
        source: all ranks' shards now; replicas may be cut differently on different ranks.
        target: all ranks' shards to be filled, each element exactly once.
        node_of: int[world], the node of each rank; None if nodes do not matter.
        rank: only the moves in which this rank sends or receives; the errors are those of the
            full plan, so that all ranks fail alike.

    Raises:
        TableError: the tables disagree about a tensor, or `node_of` is too short.
        CoverageError: a target element that no source shard holds (tensor, rank, box are named).
    """
    return MovePlanner(source, target, node_of=node_of).moves(rank)


class _Pairs(NamedTuple):
    """Source box u and target box v that meet, ascending by u, then v."""

    u: Int64Array
    v: Int64Array
    offset: Int64Array
    shape: Int64Array
    nbytes: Int64Array


class _Items(NamedTuple):
    """One for each receiving shard of a pair; ascending by pair, then receiver."""

    pair: Int64Array
    holder: Int64Array  # entry of the target's rank and local


class MovePlanner:
    """The geometry of one transition, from which any rank's moves follow.

    Args, Raises: as `plan_moves`.

    Attributes:
        dropped: names of source tensors that the target does not have, whose content is not moved.
    """

    def __init__(
        self,
        source: ShardTable,
        target: ShardTable,
        *,
        node_of: Int32Array | Sequence[int] | None = None,
    ) -> None:
        self._tensors = target.tensors
        self._space = FlatSpace(target.tensors)
        self._sources = disjoint(_source_boxes(self._space, source, target))
        self._targets = unique_boxes(
            self._space, target.tensor, target.rank, target.local, target.offset, target.shape
        )
        names = {t.name for t in target.tensors}
        self.dropped = tuple(t.name for t in source.tensors if t.name not in names)
        met = overlaps(self._sources, self._targets)
        self._check_covered(met.b, met.numel)
        sizes = itemsizes(self._tensors)
        nbytes = met.numel * sizes[self._targets.tensor[met.b]]
        self._pairs = _Pairs(met.a, met.b, met.offset, met.shape, nbytes)
        world = 1 + max(int(source.rank.max(initial=-1)), int(target.rank.max(initial=-1)))
        self._choice = _SourceChoice(self._sources, sizes, world, node_of)

    def moves(self, rank: int | None = None) -> MoveTable:
        """All moves, or those in which `rank` sends or receives."""
        u, v = self._pairs.u, self._pairs.v
        if rank is None:
            items = self._expand(np.arange(len(u)))
            return self._table(items, self._choose(items))
        sends = np.zeros(len(self._sources), dtype=np.bool_)
        sends[self._sources.owner[self._sources.rank == rank]] = True
        receives = np.zeros(len(self._targets), dtype=np.bool_)
        receives[self._targets.owner[self._targets.rank == rank]] = True
        # A receiver's place among all receivers of a box decides which holder serves it, so the
        # others' items are needed as well; not where there is one holder, which serves all.
        shared = sends.copy()
        wanted = u[receives[v]]
        shared[wanted] |= self._sources.count[wanted] > 1
        items = self._expand(np.flatnonzero(shared[u]))
        entry = self._choose(items)
        mine = (self._sources.rank[entry] == rank) | (self._targets.rank[items.holder] == rank)
        single = self._expand(np.flatnonzero(receives[v] & ~shared[u]), only=rank)
        both = _Items(*(np.concatenate((a[mine], b)) for a, b in zip(items, single, strict=True)))
        return self._table(both, np.concatenate((entry[mine], self._choose(single))))

    def _check_covered(self, v: Int64Array, numel: Int64Array) -> None:
        targets = self._targets
        covered = np.zeros(len(targets), dtype=np.int64)
        np.add.at(covered, v, numel)  # sources are disjoint: the sum is the union
        short = np.flatnonzero(covered != targets.numel)
        if not len(short):
            return
        i = int(short[0])
        t = int(targets.tensor[i])
        pieces = [
            self._sources.box(self._tensors, j)
            for j in np.flatnonzero(self._sources.tensor == t).tolist()
        ]
        box = targets.box(self._tensors, i)
        raise CoverageError(
            f"{self._tensors[t].name}: rank {targets.rank[targets.start[i]]} is to hold {box}, but "
            f"no source shard holds {first_missing(box, pieces)}"
        )

    def _expand(self, pairs: Int64Array, only: int | None = None) -> _Items:
        """One item for each receiver of these pairs, or for the rank `only` alone."""
        targets = self._targets
        if only is None:
            which, within = repeat_ranges(targets.count[self._pairs.v[pairs]])
            pair = pairs[which]
            return _Items(pair, targets.start[self._pairs.v[pair]] + within)
        mine = np.flatnonzero(targets.rank == only)
        owner = targets.owner[mine]
        v = self._pairs.v[pairs]
        begin = np.searchsorted(owner, v, side="left")
        which, within = repeat_ranges(np.searchsorted(owner, v, side="right") - begin)
        return _Items(pairs[which], mine[begin[which] + within])

    def _choose(self, items: _Items) -> Int64Array:
        """int64[n]: the holder entry of the source that serves each item."""
        pair = items.pair
        receiver = self._targets.rank[items.holder]
        return self._choice(self._pairs.u[pair], receiver, self._pairs.nbytes[pair])

    def _table(self, items: _Items, entry: Int64Array) -> MoveTable:
        pairs, pair = self._pairs, items.pair
        src, dst = self._sources.rank[entry], self._targets.rank[items.holder]
        dst_local = self._targets.local[items.holder]
        address = self._space.first(self._targets.tensor[pairs.v], pairs.offset)[pair]
        order = _move_order(dst, src, address, dst_local, self._space.numel)
        pair = pair[order]
        return MoveTable(
            tensors=self._tensors,
            tensor=self._targets.tensor[pairs.v[pair]].astype(np.int32),
            src_rank=src[order].astype(np.int32),
            dst_rank=dst[order].astype(np.int32),
            src_local=self._sources.local[entry[order]].astype(np.int32),
            dst_local=dst_local[order].astype(np.int32),
            offset=pairs.offset[pair],
            shape=pairs.shape[pair],
            nbytes=pairs.nbytes[pair],
        )


def _source_boxes(space: FlatSpace, source: ShardTable, target: ShardTable) -> UniqueBoxes:
    """The source's boxes in the target's numbering of tensors; tensors only it has left out."""
    place = {t.name: i for i, t in enumerate(target.tensors)}
    number = np.full(len(source.tensors), -1, dtype=np.int64)
    for i, info in enumerate(source.tensors):
        number[i] = place.get(info.name, -1)
        if number[i] >= 0 and target.tensors[number[i]] != info:
            other = target.tensors[number[i]]
            raise TableError(
                f"tensor {info.name} is {info.dtype} {info.shape} in the source and {other.dtype} "
                f"{other.shape} in the target; moves copy, they do not convert"
            )
    tensor, dims = number[source.tensor], table_dims(target.tensors)
    columns = (tensor, source.rank, source.local, source.offset, source.shape)
    if (tensor < 0).any():
        columns = tuple(column[tensor >= 0] for column in columns)  # type: ignore[assignment]
    tensor, rank, local, offset, shape = columns
    if (missing := dims - offset.shape[1]) > 0:  # a source that lacks the widest tensors
        offset = np.pad(offset, ((0, 0), (0, missing)))
        shape = np.pad(shape, ((0, 0), (0, missing)), constant_values=1)
    return unique_boxes(space, tensor, rank, local, offset[:, :dims], shape[:, :dims])


def _move_order(
    dst: Int64Array, src: Int64Array, address: Int64Array, dst_local: Int64Array, numel: int
) -> Int64Array:
    """The row order of a `MoveTable`; tensor and offset are one address."""
    world = int(src.max(initial=0)) + 1
    if (int(dst.max(initial=0)) + 1) * world * max(numel, 1) < 1 << 62:
        key = (dst * world + src) * max(numel, 1) + address
        order = np.argsort(key)
        in_order = key[order]
        if not (in_order[1:] == in_order[:-1]).any():
            return order
    return np.lexsort((dst_local, address, src, dst))


class _SourceChoice:
    """Which holder of a source box sends to a receiver.

    The receivers of a box that have no copy themselves, in a fixed order, are laid end to end by
    bytes, and that line is cut into as many equal parts as there are holders (on the receiver's
    node if it has any, else anywhere). Where a receiver straddles a cut, the `phase` of the box
    decides; it runs from 0 to 1 over the boxes that have the same holders, by bytes. So holders
    carry equal loads also where they outnumber the receivers, and each receiver hears from few.
    """

    def __init__(
        self,
        boxes: UniqueBoxes,
        itemsize: Int64Array,
        world: int,
        node_of: Int32Array | Sequence[int] | None,
    ) -> None:
        self._world = world
        # One holder entry for each box and rank: a rank that has a box twice offers the first.
        rank, owner = boxes.rank, boxes.owner
        again = np.zeros(len(rank), dtype=np.bool_)
        again[1:] = (rank[1:] == rank[:-1]) & (owner[1:] == owner[:-1])
        self._entry = np.flatnonzero(~again)
        rank, owner = rank[self._entry], owner[self._entry]
        self._count = np.bincount(owner, minlength=len(boxes))
        self._start = self._count.cumsum() - self._count
        self._key = owner * world + rank  # ascending
        self._phase = self._phases(rank, boxes.numel * itemsize[boxes.tensor])
        self._node: Int64Array | None = None
        if node_of is None:
            return
        self._node = np.asarray(node_of, dtype=np.int64)
        if len(self._node) < world:
            raise TableError(f"node_of has {len(self._node)} entries, the tables {world} ranks")
        self._nodes = int(self._node.max(initial=0)) + 1
        key = owner * self._nodes + self._node[rank]
        self._by_node = np.argsort(key, kind="stable")  # entries come ascending by rank
        key = key[self._by_node]
        begins = np.flatnonzero(np.concatenate((key[:1] >= 0, key[1:] != key[:-1])))
        self._node_key, self._node_start = key[begins], begins
        self._node_count = np.diff(begins, append=len(key))

    def _phases(self, rank: Int64Array, nbytes: Int64Array) -> NDArray[np.float64]:
        """float64[u]: by bytes, how far along the boxes with the same holders each box is."""
        if not len(nbytes):
            return np.zeros(0)
        # Equal sets of holders have equal sums of hashes. Two different sets with equal sums would
        # share a count, which costs a little balance; every rank would still choose alike.
        mixed = (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        holders = np.add.reduceat(mixed ^ (mixed >> np.uint64(32)), self._start)
        order = np.argsort(holders, kind="stable")
        before, total = _running_bytes(holders[order], nbytes[order])
        phase = np.empty(len(nbytes))
        phase[order] = (before + nbytes[order] / 2) / total
        return phase

    def __call__(self, box: Int64Array, receiver: Int64Array, nbytes: Int64Array) -> Int64Array:
        """int64[n]: for each item (a source box, a receiving rank, bytes) the holder entry of the
        source that sends. Items of one box must be complete and in a fixed order."""
        chosen = self._start[box]
        open_ = np.flatnonzero(self._count[box] > 1)
        own, place = _lookup(self._key, box[open_] * self._world + receiver[open_])
        chosen[open_[own]] = place[own]
        open_ = open_[~own]
        if self._node is not None:
            key = box[open_] * self._nodes + self._node[receiver[open_]]
            found, near = _lookup(self._node_key, key)
            items, group = open_[found], near[found]
            part = self._spread(box, items, group, nbytes, self._node_count[group])
            chosen[items] = self._by_node[self._node_start[group] + part]
            open_ = open_[~found]
        part = self._spread(box, open_, box[open_], nbytes, self._count[box[open_]])
        chosen[open_] = self._start[box[open_]] + part
        return self._entry[chosen]

    def _spread(
        self,
        box: Int64Array,
        items: Int64Array,
        group: Int64Array,
        nbytes: Int64Array,
        holders: Int64Array,
    ) -> Int64Array:
        """int64[items]: which of its group's `holders` serves each item."""
        order = np.argsort(group, kind="stable")
        sizes = nbytes[items[order]]
        before, total = _running_bytes(group[order], sizes)
        place = (before + self._phase[box[items[order]]] * sizes) / total
        part = np.empty(len(items), dtype=np.int64)
        part[order] = np.minimum((place * holders[order]).astype(np.int64), holders[order] - 1)
        return part


def _running_bytes(
    group: NDArray[np.int64] | NDArray[np.uint64], nbytes: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """For items ordered by group: the bytes of its group before each, and of its whole group."""
    if not len(group):
        return nbytes, nbytes
    begins = np.concatenate(([True], group[1:] != group[:-1]))
    first = np.flatnonzero(begins)
    which = np.cumsum(begins) - 1
    before = nbytes.cumsum() - nbytes
    return before - before[first][which], np.add.reduceat(nbytes, first)[which]


def _lookup(keys: Int64Array, wanted: Int64Array) -> tuple[NDArray[np.bool_], Int64Array]:
    """Whether each wanted number is among the ascending `keys`, and where."""
    place = np.searchsorted(keys, wanted)
    place[place == len(keys)] = 0
    found = keys[place] == wanted if len(keys) else np.zeros(len(wanted), dtype=np.bool_)
    return found, place
