"""The OpenRLHF side of the measured comparison, on CPU: a real GRPO job, plain and with Nereus.

    ./dev env openrlhf
    .venvs/openrlhf/bin/python recipes/ab/openrlhf_cpu.py DIR [--arms plain,nereus] [--seeds 3]

Model, data, batch and seeds are those of the verl jobs that `verl_cpu.py --longest 32` runs here.
`plain` is OpenRLHF's own launcher, whose console log is imported; `nereus` changes its layout by
a schedule. Records of each run lie under DIR/<arm>-<seed>/. At the end stands the `nereus ab`
command that compares them; runs of verl can be put beside them (see README.md here).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_cpu.arms import parser_for, run_arms
from nereus_cpu.task import make_task
from nereus_openrlhf import demo

from nereus_plugins import cli
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records

STEPS, RANKS, PROMPTS, SAMPLES, TOKENS = 8, 2, 8, 4, 32
LAYERS, HIDDEN = 4, 128
TIMEOUT_S = 600.0
# In which layout from which step on, by arm; None is OpenRLHF without Nereus. Models and engines
# share GPUs here, so that the sharding is what can change.
ARMS: Mapping[str, Mapping[int, Any] | None] = {
    "plain": None,
    "nereus": {STEPS // 2: {"sharding": "zero3"}},
}


def arguments(directory: Path, work: Path, seed: int) -> list[str]:
    """OpenRLHF's: what verl_cpu.py has for verl (GRPO without reference or critic, one optimizer
    step of all samples, the actor and two rollout engines on two ranks), where both have it."""
    task = make_task(directory / f"task-{seed}", layers=LAYERS, hidden=HIDDEN, seed=seed)
    samples = PROMPTS * SAMPLES
    return f"""--actor.model_name_or_path {task.model_dir}
        --reward.remote_url {task.reward_file} --train.seed {seed}
        --data.prompt_dataset {task.prompts_file} --data.input_key prompt --data.label_key label
        --data.apply_chat_template --data.max_samples {STEPS * PROMPTS} --data.max_len {64 + TOKENS}
        --rollout.max_new_tokens {TOKENS} --rollout.batch_size {PROMPTS}
        --rollout.n_samples_per_prompt {SAMPLES} --rollout.micro_batch_size {samples // RANKS}
        --train.batch_size {samples} --train.micro_batch_size {samples // RANKS}
        --algo.advantage.estimator group_norm --algo.kl.init_coef 0
        --actor.adam.lr 1e-3 --actor.adam.betas 0.9 0.999 --actor.adam.weight_decay 0.01
        --actor.lr_scheduler constant
        --train.colocate_all --actor.num_gpus_per_node {RANKS} --ds.zero_stage 2
        --ds.attn_implementation eager
        --vllm.num_engines {RANKS} --vllm.sync_backend gloo --vllm.enforce_eager
        --ckpt.output_dir {work / "final"} --ckpt.path {work / "checkpoints"}""".split()


def run_arm(name: str, directory: Path, seed: int) -> Path:
    """Run one arm once; where its records are.

    Raises: RuntimeError with the log's end, if the job failed or its log could not be imported.
    """
    work = directory / f"{name}-{seed}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    words, log, schedule = arguments(directory, work, seed), work / "job.log", ARMS[name]
    run_dir = work / "records"
    if schedule is not None:
        words += ["--nereus.enable", "--nereus.run_dir", str(run_dir)]
        words += ["--nereus.schedule", json.dumps(schedule)]
    status = demo.run(work, words, log, TIMEOUT_S)
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"OpenRLHF ended with {status}; log {log}, its end:\n{tail}")
    if schedule is None:
        import_log(log, run_dir / "records.jsonl")
    return run_dir


def import_log(log: Path, records: Path) -> None:
    """The console log of a job that ran here, as records. Raises: RuntimeError."""
    records.parent.mkdir(parents=True, exist_ok=True)
    asked = ["trace", "import", "openrlhf", str(log), "-o", str(records)]
    if cli.main([*asked, "--gpus", str(RANKS), "--ran-here"]):
        raise RuntimeError(f"{log} could not be imported")


def told(run_dir: Path) -> dict[str, Any]:
    """What a person wants to know of a run at once."""
    records = list(read_records(run_dir))
    steps = [one for one in records if isinstance(one, StepRecord)]
    done = [one for one in records if isinstance(one, TransitionRecord)]
    return {
        "steps": len(steps),
        "steps_s": sum(one.alone_s for one in steps),
        "transitions": [one.outcome for one in done],
        "transitions_s": sum(one.stall_s for one in done),
        "reward": [one.reward for one in steps],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__, ARMS)
    args = parser.parse_args(argv)
    directory = args.directory.absolute()

    def run(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        run_dir = run_arm(name, directory, seed)
        return run_dir, told(run_dir)

    run_arms(parser, args, ARMS, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
