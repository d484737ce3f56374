"""The digest sees flips, exchanges, shifts and lengths, at any alignment."""

from __future__ import annotations

import pytest
import torch

from nereus_plugins.transport.checksum import BLOCK_BYTES, COLUMNS, WORD_BYTES, digest

SIZES = [0, 1, 7, 8, 9, 2048, 2049, BLOCK_BYTES, BLOCK_BYTES + 3, 3 * BLOCK_BYTES - 8]


def random_bytes(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(digest(a), digest(b))


@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_at_any_alignment(size: int) -> None:
    data = random_bytes(size)
    shifted = torch.zeros(size + 3, dtype=torch.uint8)[3:]
    shifted.copy_(data)
    assert torch.equal(digest(data), digest(shifted))


@pytest.mark.parametrize("size", SIZES[1:])
def test_one_bit(size: int) -> None:
    data = random_bytes(size)
    for position in {0, size // 2, size - 1}:
        for bit in (1, 128):
            other = data.clone()
            other[position] ^= bit
            assert differs(data, other)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, COLUMNS * WORD_BYTES, BLOCK_BYTES])
def test_exchanged_units(unit: int) -> None:
    data = random_bytes(3 * BLOCK_BYTES)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        other = data.clone().view(-1, unit)
        other[[i, j]] = other[[j, i]]
        assert differs(data, other.view(-1))


def test_exchanged_signs() -> None:
    # The words differ in the highest bit only, which a weighted sum with odd weights would miss.
    data = torch.ones(BLOCK_BYTES // 4 * 3, dtype=torch.float32)
    data[0] = -1
    for position in (1, 2, 511, 512, 513, BLOCK_BYTES // 4, BLOCK_BYTES // 4 * 3 - 1):
        other = torch.ones_like(data)
        other[position] = -1
        assert differs(data.view(torch.uint8), other.view(torch.uint8))


def test_transposed_rolled_and_longer() -> None:
    data = random_bytes(BLOCK_BYTES)
    assert differs(data, data.view(-1, 1024).t().contiguous().view(-1))
    assert differs(data, data.roll(8))
    assert differs(data, data.roll(2048))
    zeros = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    assert differs(zeros, zeros[:-1])
    assert differs(zeros, torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8))
