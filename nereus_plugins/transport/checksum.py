"""A digest of bytes: the same on every device, sensitive to position, near memory speed.

Bytes are read as little-endian int64 words, zero-padded, in blocks of 256 rows of 256 words. All
row sums and all column sums of a block are taken (wrapping; plain reductions are what torch does
fastest), then each sum is mixed with its position by a bijection of 64 bits and the results are
added up: one total over rows, one over columns. A changed byte changes a row sum and a column
sum; two exchanged words differ in their row or in their column, so a sum sees them; exchanged
rows, columns or blocks are seen by the position in the mix. What sums cannot see are changes in
four or more words that cancel in every row and every column at once. It guards against
accidents, not against an adversary.
"""

from __future__ import annotations

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
    rows, columns = [], []
    # On CPU a block at a time, which stays in cache between its two readings; on an accelerator
    # all whole blocks at once, which takes few kernels.
    whole = data.numel() // BLOCK_BYTES * BLOCK_BYTES
    step = BLOCK_BYTES if data.device.type == "cpu" else max(whole, BLOCK_BYTES)
    for start in range(0, data.numel(), step):
        part = data[start : start + step]
        if part.numel() % BLOCK_BYTES:
            row_bytes = COLUMNS * WORD_BYTES
            padded = part.new_zeros(-(-part.numel() // row_bytes) * row_bytes)
            padded[: part.numel()].copy_(part)
            words = padded.view(torch.int64).view(1, -1, COLUMNS)
        else:
            if part.data_ptr() % WORD_BYTES or part.storage_offset() % WORD_BYTES:
                part = part.clone()
            words = part.view(torch.int64).view(-1, ROWS, COLUMNS)
        rows.append(words.sum(dim=2).view(-1))
        columns.append(words.sum(dim=1).view(-1))
    if not rows:
        return torch.zeros(2, dtype=torch.int64, device=data.device)
    return torch.stack([_total(torch.cat(rows)), _total(torch.cat(columns))]) + data.numel()


def _total(sums: torch.Tensor) -> torch.Tensor:
    """int64[]: the sum over i of a mix of ``sums[i]`` and i (splitmix64's finalizer)."""
    z = sums + torch.arange(1, sums.numel() + 1, device=sums.device) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return (z ^ _shift_right(z, 31)).sum()


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic, which would lose the sign bit in the mix."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
