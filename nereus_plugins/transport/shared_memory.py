"""Messages between the ranks of one host through memory they share, without sockets.

Each rank owns one anonymous file of a few slots, which its peers map. A message is packed into a
slot and unpacked from there: two copies, in cache where slots are small; a socket takes two through
the kernel, and as many again for what is not contiguous. A pipe from each rank to each other
carries the numbers of slots: lent to the reader, and given back to the owner. Memory and pipes have
no path, so nothing is left behind by a process that is killed, and the size of /dev/shm is no
limit; a peer's death closes its pipes, which is noticed at once.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.transport.base import TransportError
from nereus_plugins.transport.metadata import gather_bytes

NONCE_BYTES = 16

# A record in a pipe: n, the number of a slot that the writer lends; -1 - n, of one it gives back.
_RECORD = struct.Struct("=q")
_READ_BYTES = 512 * _RECORD.size

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class SharedMemory:
    """This rank's slots, and those of the peers it shares memory with. Collective to make.

    Ranks first say which host they are on, and open descriptors for those of their own only: about
    four a peer. Where sharing fails (another container, memory or descriptors refused, not Linux)
    ranks do without, pair by pair, and both ends know.

    Attributes:
        peers: ranks that share memory with this one.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, slots: int, slot_bytes: int, timeout_s: float
    ) -> None:
        """Args:
        slots, slot_bytes: what each rank owns; the same on all ranks.
        timeout_s: longest wait for a peer.
        """
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = mmap.PAGESIZE + slots * self._stride
        self._inbox: dict[int, int] = {}  # by peer, the end of its pipe to this rank
        self._outbox: dict[int, int] = {}
        self._lent_to: dict[int, int] = {}  # by slot of this rank, the peer that reads it
        self._received: dict[int, deque[int]] = {}  # by peer, its slots to read, in order
        self._memory: dict[int, torch.Tensor] = {}  # by rank, uint8[size]
        try:
            host = _host().encode()
            hosts = gather_bytes(host, group)
            nearby = [p for p in range(world) if host and hosts[p] == host and p != self._rank]
            near = self._share(group, nearby)
        except BaseException:
            self.close()
            raise
        for ends in (self._inbox, self._outbox):
            for peer in ends.keys() - near:
                os.close(ends.pop(peer))
        self.peers = frozenset(near)
        own = {self._rank} if near else set()
        self._memory = {p: m for p, m in self._memory.items() if p in near | own}
        self._free = list(range(slots)) if near else []
        self._received = {peer: deque() for peer in near}
        self._poll = select.poll()
        for end in self._inbox.values():
            self._poll.register(end, select.POLLIN)
        self._peer_of = {end: peer for peer, end in self._inbox.items()}

    def _share(self, group: dist.ProcessGroup, nearby: list[int]) -> set[int]:
        """Offer memory and pipes to the ranks `nearby`, and open theirs. Collective.

        A rank that meets the limit of open files does without any, and leaves the rest to others.

        Returns: the ranks that this one reaches, and that reach it.
        """
        given: list[int] = []  # descriptors that only peers use
        try:
            offer: dict[str, Any] = {}
            with suppress(OSError):
                offer = self._offer(nearby, given) if nearby else {}
            offers = [json.loads(x) for x in gather_bytes(json.dumps(offer).encode(), group)]
            try:
                for peer in nearby if offer else ():
                    self._open(peer, offers[peer])
            except OSError:
                self.close()
            reached = bytes(peer in self._outbox for peer in range(dist.get_world_size(group)))
            reached_by = gather_bytes(reached, group)
        finally:
            for descriptor in given:
                os.close(descriptor)  # peers have opened them by now
        return {peer for peer in self._outbox if reached_by[peer][self._rank]}

    def _offer(self, nearby: list[int], given: list[int]) -> dict[str, Any]:
        """What peers need to know. Raises: OSError: memory or descriptors are refused."""
        try:
            memory = _memory_file(self._size)
            given.append(memory)
            self._map(self._rank, memory)
            nonce = secrets.token_bytes(NONCE_BYTES)
            os.pwrite(memory, nonce, 0)
            pipes = {}
            for peer in nearby:
                self._inbox[peer], pipes[str(peer)] = os.pipe()
                given.append(pipes[str(peer)])
        except OSError:
            self.close()
            while given:
                os.close(given.pop())
            raise
        return {"pid": os.getpid(), "fd": memory, "nonce": nonce.hex(), "pipes": pipes}

    def _open(self, peer: int, offer: dict[str, Any]) -> None:
        """Map the memory that a rank offers, and open its pipe, if they can be had here.

        Raises: OSError: descriptors are refused.
        """
        if not offer:
            return
        # In another container the same numbers may name anything: hence the nonce.
        folder = Path(f"/proc/{int(offer['pid'])}/fd")
        try:
            with (folder / str(int(offer["fd"]))).open("r+b") as file:
                if os.pread(file.fileno(), NONCE_BYTES, 0).hex() == offer["nonce"]:
                    pipe = folder / str(int(offer["pipes"][str(self._rank)]))
                    self._outbox[peer] = os.open(pipe, os.O_WRONLY)
                    self._map(peer, file.fileno())
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
                raise

    def _map(self, rank: int, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, self._size)
        self._memory[rank] = torch.frombuffer(memory, dtype=torch.uint8)

    # -- sending ----------------------------------------------------------------------------

    def has_free_slot(self) -> bool:
        """Whether a message may be sent now, without waiting for a peer."""
        if not self._free:
            self._read(0.0)
        return bool(self._free)

    def slot(self) -> tuple[int, torch.Tensor]:
        """A free slot, waiting until a peer returns one: its number, its uint8[slot_bytes].

        Raises: TransportError: no peer returned one within `timeout_s`, or one is gone.
        """
        self._until(lambda: bool(self._free), sorted(set(self._lent_to.values())))
        number = self._free.pop()
        return number, self._slot_of(self._rank, number)

    def lend(self, peer: int, number: int) -> None:
        """Let `peer` read the slot. Raises: TransportError: it is gone."""
        self._lent_to[number] = peer
        self._write(peer, number)

    def finish(self) -> None:
        """Wait until every slot is back. Raises: TransportError."""
        self._until(lambda: not self._lent_to, sorted(set(self._lent_to.values())))

    # -- receiving --------------------------------------------------------------------------

    def receive(self, peer: int) -> torch.Tensor:
        """uint8[slot_bytes]: the next message of `peer`; to be followed by `give_back`.

        Raises: TransportError: none came within `timeout_s`, or the peer is gone.
        """
        self._until(lambda: bool(self._received[peer]), [peer])
        return self._slot_of(peer, self._received[peer][0])

    def give_back(self, peer: int) -> None:
        """Return the slot received last. Raises: TransportError: the peer is gone."""
        self._write(peer, -1 - self._received[peer].popleft())

    def close(self) -> None:
        """Drop memory and pipes; peers that wait fail at once. May be called more than once."""
        for ends in (self._inbox, self._outbox):
            while ends:
                os.close(ends.popitem()[1])
        self._memory.clear()
        self.peers = frozenset()

    # -- helpers ----------------------------------------------------------------------------

    def _slot_of(self, rank: int, number: int) -> torch.Tensor:
        start = mmap.PAGESIZE + number * self._stride
        return self._memory[rank][start : start + self._slot_bytes]

    def _write(self, peer: int, value: int) -> None:
        try:
            os.write(self._outbox[peer], _RECORD.pack(value))
        except OSError as error:
            # As with a closed connection: a peer's failure, not one that began here.
            raise TransportError(f"rank {self._rank}: lost peer(s) {peer}: {error}") from None

    def _until(self, done: Callable[[], bool], peers: list[int]) -> None:
        """Read records until `done`; `peers` are those it depends on."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError(
                    f"rank {self._rank}: lost peer(s) {', '.join(map(str, peers))}: hung, or "
                    f"slower than timeout_s={self._timeout_s:g}"
                )
            self._read(left)

    def _read(self, timeout_s: float) -> None:
        """Take in the records that are there, waiting for the first one at most `timeout_s`."""
        for end, _ in self._poll.poll(timeout_s * 1e3):
            peer = self._peer_of[end]
            data = os.read(end, _READ_BYTES)
            if not data:
                raise TransportError(f"rank {self._rank}: lost peer(s) {peer}: aborted or dead")
            for (value,) in _RECORD.iter_unpack(data):
                if value >= 0:
                    self._received[peer].append(value)
                else:
                    del self._lent_to[-1 - value]
                    self._free.append(-1 - value)


def _host() -> str:
    """The same for processes that can name each other in /proc, "" where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _memory_file(size: int) -> int:
    """A descriptor of `size` bytes of anonymous shared memory. Raises: OSError."""
    try:
        descriptor = os.memfd_create("nereus-transport")
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "no anonymous files here") from error
    try:
        # Now, with an error; not on first use, with a signal that ends the process.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
