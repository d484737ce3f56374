"""Keeping the mini-batches of an iteration the same when data parallelism changes.

verl cuts a batch into one contiguous chunk for each data-parallel rank, and each rank cuts its
chunk into mini-batches; so with several mini-batches in an iteration, which samples one optimizer
step sees depends on the number of data-parallel ranks. Ordering the batch anew makes every step of
the new layout see exactly the samples it would have seen in the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Splits positions into that many parts of equal size, of about equal work.
Balance = Callable[[Sequence[int], int], list[list[int]]]


def members(rows: int, mini: int, dp: int) -> list[list[int]]:
    """Positions of the batch that each mini-batch is made of.

    Args:
        rows: samples in the batch. mini: samples in one mini-batch, over all ranks.
        dp: data-parallel ranks; divides `mini`, which divides `rows`.
    """
    share, chunk = mini // dp, rows // dp
    return [
        [rank * chunk + step * share + i for rank in range(dp) for i in range(share)]
        for step in range(rows // mini)
    ]


def order(rows: int, mini: int, old_dp: int, new_dp: int, balance: Balance) -> list[int]:
    """The order of a batch in which `new_dp` ranks make the mini-batches that `old_dp` ranks made.

    Args:
        rows, mini: as in `members`. balance: spreads one mini-batch over ranks.

    Returns: for each position of the new order, the position in the old one.
    """
    if old_dp == new_dp:
        return list(range(rows))
    share, chunk = mini // new_dp, rows // new_dp
    out = [-1] * rows
    for step, positions in enumerate(members(rows, mini, old_dp)):
        for rank, part in enumerate(balance(positions, new_dp)):
            start = rank * chunk + step * share
            out[start : start + share] = part
    return out


def compose(current: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """The reordering that turns order `current` of some batch into order `wanted` of it."""
    place = {position: i for i, position in enumerate(current)}
    return [place[position] for position in wanted]
