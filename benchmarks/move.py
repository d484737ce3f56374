"""Time to move a training state between two layouts, against the least that the network allows.

    python benchmarks/move.py [--json] [--sizes-mib 50 500] [--repetitions 9]

Four gloo ranks on this machine reshard the state of a model (bf16 weights, fp32 masters and two
Adam moments) between two layouts. The model is sized so that each rank sends the given number of
bytes. Two cases:

- strided: Megatron with its distributed optimizer, TP2 PP1 DP2 to TP1 PP2 DP2; what row-parallel
  weights bring is scattered over the target's rows, so it must be unpacked;
- contiguous: FSDP2 over four ranks to HSDP in shards of two; every box is contiguous at both ends.

Compared, in turn in every repetition:

- bare: the same bytes between the same ranks, one preallocated and warmed message for each pair,
  as torch.distributed sends it over gloo; the transport goes through shared memory on one host;
- data phase without checksums: `TorchTransport.exchange` on a fresh group with fresh staging;
- data phase with checksums: `exchange` and `verify`;
- checkpoint: `torch.distributed.checkpoint` save in the old layout and load in the new through
  /dev/shm, at the fastest of the settings tried (fewer repetitions).

The whole transition is group, metadata, planning, transport, data and verification. A time is that
of the slowest rank; ratios are medians over repetitions of ratios within one repetition. The `cpu_`
figures compare the CPU time of all ranks (gloo's threads and the kernel included): on a machine
whose cores are shared with other work they say more than wall time does.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.moves import MoveTable, plan_moves
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.selftest.ranks import end_with_parent
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec
from nereus_plugins.transport.metadata import gather_tables
from nereus_plugins.transport.torch_transport import TorchTransport

WORLD = 4


@dataclass(frozen=True)
class Case:
    """What moves: the state of a `backend`'s model from one layout to another."""

    backend: str
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}, {self.backend}, {WORLD} ranks"


CASES = {
    "strided": Case(
        "megatron", Layout(tp=2, dp=2, sharding="zero1"), Layout(pp=2, dp=2, sharding="zero1")
    ),
    "contiguous": Case(
        "fsdp2", Layout(dp=4, sharding="fsdp"), Layout(dp=4, sharding="hsdp", shard_size=2)
    ),
}
MIB = 1 << 20
TIMEOUT = datetime.timedelta(minutes=5)
CHECKPOINT_THREADS = (1, 2)

BASE = ModelSpec(
    name="benchmark",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_kv_heads=8,
    vocab_size=16384,
)


@dataclass
class Shard:
    """A box of a tensor and its memory on this rank."""

    name: str
    box: Box
    global_shape: tuple[int, ...]
    view: torch.Tensor


def sent_bytes(model: ModelSpec, case: Case) -> int:
    """Mean bytes that a rank sends to others in the transition."""
    moves = plan_moves(predict(model, case, case.source), predict(model, case, case.target))
    return int(moves.nbytes[moves.src_rank != moves.dst_rank].sum()) // WORLD


def predict(model: ModelSpec, case: Case, layout: Layout) -> ShardTable:
    return predict_unit(
        model, layout, backend=case.backend, optimizer=OptimizerSpec(), device="cpu"
    )


def model_for(size_bytes: int, case: Case) -> ModelSpec:
    """The base model, with hidden sizes such that a rank sends about `size_bytes`."""
    scale = 1 if size_bytes >= 200 * MIB else 4
    model = replace(
        BASE,
        hidden_size=BASE.hidden_size // scale,
        vocab_size=BASE.vocab_size // scale,
        num_attention_heads=BASE.num_attention_heads // scale,
        num_kv_heads=BASE.num_kv_heads // scale,
    )
    low, high = (sent_bytes(replace(model, ffn_hidden_size=f), case) for f in (512, 1024))
    ffn = 512 + (size_bytes - low) * 512 / (high - low)
    return replace(model, ffn_hidden_size=max(64, round(ffn / 64) * 64))


def allocate(table: ShardTable, *, fill: bool) -> list[Shard]:
    """The shards of one rank, one after the other in their storages, as a framework's flat
    buffers hold them; memory is touched."""
    sizes = table.nbytes_per_row()
    buffers = {
        key: torch.zeros(int(sizes[table.storage == key].sum()), dtype=torch.uint8)
        for key in np.unique(table.storage).tolist()
    }
    used = dict.fromkeys(buffers, 0)
    shards = []
    for row in range(len(table)):
        info, box, key = table.tensors[table.tensor[row]], table.box(row), int(table.storage[row])
        start, size = used[key], int(sizes[row])
        used[key] += size
        memory = buffers[key][start : start + size]
        if fill:  # random bytes, the same for replicas
            seed = zlib.crc32(f"{info.name} {box}".encode())
            memory.random_(generator=torch.Generator().manual_seed(seed))
        view = memory.view(getattr(torch, info.dtype)).view(box.shape)
        shards.append(Shard(info.name, box, info.shape, view))
    return shards


class Boxes(torch.Tensor):
    """The shards of one tensor on this rank, in the form torch's checkpoint asks for
    (`torch.distributed._checkpointable`): a tensor of the global shape that holds no data."""

    shards: list[Shard]

    @staticmethod
    def of(shards: list[Shard]) -> Boxes:
        boxes: Boxes = torch.Tensor._make_wrapper_subclass(
            Boxes, shards[0].global_shape, dtype=shards[0].view.dtype
        )
        boxes.shards = shards
        return boxes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}: only the checkpoint's own protocol is served")

    def _chunk(self, shard: Shard) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(shard.box.offset), torch.Size(shard.box.shape))

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(shard.box.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.view),
                    size=torch.Size(shard.global_shape),
                ),
            )
            for shard in self.shards
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(shard) for shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(s.view for s in self.shards if torch.Size(s.box.offset) == index.offset)


def state_dict(shards: list[Shard]) -> dict[str, Any]:
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return {name: Boxes.of(own) for name, own in by_name.items()}


class Rank:
    """One rank's state in both layouts, and the things that are timed."""

    def __init__(self, rank: int, model: ModelSpec, case: Case) -> None:
        self.rank = rank
        self.tables = [
            predict(model, case, layout).of_rank(rank) for layout in (case.source, case.target)
        ]
        self.source = allocate(self.tables[0], fill=True)
        self.target = allocate(self.tables[1], fill=False)
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.moves = self.plan(self.group)[0]
        m = self.moves
        pair = {p: [0, 0] for p in range(WORLD) if p != rank}
        for src, dst, size in zip(m.src_rank, m.dst_rank, m.nbytes, strict=True):
            if src != dst:
                pair[int(dst if src == rank else src)][int(dst == rank)] += int(size)
        self.messages = {
            peer: [torch.ones(size, dtype=torch.uint8) for size in sizes]
            for peer, sizes in pair.items()
        }

    def plan(self, group: Any) -> tuple[MoveTable, dict[str, float]]:
        start = time.perf_counter()
        source, target = (gather_tables(table, group) for table in self.tables)
        gathered = time.perf_counter()
        moves = plan_moves(source, target, rank=self.rank)
        return moves, {"metadata": gathered - start, "planning": time.perf_counter() - gathered}

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Wall seconds of the slowest rank, from a common start; CPU seconds of all ranks."""
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        wall = time.perf_counter() - start
        cpu = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
        dist.all_reduce(cpu)
        return self.slowest(wall), float(cpu)

    def slowest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def bare(self) -> tuple[float, float]:
        def work() -> None:
            ops = []
            for step in range(1, WORLD):
                to, origin = (self.rank + step) % WORLD, (self.rank - step) % WORLD
                ops.append(dist.P2POp(dist.isend, self.messages[to][0], to, self.group))
                ops.append(dist.P2POp(dist.irecv, self.messages[origin][1], origin, self.group))
            for request in dist.batch_isend_irecv(ops):
                request.wait()

        return self.timed(work)

    def transition(self, checksum: bool, staging_bytes: int | None) -> dict[str, float]:
        """Seconds by part; "data" is exchange and verification, "whole" everything."""
        dist.barrier()
        start = time.perf_counter()
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        parts = {"group": time.perf_counter() - start}
        moves, planning = self.plan(group)
        parts |= planning
        opened = time.perf_counter()
        transport = TorchTransport(group, checksum=checksum, staging_bytes=staging_bytes)
        parts["transport"] = time.perf_counter() - opened
        before = self.slowest(time.perf_counter() - start)

        def work() -> None:
            report = transport.exchange(moves, self.source, self.target)
            parts.update(
                compile=report.seconds_compile,
                pack=report.seconds_pack,
                wire=report.seconds_wire,
                unpack=report.seconds_unpack,
                local=report.seconds_local,
                checksum_sender=report.seconds_checksum,
                verify=transport.verify().seconds if checksum else 0.0,
                packed_share=report.bytes_packed / report.bytes_sent,
                unpacked_share=report.bytes_unpacked / report.bytes_received,
            )

        data, cpu = self.timed(work)
        transport.close()
        return {**parts, "data": data, "data_cpu": cpu, "whole": before + data}

    def checkpoint(self, folder: Path, threads: int) -> float:
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

        def work() -> None:
            writer = dcp.FileSystemWriter(
                folder, single_file_per_rank=True, sync_files=False, thread_count=threads
            )
            dcp.save(state_dict(self.source), storage_writer=writer)
            dcp.load(state_dict(self.target), storage_reader=dcp.FileSystemReader(folder))

        return self.timed(work)[0]

    def check(self, folder: Path) -> None:
        """The move and the checkpoint must have brought the same bytes."""
        for shard in self.target:
            shard.view.zero_()
        self.transition(True, None)
        moved = [shard.view.clone() for shard in self.target]
        for shard in self.target:
            shard.view.zero_()
        self.checkpoint(folder, CHECKPOINT_THREADS[0])
        for shard, view in zip(self.target, moved, strict=True):
            if not torch.equal(shard.view.view(torch.uint8), view.view(torch.uint8)):
                raise AssertionError(f"rank {self.rank}: move and checkpoint differ: {shard.name}")


def measure(rank: int, port: int, args: argparse.Namespace, results: Any) -> None:
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    folder = Path(args.folder)
    cases: dict[str, dict[str, Any]] = {name: {} for name in args.cases}
    for name, size_mib in itertools.product(args.cases, args.sizes_mib):
        model = model_for(size_mib * MIB, CASES[name])
        state = Rank(rank, model, CASES[name])
        state.check(folder / "check")
        series: dict[str, list[Any]] = {"bare": [], "plain": [], "checked": [], "checkpoint": []}
        state.bare()
        for repetition in range(args.repetitions):
            turns: list[tuple[str, Callable[[], Any]]] = [
                ("bare", state.bare),
                ("plain", partial(state.transition, False, args.staging_bytes)),
                ("checked", partial(state.transition, True, args.staging_bytes)),
            ]
            # No kind always follows the same other one.
            for kind, turn in turns[repetition % 3 :] + turns[: repetition % 3]:
                series[kind].append(turn())
            if repetition < args.checkpoints:
                best = min(state.checkpoint(folder / "c", t) for t in CHECKPOINT_THREADS)
                series["checkpoint"].append((best, series["checked"][-1]["whole"]))
        cases[name][f"{size_mib}MiB"] = summary(model, state, series)
        del state, turns, turn
        gc.collect()
    if rank == 0:
        results.put(cases)
    dist.barrier()
    dist.destroy_process_group()


def summary(model: ModelSpec, state: Rank, series: dict[str, list[Any]]) -> dict[str, Any]:
    def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(row[key] for row in rows) for key in rows[0]}

    def paired(rows: list[dict[str, float]]) -> list[float]:
        return [row["data"] / bare for row, (bare, _) in zip(rows, series["bare"], strict=True)]

    def paired_cpu(rows: list[dict[str, float]]) -> float:
        pairs = zip(rows, series["bare"], strict=True)
        return statistics.median(row["data_cpu"] / cpu for row, (_, cpu) in pairs)

    plain, checked = paired(series["plain"]), paired(series["checked"])
    checkpoint = [whole / best for best, whole in series["checkpoint"]]
    sent = sum(sizes[0].numel() for sizes in state.messages.values())
    return {
        "ratio_to_bare_exchange": statistics.median(plain),
        "ratio_with_checksums": statistics.median(checked),
        "ratio_to_checkpoint": statistics.median(checkpoint),
        "ratios_to_bare_exchange": plain,
        "ratios_with_checksums": checked,
        "ratios_to_checkpoint": checkpoint,
        "cpu_ratio_to_bare_exchange": paired_cpu(series["plain"]),
        "cpu_ratio_with_checksums": paired_cpu(series["checked"]),
        "seconds_bare": statistics.median(wall for wall, _ in series["bare"]),
        "cpu_seconds_bare": statistics.median(cpu for _, cpu in series["bare"]),
        "seconds_checkpoint": statistics.median(best for best, _ in series["checkpoint"]),
        "seconds_without_checksums": median_of(series["plain"]),
        "seconds_with_checksums": median_of(series["checked"]),
        "bytes_sent_rank_0": sent,
        "moves_rank_0": len(state.moves),
        "parameters": model.num_parameters(),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object, last line")
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--checkpoints", type=int, default=3, help="repetitions of the checkpoint")
    parser.add_argument("--staging-bytes", type=int, default=None)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nereus-move-") as folder:
        args.folder = folder
        mp.spawn(measure, (store.port, args, results), nprocs=WORLD)
    cases = results.get()
    first = cases[args.cases[0]]
    largest = first[f"{max(args.sizes_mib)}MiB"]
    keys = ("ratio_to_bare_exchange", "ratio_with_checksums", "ratio_to_checkpoint")
    report = {
        **{key: largest[key] for key in keys},
        **first,
        "cases": {name: {"transition": str(CASES[name]), **cases[name]} for name in args.cases},
        "measured_on": f"CPU, gloo over loopback: {cpu_name()}, {os.cpu_count()} cores",
        "load_average_1min": [load_before, os.getloadavg()[0]],
        "repetitions": args.repetitions,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if args.json:
        print(json.dumps(report))
        return
    print(report["measured_on"])
    for name, size_name in itertools.product(cases, first):
        size = cases[name][size_name]
        print(
            f"{name} ({CASES[name]}), {size_name}: "
            f"data phase {size['ratio_to_bare_exchange']:.2f}x a bare exchange "
            f"({size['seconds_bare']:.3f} s), with checksums {size['ratio_with_checksums']:.2f}x; "
            f"in CPU time {size['cpu_ratio_to_bare_exchange']:.2f}x and "
            f"{size['cpu_ratio_with_checksums']:.2f}x; whole transition "
            f"{size['ratio_to_checkpoint']:.3f}x a checkpoint ({size['seconds_checkpoint']:.2f} s)"
        )
        for key in ("seconds_without_checksums", "seconds_with_checksums"):
            parts = ", ".join(f"{part} {value:.3f}" for part, value in size[key].items())
            print(f"  {key.replace('_', ' ')}: {parts}")


if __name__ == "__main__":
    main()
