"""The transport interface: carry moves between ranks, then prove that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from nereus_plugins.emu.boxes import Box
    from nereus_plugins.emu.moves import MoveTable

# Called as messages complete: bytes done and bytes in all on this rank (sent + received + local).
Progress = Callable[[int, int], None]


class Shard(Protocol):
    """What a transport needs of a shard: its box and a view of its live memory, of equal shape."""

    @property
    def box(self) -> Box: ...

    @property
    def view(self) -> torch.Tensor: ...


class TransportError(RuntimeError):
    """An exchange failed; the transport is aborted, peers fail too, and targets are garbage."""


class ChecksumError(TransportError):
    """Bytes in a target differ from those in its source.

    Attributes:
        rank: the receiving rank (this one).
        peers: the sending ranks concerned.
        tensors: names of the tensors concerned.
    """

    def __init__(self, rank: int, found: Sequence[tuple[int, int, tuple[str, ...]]]) -> None:
        """`found`: (sender, round, tensor names) of each message that differs."""
        shown = "; ".join(
            f"from rank {peer} in round {number}: {', '.join(names[:4])}"
            + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            for peer, number, names in found[:4]
        )
        more = f"; and {len(found) - 4} more messages" if len(found) > 4 else ""
        super().__init__(f"rank {rank}: checksum differs for data {shown}{more}")
        self.rank = rank
        self.peers = tuple(sorted({peer for peer, _, _ in found}))
        self.tensors = tuple(sorted({name for _, _, names in found for name in names}))


@dataclass(frozen=True)
class ExchangeReport:
    """What one rank's exchange did.

    Bytes are of moved data; times are this rank's wall time in s by part. `seconds_wire` is time
    spent posting and waiting for messages, in which packing may have been hidden;
    `seconds_paused` was left to other work (`pace.Pace`). On an
    accelerator the parts are the times to enqueue, and only `seconds_total` is exact.
    """

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    messages_sent: int
    messages_received: int
    bytes_packed: int
    bytes_unpacked: int
    seconds_compile: float
    seconds_pack: float
    seconds_wire: float
    seconds_unpack: float
    seconds_local: float
    seconds_checksum: float
    seconds_paused: float
    seconds_total: float


@dataclass(frozen=True)
class VerifyReport:
    """What one rank compared: `messages` and `bytes` it had received or copied, in `seconds`."""

    messages: int
    bytes: int
    seconds: float


class Transport(Protocol):
    """Carries moves. One object serves one epoch's set of ranks; collective in all ranks."""

    def exchange(
        self, moves: MoveTable, source: Sequence[Shard], target: Sequence[Shard]
    ) -> ExchangeReport:
        """Copy every move's box from its source shard into its target shard.

        Args:
            moves: the rows that touch this rank (others are ignored); ranks are those of the
                transport's group.
            source: this rank's source shards, indexed by `src_local`.
            target: this rank's target shards, indexed by `dst_local`.

        Raises:
            TransportError: something failed here or at a peer. The transport is then aborted.
        """
        ...

    def verify(self) -> VerifyReport:
        """Compare targets, read again, with sources as sent, for exchanges since the last verify.

        Raises:
            ChecksumError: on the receiving rank, naming sender, round and tensors.
            TransportError: digests could not be exchanged, or checksums are off.
        """
        ...

    def abort(self) -> None:
        """Break the connections so that peers' pending operations fail at once. Local."""
        ...

    def close(self) -> None:
        """Give back staging memory and the group. Collective in all ranks (after success)."""
        ...
