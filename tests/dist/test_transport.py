"""The transport on gloo: values, packing, checksums, failures, and what it leaves behind."""

from __future__ import annotations

import datetime
import errno
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.moves import MoveTable, plan_moves
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo
from nereus_plugins.transport import shared_memory as sharing
from nereus_plugins.transport.base import ChecksumError, TransportError
from nereus_plugins.transport.groups import live_group_count
from nereus_plugins.transport.metadata import gather_bytes, gather_tables
from nereus_plugins.transport.torch_transport import TorchTransport

from .spawn import run_ranks, run_ranks_outcomes


@dataclass
class Shard:
    info: TensorInfo
    box: Box
    view: torch.Tensor


def whole(info: TensorInfo) -> torch.Tensor:
    """The global tensor: the same random values on every rank."""
    seed = sum(info.name.encode())
    values = torch.randn(info.shape, generator=torch.Generator().manual_seed(seed)) * 100
    return values.to(getattr(torch, info.dtype))


def bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    return size * index // parts, size * (index + 1) // parts


def shards_of(
    infos: list[TensorInfo], grid: tuple[int, int], rank: int, *, filled: bool
) -> list[Shard]:
    """Rank's shards on a (rows, columns) grid of ranks; a tensor of fewer dims is replicated over
    the rest of the grid. Views are strided: they lie in a tensor twice as wide."""
    row, column = divmod(rank, grid[1])
    shards = []
    for info in infos:
        cuts = [(0, n) for n in info.shape]
        if info.shape:
            cuts[0] = bounds(info.shape[0], grid[0], row)
        if len(info.shape) > 1:
            cuts[1] = bounds(info.shape[1], grid[1], column)
        box = Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))
        dtype = getattr(torch, info.dtype)
        if info.name.endswith("strided") and box.shape:
            wide = torch.zeros(*box.shape[:-1], 2 * box.shape[-1], dtype=dtype)
            view = wide[..., : box.shape[-1]]
        else:
            view = torch.zeros(box.shape, dtype=dtype)
        if filled:
            view.copy_(whole(info)[box.slices_in(Box.whole(info.shape))])
        shards.append(Shard(info, box, view))
    return shards


def table_of(rank: int, shards: list[Shard]) -> ShardTable:
    rows = [(s.info, s.box, i) for i, s in enumerate(shards)]
    sizes = [s.view.numel() * s.view.element_size() for s in shards]
    return ShardTable.from_shards(
        rank, rows, [StorageInfo(rank, i, n, "cpu") for i, n in enumerate(sizes)]
    )


INFOS = [
    TensorInfo("weight/large", (300, 200), "float32"),
    TensorInfo("weight/strided", (97, 53), "bfloat16"),
    TensorInfo("master/cube", (7, 5, 11), "float32"),
    TensorInfo("buffer/flags", (19,), "bool"),
    TensorInfo("buffer/scalar", (), "int64"),
    TensorInfo("buffer/few", (2, 1), "float64"),  # fewer rows than ranks: zero-size shards
    TensorInfo("exp_avg/strided", (64, 64), "float32"),
]


def new_group(timeout_s: float = 30.0) -> dist.ProcessGroup:
    limit = datetime.timedelta(seconds=timeout_s)
    group = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    return group


def plan(
    rank: int, source: list[Shard], target: list[Shard], group: dist.ProcessGroup
) -> MoveTable:
    tables = [gather_tables(table_of(rank, shards), group) for shards in (source, target)]
    return plan_moves(tables[0], tables[1], node_of=None, rank=rank)


def assert_filled(target: list[Shard]) -> None:
    for shard in target:
        expected = whole(shard.info)[shard.box.slices_in(Box.whole(shard.info.shape))]
        assert torch.equal(shard.view, expected), shard.info.name


def _move(
    rank: int, world: int, grids: list, staging_bytes: int, checksum: bool, shared_memory: bool
) -> list:
    group = new_group()
    seen: list[tuple[int, int]] = []
    transport = TorchTransport(
        group,
        staging_bytes=staging_bytes,
        checksum=checksum,
        shared_memory=shared_memory,
        progress=lambda done, total: seen.append((done, total)),
    )
    source = shards_of(INFOS, grids[0], rank, filled=True)
    target = shards_of(INFOS, grids[1], rank, filled=False)
    moves = plan(rank, source, target, group)
    report = transport.exchange(moves, source, target)
    assert_filled(target)
    if checksum:
        verified = transport.verify()
        assert verified.bytes == report.bytes_received + report.bytes_local
        assert transport.verify().messages == 0
    assert int(moves.nbytes[moves.dst_rank == rank].sum()) == (
        report.bytes_received + report.bytes_local
    )
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)
    transport.close()
    return [report.bytes_sent, report.bytes_received, report.messages_sent]


@pytest.mark.parametrize("staging_bytes", [256, 1 << 16])
@pytest.mark.parametrize(
    ("checksum", "shared_memory"), [(True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize("grids", [[(4, 1), (1, 4)], [(2, 2), (4, 1)], [(1, 4), (1, 4)]])
def test_values_arrive(
    grids: list, staging_bytes: int, checksum: bool, shared_memory: bool
) -> None:
    reports = run_ranks(_move, 4, grids, staging_bytes, checksum, shared_memory, timeout_s=60)
    assert sum(r[0] for r in reports) == sum(r[1] for r in reports)
    if grids[0] == grids[1]:
        assert all(r[0] == 0 for r in reports)


def _direct(rank: int, world: int) -> tuple[int, int, int]:
    """Contiguous boxes of at least a message: nothing may be packed."""
    group = new_group()
    infos = [TensorInfo("weight/w", (world * 4, 1024), "float32")]
    source = shards_of(infos, (world, 1), rank, filled=True)
    full = Shard(infos[0], Box.whole(infos[0].shape), torch.zeros(infos[0].shape))
    transport = TorchTransport(group, staging_bytes=8192, shared_memory=False)
    report = transport.exchange(plan(rank, source, [full], group), source, [full])
    assert_filled([full])
    transport.verify()
    transport.close()
    return report.bytes_packed, report.bytes_unpacked, report.bytes_received


def test_contiguous_boxes_are_not_packed() -> None:
    assert run_ranks(_direct, 3, timeout_s=60) == [(0, 0, 2 * 4 * 4096)] * 3


def _same_memory(rank: int, world: int) -> None:
    group = new_group()
    shards = shards_of(INFOS, (world, 1), rank, filled=True)
    before = [s.view.clone() for s in shards]
    transport = TorchTransport(group)
    transport.exchange(plan(rank, shards, shards, group), shards, shards)
    transport.verify()
    assert all(torch.equal(a, s.view) for a, s in zip(before, shards, strict=True))
    transport.close()


def test_a_move_onto_itself_does_nothing() -> None:
    run_ranks(_same_memory, 2, timeout_s=60)


def _corrupt(rank: int, world: int, kind: str) -> Any:
    group = new_group()
    transport = TorchTransport(group, staging_bytes=4096)
    source = shards_of(INFOS, (4, 1), rank, filled=True)
    target = shards_of(INFOS, (1, 4), rank, filled=False)
    transport.exchange(plan(rank, source, target, group), source, target)
    if rank == 2:
        view = target[0].view if kind != "strided" else target[1].view
        if kind == "swap":
            view[[10, 100]] = view[[100, 10]]
        else:
            view[150 if kind == "flip" else 60].view(torch.uint8)[1] ^= 1
    try:
        transport.verify()
        found = None
    except ChecksumError as error:
        found = (error.rank, error.peers, error.tensors, str(error))
    # A difference is no broken connection: the transport still works.
    transport.exchange(plan(rank, source, target, group), source, target)
    transport.verify()
    transport.close()
    return found


@pytest.mark.parametrize(
    ("kind", "peers", "tensor"),
    [("flip", (2,), "large"), ("swap", (0, 1), "large"), ("strided", (2,), "strided")],
)
def test_a_changed_target_is_named(kind: str, peers: tuple[int, ...], tensor: str) -> None:
    found = run_ranks(_corrupt, 4, kind, timeout_s=60)
    assert [f is None for f in found] == [True, True, False, True]
    rank, where, tensors, message = found[2]
    assert (rank, where) == (2, peers)
    assert f"weight/{tensor}" in tensors
    assert "rank 2: checksum differs for data from rank" in message


class _Broken:
    """A shard whose memory cannot be read, as when a view outlives its storage."""

    box = Box((0, 0), (300, 200))

    @property
    def view(self) -> torch.Tensor:
        time.sleep(0.5)
        raise RuntimeError("this storage was freed")


def _fail(rank: int, world: int, shared_memory: bool) -> tuple[str, float, float]:
    group = new_group(60)
    transport = TorchTransport(group, staging_bytes=4096, shared_memory=shared_memory, timeout_s=60)
    source: list[Any] = shards_of(INFOS, (4, 1), rank, filled=True)
    target = shards_of(INFOS, (1, 4), rank, filled=False)
    moves = plan(rank, source, target, group)
    if rank == 1:
        source[0] = _Broken()
    start = time.monotonic()
    try:
        transport.exchange(moves, source, target)
        message = ""
    except TransportError as error:
        message = str(error)
    spent = time.monotonic() - start
    with pytest.raises(TransportError, match="closed or was aborted"):
        transport.exchange(moves, shards_of(INFOS, (4, 1), rank, filled=True), target)
    # Training goes on in the default group.
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    return message, spent, float(ones[0])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_one_rank_failing_fails_all_at_once_and_leaves_the_default_group(
    shared_memory: bool,
) -> None:
    results = run_ranks(_fail, 4, shared_memory, timeout_s=90)
    assert "this storage was freed" in results[1][0]
    for rank in (0, 2, 3):
        assert "lost peer(s)" in results[rank][0] or "Connection" in results[rank][0]
    assert max(spent for _, spent, _ in results) < 10
    assert all(total == 4 for _, _, total in results)


def _killed(rank: int, world: int, shared_memory: bool) -> tuple[str, float]:
    group = new_group(60)
    transport = TorchTransport(group, staging_bytes=4096, shared_memory=shared_memory, timeout_s=60)
    source = shards_of(INFOS, (4, 1), rank, filled=True)
    target = shards_of(INFOS, (1, 4), rank, filled=False)
    moves = plan(rank, source, target, group)
    if rank == 3:
        os._exit(9)
    start = time.monotonic()
    try:
        transport.exchange(moves, source, target)
        message = ""
    except TransportError as error:
        message = str(error)
    return message, time.monotonic() - start


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_killed_rank_fails_the_others_at_once(
    shared_memory: bool,
) -> None:
    outcomes = run_ranks_outcomes(_killed, 4, shared_memory, timeout_s=60)
    assert [o.exitcode for o in outcomes] == [0, 0, 0, 9]
    for outcome in outcomes[:3]:
        assert outcome.value[0], outcome
        assert outcome.value[1] < 10


def _late(rank: int, world: int, shared_memory: bool) -> str:
    group = new_group(60)
    transport = TorchTransport(group, shared_memory=shared_memory, timeout_s=1)
    source = shards_of(INFOS, (2, 1), rank, filled=True)
    target = shards_of(INFOS, (1, 2), rank, filled=False)
    moves = plan(rank, source, target, group)
    if rank == 1:
        time.sleep(3)
    with pytest.raises(TransportError) as caught:
        transport.exchange(moves, source, target)
    return str(caught.value)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_late_rank_is_a_timeout_that_names_the_setting(
    shared_memory: bool,
) -> None:
    messages = run_ranks(_late, 2, shared_memory, timeout_s=60)
    assert "lost peer(s) 1" in messages[0]
    assert "timeout_s=1" in messages[0]


def _resources() -> tuple[int, int, float]:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def _soak(rank: int, world: int) -> list[tuple[int, int, float]]:
    seen = []
    for i in range(50):
        group = new_group()
        transport = TorchTransport(group, staging_bytes=1 << 16)
        grids = [(world, 1), (1, world)]
        source = shards_of(INFOS, grids[i % 2], rank, filled=True)
        target = shards_of(INFOS, grids[1 - i % 2], rank, filled=False)
        transport.exchange(plan(rank, source, target, group), source, target)
        transport.verify()
        if i % 10 == 9:
            transport.abort()
        else:
            transport.close()
        del group, transport
        if i in (19, 49):
            dist.barrier()
            seen.append(_resources())
    return seen


def test_fifty_exchanges_on_fresh_groups_leave_nothing() -> None:
    for early, late in run_ranks(_soak, 3, timeout_s=120):
        assert late[0] <= early[0] + 2  # file descriptors
        assert late[1] <= early[1]  # threads
        assert late[2] <= early[2] + 16  # resident MiB


def _unshared(rank: int, world: int, kind: str) -> tuple[list[int], int]:
    """Rank 1 shares no memory: it has none to offer, what it offers is found to be another's, or it
    meets the limit of open files, when it offers or when it opens what others do."""
    group = new_group()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if rank == 1 and kind == "refused":
            patch.setattr(os, "posix_fallocate", _no_space)
        elif rank == 1 and kind == "another":
            patch.setattr(os, "getpid", os.getppid)
        elif rank == 1:
            stack.enter_context(_descriptors_left(int(kind)))
        transport = TorchTransport(group, staging_bytes=4096)
    if rank == 1:
        assert len(os.listdir("/proc/self/fd")) == before
    source = shards_of(INFOS, (3, 1), rank, filled=True)
    target = shards_of(INFOS, (1, 3), rank, filled=False)
    report = transport.exchange(plan(rank, source, target, group), source, target)
    assert_filled(target)
    transport.verify()
    near = sorted(transport.shared_with)
    transport.close()
    return near, report.bytes_received


def _no_space(descriptor: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@contextmanager
def _descriptors_left(count: int) -> Iterator[None]:
    """Inside, this process can open `count` files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + count, hard))
    opened = []
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in opened[:count]:
            os.close(descriptor)
        del opened[:count]
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Offering takes a file, its mapping, and a pipe for each of two peers: six descriptors; opening a
# peer's then takes three.
@pytest.mark.parametrize("kind", ["refused", "another", "2", "5", "7"])
def test_ranks_that_cannot_share_memory_use_the_group(kind: str) -> None:
    results = run_ranks(_unshared, 3, kind, timeout_s=60)
    assert [near for near, _ in results] == [[2], [], [0]]
    assert all(received for _, received in results)


def _hosts(rank: int, world: int) -> tuple[list[int], int]:
    """Ranks 0 and 2 are on one host, rank 1 is on another."""
    made = []
    pipe = os.pipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_host", lambda: f"host {rank % 2}")
        patch.setattr(os, "pipe", lambda: made.append(1) or pipe())
        transport = TorchTransport(new_group(), staging_bytes=4096)
    near = sorted(transport.shared_with)
    transport.close()
    return near, len(made)


def test_a_rank_opens_pipes_for_those_of_its_own_host_only() -> None:
    assert run_ranks(_hosts, 3, timeout_s=60) == [([2], 1), ([], 0), ([0], 1)]


def _deserted(rank: int, world: int) -> int:
    transport = TorchTransport(new_group(5), staging_bytes=4096, timeout_s=5)
    if rank == 1:
        os._exit(9)
    with pytest.raises(RuntimeError):
        transport.close()
    return live_group_count()


def test_closing_without_a_dead_peer_keeps_no_group() -> None:
    outcomes = run_ranks_outcomes(_deserted, 3, timeout_s=60)
    assert [o.exitcode for o in outcomes] == [0, 9, 0], outcomes
    assert [outcomes[rank].value for rank in (0, 2)] == [1, 1]  # the default group


def _gather(rank: int, world: int) -> list[bytes]:
    return gather_bytes(bytes([rank]) * (3 * rank), dist.group.WORLD)


def test_bytes_of_unequal_length_are_gathered() -> None:
    expected = [b"", b"\1\1\1", b"\2" * 6]
    assert run_ranks(_gather, 3, timeout_s=60) == [expected] * 3


def _random(rank: int, world: int, seed: int) -> None:
    """Random tensors on random grids, several exchanges before one verify."""
    draw = np.random.default_rng(seed)
    group = new_group()
    transport = TorchTransport(group, staging_bytes=int(draw.integers(64, 5000)))
    grids = [(1, 4), (2, 2), (4, 1)]
    for _ in range(4):
        infos = [
            TensorInfo(
                f"weight/t{i}{draw.choice(['', 'strided'])}",
                tuple(int(n) for n in draw.integers(0, 40, size=draw.integers(0, 4))),
                str(draw.choice(["float32", "bfloat16", "float16", "uint8", "int32"])),
            )
            for i in range(12)
        ]
        source = shards_of(infos, grids[draw.integers(3)], rank, filled=True)
        target = shards_of(infos, grids[draw.integers(3)], rank, filled=False)
        transport.exchange(plan(rank, source, target, group), source, target)
        assert_filled(target)
    transport.verify()
    transport.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts(seed: int) -> None:
    run_ranks(_random, 4, seed, timeout_s=60)
