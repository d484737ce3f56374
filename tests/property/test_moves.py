"""Moves between random layouts against an oracle that looks at every element.

Layouts are what frameworks do and worse: 0 to 4 dims, uneven cuts, zero-sized shards, replicas,
flat ranges, replicas cut differently on different ranks, the same box twice on a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_plugins.emu.boxes import Box, flat_range_to_boxes
from nereus_plugins.emu.moves import MovePlanner, MoveTable, plan_moves
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo, concat
from nereus_plugins.emu.tiling import CoverageError, check_tiling

Shards = list[list[tuple[TensorInfo, Box, int]]]  # of each rank

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)
styles = st.sampled_from(["whole", "grid", "flat", "dim"])


def cuts(rng: np.random.Generator, n: int, parts: int) -> list[tuple[int, int]]:
    """[0, n) in `parts` consecutive ranges, uneven, some of them empty."""
    edges = [0, *sorted(rng.integers(0, n + 1, parts - 1).tolist()), n]
    return list(itertools.pairwise(edges))


def tile(
    rng: np.random.Generator, shape: tuple[int, ...], style: str, parts: int
) -> Iterator[tuple[int, Box]]:
    """(part, box) such that the boxes of all parts tile the tensor."""
    if style == "whole" or not shape:
        yield int(rng.integers(parts)), Box.whole(shape)
    elif style == "flat":
        for part, (lo, hi) in enumerate(cuts(rng, math.prod(shape), parts)):
            for piece in flat_range_to_boxes(shape, lo, hi):
                yield part, piece.box
    elif style == "dim":
        dim = int(rng.integers(len(shape)))
        for part, (lo, hi) in enumerate(cuts(rng, shape[dim], parts)):
            offset, size = [0] * len(shape), list(shape)
            offset[dim], size[dim] = lo, hi - lo
            yield part, Box(tuple(offset), tuple(size))
    else:
        grid = [cuts(rng, n, int(rng.integers(1, 4))) for n in shape]
        for index in np.ndindex(*(len(g) for g in grid)):
            ends = [g[i] for g, i in zip(grid, index, strict=True)]
            box = Box(tuple(lo for lo, _ in ends), tuple(hi - lo for lo, hi in ends))
            yield int(rng.integers(parts)), box


def layout(
    rng: np.random.Generator,
    infos: list[TensorInfo],
    world: int,
    drawn: list[tuple[str, int, bool]],
) -> Shards:
    """Ranks in groups that each hold every tensor: replicas, cut alike (`alike`) or not."""
    shards: Shards = [[] for _ in range(world)]
    for info, (style, groups, alike) in zip(infos, drawn, strict=True):
        ranks = rng.permutation(world)
        size = max(1, world // groups)
        seed = int(rng.integers(2**31))
        for group in range(min(groups, world)):
            own = np.random.default_rng(seed) if alike else rng
            for part, box in tile(own, info.shape, style, size):
                shards[ranks[group * size + part]].append((info, box, 0))
    return shards


def table(shards: Shards) -> ShardTable:
    return concat(
        [
            ShardTable.from_shards(rank, own, [StorageInfo(rank, 0, 0, "cpu")])
            for rank, own in enumerate(shards)
        ]
    )


def draw_layout(
    data: st.DataObject, rng: np.random.Generator, infos: list[TensorInfo], world: int
) -> Shards:
    one = st.tuples(styles, st.integers(1, 3), st.booleans())
    return layout(rng, infos, world, [data.draw(one) for _ in infos])


def draw_tensors(data: st.DataObject) -> list[TensorInfo]:
    drawn = data.draw(st.lists(shapes, min_size=1, max_size=3))
    return [TensorInfo(f"weight/t{i}", shape, "float32") for i, shape in enumerate(drawn)]


def content(infos: list[TensorInfo], shards: Shards) -> list[list[np.ndarray]]:
    """What each shard holds: every element of a tensor has its own value."""
    whole = {t.name: np.arange(t.numel).reshape(t.shape) for t in infos}
    return [
        [whole[info.name][box.slices_in(Box.whole(info.shape))] for info, box, _ in own]
        for own in shards
    ]


def check_executed(
    infos: list[TensorInfo], source: Shards, target: Shards, moves: MoveTable
) -> None:
    """Copying the moves' boxes writes each target element once, with its right value."""
    have, want = content(infos, source), content(infos, target)
    got = [[np.full(a.shape, -1) for a in own] for own in want]
    for i in range(len(moves)):
        src, dst = int(moves.src_rank[i]), int(moves.dst_rank[i])
        a, b = int(moves.src_local[i]), int(moves.dst_local[i])
        info = moves.tensors[moves.tensor[i]]
        assert source[src][a][0] == target[dst][b][0] == info
        box = moves.box(i)
        assert moves.nbytes[i] == box.numel * 4 > 0
        into = got[dst][b][(..., *box.slices_in(target[dst][b][1]))]
        assert (into == -1).all()  # nothing is written twice
        into[...] = have[src][a][box.slices_in(source[src][a][1])]
    for own, right in zip(got, want, strict=True):
        for a, b in zip(own, right, strict=True):
            np.testing.assert_array_equal(a, b)


def check_sources(source: Shards, moves: MoveTable, node_of: np.ndarray | None) -> None:
    """Itself if it can, else its node if that can."""
    for i in range(len(moves)):
        info, box = moves.tensors[moves.tensor[i]], moves.box(i)
        holders = [
            rank
            for rank, own in enumerate(source)
            if any(t == info and held.contains(box) for t, held, _ in own)
        ]
        src, dst = int(moves.src_rank[i]), int(moves.dst_rank[i])
        near = [r for r in holders if node_of is not None and node_of[r] == node_of[dst]]
        assert src in ([dst] if dst in holders else near or holders)


@settings(max_examples=1500, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**32 - 1), st.data())
def test_moves_rebuild_any_layout(world: int, nodes: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    infos = draw_tensors(data)
    source, target = (draw_layout(data, rng, infos, world) for _ in range(2))
    node_of = rng.integers(0, nodes, world).astype(np.int32) if nodes else None
    planner = MovePlanner(table(source), table(target), node_of=node_of)
    moves = planner.moves()
    check_executed(infos, source, target, moves)
    check_sources(source, moves, node_of)
    for rank in range(world):
        assert planner.moves(rank).equals(moves.of_rank(rank))
    order = np.lexsort(
        (*moves.offset.T[::-1], moves.tensor, moves.src_rank, moves.dst_rank), axis=0
    )
    keys = [c[order] for c in (moves.dst_rank, moves.src_rank, moves.tensor, moves.offset)]
    given_keys = (moves.dst_rank, moves.src_rank, moves.tensor, moves.offset)
    assert all(np.array_equal(a, b) for a, b in zip(keys, given_keys, strict=True))


@settings(max_examples=800, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_moves_into_any_boxes_or_a_named_gap(world: int, seed: int, data: st.DataObject) -> None:
    """Targets that tile nothing, sources with shards missing: all or `CoverageError`."""
    rng = np.random.default_rng(seed)
    infos = draw_tensors(data)
    source, target = (draw_layout(data, rng, infos, world) for _ in range(2))
    source = [[s for s in own if rng.random() > 0.1] for own in source]
    # Some of the target's shards again, on other ranks and twice on one.
    every = list(itertools.chain(*target))
    target = [own + [s for s in every if rng.random() < 0.2] for own in target]
    target[0] = target[0] + target[0][:1]
    held = {info.name: np.zeros(info.shape, dtype=bool) for info in infos}
    for info, box, _ in itertools.chain(*source):
        held[info.name][box.slices_in(Box.whole(info.shape))] = True
    whole = all(
        held[info.name][box.slices_in(Box.whole(info.shape))].all()
        for info, box, _ in itertools.chain(*target)
    )
    if not whole:
        for rank in (None, *range(world)):
            with pytest.raises(CoverageError, match=r"weight/t\d"):
                plan_moves(table(source), table(target), rank=rank)
        return
    planner = MovePlanner(table(source), table(target))
    moves = planner.moves()
    check_executed(infos, source, target, moves)
    for rank in range(world):
        assert planner.moves(rank).equals(moves.of_rank(rank))


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_check_tiling_agrees_with_counting(world: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    infos = draw_tensors(data)
    shards = draw_layout(data, rng, infos, world)
    if data.draw(st.booleans()):
        shards = [[s for s in own if rng.random() > 0.1] for own in shards]
    present = table(shards).tensors
    different = {(info, box) for own in shards for info, box, _ in own}
    count = {info.name: np.zeros(info.shape, dtype=int) for info in present}
    for info, box in different:
        count[info.name][box.slices_in(Box.whole(info.shape))] += 1
    if all((n == 1).all() for n in count.values()):
        check_tiling(table(shards))
    else:
        with pytest.raises(CoverageError, match=r"weight/t\d"):
            check_tiling(table(shards))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
def test_row_order_of_tables_does_not_matter(world: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    infos = draw_tensors(data)
    source, target = (table(draw_layout(data, rng, infos, world)) for _ in range(2))

    def shuffled(t: ShardTable) -> ShardTable:
        order = rng.permutation(len(t))
        columns = (t.tensor, t.rank, t.storage, t.local, t.offset, t.shape)
        return ShardTable(t.tensors, *(c[order] for c in columns), t.storages)

    moves = plan_moves(source, target)
    assert plan_moves(shuffled(source), shuffled(target)).equals(moves)
