"""What a snapshot costs the step time of a job, against the same job without and torch's own.

    python benchmarks/snapshot.py [--json] [--hidden 384] [--steps 12] [--rounds 7] [--ranks 2]

An FSDP2 job on gloo ranks of this machine. A round is some steps of each of these, the order turned
round from round to round; a snapshot is begun before the first of the steps:

- without: no snapshot;
- disk: `Snapshots.take` to a folder;
- memory: `Snapshots.take` into the memory of the nodes (here all ranks are on one): each rank's
  part copied to /dev/shm twice, once by its buddy;
- async_save: `torch.distributed.checkpoint.async_save` of model and optimizer, as it comes, with a
  group of its own.

The figures are medians over rounds, each against the steps without a snapshot of the same round:

- step_time_ratio: the seconds of all steps, with what training waited for, over those without;
- cost_s: the difference; blocked_s: how long training waited as the snapshot was begun;
- total_s: from there until it was complete, also where the steps ended before;
- cpu_ratio, cpu_cost_s: processor seconds of all ranks and their threads, from the beginning of the
  steps until the snapshot was complete, over those without, and the difference: on a machine whose
  cores are shared with other work they say more than the seconds that go by.

async_save writes with torch.save; neither side's files are read here (`tests/` do).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict

from nereus_plugins.selftest.fsdp2_job import Fsdp2Job, Fsdp2Model
from nereus_plugins.selftest.ranks import prepare_process
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots
from nereus_plugins.spec import Layout

SIDES = ("without", "disk", "memory", "async_save")
WARM_UP_STEPS = 3
UNIT = "model"


class Bench:
    """One rank."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        model = Fsdp2Model(hidden=args.hidden, ffn=3 * args.hidden, vocab=2000)
        layout = Layout(dp=args.ranks, sharding="fsdp")
        self.job = Fsdp2Job(UNIT, model, layout, seed=1, device=torch.device("cpu"))
        self._steps = args.steps
        self._place = place
        self._step = 0
        self._begun: Any = None
        everyone = list(range(args.ranks))
        self._groups = {side: dist.new_group(everyone) for side in SIDES[1:]}
        rank = dist.get_rank()
        memory = Path(tempfile.gettempdir() if not Path("/dev/shm").is_dir() else "/dev/shm")
        self.memory = memory / f"nereus-benchmark-{place.name}"
        self._snapshots = {
            "disk": Snapshots(SnapshotOptions(place / "disk", 1), self._groups["disk"]),
            "memory": Snapshots(SnapshotOptions(memory_folder=self.memory), self._groups["memory"]),
        }
        self._rank = rank

    def warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self._train()
        for side in SIDES:
            self.segment(side)

    def segment(self, side: str) -> tuple[float, float, float, float]:
        """Seconds of all steps, of which training waited, and until the snapshot was complete;
        processor seconds of all ranks."""
        dist.barrier()
        cpu_s = time.process_time()
        begin = time.perf_counter()
        self._begin(side)
        blocked_s = time.perf_counter() - begin
        for _ in range(self._steps):
            self._train()
        dist.barrier()
        steps_s = time.perf_counter() - begin
        total_s = self._end(side)
        dist.barrier()
        used = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
        dist.all_reduce(used)
        return steps_s, blocked_s, total_s, float(used)

    def close(self) -> None:
        for one in self._snapshots.values():
            one.close()

    def _train(self) -> None:
        self.job.train_step(self._step)
        self._step += 1

    def _begin(self, side: str) -> None:
        if side == "async_save":
            current = self.job.current
            model, optimizer = get_state_dict(current.module, current.optimizer)
            self._since_s = time.perf_counter()
            self._begun = dcp.async_save(
                {"model": model, "optim": optimizer},
                checkpoint_id=str(self._place / f"dcp-{self._step}"),
                process_group=self._groups[side],
            )
            self._ended_s: list[float] = []
            self._begun.add_done_callback(lambda _: self._ended_s.append(time.perf_counter()))
        elif side != "without" and not self._snapshots[side].take(self._step, {UNIT: self.job}):
            raise RuntimeError("a rank is lost")

    def _end(self, side: str) -> float:
        if side == "without":
            return 0.0
        if side == "async_save":
            self._begun.result()
            for old in self._place.glob("dcp-*"):
                if self._rank == 0:
                    shutil.rmtree(old)
            return self._ended_s[0] - self._since_s
        taken = self._snapshots[side].wait()
        if taken is None or taken.error:
            raise RuntimeError(taken.error if taken else "no snapshot")
        return taken.blocked_s + taken.background_s

    def state_bytes(self) -> int:
        """Of all ranks."""
        mine = sum(shard.nbytes for shard in self.job.described().shards)
        total = torch.tensor([mine])
        dist.all_reduce(total)
        return int(total)


def measure(rank: int, args: argparse.Namespace, place: str, results: Any) -> None:
    """On a rank; rank 0 puts (bytes, {side: [segment, ...]})."""
    prepare_process("cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{place}/store", args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    bench = Bench(args, Path(place))
    found: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
    try:
        bench.warm_up()
        for number in range(args.rounds):
            turned = SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]
            for side in turned:
                found[side].append(bench.segment(side))
        nbytes = bench.state_bytes()
    finally:
        bench.close()
        shutil.rmtree(bench.memory, ignore_errors=True)
    if rank == 0:
        results.put(json.dumps([nbytes, found]))
    dist.barrier()
    dist.destroy_process_group()


def evaluate(nbytes: int, found: dict[str, list[list[float]]], steps: int) -> dict[str, Any]:
    without = [one[0] for one in found["without"]]
    cpu_without = [one[3] for one in found["without"]]
    figures: dict[str, Any] = {
        "state_bytes": nbytes,
        "step_s_without": statistics.median(without) / steps,
        "steps": steps,
        "rounds": len(without),
        # Of the steps without a snapshot, round against round: what noise alone makes.
        "noise_ratio_p90": statistics.quantiles(
            [a / b for a, b in zip(without[1:], without, strict=False)], n=10
        )[-1],
    }
    for side in SIDES[1:]:
        ratios = [one[0] / base for one, base in zip(found[side], without, strict=True)]
        costs_s = [one[0] - base for one, base in zip(found[side], without, strict=True)]
        figures |= {
            f"step_time_ratio_{side}": statistics.median(ratios),
            f"step_time_ratios_{side}": [round(ratio, 3) for ratio in ratios],
            f"cost_s_{side}": statistics.median(costs_s),
            f"blocked_s_{side}": statistics.median(one[1] for one in found[side]),
            f"cpu_ratio_{side}": statistics.median(
                one[3] / base for one, base in zip(found[side], cpu_without, strict=True)
            ),
            f"cpu_cost_s_{side}": statistics.median(
                one[3] - base for one, base in zip(found[side], cpu_without, strict=True)
            ),
            f"total_s_{side}": statistics.median(one[2] for one in found[side]),
        }
    for side in ("disk", "memory"):
        figures[f"blocked_ratio_{side}_over_async_save"] = (
            figures[f"blocked_s_{side}"] / figures["blocked_s_async_save"]
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--steps", type=int, default=12, help="of each side in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if args.rounds < 3 or args.hidden % 3 or args.hidden < 3:
        parser.error("at least 3 rounds, and a width that 3 divides")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="nereus-snapshot-") as place:
        mp.spawn(measure, (args, place, results), nprocs=args.ranks)
        nbytes, found = json.loads(results.get())
    figures = evaluate(nbytes, found, args.steps) | {
        "ranks": args.ranks,
        "load_average": os.getloadavg()[0],
        "measured_on": f"CPU/gloo, {os.cpu_count()} cores, "
        f"{platform.processor() or platform.machine()}",
        "versions": {name: version(name) for name in ("nereus-plugins", "torch")},
    }
    print(
        f"{nbytes / 2**20:.0f} MiB of state on {args.ranks} ranks, {args.steps} steps of "
        f"{figures['step_s_without']:.3f} s: "
        + "; ".join(
            f"{side}: step time x {figures[f'step_time_ratio_{side}']:.3f}, processor time x "
            f"{figures[f'cpu_ratio_{side}']:.3f}, training waited "
            f"{figures[f'blocked_s_{side}'] * 1e3:.0f} ms, complete after "
            f"{figures[f'total_s_{side}']:.2f} s"
            for side in SIDES[1:]
        )
        + f"; noise x {figures['noise_ratio_p90']:.3f}; measured on {figures['measured_on']}, "
        f"load {figures['load_average']:.1f}"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
