"""One file of a snapshot, from host memory to disk: digested block by block on the way."""

from __future__ import annotations

import os
from pathlib import Path

from nereus_plugins.snapshot.blocks import BLOCK_BYTES, of_block, of_bytes
from nereus_plugins.snapshot.host_copy import HostFile
from nereus_plugins.snapshot.index import FileRecord


def write_file(folder: Path, unit: str, rank: int, file: HostFile) -> FileRecord:
    """Write a file of a rank into the folder of a snapshot and have it on disk.

    Raises: OSError: the disk is full, ...
    """
    place = folder / unit
    place.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(place / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_all(handle, memoryview(file.layout.header))
        blocks = []
        for begin in range(0, file.layout.data_bytes, BLOCK_BYTES):
            block = file.data[begin : begin + BLOCK_BYTES]
            blocks.append(of_block(block))
            _write_all(handle, block.numpy().data)
        os.fsync(handle)
    finally:
        os.close(handle)
    return record_of(unit, rank, file, blocks)


def record_of(unit: str, rank: int, file: HostFile, blocks: list[str]) -> FileRecord:
    """What the index says of a file. Args: blocks: digests of its data."""
    return FileRecord(
        unit=unit,
        name=file.name,
        rank=rank,
        nbytes=len(file.layout.header) + file.layout.data_bytes,
        header_bytes=len(file.layout.header),
        header_digest=of_bytes(file.layout.header),
        blocks=tuple(blocks),
    )


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]
