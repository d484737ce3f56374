"""How long planning takes on one core.

    python benchmarks/planning.py [--json] [--jobs ppo_8b ...] [--gpus 8 64 ...]

cold: a fresh process, kernel tables and caches empty; replan: the workload's lengths moved by 10 %,
from the shortlist of the cold plan. `*_cpu_s` is processor time, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.planner import plan
from nereus_plugins.spec import LengthDistribution, SpecError, WorkloadSpec

JOBS = ("ppo_8b", "ppo_70b", "grpo_moe_235b")
GPUS = (8, 64, 256, 1024)


def job(name: str) -> JobSpec:
    if name == "grpo_moe_235b":
        return JobSpec(read_model("qwen3-235b-a22b"), backend="megatron")
    model = {"ppo_8b": "llama3-8b", "ppo_70b": "llama3-70b"}[name]
    value = read_model(model, value_head=True)
    return JobSpec(
        read_model(model), algorithm="ppo", critic=value, reward=value, backend="megatron"
    )


def workload(gpus: int, median: float) -> WorkloadSpec:
    return WorkloadSpec(
        max(512, 2 * gpus),
        LengthDistribution.fixed(512),
        LengthDistribution.lognormal(median, 0.6, max_tokens=4096),
        4,
        max(128, gpus // 2),
    )


def measure(name: str, gpus: int) -> dict[str, float | bool]:
    """Seconds of a cold and of a second plan, in this process."""
    cluster = cluster_of("h100", gpus)
    out: dict[str, float | bool] = {}
    found = None
    for key, median in (("cold", 1000.0), ("replan", 1100.0)):
        start, busy = time.perf_counter(), time.process_time()
        try:
            found = plan(job(name), cluster, workload(gpus, median), after=found)
            out["fits"], out["gap"] = found.estimate.fits, round(found.gap, 4)
        except SpecError:
            out["fits"] = False
        out[f"{key}_s"] = round(time.perf_counter() - start, 3)
        out[f"{key}_cpu_s"] = round(time.process_time() - busy, 3)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.jobs[0], args.gpus[0])))
        return 0
    result: dict[str, dict[str, dict[str, float | bool]]] = {}
    for name in args.jobs:
        result[name] = {}
        for gpus in args.gpus:
            # A process of its own: nothing is warm.
            command = [sys.executable, __file__, "--one", "--jobs", name, "--gpus", str(gpus)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            result[name][str(gpus)] = json.loads(done.stdout)
            if not args.json:
                print(name, gpus, result[name][str(gpus)])
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
