"""What Nereus costs a verl job that keeps its layout: step time, flag on against flag off.

    python benchmarks/overhead.py [--json] [--steps N] [--pairs N] [--engine fsdp2|megatron]

Runs verl's main_ppo (PPO with critic, CPU, tiny model) in pairs, the order turned round from pair
to pair: once as it is, once with `+nereus=on` and no transition. The figure is the median over all
pairs and steps of (step time on / step time off), the first steps of each run (warm-up) left out.
Both runs must log bitwise the same losses, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nereus_cpu.task import make_task
from nereus_verl.demo.launch import ENGINES, Job, run

WARM_UP_STEPS = 2
TIMEOUT_S = 900.0
LOSSES = ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm")


def measure(engine: str, ranks: int, steps: int, pairs: int, directory: Path) -> dict[str, Any]:
    """Raises: RuntimeError if a run failed, or if losses with and without Nereus differ."""
    task = make_task(directory / "task")
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for pair in range(pairs):
        metrics = {}
        for side in ("off", "on") if pair % 2 == 0 else ("on", "off"):
            print(f"pair {pair + 1} of {pairs}: Nereus {side}", file=sys.stderr, flush=True)
            job = Job(
                engine=engine,
                ranks=ranks,
                steps=steps,
                model_dir=task.model_dir,
                train_file=task.train_file,
                test_file=task.test_file,
                reward_file=task.reward_file,
                nereus={} if side == "on" else None,
            )
            result = run(job, directory / f"{pair}-{side}", timeout_s=TIMEOUT_S)
            metrics[side] = result.require_success().metrics
        for off, on in zip(metrics["off"], metrics["on"], strict=True):
            for name in LOSSES:
                if off[name] != on[name]:
                    raise RuntimeError(
                        f"step {off['step']}: {name} is {off[name]} without Nereus and {on[name]} "
                        "with it; it must be the same"
                    )
        for side in seconds:
            seconds[side] += [m["timing_s/step"] for m in metrics[side][WARM_UP_STEPS:]]
        ratios += [
            on["timing_s/step"] / off["timing_s/step"]
            for off, on in zip(
                metrics["off"][WARM_UP_STEPS:], metrics["on"][WARM_UP_STEPS:], strict=True
            )
        ]
    return {
        "step_time_ratio_median": statistics.median(ratios),
        "step_time_ratio_p10": statistics.quantiles(ratios, n=10)[0],
        "step_time_ratio_p90": statistics.quantiles(ratios, n=10)[-1],
        "step_s_off_median": statistics.median(seconds["off"]),
        "step_s_on_median": statistics.median(seconds["on"]),
        "paired_steps": len(ratios),
        "losses_bitwise_equal": True,
        "engine": engine,
        "ranks": ranks,
        "measured_on": f"CPU/gloo, {platform.processor() or platform.machine()}",
        "versions": {name: version(name) for name in ("nereus-plugins", "verl", "torch", "ray")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nereus-overhead-") as directory:
        figures = measure(args.engine, args.ranks, args.steps, args.pairs, Path(directory))
    print(
        f"step time with Nereus on (no transition) / off: {figures['step_time_ratio_median']:.4f} "
        f"(p10 {figures['step_time_ratio_p10']:.4f}, p90 {figures['step_time_ratio_p90']:.4f}, "
        f"{figures['paired_steps']} paired steps; measured on {figures['measured_on']})"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
