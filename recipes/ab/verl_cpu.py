"""The measured comparison, on CPU: a real verl GRPO job whose responses grow and whose ranks have a
memory budget, in fixed plans with Nereus off, and with the controller acting.

    ./dev run recipes/ab/verl_cpu.py DIR [--arms off,act] [--seeds 3]

Every arm starts from the same weights and sees the same prompts and seeds; `act` starts in the plan
of `off`. Records of each run lie under DIR/<arm>-<seed>/records; those of arms without Nereus are
imported from verl's console log. At the end stands the `nereus ab` command that compares them.
See verl_cpu.md here.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_cpu.arms import parser_for, run_arms
from nereus_cpu.memory import VARIABLE
from nereus_cpu.task import make_task
from nereus_verl.demo.launch import Job, JobResult, run

from nereus_plugins import cli

STEPS, RANKS, PROMPTS, SAMPLES = 16, 2, 8, 4
SHORT_TOKENS, LONG_TOKENS = 32, 256
LAYERS, HIDDEN = 4, 128
BUDGET_MIB = 90
# Steps take seconds, and memory fills within ten of them.
CONTROLLER = {"mode": "act", "dwell_steps": 2, "look_ahead_steps": 8}
TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Arm:
    """A fixed plan, or (controller) the plan that the controller starts in.

    budget_tokens: of a micro-batch of a rank. recompute: activations computed again in backward.
    """

    budget_tokens: int
    recompute: bool = False
    controller: bool = False


# The plan that is right at first, and every other that this job could be held in: a smaller token
# budget, recompute, or both.
ARMS: Mapping[str, Arm] = {
    "off": Arm(16384),
    "fixed-1024": Arm(1024),
    "fixed-512": Arm(512),
    "fixed-recompute": Arm(16384, recompute=True),
    "fixed-recompute-1024": Arm(1024, recompute=True),
    "act": Arm(16384, controller=True),
}


def job_of(arm: Arm, directory: Path, seed: int, longest: int) -> Job:
    """The job of an arm, whose responses may grow to `longest` tokens."""
    growth = [SHORT_TOKENS + (longest - SHORT_TOKENS) * s // (STEPS - 1) for s in range(STEPS)]
    task = make_task(
        directory / f"task-{seed}",
        layers=LAYERS,
        hidden=HIDDEN,
        seed=seed,
        response_limits=[tokens for tokens in growth for _ in range(PROMPTS)],
    )
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return Job(
        engine="fsdp2",
        ranks=RANKS,
        model_dir=task.model_dir,
        train_file=task.train_file,
        test_file=task.test_file,
        reward_file=task.reward_file,
        critic=False,
        steps=STEPS,
        batch_prompts=PROMPTS,
        samples_per_prompt=SAMPLES,
        mini_batch_prompts=PROMPTS,
        response_tokens=longest,
        seed=seed,
        nereus={"controller": CONTROLLER} if arm.controller else None,
        extra=[
            "data.shuffle=False",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={arm.recompute}",
            f"{actor}.use_dynamic_bsz=True",
            f"{actor}.ppo_max_token_len_per_gpu={arm.budget_tokens}",
            f"{rollout}.log_prob_use_dynamic_bsz=True",
            f"{rollout}.log_prob_max_token_len_per_gpu={arm.budget_tokens}",
            f"{rollout}.tensor_model_parallel_size=1",
        ],
    )


def run_arm(
    name: str, directory: Path, seed: int, budget_mib: float, longest: int
) -> tuple[JobResult, Path]:
    """Run one arm once; its result, and where its records are."""
    work = directory / f"{name}-{seed}"
    shutil.rmtree(work, ignore_errors=True)
    job = job_of(ARMS[name], directory, seed, longest)
    result = run(job, work, timeout_s=TIMEOUT_S, env={VARIABLE: f"{budget_mib:g}"})
    if ARMS[name].controller:
        return result, work / "checkpoints" / "nereus"
    records = work / "records" / "records.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    rows = str(PROMPTS * SAMPLES)
    asked = ["trace", "import", "verl", str(result.log), "-o", str(records)]
    if cli.main([*asked, "--samples", rows, "--gpus", str(RANKS), "--ran-here"]):
        raise RuntimeError(f"{result.log} could not be imported")
    return result, records.parent


def told(result: JobResult) -> dict[str, Any]:
    """What a person wants to know of a run at once."""
    metrics = result.metrics
    steps_s = [one["timing_s/step"] for one in metrics]
    return {
        "steps": len(metrics),
        "out_of_memory": "out of memory" in result.log.read_text(errors="replace"),
        "steps_s": sum(steps_s),
        "transitions_s": sum(one.get("nereus/transition/seconds", 0.0) for one in metrics),
        "reward": [one["critic/score/mean"] for one in metrics],
        "controller_ms_max": max(
            (one.get("nereus/controller_ms", 0.0) for one in metrics), default=0.0
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__, ARMS)
    parser.add_argument("--memory-mib", type=float, default=BUDGET_MIB, help="of a rank")
    parser.add_argument(
        "--longest",
        type=int,
        default=LONG_TOKENS,
        help=f"tokens of a response at the last step, at least {SHORT_TOKENS} (default: "
        f"%(default)s); {SHORT_TOKENS}: they do not grow, as in openrlhf_cpu.py",
    )
    args = parser.parse_args(argv)
    if args.longest < SHORT_TOKENS:
        parser.error(f"--longest must be at least {SHORT_TOKENS}")

    def run_one(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        result, records = run_arm(name, args.directory, seed, args.memory_mib, args.longest)
        return records, told(result)

    run_arms(parser, args, ARMS, run_one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
