"""What snapshots cost a verl job's steps.

    python benchmarks/verl_snapshots.py [--json] [--steps N] [--every N] [--hidden N]

Runs verl's main_ppo once (PPO with critic, FSDP2 on 2 gloo ranks, CPU) with a snapshot every few
steps. Training waits for the copy at the end of such a step, and the next step runs beside the
writing; the steps after that are alone. Each kind of step is compared with those alone of the same
job: medians, the first steps (warm-up) left out. A job takes a snapshot every few hundred seconds;
here it is every few steps, so that there are many.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nereus_verl.demo.launch import Job, run
from nereus_verl.demo.task import make_task

from nereus_plugins.snapshot import folder
from nereus_plugins.trace.record import StepRecord, read_records

WARM_UP_STEPS = 3
RANKS = 2
TIMEOUT_S = 900.0


def measure(steps: int, every: int, hidden: int, directory: Path) -> dict[str, Any]:
    """Raises: RuntimeError if the job failed, or if a snapshot is missing."""
    task = make_task(directory / "task", layers=2, hidden=hidden)
    job = Job(
        engine="fsdp2",
        ranks=RANKS,
        steps=steps,
        model_dir=task.model_dir,
        train_file=task.train_file,
        test_file=task.test_file,
        reward_file=task.reward_file,
        nereus={
            "snapshot": {"folder": str(directory / "snapshots"), "every": every, "keep": steps}
        },
    )
    run(job, directory / "job", timeout_s=TIMEOUT_S).require_success()
    found, _ = folder.find(directory / "snapshots")
    if len(found) != steps // every:
        raise RuntimeError(f"{len(found)} snapshots of {steps // every} are whole")
    kinds: dict[str, list[float]] = {"copied": [], "beside": [], "alone": []}
    waited_ms = []
    for record in read_records(directory / "job" / "checkpoints" / "nereus"):
        if not isinstance(record, StepRecord) or record.step <= WARM_UP_STEPS:
            continue
        after = record.step % every
        kinds["copied" if after == 0 else "beside" if after == 1 else "alone"].append(record.step_s)
        if after == 0:
            waited_ms.append(record.metrics["nereus/snapshot_ms"])
    alone_s = statistics.median(kinds["alone"])
    tenths = statistics.quantiles(kinds["alone"], n=10)
    return {
        "waited_ms_median": statistics.median(waited_ms),
        "waited_ms_max": max(waited_ms),
        "step_alone_s": alone_s,
        "step_alone_s_p10": tenths[0],
        "step_alone_s_p90": tenths[-1],
        "copied_over_alone": statistics.median(kinds["copied"]) / alone_s,
        "beside_over_alone": statistics.median(kinds["beside"]) / alone_s,
        "snapshot_mib": sum(file.nbytes for file in found[-1].index.files) / 2**20,
        "snapshots": len(waited_ms),
        "steps_alone": len(kinds["alone"]),
        "every": every,
        "measured_on": f"CPU/gloo, {RANKS} ranks, {platform.processor() or platform.machine()}",
        "versions": {name: version(name) for name in ("nereus-plugins", "verl", "torch", "ray")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=4, help="at least 3")
    parser.add_argument("--hidden", type=int, default=256, help="of the model: size of the state")
    args = parser.parse_args()
    if args.every < 3:
        parser.error("--every: at least 3, so that some steps are alone")
    with tempfile.TemporaryDirectory(prefix="nereus-snapshots-") as directory:
        figures = measure(args.steps, args.every, args.hidden, Path(directory))
    print(
        f"training waits {figures['waited_ms_median']:.0f} ms for a snapshot of "
        f"{figures['snapshot_mib']:.0f} MiB; the step with the copy takes "
        f"{figures['copied_over_alone']:.3f}, the one beside the writing "
        f"{figures['beside_over_alone']:.3f} of a step alone "
        f"({figures['step_alone_s']:.2f} s; {figures['snapshots']} snapshots; measured on "
        f"{figures['measured_on']})"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
