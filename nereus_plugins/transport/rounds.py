"""Moves compiled into messages, and messages into rounds. NumPy only.

Between two ranks the moves form a stream of messages. A large move is a message of its own, cut
by boxes into several if it exceeds the staging size, so that a contiguous box can go straight from
and into live memory. Small moves share a message. Both ends derive the same messages from the
moves between them alone, so each rank compiles just its own part and no plan is sent around.

Chunk `c` of every pair whose distance `(dst - src) mod world` is `s` goes in round
``c * world + s``: in a round a rank sends at most one message and receives at most one, and
successive rounds use different links. Every rank handles its rounds in ascending order and always
has its earliest unfinished one posted; the earliest unfinished round of all is therefore posted at
both ends of each of its messages, and no schedule can deadlock. Distance 0 is a copy on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from nereus_plugins.emu.moves import MoveTable

# A move of at least 1/DIRECT_SHARE of the staging size gets a message of its own.
DIRECT_SHARE = 8


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Messages in the order of their rounds, and the pieces of moves each is made of.

    Attributes:
        world: number of ranks.
        staging_bytes: upper bound of a message's size.
        round: int64[m], ascending; ``chunk * world + (dst - src) mod world``.
        src, dst: int32[m], ranks.
        nbytes: int64[m], size of the message.
        first_piece: int64[m + 1]; message i holds the pieces ``first_piece[i]:first_piece[i+1]``,
            one after the other without gaps, of descending element size, so that each starts at a
            multiple of its element size.
        piece_row: int64[p], row of the move table.
        piece_offset, piece_shape: int64[p, D], box in the global tensor, as in the move table.
        piece_nbytes: int64[p].
    """

    world: int
    staging_bytes: int
    round: NDArray[np.int64]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    first_piece: NDArray[np.int64]
    piece_row: NDArray[np.int64]
    piece_offset: NDArray[np.int64]
    piece_shape: NDArray[np.int64]
    piece_nbytes: NDArray[np.int64]

    @property
    def messages(self) -> int:
        return len(self.round)

    def of_rank(self, rank: int) -> NDArray[np.int64]:
        """Indices of the messages that `rank` sends, receives or copies, in order."""
        return np.flatnonzero((self.src == rank) | (self.dst == rank))


def compile_transfer(moves: MoveTable, world: int, *, staging_bytes: int) -> TransferPlan:
    """Compile `moves` (all, or those of one rank) for `world` ranks.

    `staging_bytes` bounds a message; every rank must use the same. A message between two ranks
    depends only on the moves between them and their order in the table. Moves without bytes are
    dropped.

    Raises:
        ValueError: a rank outside of the world, or `staging_bytes` smaller than one element.
    """
    nbytes = np.asarray(moves.nbytes, dtype=np.int64)
    row = np.flatnonzero(nbytes > 0)
    src, dst = np.asarray(moves.src_rank)[row], np.asarray(moves.dst_rank)[row]
    if len(row) and (
        min(int(src.min()), int(dst.min())) < 0 or max(int(src.max()), int(dst.max())) >= world
    ):
        raise ValueError(f"moves name ranks outside of a world of {world}")
    offset, shape = moves.offset[row], moves.shape[row]
    nbytes = nbytes[row]
    item = nbytes // shape.prod(axis=1)
    if len(row) and staging_bytes < int(item.max()):
        raise ValueError(
            f"staging_bytes={staging_bytes} is smaller than one element ({int(item.max())} bytes)"
        )
    row, offset, shape, nbytes = _split(row, offset, shape, nbytes, item, staging_bytes)
    src, dst = np.asarray(moves.src_rank)[row], np.asarray(moves.dst_rank)[row]
    item = nbytes // np.maximum(shape.prod(axis=1), 1)

    # Stable, so that pieces of one kind keep the order of the table and of the split.
    small = nbytes * DIRECT_SHARE < staging_bytes
    order = np.lexsort((-item, small, dst, src))
    row, offset, shape, nbytes = row[order], offset[order], shape[order], nbytes[order]
    src, dst, small = src[order], dst[order], small[order]
    new_pair = _changes(src, dst)
    new_group = new_pair | _changes(small)
    # A small piece starts inside its window and is shorter than an eighth of the limit: windows
    # of the other seven eighths keep every message below it.
    window = max(staging_bytes - staging_bytes // DIRECT_SHARE, 1)
    start = np.cumsum(nbytes) - nbytes
    start -= _carry(start, new_group)
    new_message = new_group | ~small | _changes(start // window)
    first = np.flatnonzero(new_message)
    index = np.arange(len(first), dtype=np.int64)
    chunk = index - _carry(index, new_pair[first])
    message_src, message_dst = src[first].astype(np.int32), dst[first].astype(np.int32)
    message_round = chunk * world + (message_dst.astype(np.int64) - message_src) % world
    bounds = np.append(first, len(row))
    size = np.add.reduceat(nbytes, first) if len(first) else np.zeros(0, dtype=np.int64)

    by_round = np.lexsort((message_src, message_round))
    counts = np.diff(bounds)[by_round]
    first_piece = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    # Pieces follow their messages into the order of rounds.
    take = np.repeat(bounds[:-1][by_round] - first_piece[:-1], counts) + np.arange(len(row))
    return TransferPlan(
        world=world,
        staging_bytes=staging_bytes,
        round=message_round[by_round],
        src=message_src[by_round],
        dst=message_dst[by_round],
        nbytes=size[by_round],
        first_piece=first_piece,
        piece_row=row[take],
        piece_offset=offset[take],
        piece_shape=shape[take],
        piece_nbytes=nbytes[take],
    )


def _changes(*columns: NDArray[np.generic]) -> NDArray[np.bool_]:
    """bool[n]: whether entry i differs from entry i - 1 in any column; the first one does."""
    changed = np.ones(len(columns[0]), dtype=bool)
    if len(changed):
        changed[1:] = False
        for column in columns:
            changed[1:] |= column[1:] != column[:-1]
    return changed


def _carry(values: NDArray[np.int64], starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64[n]: the value at the last start at or before each entry."""
    return values[np.flatnonzero(starts)][np.cumsum(starts) - 1] if len(values) else values


def _split(
    row: NDArray[np.int64],
    offset: NDArray[np.int64],
    shape: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    item: NDArray[np.int64],
    limit: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut boxes larger than `limit` bytes along their first dim of extent over 1, evenly, again
    until all fit: at most one pass a dim. Returns row, offset, shape, nbytes of the parts; the
    parts of a row stay together, in row-major order."""
    while (large := nbytes > limit).any():
        big = np.flatnonzero(large)
        dim = (shape[big] > 1).argmax(axis=1)
        extent = shape[big, dim]
        step_bytes = nbytes[big] // extent
        most = np.maximum(limit // step_bytes, 1)
        parts = np.ones(len(row), dtype=np.int64)
        parts[big] = -(-extent // most)
        source = np.repeat(np.arange(len(row)), parts)
        part = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
        row, offset, shape, item = row[source], offset[source], shape[source], item[source]
        cut = np.flatnonzero(large[source])
        place = np.full(len(nbytes), -1, dtype=np.int64)
        place[big] = np.arange(len(big))
        which = place[source[cut]]
        d, n, total = dim[which], extent[which], parts[source[cut]]
        low, high = part[cut] * n // total, (part[cut] + 1) * n // total
        offset[cut, d] += low
        shape[cut, d] = high - low
        nbytes = shape.prod(axis=1) * item
    return row, offset, shape, nbytes
