"""Digests of a file's data, block by block: who reads a few boxes checks what it reads."""

from __future__ import annotations

import torch

from nereus_plugins.transport.checksum import digest

BLOCK_BYTES = 4 << 20
_WORD = (1 << 64) - 1


def of_block(data: torch.Tensor) -> str:
    """32 hexadecimal digits for the bytes of one block, uint8[n] on the host."""
    first, second = digest(data).tolist()
    return f"{first & _WORD:016x}{second & _WORD:016x}"


def of_bytes(data: bytes) -> str:
    """As `of_block`, of bytes."""
    return of_block(torch.frombuffer(bytearray(data), dtype=torch.uint8))
