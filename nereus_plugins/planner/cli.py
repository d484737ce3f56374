"""`nereus plan`: the best plan for a job on so many GPUs, and why not another."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nereus_plugins.cost import cli as cost_cli
from nereus_plugins.cost.calibration import Calibration
from nereus_plugins.cost.explain import explanation, table, to_dict
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.pools import Pools
from nereus_plugins.spec import ModelStage, SpecError

from .flags import launch_flags
from .search import Planned, StageChanges, plan


def parser() -> argparse.ArgumentParser:
    p = cost_cli.parser(states_plan=False)
    p.prog = "nereus plan"
    p.description = "The fastest plan that fits, its alternatives, and why others were not taken."
    p.epilog = None
    p.add_argument(
        "--uncoupled",
        action="store_true",
        help="let models of a Megatron job differ in layout, which verl runs with Nereus on only",
    )
    p.add_argument("--curve", action="store_true", help="throughput by number of GPUs")
    return p


class Coupled(NamedTuple):
    """Limits of a framework before a job runs: stages that must share one layout."""

    coupled: tuple[frozenset[ModelStage], ...]
    stages: Mapping[ModelStage, StageChanges] = {}
    devices_fixed: bool = False
    colocated: bool = False
    sharing_fixed: bool = False
    dp_divides: int | None = None
    least_budget_tokens: int = 0


def limits_of(job: JobSpec) -> Coupled | None:
    """verl's Megatron workers have one parallel state in each process, for all their models, unless
    Nereus is on."""
    if job.backend != "megatron":
        return None
    return Coupled((frozenset(s for s in job.stages() if s is not ModelStage.ACTOR_GENERATE),))


def _text(found: Planned, job: JobSpec) -> str:
    lines = [
        f"{found.plan.name}: at most {100 * found.gap:.1f} % from the fastest plan of "
        f"{found.considered} candidates",
        table(found.estimate),
        "",
    ]
    for other, result in found.alternatives:
        slower = result.iteration_s / found.estimate.iteration_s - 1.0
        layouts = ", ".join(f"{s} {a.layout}" for s, a in other.assignments.items())
        lines.append(f"next: {100 * slower:+.1f} %  {other.name}: {layouts}")
    for reason in found.rejections:
        amount = ""
        if reason.kind == "memory":
            amount = f", nearest {reason.least / 2**30:.1f} GiB a GPU over: {reason.example}"
        elif reason.kind != "slower":
            amount = f": {reason.example}"
        lines.append(f"not taken, {reason.kind}: {reason.count}{amount}")
    name = "OpenRLHF flags:" if job.backend == "deepspeed" else "verl overrides:"
    lines += ["", name, *(f"  {o}" for o in launch_flags(found.plan, job))]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 found, 1 nothing fits, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        job, cluster = cost_cli.job_from(args), cost_cli.pools_from(args)
        workload = cost_cli.workload_from(args)
        learned = Calibration.load(args.calibration) if args.calibration else None
    except (SpecError, OSError) as error:
        print(f"nereus plan: {error}", file=sys.stderr)
        return 2
    limits = None if args.uncoupled else limits_of(job)
    if args.curve:
        if isinstance(cluster, Pools):
            print("nereus plan: --curve is of GPUs of one kind: leave out --also", file=sys.stderr)
            return 2
        count = min(cluster.gpus_per_node, cluster.world_size)
        points: list[dict[str, Any]] = []
        while count <= cluster.world_size:
            try:
                found = plan(job, cluster, workload, learned, gpus=count, capabilities=limits)
                rate = workload.sequences_per_step / found.estimate.iteration_s
                points.append({"gpus": count, "sequences_per_s": rate, "fits": True})
            except SpecError:
                points.append({"gpus": count, "sequences_per_s": 0.0, "fits": False})
            count *= 2
        if args.json:
            print(json.dumps(points))
        else:
            for point in points:
                print(f"{point['gpus']:6d} GPUs  {point['sequences_per_s']:10.2f} sequences/s")
        return 0
    try:
        found = plan(job, cluster, workload, learned, capabilities=limits)
    except SpecError as error:
        if job.backend == "deepspeed" and not job.cpu_adam:
            error = SpecError(f"{error}; or with updates on the host (--cpu-adam)")
        print(f"nereus plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        out = {
            "plan": found.plan.to_dict(),
            "estimate": to_dict(found.estimate),
            "gap": found.gap,
            "considered": found.considered,
            "alternatives": [
                {"plan": p.to_dict(), "iteration_s": e.iteration_s} for p, e in found.alternatives
            ],
            "rejections": [dataclasses.asdict(r) for r in found.rejections],
            "launch_flags": launch_flags(found.plan, job),
        }
        print(json.dumps(out))
    else:
        print(_text(found, job))
        if args.explain:
            print()
            print(explanation(found.estimate))
    return 0
