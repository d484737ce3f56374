"""Transport over torch.distributed point-to-point messages: gloo and NCCL.

Between ranks of one host whose wire is host memory, a message goes through memory they share
(`shared_memory`). Elsewhere a message whose only piece is contiguous memory on the device of the
wire is sent from, or received into, that memory itself; any other goes through a staging buffer.
The two ends decide this apart. Several rounds are in flight, so that packing the next and unpacking
the last overlap with the wire. Slots and staging buffers are few and used again; a round that would
need more waits for the earliest.

NCCL runs through the same code, but has not been run: see `nereus selftest`.
"""

from __future__ import annotations

import datetime
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from nereus_plugins.transport.base import (
    ChecksumError,
    ExchangeReport,
    Progress,
    Shard,
    TransportError,
    VerifyReport,
)
from nereus_plugins.transport.checksum import digest
from nereus_plugins.transport.metadata import wire_device
from nereus_plugins.transport.pace import Pace
from nereus_plugins.transport.rounds import TransferPlan, compile_transfer
from nereus_plugins.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from nereus_plugins.emu.moves import MoveTable

# On gloo, messages small enough to stay in cache between packing and the socket, and large enough
# to hide the cost of each; NCCL wants them larger.
GLOO_STAGING_BYTES = 4 << 20
NCCL_STAGING_BYTES = 64 << 20

# Slots a rank shares with the others of its host: few, for memory that stays in cache.
SHARED_SLOTS = 4

# Rounds posted at once: enough that a rank that is not scheduled for a while holds up no link.
ROUNDS_IN_FLIGHT = 16

# How often a wait for the device looks whether it is over, and whether a peer has failed.
_DEVICE_POLL_S = 0.0005
_PEER_POLL_S = 0.1

# A tag that no message carries, see `TorchTransport.abort`.
_ABORT_TAG = (1 << 30) + 7


@dataclass
class _Round:
    """One round of this rank in the air."""

    works: list[dist.Work]
    nbytes: int
    begin_s: float
    buffers: list[torch.Tensor] = field(default_factory=list)
    # (received staging buffer, its pieces in the target), if the message was staged
    unpack: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    # (sender, message size, its pieces in the target), if it comes through shared memory
    read: tuple[int, int, list[torch.Tensor]] | None = None
    peers: tuple[int, ...] = ()


@dataclass
class _Exchange:
    """What `verify` needs of a finished exchange."""

    moves: MoveTable
    plan: TransferPlan
    target: Sequence[Shard]
    skipped: set[int]  # local messages whose source and target are the same memory


class _Clock:
    """Seconds by part; parts may nest, an inner part's time is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        yield
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
        self._inner[-1] += spent


class TorchTransport:
    """See `base.Transport`. Takes over `group`: `close` and `abort` destroy it.

    Args:
        group: a process group of its own, gloo or NCCL; ranks in moves are ranks in this group.
        staging_bytes: largest message, the same on all ranks; default by back end.
        staging_buffers: how many buffers of `staging_bytes` may be in use at once, at least 2 (a
            round may need one each way); one more serves digests.
        shared_memory: use it, off NCCL, between ranks that can; the same on all ranks.
        checksum: keep digests of what is sent, for `verify`; the same on all ranks.
        timeout_s: longest wait for one round. On NCCL the group's own timeout rules.
        progress: called with bytes done and in all.
        pace: while it is on, one round is in flight and pauses follow it, in `exchange` and in
            `verify`; may differ between ranks. Default: no pauses.
        peer_failed: asked now and then while this rank waits for NCCL, whose collectives do not end
            when a peer leaves: whether one did.

    Attributes:
        shared_with: ranks that messages reach through shared memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        staging_bytes: int | None = None,
        staging_buffers: int = 6,
        shared_memory: bool = True,
        checksum: bool = True,
        timeout_s: float = 300.0,
        progress: Progress | None = None,
        pace: Pace | None = None,
        peer_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.checksum = checksum
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group
        self._device = wire_device(group)
        self._nccl = self._device.type == "cuda"
        self.staging_bytes = staging_bytes or (
            NCCL_STAGING_BYTES if self._nccl else GLOO_STAGING_BYTES
        )
        if staging_buffers < 2:
            raise ValueError(f"staging_buffers={staging_buffers}: a round may need 2")
        self._staging_buffers = staging_buffers
        self._progress = progress
        self._pace = pace or Pace(1.0)
        self._peer_failed = peer_failed
        self._free: list[torch.Tensor] = []
        self._pending: list[_Exchange] = []
        # Digests of what was sent, by peer, for `verify`.
        self._sent: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.shared_with: frozenset[int] = frozenset()
        if self._nccl:
            # NCCL wants every rank in a communicator's first operation; later ones are sparse.
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        elif shared_memory and self.world > 1:
            self._shared = SharedMemory(
                group, slots=SHARED_SLOTS, slot_bytes=self.staging_bytes, timeout_s=timeout_s
            )
            self.shared_with = self._shared.peers

    # -- exchange ---------------------------------------------------------------------------

    def exchange(
        self, moves: MoveTable, source: Sequence[Shard], target: Sequence[Shard]
    ) -> ExchangeReport:
        """See `base.Transport.exchange`."""
        with self._aborting("exchange"), torch.no_grad():
            return self._exchange(moves, source, target)

    def _exchange(
        self, moves: MoveTable, source: Sequence[Shard], target: Sequence[Shard]
    ) -> ExchangeReport:
        self._open_group()  # also where nothing will be sent through it
        start = time.perf_counter()
        clock = _Clock()
        with clock.part("compile"):
            plan = compile_transfer(moves, self.world, staging_bytes=self.staging_bytes)
            mine = plan.of_rank(self.rank)
            rounds = np.split(mine, np.flatnonzero(np.diff(plan.round[mine])) + 1)
        counts = dict.fromkeys(("sent", "received", "local", "packed", "unpacked"), 0)
        total = int(plan.nbytes[mine].sum())
        done = 0
        record = _Exchange(moves, plan, target, set())
        in_flight: deque[_Round] = deque()

        def finish() -> None:
            nonlocal done
            posted = in_flight.popleft()
            self._finish(posted, clock)
            if self._pace.on:
                self.wait_for_device()
                with clock.part("pace"):
                    self._pace.moved(posted.nbytes, time.perf_counter() - posted.begin_s)
            done += posted.nbytes
            if self._progress:
                self._progress(done, total)

        for messages in rounds:
            if not len(messages):
                continue
            if plan.src[messages[0]] == plan.dst[messages[0]]:
                begin_s = time.perf_counter()
                self._copy_local(record, int(messages[0]), source, clock)
                if self._pace.on:
                    self.wait_for_device()
                    with clock.part("pace"):
                        self._pace.worked(time.perf_counter() - begin_s)
                counts["local"] += int(plan.nbytes[messages[0]])
                done += int(plan.nbytes[messages[0]])
                if self._progress:
                    self._progress(done, total)
                continue
            while in_flight and (
                len(in_flight) >= (1 if self._pace.on else ROUNDS_IN_FLIGHT)
                or sum(len(r.buffers) for r in in_flight) + 2 > self._staging_buffers
                or (self.shared_with and not self._shared.has_free_slot())
            ):
                finish()
            in_flight.append(self._post(record, messages.tolist(), source, counts, clock))
        while in_flight:
            finish()
        if self.shared_with:
            with clock.part("wire"):
                self._shared.finish()
        self.wait_for_device()
        if self.checksum:
            self._pending.append(record)
        seconds = clock.seconds
        return ExchangeReport(
            bytes_sent=counts["sent"],
            bytes_received=counts["received"],
            bytes_local=counts["local"],
            messages_sent=int(((plan.src == self.rank) & (plan.dst != self.rank)).sum()),
            messages_received=int(((plan.dst == self.rank) & (plan.src != self.rank)).sum()),
            bytes_packed=counts["packed"],
            bytes_unpacked=counts["unpacked"],
            seconds_compile=seconds["compile"],
            seconds_pack=seconds.get("pack", 0.0),
            seconds_wire=seconds.get("wire", 0.0),
            seconds_unpack=seconds.get("unpack", 0.0),
            seconds_local=seconds.get("local", 0.0),
            seconds_checksum=seconds.get("checksum", 0.0),
            seconds_paused=seconds.get("pace", 0.0),
            seconds_total=time.perf_counter() - start,
        )

    def _post(
        self,
        record: _Exchange,
        messages: list[int],
        source: Sequence[Shard],
        counts: dict[str, int],
        clock: _Clock,
    ) -> _Round:
        """Start one round: at most one message each way."""
        plan = record.plan
        posted = _Round([], sum(int(plan.nbytes[m]) for m in messages), time.perf_counter())
        ops = []
        for m in messages:
            size = int(plan.nbytes[m])
            sending = plan.src[m] == self.rank
            peer = int(plan.dst[m] if sending else plan.src[m])
            if sending:
                pieces = self._pieces(record, m, source, record.moves.src_local)
                counts["sent"] += size
                if peer in self.shared_with:
                    self._lend(peer, pieces, size, clock)
                    continue
                data = self._direct(pieces)
                if data is None:
                    data = self._take(size)
                    posted.buffers.append(data)
                    data = data[:size]
                    with clock.part("pack"):
                        _pack(pieces, data)
                    counts["packed"] += size
                if self.checksum:
                    with clock.part("checksum"):
                        self._sent[peer].append(digest(data))
            else:
                pieces = self._pieces(record, m, record.target, record.moves.dst_local)
                counts["received"] += size
                if peer in self.shared_with:
                    posted.read = (peer, size, pieces)
                    continue
                data = self._direct(pieces)
                if data is None:
                    data = self._take(size)
                    posted.buffers.append(data)
                    data = data[:size]
                    posted.unpack = (data, pieces)
                    counts["unpacked"] += size
            op = dist.isend if sending else dist.irecv
            ops.append(dist.P2POp(op, data, group=self._open_group(), group_peer=peer))
            posted.peers += (peer,)
        if ops:
            with clock.part("wire"):
                posted.works = dist.batch_isend_irecv(ops)
        return posted

    def _lend(self, peer: int, pieces: list[torch.Tensor], size: int, clock: _Clock) -> None:
        """Send a message through shared memory."""
        with clock.part("wire"):
            number, memory = self._shared.slot()
        with clock.part("pack"):
            _pack(pieces, memory[:size])
        if self.checksum:
            with clock.part("checksum"):
                self._sent[peer].append(digest(memory[:size]))
        self._shared.lend(peer, number)

    def _finish(self, posted: _Round, clock: _Clock) -> None:
        """Wait for a round and bring what was received into place."""
        with clock.part("wire"):
            self._wait(posted.works, posted.peers)
        if posted.unpack:
            with clock.part("unpack"):
                _unpack(*posted.unpack)
        self._free += posted.buffers
        if posted.read:
            peer, size, pieces = posted.read
            with clock.part("wire"):
                memory = self._shared.receive(peer)
            with clock.part("unpack"):
                _unpack(memory[:size], pieces)
            self._shared.give_back(peer)

    def _copy_local(
        self, record: _Exchange, message: int, source: Sequence[Shard], clock: _Clock
    ) -> None:
        """Copy a message whose source and target are both here."""
        old = self._pieces(record, message, source, record.moves.src_local)
        new = self._pieces(record, message, record.target, record.moves.dst_local)
        if all(_same_memory(a, b) for a, b in zip(old, new, strict=True)):
            record.skipped.add(message)
            return
        if self.checksum:
            with clock.part("checksum"):
                self._sent[self.rank].append(self._digest_of(old))
        with clock.part("local"):
            for a, b in zip(old, new, strict=True):
                b.copy_(a)

    # -- verify -----------------------------------------------------------------------------

    def verify(self) -> VerifyReport:
        """See `base.Transport.verify`."""
        if not self.checksum:
            raise TransportError("nothing to verify: the transport was made with checksum=False")
        start = time.perf_counter()
        with self._aborting("verify"), torch.no_grad():
            differ, messages, nbytes = self._compare()
        if differ:
            raise ChecksumError(self.rank, differ)
        return VerifyReport(messages, nbytes, time.perf_counter() - start)

    def _compare(self) -> tuple[list[tuple[int, int, tuple[str, ...]]], int, int]:
        """(sender, round, tensor names) of what differs; messages and bytes compared."""
        pending, self._pending = self._pending, []
        sent, self._sent = self._sent, defaultdict(list)
        found: dict[int, list[torch.Tensor]] = defaultdict(list)  # by peer, of what it brought
        labels: dict[int, list[tuple[_Exchange, int]]] = defaultdict(list)
        nbytes = 0
        for record in pending:
            plan = record.plan
            for m in plan.of_rank(self.rank).tolist():
                if plan.dst[m] == self.rank and m not in record.skipped:
                    peer = int(plan.src[m])
                    pieces = self._pieces(record, m, record.target, record.moves.dst_local)
                    begin_s = time.perf_counter()
                    found[peer].append(self._digest_of(pieces))
                    if self._pace.on:
                        self.wait_for_device()
                        self._pace.worked(time.perf_counter() - begin_s)
                    labels[peer].append((record, m))
                    nbytes += int(plan.nbytes[m])
        theirs = self._swap_digests(
            {peer: _stack(digests) for peer, digests in sent.items()},
            {peer: len(digests) for peer, digests in found.items()},
        )
        differ = []
        for peer, digests in sorted(found.items()):
            wrong = (_stack(digests) != theirs[peer].cpu()).any(dim=1)
            for i in wrong.nonzero().view(-1).tolist():
                record, m = labels[peer][i]
                plan = record.plan
                rows = plan.piece_row[plan.first_piece[m] : plan.first_piece[m + 1]]
                tensors = sorted({record.moves.tensors[record.moves.tensor[r]].name for r in rows})
                differ.append((peer, int(plan.round[m]), tuple(tensors)))
        return differ, sum(map(len, found.values())), nbytes

    def _swap_digests(
        self, mine: dict[int, torch.Tensor], counts: dict[int, int]
    ) -> dict[int, torch.Tensor]:
        """Send each peer its digests of `mine`, int64[n, 2]; returns those from each sender."""
        theirs: dict[int, torch.Tensor] = {}
        ops, peers = [], []
        for step in range(self.world):  # every rank meets its peers in the same rotation
            to, origin = (self.rank + step) % self.world, (self.rank - step) % self.world
            if step == 0:
                if to in mine:
                    theirs[to] = mine[to]
                continue
            group = self._open_group()
            if to in mine:
                digests = mine[to].to(self._device)
                ops.append(dist.P2POp(dist.isend, digests, group=group, group_peer=to))
                peers.append(to)
            if origin in counts:
                shape = (counts[origin], 2)
                theirs[origin] = torch.empty(shape, dtype=torch.int64, device=self._device)
                ops.append(dist.P2POp(dist.irecv, theirs[origin], group=group, group_peer=origin))
                peers.append(origin)
        if ops:
            self._wait(dist.batch_isend_irecv(ops), tuple(peers))
            self.wait_for_device()
        return theirs

    # -- ending -----------------------------------------------------------------------------

    def abort(self) -> None:
        """See `base.Transport.abort`. May be called at any time, more than once."""
        group = self._let_go()
        if self.shared_with:
            self._shared.close()
        if group is None:
            return
        if self._nccl:
            group.abort()
        elif self.world > 1:
            # Destroying a gloo group closes its sockets only once nothing refers to it, which
            # the caller decides. A receive that times out closes all of its connections now; one
            # on a connection that is already broken fails and closes no other, so all are tried.
            nothing = torch.empty(1, dtype=torch.uint8)
            for step in range(1, self.world):
                peer = (self.rank + step) % self.world
                with suppress(RuntimeError):
                    work = dist.irecv(nothing, group=group, group_src=peer, tag=_ABORT_TAG)
                    assert work is not None
                    work.wait(datetime.timedelta(milliseconds=1))
        dist.destroy_process_group(group)

    def close(self) -> None:
        """See `base.Transport.close`."""
        group = self._let_go()
        if group is None:
            return
        try:
            dist.barrier(group)  # no rank closes connections that a slower one still uses
        finally:  # a peer may be dead
            if self.shared_with:
                self._shared.close()
            dist.destroy_process_group(group)

    def _let_go(self) -> dist.ProcessGroup | None:
        """The group, None if it was given up before; nothing else is kept."""
        group, self._group = self._group, None
        self._free, self._pending = [], []
        self._sent.clear()
        return group

    @contextmanager
    def _aborting(self, doing: str) -> Iterator[None]:
        """Whatever fails inside breaks the connections, so that peers fail too and not hang."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, TransportError) or not isinstance(error, Exception):
                raise
            raise TransportError(f"rank {self.rank}: {doing} failed: {error}") from error

    def wait_for_device(self) -> None:
        """On NCCL, wait until all that was queued is done: the host must not block in the device,
        where nothing could tell it that a peer has failed. On gloo nothing is queued.

        Raises: TransportError.
        """
        if not self._nccl:
            return
        event = torch.cuda.Event()
        event.record()
        wait_until(event.query, timeout_s=self.timeout_s, peer_failed=self._peer_failed)
        self._open_group()  # work of a communicator that was aborted may end without an error

    # -- helpers ----------------------------------------------------------------------------

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise TransportError(f"rank {self.rank}: the transport is closed or was aborted")
        return self._group

    def _wait(self, works: list[dist.Work], peers: tuple[int, ...]) -> None:
        try:
            for work in works:
                if self._nccl:
                    work.wait()  # the stream waits; with a timeout the host would
                else:
                    work.wait(datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank}: lost peer(s) {', '.join(map(str, peers))}: aborted, dead, or "
                f"slower than timeout_s={self.timeout_s:g} ({error})"
            ) from error

    def _pieces(
        self,
        record: _Exchange,
        message: int,
        shards: Sequence[Shard],
        local: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    ) -> list[torch.Tensor]:
        """The message's pieces as views of live memory, in order."""
        plan = record.plan
        at = slice(plan.first_piece[message], plan.first_piece[message + 1])
        views = []
        for index, offset, shape in zip(
            local[plan.piece_row[at]].tolist(),
            plan.piece_offset[at].tolist(),
            plan.piece_shape[at].tolist(),
            strict=True,
        ):
            shard = shards[index]
            view = shard.view
            for dim, base in enumerate(shard.box.offset):
                if shape[dim] != view.shape[dim]:
                    view = view.narrow(dim, offset[dim] - base, shape[dim])
            views.append(view)
        return views

    def _direct(self, pieces: list[torch.Tensor]) -> torch.Tensor | None:
        """The message as uint8[n] in place, if it is one contiguous piece where the wire is."""
        if len(pieces) != 1 or not pieces[0].is_contiguous():
            return None
        return _as_bytes(pieces[0]) if pieces[0].device == self._device else None

    def _digest_of(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Digest of the pieces, in order, read where they lie."""
        if len(pieces) == 1 and pieces[0].is_contiguous():
            return digest(_as_bytes(pieces[0]))
        size = sum(p.numel() * p.element_size() for p in pieces)
        buffer = self._take(size)
        _pack(pieces, buffer[:size])
        result = digest(buffer[:size])
        self._free.append(buffer)
        return result

    def _take(self, size: int) -> torch.Tensor:
        """A staging buffer of `staging_bytes`; to be put back on `_free`."""
        assert size <= self.staging_bytes
        if self._free:
            return self._free.pop()
        return torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._device)


def wait_until(
    done: Callable[[], bool], *, timeout_s: float, peer_failed: Callable[[], bool]
) -> None:
    """Wait for `done`, without blocking.

    Raises: TransportError: a peer failed, or `timeout_s` are over.
    """
    start = asked = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - asked >= _PEER_POLL_S:
            asked = now
            if peer_failed():
                raise TransportError("a peer failed in the same step")
        if now - start > timeout_s:
            raise TransportError(
                f"the device did not finish within timeout_s={timeout_s:g}: a peer is dead or slow"
            )
        time.sleep(_DEVICE_POLL_S)


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    """uint8[n] on the memory of a contiguous tensor."""
    return view.reshape(-1).view(torch.uint8)


def _typed(buffer: torch.Tensor, pieces: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The part of `buffer` that belongs to each piece, with the piece's dtype and shape."""
    position = 0
    for piece in pieces:
        size = piece.numel() * piece.element_size()
        yield buffer[position : position + size].view(piece.dtype).view(piece.shape)
        position += size


def _pack(pieces: list[torch.Tensor], buffer: torch.Tensor) -> None:
    for piece, place in zip(pieces, _typed(buffer, pieces), strict=True):
        place.copy_(piece)


def _unpack(buffer: torch.Tensor, pieces: list[torch.Tensor]) -> None:
    for piece, place in zip(pieces, _typed(buffer, pieces), strict=True):
        piece.copy_(place)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device


def _stack(digests: list[torch.Tensor]) -> torch.Tensor:
    """int64[n, 2] on the host; digests may lie on several devices."""
    by_device = {d.device for d in digests}
    if len(by_device) == 1:
        return torch.stack(digests).cpu()
    return torch.stack([d.cpu() for d in digests])
