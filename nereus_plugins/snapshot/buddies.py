"""Which rank keeps a copy of another one's part, and the copying of it.

The ring rule: nodes in the order of their lowest ranks; the buddy of the j-th rank of a node is the
j-th rank of the next node (counted round where that has fewer), of the last node's ranks on the
first. So every part is on two nodes, and the loss of any one node, or of nodes that are not
neighbours in the ring, loses nothing. On a single node it is the next rank: that survives the loss
of a process and of its memory, not that of the node. A job of one rank has no buddy.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from nereus_plugins.snapshot.blocks import BLOCK_BYTES, of_block
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.host_copy import HostFile
from nereus_plugins.snapshot.index import FileRecord


def node_here() -> str:
    """A name of the machine, the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def buddies(nodes: Sequence[str]) -> list[int | None]:
    """By rank, the rank that keeps a copy of its part. Args: nodes: by rank, the name of its."""
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    ring = list(ranks_of.values())
    if len(nodes) == 1:
        return [None]
    if len(ring) == 1:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    out: list[int | None] = [None] * len(nodes)
    for i, ranks in enumerate(ring):
        beyond = ring[(i + 1) % len(ring)]
        for j, rank in enumerate(ranks):
            out[rank] = beyond[j % len(beyond)]
    return out


def exchange(
    group: dist.ProcessGroup,
    buddy: Sequence[int | None],
    mine: Sequence[HostFile],
    records: Sequence[FileRecord],
    writing: Path,
) -> None:
    """Send this rank's files to its buddy, and write those of the ranks whose buddy it is.
    Collective. At most a block each way to and from each peer is in memory.

    Args:
        buddy: by rank (`buddies`). mine: this rank's files. records: those of all ranks.
        writing: the folder that the files of others go into, by unit.

    Raises:
        OSError: no room for them; SnapshotError: what came is not what was sent. Both only when
            all is exchanged, so that peers do not wait.
        RuntimeError (torch's): a peer is gone.
    """
    me = dist.get_rank(group)
    outgoing = [chunk for file in mine for chunk in _chunks(file)]
    if buddy[me] is None:
        outgoing = []
    wards = [rank for rank, other in enumerate(buddy) if other == me]
    incoming = [_Ward([r for r in records if r.rank == ward], writing) for ward in wards]
    rounds = max([len(outgoing), *(len(ward.sizes) for ward in incoming)], default=0)
    try:
        for i in range(rounds):
            works = []
            if i < len(outgoing):
                works.append(dist.isend(outgoing[i], group=group, group_dst=buddy[me]))
            received = []
            for rank, ward in zip(wards, incoming, strict=True):
                if i < len(ward.sizes):
                    data = torch.empty(ward.sizes[i], dtype=torch.uint8)
                    works.append(dist.irecv(data, group=group, group_src=rank))
                    received.append((ward, data))
            for work in works:
                assert work is not None
                work.wait()
            for ward, data in received:
                ward.take(data)
    finally:
        for ward in incoming:
            ward.close()
    for ward in incoming:
        if ward.error is not None:
            raise ward.error


def _chunks(file: HostFile) -> list[torch.Tensor]:
    """The bytes of a file: its header, then its blocks, as views."""
    header = torch.frombuffer(bytearray(file.layout.header), dtype=torch.uint8)
    begins = range(0, file.layout.data_bytes, BLOCK_BYTES)
    return [header, *(file.data[begin : begin + BLOCK_BYTES] for begin in begins)]


class _Ward:
    """The files of a rank whose buddy this one is, as they come in. A failure is kept in `error`;
    what comes after it is dropped."""

    def __init__(self, records: Sequence[FileRecord], writing: Path) -> None:
        self.error: Exception | None = None
        self._writing = writing
        self._handle: int | None = None
        # (file, its first chunk?, size, digest), in the order of `_chunks`
        self._expected: list[tuple[FileRecord, bool, int, str]] = []
        for record in records:
            self._expected.append((record, True, record.header_bytes, record.header_digest))
            left = record.nbytes - record.header_bytes
            for digest in record.blocks:
                size = min(left, BLOCK_BYTES)
                self._expected.append((record, False, size, digest))
                left -= size
        self.sizes = [size for _, _, size, _ in self._expected]
        self._next = 0

    def take(self, data: torch.Tensor) -> None:
        record, first, _, digest = self._expected[self._next]
        self._next += 1
        if self.error is not None:
            return
        try:
            if of_block(data) != digest:
                raise SnapshotError(f"{record.path} came damaged from rank {record.rank}")
            if first:
                self.close()
                place = self._writing / record.path
                place.parent.mkdir(mode=0o700, exist_ok=True)
                self._handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            assert self._handle is not None
            left = data.numpy().data
            while len(left):
                left = left[os.write(self._handle, left) :]
        except (OSError, SnapshotError) as error:
            self.error = error

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
