"""Time to plan the moves of an 8B model from TP8 PP4 DP32 to TP4 PP2 DP128, 1,024 ranks.

    python benchmarks/move_planning.py [--json]

bf16 weights, fp32 masters and two Adam moments, distributed optimizer; tables predicted for
megatron, 8 GPUs a node. One process, one thread, no GPU, no process group. README.md in this folder
says what each figure covers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from nereus_plugins.cost.models import find_model
from nereus_plugins.emu.moves import MovePlanner, MoveTable, plan_moves
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.emu.tiling import check_tiling
from nereus_plugins.spec import Layout, OptimizerSpec

MODEL = find_model("llama3-8b").model
SOURCE = Layout(tp=8, pp=4, dp=32, sharding="zero1")
TARGET = Layout(tp=4, pp=2, dp=128, sharding="zero1")
GPUS_PER_NODE = 8
RANKS_TIMED = (0, 1, 300, 517, 1023)

T = TypeVar("T")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A result and the medians of wall time and of this process's CPU time, in seconds.

    They are equal on an idle machine; on a busy one CPU time is nearer to what the work costs.
    """

    result: T
    wall_s: float
    cpu_s: float


def timed(run: Callable[[], T], repeats: int) -> Timed[T]:
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Timed(result, statistics.median(walls), statistics.median(cpus))


def predict_both() -> tuple[ShardTable, ShardTable]:
    predict = partial(predict_unit, MODEL, backend="megatron", optimizer=OptimizerSpec())
    return predict(SOURCE), predict(TARGET)


def check_both(source: ShardTable, target: ShardTable) -> None:
    check_tiling(source)
    check_tiling(target)


def cpu_name() -> str:
    """The CPU's model as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure(repeats: int) -> dict[str, object]:
    """All figures. Times are medians over `repeats`, for one rank the worst of `RANKS_TIMED`."""
    predicted = timed(predict_both, repeats)
    source, target = predicted.result
    node_of = np.arange(SOURCE.world_size, dtype=np.int32) // GPUS_PER_NODE
    plan = partial(plan_moves, source, target, node_of=node_of)
    geometry = timed(partial(MovePlanner, source, target, node_of=node_of), repeats)
    every = timed(plan, repeats)
    one: list[Timed[MoveTable]] = [timed(partial(plan, rank=r), repeats) for r in RANKS_TIMED]
    own = [timed(partial(geometry.result.moves, r), repeats) for r in RANKS_TIMED]
    tiling = timed(partial(check_both, source, target), repeats)
    moves = every.result
    for rank, part in zip(RANKS_TIMED, one, strict=True):
        if not part.result.equals(moves.of_rank(rank)):
            raise AssertionError(f"rank {rank}'s own plan is not its part of the full plan")

    between = moves.src_rank != moves.dst_rank
    world = SOURCE.world_size
    sent = np.bincount(moves.src_rank[between], moves.nbytes[between], world)
    received = np.bincount(moves.dst_rank[between], moves.nbytes[between], world)
    return {
        "seconds_all_ranks_1024": every.wall_s,
        "seconds_one_rank_1024": max(t.wall_s for t in one),
        "cpu_seconds_all_ranks_1024": every.cpu_s,
        "cpu_seconds_one_rank_1024": max(t.cpu_s for t in one),
        "seconds_all_ranks_with_prediction": predicted.wall_s + every.wall_s,
        "seconds_one_rank_with_prediction": predicted.wall_s + max(t.wall_s for t in one),
        "parts": {
            "predict_both_tables_s": predicted.wall_s,
            "geometry_and_coverage_s": geometry.wall_s,
            "one_rank_after_geometry_s": max(t.wall_s for t in own),
            "check_tiling_both_s": tiling.wall_s,
        },
        "tensors": len(target.tensors),
        "source_shards": len(source),
        "target_shards": len(target),
        "moves": len(moves),
        "bytes_moved": int(moves.nbytes.sum()),
        "bytes_between_ranks": int(moves.nbytes[between].sum()),
        "max_sent_bytes_per_rank": int(sent.max()),
        "max_received_bytes_per_rank": int(received.max()),
        "mean_received_bytes_per_rank": float(received.mean()),
        "repeats": repeats,
        "measured_on": f"{cpu_name()}, one thread",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is taken")
    options = parser.parse_args()
    result = measure(options.repeats)
    print(f"{MODEL.name}, {SOURCE} -> {TARGET}, {SOURCE.world_size} ranks")
    for name, value in result.items():
        rows = value.items() if isinstance(value, dict) else [(name, value)]
        for row, figure in rows:
            print(f"  {row:<36} {round(figure, 4) if isinstance(figure, float) else figure}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
