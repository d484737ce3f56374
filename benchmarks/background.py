"""What is left of a transition that is prepared in the background, in one verl job.

    python benchmarks/background.py [--json] [--engine fsdp2|megatron] [--cycles N] [--share S]

Runs verl's main_ppo (PPO with critic, CPU) once. Actor and critic go to another layout and back,
half of the times in the background and half at the boundary, in both directions alike, the order
turned round. After each, two steps go by before the step that ends with the next one:

- exposed: seconds that everything waited for a transition, background against blocking, medians;
- generation, per token of the longest response, in the step after the transition (beside its
  preparation, if that was in the background) and in the one after that (beside the garbage that it
  left), each against the third step of the same transition, which has nothing beside it. After a
  blocking transition there is nothing beside any of them: what its ratios differ from 1 is noise;
- three steps: their seconds as a whole with a transition of each kind.
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
from nereus_cpu.task import make_task
from nereus_verl.demo.launch import ENGINES, Job, run

from nereus_plugins.trace.record import Record, StepRecord, TransitionRecord, read_records

WARM_UP_STEPS = 2
STEPS_EACH = 3  # beside the preparation, beside the garbage, beside nothing
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
    kinds = CYCLE * cycles
    after = {WARM_UP_STEPS + STEPS_EACH * i: kind for i, kind in enumerate(kinds)}
    schedule = {step: (THERE, BACK)[i % 2][engine] for i, step in enumerate(after)}
    job = Job(
        engine=engine,
        ranks=2,
        steps=max(after) + STEPS_EACH,
        actor_lr=1e-6,  # responses stay as long as they are
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
    steps = {r.step: r for r in records if isinstance(r, StepRecord)}
    for step, in_background in after.items():
        record = transitions[step]
        if record.outcome != "committed" or ("hidden_s" in record.background) != in_background:
            raise RuntimeError(f"after step {step}: {record.outcome}, {record.background}")
    generation_s = {
        step: record.stages_s["gen"] / record.metrics["response_length/max"]
        for step, record in steps.items()
    }

    def exposed_s(step: int) -> float:
        """The whole wait as the trainer saw it; in the background it is the next step's."""
        return steps[step + 1 if after[step] else step].stages_s["nereus_transition"]

    def slowdown(step: int, nth: int) -> float:
        return generation_s[step + nth] / generation_s[step + STEPS_EACH]

    def whole_s(step: int) -> float:
        """From the end of the update of `step` to that of the last step of the transition."""
        between = steps[step].stages_s["nereus_transition"] if not after[step] else 0.0
        return between + sum(steps[step + n].step_s for n in range(1, STEPS_EACH))

    figures: dict[str, Any] = {}
    for kind, name in ((True, "background"), (False, "blocking")):
        at = [step for step in after if after[step] == kind]
        figures |= {
            f"exposed_s_{name}": statistics.median(map(exposed_s, at)),
            f"whole_s_{name}": statistics.median(map(whole_s, at)),
            f"generation_ratios_{name}": [round(slowdown(step, 1), 3) for step in at],
            f"generation_ratio_{name}": statistics.median(slowdown(step, 1) for step in at),
            f"next_generation_ratio_{name}": statistics.median(slowdown(step, 2) for step in at),
            f"seconds_{name}": {
                phase: statistics.median(transitions[step].seconds[phase] for step in at)
                for phase in transitions[at[0]].seconds
            },
        }
    hidden = [transitions[step] for step in after if after[step]]
    figures |= {
        "exposed_ratio": figures["exposed_s_background"] / figures["exposed_s_blocking"],
        "generation_s": statistics.median(steps[s + STEPS_EACH].stages_s["gen"] for s in after),
        "prepare_s_background": statistics.median(t.background["prepare_s"] for t in hidden),
        "state_bytes_received": sum(unit["bytes_wire"] for unit in hidden[0].units.values()),
        "transitions_of_each_kind": len(hidden),
    }
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
    parser.add_argument("--cycles", type=int, default=2, help="of four transitions")
    parser.add_argument("--share", type=float, default=0.25, help="nereus.background_share")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nereus-background-") as directory:
        figures = measure(args.engine, args.cycles, args.share, args.hidden, Path(directory))
    print(
        f"everything waits {figures['exposed_s_background']:.2f} s for a transition in the "
        f"background, {figures['exposed_s_blocking']:.2f} s for the same one blocking (ratio "
        f"{figures['exposed_ratio']:.2f}); generation ({figures['generation_s']:.1f} s) takes "
        f"{figures['generation_ratio_background']:.2f} times as long beside the preparation "
        f"({figures['prepare_s_background']:.1f} s), "
        f"{figures['next_generation_ratio_background']:.2f} times beside its garbage "
        f"(noise: {figures['generation_ratio_blocking']:.2f}, "
        f"{figures['next_generation_ratio_blocking']:.2f}); as a whole "
        f"{figures['whole_s_background']:.2f} s against {figures['whole_s_blocking']:.2f} s; "
        f"measured on {figures['measured_on']}, load {figures['load_average']:.1f}"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
