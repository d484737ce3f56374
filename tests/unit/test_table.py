"""The shard table: what it refuses, merging, and its wire form."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.table import (
    ShardTable,
    StorageInfo,
    StorageTable,
    TableError,
    TensorInfo,
    concat,
)

WEIGHT = TensorInfo("weight/w", (4, 6), "bfloat16")
MASTER = TensorInfo("master/w", (4, 6), "float32")
SCALAR = TensorInfo("buffer/count", (), "int64")


def of_rank(rank: int) -> ShardTable:
    """Half of the rows of two tensors, in two storages, and a scalar."""
    half = Box((2 * rank, 0), (2, 6))
    return ShardTable.from_shards(
        rank,
        [(WEIGHT, half, 0), (MASTER, half, 1), (SCALAR, Box((), ()), 1)],
        [StorageInfo(rank, 0, 24, "cpu"), StorageInfo(rank, 1, 56, "cuda:0")],
    )


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("w", (1,), "float32", "<kind>/<tensor>"),
        ("gradient/w", (1,), "float32", "weight, master"),
        ("weight/", (1,), "float32", "<kind>/<tensor>"),
        ("weight/w", (1,), "float33", "unknown dtype"),
        ("weight/w", (-1,), "float32", "negative"),
        ("weight/w", (1,) * 9, "float32", "over 8 dims"),
        ("weight/w", (1 << 40, 1 << 40), "float32", r"2\*\*61"),
    ],
)
def test_tensors_that_cannot_be(
    name: str, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    with pytest.raises(TableError, match=message):
        TensorInfo(name, shape, dtype)


def test_bytes_and_boxes_of_rows() -> None:
    table = concat([of_rank(0), of_rank(1)])
    assert table.nbytes_per_row().tolist() == [24, 48, 8, 24, 48, 8]
    assert table.box(4) == Box((2, 0), (2, 6))
    assert table.box(5) == Box((), ())
    assert table.ranks == (0, 1)
    assert table.of_rank(1).storages.infos() == [
        StorageInfo(1, 0, 24, "cpu"),
        StorageInfo(1, 1, 56, "cuda:0"),
    ]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tensor", [0, 3, 2], "row 1 names tensor 3 of 3"),
        ("tensor", [0, -1, 2], "row 1 names tensor -1"),
        ("rank", [0, 0, -2], "row 2 has rank -2"),
        ("rank", [0, 1, 0], "rank 1 has no storage 1"),
        ("local", [0, 2, 2], "two shards with local index 2"),
        ("storage", [0, 1, 7], "rank 0 has no storage 7"),
        ("offset", [[0, 1], [0, 0], [0, 0]], "row 0 .* is not a box of weight/w"),
        ("offset", [[2**62, 0], [0, 0], [0, 0]], "row 0 .* is not a box of weight/w"),
        ("offset", [[0, 0], [0, 0], [0, 1]], "row 2 .* is not a box of buffer/count"),
        ("shape", [[2, 6], [2**63 - 1, 6], [1, 1]], "row 1 .* is not a box of master/w"),
        ("shape", [[2, 6], [2, 6], [1, 0]], "row 2 .* is not a box of buffer/count"),
    ],
)
def test_rows_that_cannot_be(column: str, value: list[Any], message: str) -> None:
    table = of_rank(0)
    changed: Any = {column: np.array(value, dtype=getattr(table, column).dtype)}
    with pytest.raises(TableError, match=message):
        replace(table, **changed)


def test_columns_of_the_wrong_kind() -> None:
    table = of_rank(0)
    with pytest.raises(TableError, match="column rank is int64"):
        replace(table, rank=table.rank.astype(np.int64))
    with pytest.raises(TableError, match="column offset"):
        replace(table, offset=table.offset[:, :1])


def test_storages_that_cannot_be() -> None:
    with pytest.raises(TableError, match="same rank and key"):
        StorageTable.from_infos([StorageInfo(0, 1, 8, "cpu"), StorageInfo(0, 1, 9, "cpu")])
    with pytest.raises(TableError, match="storage row 0 has nbytes -1"):
        StorageTable.from_infos([StorageInfo(0, 1, -1, "cpu")])


def test_merging_tables_that_disagree_names_the_tensor() -> None:
    other = ShardTable.from_shards(
        1,
        [(replace(MASTER, shape=(4, 7)), Box((0, 0), (4, 7)), 0)],
        [StorageInfo(1, 0, 0, "cpu")],
    )
    with pytest.raises(TableError, match=r"master/w is float32 \(4, 7\) in one place"):
        concat([of_rank(0), other])


def test_merging_one_rank_twice_is_refused() -> None:
    with pytest.raises(TableError, match="same rank and key"):
        concat([of_rank(0), of_rank(0)])


def test_merging_tables_with_other_tensors_and_fewer_dims() -> None:
    flat = TensorInfo("exp_avg/w", (24,), "float32")
    other = ShardTable.from_shards(3, [(flat, Box((5,), (7,)), 0)], [StorageInfo(3, 0, 28, "cpu")])
    table = concat([of_rank(0), other])
    assert [t.name for t in table.tensors] == ["weight/w", "master/w", "buffer/count", "exp_avg/w"]
    assert table.box(3) == Box((5,), (7,))
    assert table.offset.shape == (4, 2)


def test_the_empty_table() -> None:
    empty = concat([])
    assert len(empty) == 0
    assert ShardTable.from_bytes(empty.to_bytes()).equals(empty)


def wire(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"NereusT1" + struct.pack("<Q", len(text)) + text + body


GOOD: dict[str, Any] = {"tensors": [], "rows": 0, "storages": 0, "devices": []}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"NereusT1",
        b"\x80\x04K\x01.",
        wire(GOOD) + b"x",
        wire(GOOD)[:-1],
        wire(GOOD | {"rows": -1}),
        wire(GOOD | {"rows": True}),
        wire(GOOD | {"rows": 10**30}),
        wire(GOOD | {"devices": [1]}),
        wire(GOOD | {"tensors": [["weight/a", [10**30], "float32"]]}),
        wire(GOOD | {"tensors": [["weight/a", [-1], "float32"]]}),
        wire(GOOD | {"tensors": [["weight/a", [1]]]}),
        wire(GOOD | {"tensors": [["weight/a", [1], "float32"]] * 2}),
        wire(GOOD | {"tensors": [["weight/a", [1], ["float32"]]]}),
        wire(GOOD | {"storages": 1}, struct.pack("<iiqi", 0, 0, 8, 0)),
        wire(GOOD | {"storages": 1, "devices": ["cpu"]}, struct.pack("<iiqi", 0, -1, 8, 0)),
        wire([GOOD]),
        b"NereusT1" + struct.pack("<Q", 2**63) + b"{}",
    ],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TableError):
        ShardTable.from_bytes(data)


def test_a_header_cannot_make_the_reader_allocate() -> None:
    data = wire(GOOD | {"rows": 2**40, "storages": 2**40})
    tracemalloc.start()
    try:
        with pytest.raises(TableError, match="do not fit"):
            ShardTable.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_wire_form_is_the_same_in_each_process() -> None:
    assert (
        concat([of_rank(0), of_rank(1)]).to_bytes() == concat([of_rank(0), of_rank(1)]).to_bytes()
    )
    assert ShardTable.from_bytes(memoryview(of_rank(1).to_bytes())).equals(of_rank(1))


def test_shards_on_other_ranks() -> None:
    table = concat([of_rank(0), of_rank(1)])
    moved = table.on_ranks([3, 1])
    assert moved.rank.tolist() == [3, 3, 3, 1, 1, 1]
    assert sorted((s.rank, s.nbytes) for s in moved.storages.infos()) == [
        (1, 24),
        (1, 56),
        (3, 24),
        (3, 56),
    ]
    assert moved.on_ranks([0, 1, 2, 0]).equals(table)
    with pytest.raises(IndexError):
        table.on_ranks([5])
