"""Random moves: every byte travels once, messages are bounded, projections cannot deadlock."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_plugins.transport.rounds import TransferPlan, compile_transfer

from ..unit.test_rounds import make_moves

WORLD = 5


@st.composite
def moves_rows(draw: st.DrawFn) -> list[tuple[int, int, str, tuple[int, ...], tuple[int, ...]]]:
    rank = st.integers(0, WORLD - 1)
    rows = []
    for _ in range(draw(st.integers(1, 30))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        offset = tuple(draw(st.integers(0, 3)) for _ in shape)
        dtype = draw(st.sampled_from(["float32", "bfloat16", "bool", "int64"]))
        rows.append((draw(rank), draw(rank), dtype, offset, shape))
    # As a planner would order them.
    return sorted(rows, key=lambda row: (row[1], row[0]))


def own_rounds(plan: TransferPlan, rank: int) -> deque[list[int]]:
    """The messages between ranks that `rank` takes part in, by round."""
    mine = [m for m in plan.of_rank(rank).tolist() if plan.src[m] != plan.dst[m]]
    rounds: dict[int, list[int]] = {}
    for m in mine:
        rounds.setdefault(int(plan.round[m]), []).append(m)
    return deque(messages for _, messages in sorted(rounds.items()))


@settings(max_examples=300, deadline=None)
@given(moves_rows(), st.sampled_from([8, 40, 64, 1000]), st.integers(1, 3))
def test_plan(rows: list, staging_bytes: int, window: int) -> None:
    moves = make_moves(rows)
    plan = compile_transfer(moves, WORLD, staging_bytes=staging_bytes)

    # Every element of every move is in exactly one piece.
    for i in range(len(moves)):
        seen = np.zeros(moves.shape[i], dtype=int)
        for p in np.flatnonzero(plan.piece_row == i):
            start = plan.piece_offset[p] - moves.offset[i]
            seen[
                tuple(slice(a, a + n) for a, n in zip(start, plan.piece_shape[p], strict=True))
            ] += 1
        assert (seen == 1).all()

    # Messages are bounded, hold moves of their pair, and aligned pieces.
    assert (plan.nbytes <= staging_bytes).all()
    assert int(plan.nbytes.sum()) == int(moves.nbytes.sum())
    for m in range(plan.messages):
        at = slice(plan.first_piece[m], plan.first_piece[m + 1])
        assert (moves.src_rank[plan.piece_row[at]] == plan.src[m]).all()
        assert (moves.dst_rank[plan.piece_row[at]] == plan.dst[m]).all()
        size = plan.piece_nbytes[at]
        item = size // plan.piece_shape[at].prod(axis=1)
        assert ((np.cumsum(size) - size) % item == 0).all()

    # At most one message from and to each rank in a round.
    for number in np.unique(plan.round):
        now = plan.round == number
        assert len(np.unique(plan.src[now])) == len(np.unique(plan.dst[now])) == now.sum()

    # A rank's own part, compiled alone, is its projection of the whole.
    for rank in range(WORLD):
        keep = np.flatnonzero((moves.src_rank == rank) | (moves.dst_rank == rank))
        if len(keep):
            alone = compile_transfer(
                make_moves([rows[i] for i in keep]), WORLD, staging_bytes=staging_bytes
            )
            mine = plan.of_rank(rank)
            for name in ("round", "src", "dst", "nbytes"):
                assert np.array_equal(getattr(alone, name), getattr(plan, name)[mine])
            pieces = np.concatenate(
                [np.arange(plan.first_piece[m], plan.first_piece[m + 1]) for m in mine]
                or [np.zeros(0, int)]
            )
            assert np.array_equal(keep[alone.piece_row], plan.piece_row[pieces])

    # Rendezvous messages, each rank with `window` rounds posted and finishing in order: all end.
    waiting = [own_rounds(plan, rank) for rank in range(WORLD)]
    arrived: set[int] = set()
    while any(waiting):
        posted = [{m for r in list(q)[:window] for m in r} for q in waiting]
        for m in range(plan.messages):
            if m in posted[plan.src[m]] and m in posted[plan.dst[m]]:
                arrived.add(m)
        before = sum(map(len, waiting))
        for q in waiting:
            while q and arrived.issuperset(q[0]):
                q.popleft()
        assert sum(map(len, waiting)) < before, "deadlock"
