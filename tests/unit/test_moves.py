"""Moves: source choice, balance, odd layouts, and the errors' words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.moves import MovePlanner, MoveTable, plan_moves
from nereus_plugins.emu.table import (
    ShardTable,
    StorageInfo,
    TableError,
    TensorInfo,
    concat,
)
from nereus_plugins.emu.tiling import CoverageError, check_tiling

W = TensorInfo("weight/w", (8, 4), "float32")


def rows(lo: int, hi: int, tensor: TensorInfo = W) -> tuple[TensorInfo, Box, int]:
    return tensor, Box((lo, 0), (hi - lo, tensor.shape[1])), 0


def table(shards: dict[int, list[tuple[TensorInfo, Box, int]]]) -> ShardTable:
    return concat(
        [
            ShardTable.from_shards(rank, own, [StorageInfo(rank, 0, 0, "cpu")])
            for rank, own in shards.items()
        ]
    )


def listed(moves: MoveTable) -> list[tuple[int, int, str]]:
    """(from, to, box) of each row."""
    pairs = zip(moves.src_rank.tolist(), moves.dst_rank.tolist(), strict=True)
    return [(src, dst, str(moves.box(i))) for i, (src, dst) in enumerate(pairs)]


def between_bytes(moves: MoveTable, rank: np.ndarray, world: int) -> list[int]:
    """Bytes per rank, of moves between different ranks."""
    between = moves.src_rank != moves.dst_rank
    return np.bincount(rank[between], moves.nbytes[between], world).astype(int).tolist()


def test_two_halves_from_three_uneven_parts() -> None:
    source = table({0: [rows(0, 3)], 1: [rows(3, 3)], 2: [rows(3, 8)]})
    target = table({0: [rows(0, 4)], 1: [rows(4, 8)]})
    moves = plan_moves(source, target)
    assert listed(moves) == [(0, 0, "[0:3, 0:4]"), (2, 0, "[3:4, 0:4]"), (2, 1, "[4:8, 0:4]")]
    assert moves.nbytes.tolist() == [48, 16, 64]
    assert [column.tolist() for column in moves.pair_bytes()] == [
        [0, 2, 2],
        [0, 0, 1],
        [48, 16, 64],
    ]


def test_the_own_copy_then_the_nodes_then_any() -> None:
    source = table({0: [rows(0, 8)], 2: [rows(0, 8)]})
    target = table({rank: [rows(0, 8)] for rank in range(6)})
    moves = plan_moves(source, target, node_of=[0, 0, 1, 1, 2, 2])
    assert [(src, dst) for src, dst, _ in listed(moves)] == [
        (0, 0),
        (0, 1),
        (2, 2),
        (2, 3),
        (0, 4),
        (2, 5),
    ]


def test_a_rank_that_holds_a_box_twice_offers_the_first_and_fills_both() -> None:
    source = table({0: [rows(0, 8), rows(0, 8)]})
    target = table({1: [rows(0, 8), rows(0, 8)]})
    moves = plan_moves(source, target)
    assert moves.src_local.tolist() == [0, 0]
    assert moves.dst_local.tolist() == [0, 1]


@pytest.mark.parametrize(("holders", "receivers"), [(2, 3), (4, 1), (3, 7), (5, 5), (8, 3)])
def test_replicas_share_the_sending(holders: int, receivers: int) -> None:
    """32 tensors: no holder sends more than one tensor's bytes above its equal share."""
    tensors = [TensorInfo(f"weight/t{i}", (8, 4), "float32") for i in range(32)]
    world = holders + receivers
    source = table({r: [rows(0, 8, t) for t in tensors] for r in range(holders)})
    target = table({r: [rows(0, 8, t) for t in tensors] for r in range(holders, world)})
    moves = plan_moves(source, target)
    sent = between_bytes(moves, moves.src_rank, world)[:holders]
    share = 32 * 128 * receivers / holders
    assert max(sent) <= share + 128 * receivers
    assert min(sent) >= share - 128 * receivers
    assert len(moves.pair_bytes()[0]) <= world  # coalesced: few peers


def test_pipeline_stages_grow_onto_new_ranks_from_all_replicas() -> None:
    """Four new ranks each take a quarter of the layers: from four holders, one each."""
    tensors = [TensorInfo(f"weight/l{i}", (8, 4), "float32") for i in range(8)]
    source = table({r: [rows(0, 8, t) for t in tensors] for r in range(4)})
    target = table({4 + s: [rows(0, 8, t) for t in tensors[2 * s : 2 * s + 2]] for s in range(4)})
    moves = plan_moves(source, target)
    assert between_bytes(moves, moves.src_rank, 8)[:4] == [256] * 4
    assert len(moves.pair_bytes()[0]) == 4


def test_replicas_cut_differently_on_different_ranks() -> None:
    source = table({0: [rows(0, 4)], 1: [rows(4, 8)], 2: [rows(0, 6)], 3: [rows(6, 8)]})
    target = table({3: [rows(0, 8)], 4: [rows(2, 7)]})
    planner = MovePlanner(source, target)
    moves = planner.moves()
    assert moves.nbytes.sum() == (8 + 5) * 16
    assert [row for row in listed(moves) if row[0] == row[1]] == [(3, 3, "[6:8, 0:4]")]
    for rank in range(5):
        assert planner.moves(rank).equals(moves.of_rank(rank))


def test_a_gap_names_tensor_rank_and_box() -> None:
    source = table({0: [rows(0, 3)], 1: [rows(5, 8)]})
    target = table({0: [rows(0, 8)], 7: [rows(4, 6)]})
    words = r"weight/w: rank 0 is to hold \[0:8, 0:4\], but no source shard holds \[3:5, 0:4\]"
    for rank in (None, 0, 7):
        with pytest.raises(CoverageError, match=words):
            plan_moves(source, target, rank=rank)


def test_a_gap_is_not_hidden_by_an_overlap_of_the_same_size() -> None:
    source = table({0: [rows(0, 4)], 1: [rows(2, 6)]})
    with pytest.raises(CoverageError, match=r"no source shard holds \[6:8, 0:4\]"):
        plan_moves(source, table({0: [rows(0, 8)]}))
    with pytest.raises(CoverageError, match="overlap without being equal"):
        check_tiling(source)


def test_a_tensor_the_source_does_not_have() -> None:
    other = replace(W, name="exp_avg/w")
    with pytest.raises(CoverageError, match="exp_avg/w: rank 1 is to hold"):
        plan_moves(table({0: [rows(0, 8)]}), table({1: [rows(0, 8), rows(0, 8, other)]}))


def test_a_tensor_the_target_does_not_have_is_reported() -> None:
    wide = TensorInfo("buffer/wide", (2, 2, 2), "float32")
    source = table({0: [(wide, Box.whole((2, 2, 2)), 0), rows(0, 8)]})
    planner = MovePlanner(source, table({1: [rows(0, 8)]}))
    assert planner.dropped == ("buffer/wide",)
    assert listed(planner.moves()) == [(0, 1, "[0:8, 0:4]")]


def test_moves_do_not_convert() -> None:
    half = replace(W, dtype="bfloat16")
    with pytest.raises(TableError, match=r"weight/w is float32 .* in the source and bfloat16"):
        plan_moves(table({0: [rows(0, 8)]}), table({0: [rows(0, 8, half)]}))


def test_nodes_of_all_ranks_are_needed() -> None:
    with pytest.raises(TableError, match="node_of has 1 entries, the tables 2 ranks"):
        plan_moves(table({0: [rows(0, 8)]}), table({1: [rows(0, 8)]}), node_of=[0])


def test_tiling_of_a_table_with_a_hole() -> None:
    check_tiling(table({0: [rows(0, 4)], 1: [rows(4, 8)], 2: [rows(0, 4)]}))
    with pytest.raises(CoverageError, match=r"weight/w: \[4:8, 0:4\] is on no rank"):
        check_tiling(table({0: [rows(0, 4)]}))


def test_empty_tables() -> None:
    assert len(plan_moves(concat([]), concat([]))) == 0
    assert len(plan_moves(table({0: [rows(0, 8)]}), concat([]), rank=0)) == 0
