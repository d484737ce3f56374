"""Which different boxes a table holds, which of them meet, and whether they tile their tensors.

A table of a thousand ranks is mostly replicas: the same box on every data-parallel rank. All
geometry is therefore done on the *unique* boxes, of which there are few, and ranks are attached to
them afterwards. Everything here is vectorised over boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.emu.boxes import Box, Int64Array, subtract
from nereus_plugins.emu.table import ShardTable, TensorInfo, padded_shapes

_CANDIDATES_AT_ONCE = 1 << 21  # bounds the memory of a join, about 100 bytes each


class CoverageError(ValueError):
    """Elements that no shard holds, or that two different boxes hold; names tensor, rank, box."""


class FlatSpace:
    """Flat addresses over all tensors laid end to end, row-major: one int64 names an element.

    A box is known by the addresses of its first and last element, so equal boxes are found by
    comparing two numbers.
    """

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        self.sizes = padded_shapes(tensors)  # int64[t, D]
        self.strides = np.ones_like(self.sizes)
        for dim in range(self.sizes.shape[1] - 2, -1, -1):
            self.strides[:, dim] = self.strides[:, dim + 1] * self.sizes[:, dim + 1]
        ends = self.sizes.prod(axis=1).cumsum()
        self.base = np.concatenate(([0], ends)).astype(np.int64)

    @property
    def numel(self) -> int:
        return int(self.base[-1])

    def first(self, tensor: Int64Array, offset: Int64Array) -> Int64Array:
        """int64[n]: address of each box's first element."""
        return self.base[tensor] + self.span(tensor, offset)

    def span(self, tensor: Int64Array, steps: Int64Array) -> Int64Array:
        """int64[n]: how far `steps` (int64[n, D]) index steps are apart in addresses."""
        total = steps[:, -1].copy()  # the last stride is 1
        for dim in range(steps.shape[1] - 1):
            total += np.ascontiguousarray(self.strides[:, dim])[tensor] * steps[:, dim]
        return total


@dataclass(frozen=True, eq=False)
class UniqueBoxes:
    """The different non-empty boxes of a table, by address, and who holds each.

    Attributes:
        space: the addresses.
        tensor: int64[u]. offset, shape: int64[u, D]. first, last: int64[u], addresses.
        start: int64[u + 1]: holders of box i are entries ``start[i]:start[i + 1]`` of
        rank, local: int64[k], ascending by rank, then local.
    """

    space: FlatSpace
    tensor: Int64Array
    offset: Int64Array
    shape: Int64Array
    first: Int64Array
    last: Int64Array
    start: Int64Array
    rank: Int64Array
    local: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def end(self) -> Int64Array:
        return self.offset + self.shape

    @cached_property
    def count(self) -> Int64Array:
        """int64[u]: holders of each box."""
        return np.diff(self.start)

    @cached_property
    def numel(self) -> Int64Array:
        return self.shape.prod(axis=1)

    @cached_property
    def owner(self) -> Int64Array:
        """int64[k]: the box of each holder entry."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.count)

    def box(self, tensors: Sequence[TensorInfo], i: int) -> Box:
        ndim = len(tensors[int(self.tensor[i])].shape)
        return Box(tuple(self.offset[i, :ndim].tolist()), tuple(self.shape[i, :ndim].tolist()))


def unique_boxes(
    space: FlatSpace,
    tensor: NDArray[np.integer],
    rank: NDArray[np.integer],
    local: NDArray[np.integer],
    offset: Int64Array,
    shape: Int64Array,
) -> UniqueBoxes:
    """Group rows (as of a `ShardTable`) by equal box; empty boxes are left out."""
    number = tensor.astype(np.int64)  # once, instead of at each indexing
    if not shape.all():
        full = shape.all(axis=1)
        number, rank, local = number[full], rank[full], local[full]
        offset, shape = offset[full], shape[full]
    first = space.first(number, offset)
    last = first + space.span(number, shape - 1)
    order, begins = _group_pairs(first, last)
    sample = order[begins]  # one row for each box
    by_address = np.lexsort((last[sample], first[sample]))
    place = np.empty(len(sample), dtype=np.int64)
    place[by_address] = np.arange(len(sample))
    box = np.empty(len(order), dtype=np.int64)
    box[order] = place[np.cumsum(begins) - 1]
    sample = sample[by_address]
    # Holders, ascending by box, rank, local; one sort key is far faster than lexsort.
    key = box * (int(rank.max(initial=0)) + 1) + rank
    order = np.argsort(key)
    sorted_key = key[order]
    if (sorted_key[1:] == sorted_key[:-1]).any():
        order = np.lexsort((local, key))
    counts = np.bincount(box, minlength=len(sample))
    return UniqueBoxes(
        space=space,
        tensor=number[sample],
        offset=offset[sample],
        shape=shape[sample],
        first=first[sample],
        last=last[sample],
        start=np.concatenate(([0], counts.cumsum())).astype(np.int64),
        rank=rank[order].astype(np.int64),
        local=local[order].astype(np.int64),
    )


def _group_pairs(first: Int64Array, last: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
    """An order that brings equal (first, last) together, and where each group begins."""
    if not len(first):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    # Sorting one hash is several times faster than lexsort; a collision is seen and sorted away.
    odd = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
    mixed = first.astype(np.uint64) * odd[0] + last.astype(np.uint64) * odd[1]
    order = np.argsort(mixed)
    hashes = mixed[order]
    begins, differs = np.ones(len(first), dtype=np.bool_), np.ones(len(first), dtype=np.bool_)
    begins[1:] = hashes[1:] != hashes[:-1]
    differs[1:] = _changes(first[order]) | _changes(last[order])
    if (differs & ~begins).any():
        order = np.lexsort((last, first))
        begins[1:] = _changes(first[order]) | _changes(last[order])
    return order.astype(np.int64), begins


def _changes(column: Int64Array) -> NDArray[np.bool_]:
    return column[1:] != column[:-1]


class Overlaps(NamedTuple):
    """Pairs of boxes that have elements in common; ascending by a, then b."""

    a: Int64Array  # [n]
    b: Int64Array  # [n]
    offset: Int64Array  # [n, D] the common box
    shape: Int64Array  # [n, D]

    @property
    def numel(self) -> Int64Array:
        return self.shape.prod(axis=1)


def overlaps(a: UniqueBoxes, b: UniqueBoxes) -> Overlaps:
    """Every pair of a box of `a` and a box of `b` (same tensors) that have a common element.

    Boxes are first compared along one line: addresses, or one dim, whichever leaves the fewest
    candidates for that tensor; sharded tensors are nearly disjoint along one of them, so the work
    is close to the size of the answer instead of the product of both lists.
    """
    found = [_intersections(a, b, i, j) for i, j in _candidates(a, b)]
    if not found:
        none, flat = np.zeros((0, a.offset.shape[1]), dtype=np.int64), np.zeros(0, dtype=np.int64)
        return Overlaps(flat, flat, none, none)
    joined = Overlaps(*(np.concatenate(column) for column in zip(*found, strict=True)))
    order = np.argsort(joined.a * len(b) + joined.b)
    return Overlaps(*(column[order] for column in joined))


def _intersections(a: UniqueBoxes, b: UniqueBoxes, i: Int64Array, j: Int64Array) -> Overlaps:
    offset = np.maximum(a.offset[i], b.offset[j])
    shape = np.minimum(a.end[i], b.end[j]) - offset
    keep = (shape > 0).all(axis=1)
    return Overlaps(i[keep], j[keep], offset[keep], shape[keep])


class _Line(NamedTuple):
    """For each box of b, the candidates of a: ``order[low:low + many]``."""

    order: Int64Array
    low: Int64Array
    many: Int64Array


def _candidates(a: UniqueBoxes, b: UniqueBoxes) -> Iterator[tuple[Int64Array, Int64Array]]:
    if not len(a) or not len(b):
        return
    lines = [_line(a.first, a.last + 1, b.first, b.last + 1)]
    choice = np.zeros(len(b), dtype=np.int64)
    if int(lines[0].many.sum()) > 4 * (len(a) + len(b)):
        space = a.space
        for dim in range(a.offset.shape[1]):
            base = np.concatenate(([0], space.sizes[:, dim].cumsum()))
            at, bt = base[a.tensor], base[b.tensor]
            a_low, b_low = a.offset[:, dim] + at, b.offset[:, dim] + bt
            lines.append(_line(a_low, a_low + a.shape[:, dim], b_low, b_low + b.shape[:, dim]))
        tensors = len(space.sizes)
        work = [np.bincount(b.tensor, line.many, minlength=tensors) for line in lines]
        choice = np.argmin(work, axis=0)[b.tensor]
    for which, line in enumerate(lines):
        boxes = np.flatnonzero(choice == which)
        total = np.concatenate(([0], line.many[boxes].cumsum()))
        begin = 0
        while begin < len(boxes):
            stop = int(np.searchsorted(total, total[begin] + _CANDIDATES_AT_ONCE, side="right"))
            part = boxes[begin : max(begin + 1, stop - 1)]
            begin += len(part)
            j, within = repeat_ranges(line.many[part])
            yield line.order[line.low[part][j] + within], part[j]


def _line(a_low: Int64Array, a_high: Int64Array, b_low: Int64Array, b_high: Int64Array) -> _Line:
    """Candidates by intervals ``[low, high)`` on one line on which tensors do not touch."""
    order = np.argsort(a_low, kind="stable")
    # The running maximum of the ends is monotone even where intervals nest.
    reach = np.maximum.accumulate(a_high[order])
    low = np.searchsorted(reach, b_low, side="right")
    many = np.searchsorted(a_low[order], b_high, side="left") - low
    return _Line(order, low, np.maximum(many, 0))


def repeat_ranges(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For counts [2, 0, 1]: which range [0, 0, 2] and the place within it [0, 1, 0]."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    begins = counts.cumsum() - counts
    return which, np.arange(len(which), dtype=np.int64) - begins[which]


def self_overlaps(boxes: UniqueBoxes) -> Overlaps:
    """The pairs of different boxes (a < b) of one list that have an element in common."""
    pairs = overlaps(boxes, boxes)
    keep = pairs.a < pairs.b
    return Overlaps(*(column[keep] for column in pairs))


def disjoint(boxes: UniqueBoxes) -> UniqueBoxes:
    """The same elements with the same holders, as boxes that are equal or apart.

    Replicas may be cut differently on different ranks. Where boxes overlap without being equal
    they are split at each other's edges, dim by dim, each slab only by the boxes that reach into
    it; a part held by several ranks is then a replica like any other. All others stay whole.
    """
    pairs = self_overlaps(boxes)
    if not len(pairs.a):
        return boxes
    cut = np.unique(np.concatenate((pairs.a, pairs.b)))
    parent, slab = cut, boxes.tensor[cut]
    offset, end = boxes.offset[cut], boxes.end[cut]
    for dim in range(offset.shape[1]):
        # Coordinates by their place among all of this dim, so that the keys stay small.
        coords = np.unique(np.concatenate((offset[:, dim], end[:, dim])))
        low_key = slab * len(coords) + np.searchsorted(coords, offset[:, dim])
        high_key = slab * len(coords) + np.searchsorted(coords, end[:, dim])
        edges = np.unique(np.concatenate((low_key, high_key)))
        low = np.searchsorted(edges, low_key)
        which, within = repeat_ranges(np.searchsorted(edges, high_key) - low)
        parent, offset, end = parent[which], offset[which], end[which]
        segment = low[which] + within
        offset[:, dim] = coords[edges[segment] % len(coords)]
        end[:, dim] = coords[edges[segment + 1] % len(coords)]
        slab = segment
    # Rows again: each part once for each holder of the box it came from; the whole ones as well.
    whole = np.setdiff1d(np.arange(len(boxes)), cut)
    parent = np.concatenate((parent, whole))
    offset = np.concatenate((offset, boxes.offset[whole]))
    shape = np.concatenate((end, boxes.end[whole])) - offset
    part, within = repeat_ranges(boxes.count[parent])
    holder = boxes.start[parent[part]] + within
    return unique_boxes(
        boxes.space,
        boxes.tensor[parent[part]],
        boxes.rank[holder],
        boxes.local[holder],
        offset[part],
        shape[part],
    )


def check_tiling(table: ShardTable) -> None:
    """Check that the shards of all ranks tile every tensor of the table, replicas apart.

    Raises:
        CoverageError: an element is on no rank, or two boxes overlap without being equal.
    """
    tensors = table.tensors
    space = FlatSpace(tensors)
    boxes = unique_boxes(space, table.tensor, table.rank, table.local, table.offset, table.shape)
    pairs = self_overlaps(boxes)
    if len(pairs.a):
        a, b = int(pairs.a[0]), int(pairs.b[0])
        raise CoverageError(
            f"{tensors[boxes.tensor[a]].name}: {boxes.box(tensors, a)} on rank "
            f"{boxes.rank[boxes.start[a]]} and {boxes.box(tensors, b)} on rank "
            f"{boxes.rank[boxes.start[b]]} overlap without being equal"
        )
    held = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(held, boxes.tensor, boxes.numel)
    if short := np.flatnonzero(held != np.diff(space.base)).tolist():
        t = short[0]
        pieces = [boxes.box(tensors, i) for i in np.flatnonzero(boxes.tensor == t).tolist()]
        missing = first_missing(Box.whole(tensors[t].shape), pieces)
        raise CoverageError(f"{tensors[t].name}: {missing} is on no rank")


def first_missing(whole: Box, pieces: Sequence[Box]) -> Box | None:
    """The first box of `whole` that no piece covers; for messages, not for speed."""
    left = [whole]
    for piece in pieces:
        left = [rest for box in left for rest in subtract(box, piece)]
    return min(left, key=lambda box: box.offset, default=None)
