"""Moves compiled into messages and rounds: splitting, sharing, order, own part of many ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from nereus_plugins.emu.moves import MoveTable
from nereus_plugins.emu.table import DTYPE_BYTES, TensorInfo
from nereus_plugins.transport.rounds import compile_transfer

MIB = 1 << 20


def make_moves(rows: list[tuple[int, int, str, tuple[int, ...], tuple[int, ...]]]) -> MoveTable:
    """A move table from (src, dst, dtype, offset, shape) rows, a tensor for each row."""
    dims = max(len(shape) for *_, shape in rows)
    offset, shape = np.zeros((len(rows), dims), np.int64), np.ones((len(rows), dims), np.int64)
    tensors = []
    for i, (_, _, dtype, at, size) in enumerate(rows):
        offset[i, : len(at)], shape[i, : len(size)] = at, size
        whole = tuple(a + s for a, s in zip(at, size, strict=True))
        tensors.append(TensorInfo(f"weight/t{i}", whole, dtype))
    item = np.array([DTYPE_BYTES[row[2]] for row in rows])
    index = np.arange(len(rows), dtype=np.int32)
    return MoveTable(
        tensors=tuple(tensors),
        tensor=index,
        src_rank=np.array([row[0] for row in rows], dtype=np.int32),
        dst_rank=np.array([row[1] for row in rows], dtype=np.int32),
        src_local=index,
        dst_local=index,
        offset=offset,
        shape=shape,
        nbytes=shape.prod(axis=1) * item,
    )


def test_a_large_move_is_cut_evenly_along_its_first_long_dim() -> None:
    moves = make_moves([(0, 1, "float32", (3, 7, 0), (1, 10, MIB))])
    plan = compile_transfer(moves, 2, staging_bytes=12 * MIB)
    assert plan.piece_offset[:, 1].tolist() == [7, 9, 12, 14]  # 2, 3, 2, 3 rows of 4 MiB
    assert plan.piece_shape[:, 1].tolist() == [2, 3, 2, 3]
    assert (plan.piece_offset[:, 0] == 3).all()
    assert plan.nbytes.tolist() == [8 * MIB, 12 * MIB, 8 * MIB, 12 * MIB]


def test_a_row_longer_than_a_message_is_cut_along_the_next_dim() -> None:
    moves = make_moves([(0, 1, "bfloat16", (0, 0), (2, 3 * MIB))])
    plan = compile_transfer(moves, 2, staging_bytes=4 * MIB)
    assert plan.piece_offset.tolist() == [[0, 0], [0, 3 * MIB // 2], [1, 0], [1, 3 * MIB // 2]]
    assert (plan.nbytes == 3 * MIB).all()


def test_small_moves_share_a_message_by_descending_element_size() -> None:
    rows = [
        (0, 1, "bfloat16", (0,), (3,)),
        (0, 1, "float32", (0,), (5,)),
        (0, 1, "bool", (0,), (1,)),
        (0, 1, "float32", (), ()),
    ]
    plan = compile_transfer(make_moves(rows), 2, staging_bytes=1024)
    assert plan.messages == 1
    assert plan.piece_row.tolist() == [1, 3, 0, 2]
    assert plan.nbytes.tolist() == [20 + 4 + 6 + 1]


def test_a_large_contiguous_move_shares_with_none() -> None:
    rows = [
        (0, 1, "float32", (0,), (4,)),
        (0, 1, "float32", (0,), (200,)),
        (0, 1, "float32", (0,), (4,)),
    ]
    plan = compile_transfer(make_moves(rows), 2, staging_bytes=1024)
    assert plan.first_piece.tolist() == [0, 1, 3]
    assert plan.piece_row.tolist() == [1, 0, 2]


def test_a_round_has_one_message_each_way_and_rotates() -> None:
    rows = [(a, b, "float32", (0,), (1024,)) for b in range(4) for a in range(4)]
    plan = compile_transfer(make_moves(rows), 4, staging_bytes=2048)
    assert plan.messages == 32
    for number in np.unique(plan.round):
        now = plan.round == number
        assert len(set(plan.src[now].tolist())) == len(set(plan.dst[now].tolist())) == 4
        assert len(set(((plan.dst[now] - plan.src[now]) % 4).tolist())) == 1


def test_zero_size_moves_vanish_and_wrong_arguments_are_named() -> None:
    empty = make_moves([(0, 1, "float32", (0, 0), (0, 8))])
    assert compile_transfer(empty, 2, staging_bytes=64).messages == 0
    moves = make_moves([(0, 3, "float32", (0,), (8,))])
    with pytest.raises(ValueError, match="world of 2"):
        compile_transfer(moves, 2, staging_bytes=64)
    with pytest.raises(ValueError, match="staging_bytes=2"):
        compile_transfer(moves, 4, staging_bytes=2)


def test_one_rank_of_1024_compiles_its_part_quickly() -> None:
    # 3,000 moves from 64 peers and to 64 peers, 8 MB each: 24 GB and 6,000 rows for one rank.
    rows = [(7 if i % 2 else i % 64 + 8, i % 64 + 8 if i % 2 else 7) for i in range(6000)]
    moves = make_moves([(a, b, "float32", (0, 0), (512, 4096)) for a, b in rows])
    start = time.perf_counter()
    plan = compile_transfer(moves, 1024, staging_bytes=4 * MIB)
    assert time.perf_counter() - start < 0.5  # about 0.01 s; the margin is for a loaded machine
    assert plan.messages == 12000
