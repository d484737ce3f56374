"""What is left of a transition that is prepared in the background, in one verl job.

    python benchmarks/background.py [--json] [--engine fsdp2|megatron] [--cycles N] [--share S]

Runs verl's main_ppo (PPO with critic, CPU) once. Actor and critic go to another layout and back,
half of the times in the background and half at the boundary, in both directions alike; between two
transitions a step goes by. From the job's records, medians:

- exposed: seconds that everything waited for a transition, background against blocking;
- generation: seconds of the stage that ran while one was prepared, against the same stage alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import
from nereus_verl.demo.launch import ENGINES, Job, run
from nereus_verl.demo.task import make_task

from nereus_plugins.trace.record import Record, StepRecord, TransitionRecord, read_records

WARM_UP_STEPS = 2
TIMEOUT_S = 1500.0
BLOCKING_AFTER = "NEREUS_BENCHMARK_BLOCKING_AFTER"  # steps: the others' transitions are hidden
# A cycle: each way of getting there and back, each way once in the background.
CYCLE = (True, False, False, True)
START = {"fsdp2": {}, "megatron": {"tp": 2}}
THERE = {"fsdp2": {"shard_size": 1}, "megatron": {"pp": 2}}
BACK = {"fsdp2": {"shard_size": 2}, "megatron": {"tp": 2}}


def measure(engine: str, cycles: int, share: float, hidden: int, directory: Path) -> dict[str, Any]:
    """Raises: RuntimeError if the job failed, or if a transition did not go the way it should."""
    task = make_task(directory / "task", hidden=hidden)
    after = {WARM_UP_STEPS + 2 * i: in_background for i, in_background in enumerate(CYCLE * cycles)}
    schedule = {step: (THERE, BACK)[i % 2][engine] for i, step in enumerate(after)}
    job = Job(
        engine=engine,
        ranks=2,
        steps=max(after) + 2,
        layout=START[engine],
        batch_prompts=4,
        mini_batch_prompts=4,
        response_tokens=96,
        model_dir=task.model_dir,
        train_file=task.train_file,
        test_file=task.test_file,
        reward_file=task.reward_file,
        nereus={"schedule": schedule, "background_share": share},
    )
    env = {
        BLOCKING_AFTER: json.dumps([step for step, hides in after.items() if not hides]),
        "VERL_USE_EXTERNAL_MODULES": Path(__file__).stem,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
    }
    run(job, directory / "job", timeout_s=TIMEOUT_S, env=env).require_success()
    records = list(read_records(directory / "job" / "checkpoints" / "nereus"))
    return {
        **evaluate(records, after),
        "background_share": share,
        "engine": engine,
        "load_average": os.getloadavg()[0],
        "measured_on": f"CPU/gloo, {os.cpu_count()} cores, "
        f"{platform.processor() or platform.machine()}",
        "versions": {name: version(name) for name in ("nereus-plugins", "verl", "torch", "ray")},
    }


def evaluate(records: Sequence[Record], after: Mapping[int, bool]) -> dict[str, Any]:
    """Medians. Args: after: by step of a transition, whether it was to be in the background."""
    transitions = {r.step: r for r in records if isinstance(r, TransitionRecord)}
    stages_s = {r.step: r.stages_s for r in records if isinstance(r, StepRecord)}
    generate_s = {step: stages["gen"] for step, stages in stages_s.items()}
    for step, in_background in after.items():
        record = transitions[step]
        if record.outcome != "committed" or ("hidden_s" in record.background) != in_background:
            raise RuntimeError(f"after step {step}: {record.outcome}, {record.background}")
    exposed_s: dict[bool, list[float]] = {True: [], False: []}
    for step, in_background in after.items():
        # The whole wait as the trainer saw it; in the background it is the next step's.
        stages = stages_s[step + 1 if in_background else step]
        exposed_s[in_background].append(stages["nereus_transition"])
    beside = [generate_s[step + 1] for step, in_background in after.items() if in_background]
    moving = {step + 1 for step, in_background in after.items() if in_background}
    alone = [s for step, s in generate_s.items() if step > WARM_UP_STEPS and step not in moving]
    first = transitions[WARM_UP_STEPS]
    hidden_steps = [step for step, in_background in after.items() if in_background]
    figures = {
        "exposed_s_background": statistics.median(exposed_s[True]),
        "exposed_s_blocking": statistics.median(exposed_s[False]),
        "generation_s_beside_a_transition": statistics.median(beside),
        "generation_s_alone": statistics.median(alone),
        "prepare_s_background": statistics.median(
            transitions[step].background["prepare_s"] for step in hidden_steps
        ),
        "release_s": statistics.median(t.seconds["release"] for t in transitions.values()),
        "state_bytes_received": sum(unit["bytes_wire"] for unit in first.units.values()),
        "transitions_of_each_kind": len(hidden_steps),
    }
    figures["exposed_ratio"] = figures["exposed_s_background"] / figures["exposed_s_blocking"]
    figures["generation_ratio"] = (
        figures["generation_s_beside_a_transition"] / figures["generation_s_alone"]
    )
    return figures


def _choose(module: ModuleType) -> None:
    """In the job's driver: in the background or not, step by step."""
    on_step_end = module.NereusTrainer.on_step_end
    blocking_after = set(json.loads(os.environ[BLOCKING_AFTER]))

    def on_step_end_as_chosen(trainer: Any) -> None:
        in_background = trainer.global_steps not in blocking_after
        object.__setattr__(trainer._job.checked.nereus, "background", in_background)
        on_step_end(trainer)

    module.NereusTrainer.on_step_end = on_step_end_as_chosen  # type: ignore[attr-defined]


if os.environ.get(BLOCKING_AFTER):
    after_import("nereus_verl.trainer", _choose)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--cycles", type=int, default=3, help="of four transitions")
    parser.add_argument("--share", type=float, default=0.25, help="nereus.background_share")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nereus-background-") as directory:
        figures = measure(args.engine, args.cycles, args.share, args.hidden, Path(directory))
    print(
        f"everything waits {figures['exposed_s_background']:.2f} s for a transition in the "
        f"background, {figures['exposed_s_blocking']:.2f} s for the same one blocking (ratio "
        f"{figures['exposed_ratio']:.2f}); generation beside it "
        f"{figures['generation_s_beside_a_transition']:.2f} s, alone "
        f"{figures['generation_s_alone']:.2f} s (ratio {figures['generation_ratio']:.3f}); "
        f"measured on {figures['measured_on']}, load {figures['load_average']:.1f}"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
