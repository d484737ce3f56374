"""Boxes, flat ranges and the wire form of tables against element-by-element oracles."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus_plugins.emu.boxes import (
    Box,
    flat_range_to_boxes,
    flat_ranges_to_boxes,
    intersect,
    subtract,
)
from nereus_plugins.emu.table import (
    ShardTable,
    StorageInfo,
    TableError,
    TensorInfo,
    concat,
)

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


seeds = st.integers(0, 2**32 - 1)  # cuts are drawn from NumPy: thousands of layouts in seconds


def any_range(rng: np.random.Generator, n: int) -> tuple[int, int]:
    lo, hi = sorted(rng.integers(0, n + 1, 2).tolist())
    return lo, hi


def any_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    ends = [any_range(rng, n) for n in shape]
    return Box(tuple(lo for lo, _ in ends), tuple(hi - lo for lo, hi in ends))


def elements(shape: tuple[int, ...], box: Box) -> set[int]:
    """The flat indices in a box."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    return set(ids[box.slices_in(Box.whole(shape))].ravel().tolist())


@settings(max_examples=1000, deadline=None)
@given(shapes, seeds)
def test_flat_range_is_its_boxes_in_order(shape: tuple[int, ...], seed: int) -> None:
    numel = math.prod(shape)
    lo, hi = any_range(np.random.default_rng(seed), numel)
    pieces = flat_range_to_boxes(shape, lo, hi)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    ids = np.arange(numel).reshape(shape)
    position = lo
    for box, start, stop in pieces:
        assert start == position < stop
        content = ids[box.slices_in(Box.whole(shape))].ravel()
        np.testing.assert_array_equal(content, np.arange(start, stop))
        position = stop
    assert position == hi


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 4), st.integers(0, 6), seeds)
def test_many_flat_ranges_equal_one_by_one(ndim: int, many: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 6, (many, ndim))
    ends = [any_range(rng, math.prod(shape)) for shape in table.tolist()]
    found = flat_ranges_to_boxes(
        table,
        np.array([lo for lo, _ in ends], dtype=np.int64),
        np.array([hi for _, hi in ends], dtype=np.int64),
    )
    expected = [
        (i, p.lo, p.hi, p.box.offset, p.box.shape)
        for i, (shape, (lo, hi)) in enumerate(zip(table.tolist(), ends, strict=True))
        for p in flat_range_to_boxes(shape, lo, hi)
    ]
    rows = zip(*(column.tolist() for column in found), strict=True)
    assert [(i, lo, hi, tuple(o), tuple(s)) for i, lo, hi, o, s in rows] == expected


@settings(max_examples=1000, deadline=None)
@given(shapes, seeds)
def test_intersect_and_subtract_split_the_elements(shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = any_box(rng, shape), any_box(rng, shape)
    common, rest = intersect(a, b), subtract(a, b)
    inside, left = elements(shape, a) & elements(shape, b), elements(shape, a) - elements(shape, b)
    assert (elements(shape, common) if common else set()) == inside
    assert all(piece.numel for piece in rest)
    assert len(rest) <= 2 * len(shape)
    assert sum(piece.numel for piece in rest) == len(left)
    assert set().union(*(elements(shape, piece) for piece in rest)) == left


def any_table(rng: np.random.Generator) -> ShardTable:
    def any_info(i: int) -> TensorInfo:
        shape = tuple(rng.integers(0, 6, rng.integers(0, 5)).tolist())
        return TensorInfo(f"weight/t{i}", shape, str(rng.choice(["float32", "bfloat16"])))

    infos = [any_info(i) for i in range(rng.integers(0, 4))]
    parts = []
    for rank in sorted(set(rng.integers(0, 2**31, rng.integers(0, 4)).tolist())):
        shards = [
            (info, any_box(rng, info.shape), int(rng.integers(2)))
            for info in infos
            if rng.random() < 0.5
        ]
        sizes = rng.integers(0, 2**63 - 1, 2).tolist()
        storages = [
            StorageInfo(rank, key, size, f"cuda:{rank % 2}") for key, size in enumerate(sizes)
        ]
        parts.append(ShardTable.from_shards(rank, shards, storages))
    return concat(parts)


@settings(max_examples=300, deadline=None)
@given(seeds)
def test_a_table_survives_the_wire(seed: int) -> None:
    table = any_table(np.random.default_rng(seed))
    assert ShardTable.from_bytes(table.to_bytes()).equals(table)


@settings(max_examples=300, deadline=None)
@given(seeds)
def test_concat_of_each_ranks_rows_is_the_table(seed: int) -> None:
    table = any_table(np.random.default_rng(seed))
    assert concat([table.of_rank(rank) for rank in table.ranks]).equals(table)


@settings(max_examples=2000, deadline=None)
@given(seeds, st.sampled_from(["set", "cut", "insert"]))
def test_damaged_bytes_are_a_table_or_an_error(seed: int, what: str) -> None:
    rng = np.random.default_rng(seed)
    wire = bytearray(any_table(rng).to_bytes())
    for place in rng.integers(0, len(wire), rng.integers(1, 4)).tolist():
        if what == "set":
            wire[place] = int(rng.integers(256))
        elif what == "cut":
            del wire[place:]
        else:
            wire[place:place] = rng.bytes(int(rng.integers(1, 10)))
    try:
        read = ShardTable.from_bytes(wire)
    except TableError:
        return
    assert ShardTable.from_bytes(read.to_bytes()).equals(read)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.booleans())
@example(b'{"tensors":' + b"[" * 100_000, 100_011, True)
@example(b"[]", 2, True)
@example(b'{"tensors":[],"rows":1.5,"storages":0,"devices":[]}', 51, True)
@example(b'{"tensors":[["weight/a",[NaN],"float32"]],"rows":0,"storages":0,"devices":[]}', 77, True)
@example(b'{"tensors":[[1,[],"float32"]],"rows":0,"storages":0,"devices":[]}', 65, True)
@example(b'{"tensors":[["weight/a",3,"float32"]],"rows":0,"storages":0,"devices":[]}', 73, True)
@example(b'{"tensors":[],"rows":0,"storages":0,"devices":{"a":1}}', 54, True)
def test_garbage_is_an_error(body: bytes, header_bytes: int, magic: bool) -> None:
    start = b"NereusT1" + header_bytes.to_bytes(8, "little") if magic else b""
    try:
        ShardTable.from_bytes(start + body)
    except TableError:
        return
    raise AssertionError("garbage was read as a table")
