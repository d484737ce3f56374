"""Boxes: axis-aligned pieces of a named global tensor, and flat ranges cut into boxes.

A box is `(offset, shape)` in the coordinates of the global tensor, in elements. Everything a
framework calls a shard reduces to boxes: a TP or FSDP slice is one box; a flat range of a
row-major tensor (what a distributed optimizer records) is at most ``2 * ndim - 1`` boxes.

NumPy only: planning works where torch is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


class BoxError(ValueError):
    """A box or a flat range that cannot exist: negative sizes, or outside of its tensor."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a global tensor: `offset` and `shape`, one entry (in elements) per dim.

    A scalar is ``Box((), ())`` with one element; a box with a zero in `shape` is empty.

    Raises:
        BoxError: different lengths, or a negative entry.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise BoxError(f"box offset {self.offset} and shape {self.shape} differ in length")
        if any(o < 0 for o in self.offset) or any(s < 0 for s in self.shape):
            raise BoxError(f"box has a negative entry: offset {self.offset}, shape {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Whether `other` (same ndim) lies inside this box."""
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def shifted(self, by: Sequence[int]) -> Box:
        """This box moved by `by` elements per dim, e.g. from a shard's own coordinates to the
        global tensor's by the shard's offset."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds `outer`.

        Raises:
            BoxError: this box does not lie inside `outer`.
        """
        if not outer.contains(self):
            raise BoxError(f"{self} does not lie inside {outer}")
        return tuple(
            slice(o - base, o - base + s)
            for o, s, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes (of one tensor), or None if there are none."""
    if a.ndim != b.ndim:
        raise BoxError(f"cannot intersect {a} with {b}: {a.ndim} and {b.ndim} dims")
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    if any(e <= o for o, e in zip(offset, end, strict=True)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without the elements of `b`, as at most ``2 * ndim`` disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.numel else []
    pieces = []
    low, high = list(a.offset), list(a.end)
    for dim in range(a.ndim):
        for start, stop in ((low[dim], common.offset[dim]), (common.end[dim], high[dim])):
            if start < stop:
                offset = (*low[:dim], start, *low[dim + 1 :])
                end = (*high[:dim], stop, *high[dim + 1 :])
                pieces.append(Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True))))
        low[dim], high[dim] = common.offset[dim], common.end[dim]
    return pieces


class FlatPiece(NamedTuple):
    """A box whose row-major elements are exactly the flat range ``[lo, hi)`` of its tensor."""

    box: Box
    lo: int
    hi: int


def flat_range_to_boxes(shape: Sequence[int], lo: int, hi: int) -> list[FlatPiece]:
    """Cut the flat range ``[lo, hi)`` of a row-major tensor of `shape` into boxes.

    Returns at most ``max(1, 2 * ndim - 1)`` pieces, in flat order: they rise to the largest whole
    sub-tensor that fits and fall again. An empty range gives no pieces.

    Raises:
        BoxError: the range is not inside the tensor.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= lo <= hi <= numel:
        raise BoxError(f"flat range [{lo}, {hi}) is not inside {shape} ({numel} elements)")
    if not shape:
        return [FlatPiece(Box((), ()), lo, hi)] if lo < hi else []
    # strides[d]: elements in one index step of dim d
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    pieces = []
    while lo < hi:
        dim = next(d for d, s in enumerate(strides) if lo % s == 0 and lo + s <= hi)
        index = [(lo // s) % n for s, n in zip(strides, shape, strict=True)]
        count = min((hi - lo) // strides[dim], shape[dim] - index[dim])
        box = Box(tuple(index), (1,) * dim + (count,) + shape[dim + 1 :])
        pieces.append(FlatPiece(box, lo, lo + count * strides[dim]))
        lo += count * strides[dim]
    return pieces


class FlatPieces(NamedTuple):
    """The pieces of many flat ranges; see `flat_ranges_to_boxes`."""

    range_index: Int64Array  # [n] which range the piece came from, ascending
    lo: Int64Array  # [n] first flat element of the piece
    hi: Int64Array  # [n] one past the last
    offset: Int64Array  # [n, ndim]
    shape: Int64Array  # [n, ndim]


def flat_ranges_to_boxes(shapes: Int64Array, lo: Int64Array, hi: Int64Array) -> FlatPieces:
    """`flat_range_to_boxes` for many ranges at once, without a Python loop over them.

    Args:
        shapes: int64[n, ndim], the tensor of each range (missing leading or trailing dims as 1).
        lo, hi: int64[n], the flat range ``[lo, hi)`` in that tensor.

    Raises:
        BoxError: a range is not inside its tensor.
    """
    shapes = np.asarray(shapes, dtype=np.int64)
    lo, hi = np.array(lo, dtype=np.int64), np.asarray(hi, dtype=np.int64)
    if bad := np.flatnonzero((lo < 0) | (lo > hi) | (hi > shapes.prod(axis=1))).tolist():
        i = bad[0]
        raise BoxError(f"flat range [{lo[i]}, {hi[i]}) is not inside {tuple(shapes[i].tolist())}")
    ndim = shapes.shape[1]
    strides = np.ones_like(shapes)
    for dim in range(ndim - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shapes[:, dim + 1]
    out: list[tuple[Int64Array, ...]] = []
    active = np.flatnonzero(lo < hi)
    while active.size:  # at most 2 * ndim - 1 rounds, each takes one piece off every open range
        s, n, start = strides[active], shapes[active], lo[active]
        fits = (start[:, None] % s == 0) & (start[:, None] + s <= hi[active, None])
        dim = fits.argmax(axis=1)  # the first dim that fits has the largest stride
        row = np.arange(active.size)
        index = (start[:, None] // s) % n
        step = s[row, dim]
        count = np.minimum((hi[active] - start) // step, n[row, dim] - index[row, dim])
        dims = np.arange(ndim)[None, :]
        box_shape = np.where(dims < dim[:, None], 1, n)
        box_shape[row, dim] = count
        lo[active] = start + count * step
        out.append((active, start, lo[active], index, box_shape))
        active = active[lo[active] < hi[active]]
    if not out:
        empty = np.zeros(0, dtype=np.int64)
        return FlatPieces(empty, empty, empty, empty.reshape(0, ndim), empty.reshape(0, ndim))
    columns = [np.concatenate(column) for column in zip(*out, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return FlatPieces(*(column[order] for column in columns))
