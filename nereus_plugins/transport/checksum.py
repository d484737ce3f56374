"""A digest of bytes: the same on every device, sensitive to position, near memory speed.

Bytes are read as little-endian int64 words, zero-padded, in blocks of 256 rows of 256 words. All
row sums and all column sums of a block are taken (wrapping; plain reductions are what torch does
fastest), then each sum goes through a bijection of 64 bits that its position chooses, and the
results are added up: one total over rows, one over columns. A changed byte changes a row sum and
a column sum; two exchanged words differ in their row or in their column, so a sum sees them;
exchanged rows, columns or blocks are seen through the position. What sums cannot see are changes
in four or more words that cancel in every row and every column at once. It guards against
accidents, not against an adversary.
"""

from __future__ import annotations

import functools

import torch

ROWS = 256
COLUMNS = 256
WORD_BYTES = 8
BLOCK_BYTES = ROWS * COLUMNS * WORD_BYTES

# splitmix64's constants, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def digest(data: torch.Tensor) -> torch.Tensor:
    """int64[2] on the device of `data`, a 1-D contiguous uint8 tensor of any length.

    Asynchronous on CUDA. Equal for equal bytes on any device and at any alignment.
    """
    row_bytes = COLUMNS * WORD_BYTES
    if data.data_ptr() % WORD_BYTES or data.storage_offset() % WORD_BYTES:
        # Words cannot be read where they lie: a block's copy at a time.
        step = BLOCK_BYTES
    elif data.device.type == "cpu":
        step = BLOCK_BYTES  # stays in cache between its two readings
    else:
        step = max(data.numel() // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)  # few kernels
    rows, columns = [], []
    for start in range(0, data.numel(), step):
        part = data[start : start + step]
        whole_rows = part.numel() // row_bytes * row_bytes
        words = _words(part[:whole_rows])
        if part.numel() > BLOCK_BYTES:
            words = words.view(-1, ROWS, COLUMNS)
        by_row, by_column = words.sum(dim=-1), words.sum(dim=-2)
        if whole_rows < part.numel():
            last = part.new_zeros(row_bytes)
            last[: part.numel() - whole_rows].copy_(part[whole_rows:])
            by_row = torch.cat([by_row, last.view(torch.int64).sum(dim=0, keepdim=True)])
            by_column = by_column + last.view(torch.int64)
        rows.append(by_row.view(-1))
        columns.append(by_column.view(-1))
    if not rows:
        return torch.zeros(2, dtype=torch.int64, device=data.device)
    count = sum(len(sums) for sums in rows)
    mixed = _mix(torch.cat(rows + columns))
    return torch.stack([mixed[:count].sum(), mixed[count:].sum()]) + data.numel()


def _words(part: torch.Tensor) -> torch.Tensor:
    """int64[n, COLUMNS] of whole rows, in place where the alignment allows it."""
    if part.data_ptr() % WORD_BYTES or part.storage_offset() % WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64).view(-1, COLUMNS)


def _mix(sums: torch.Tensor) -> torch.Tensor:
    """int64[n]: each sum through a bijection of its own; in place."""
    size = max(1024, 1 << (len(sums) - 1).bit_length())
    z = sums.bitwise_xor_(_keys(size, sums.device)[: len(sums)])
    z.bitwise_xor_(_shift_right(z, 32)).mul_(_MIX_1)
    return z.bitwise_xor_(_shift_right(z, 29))


@functools.lru_cache(maxsize=32)
def _keys(count: int, device: torch.device) -> torch.Tensor:
    """int64[count]: splitmix64 of 1, 2, ...; for a position the same at any count."""
    z = torch.arange(1, count + 1, device=device) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic, which would lose the sign bit in the mix."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
