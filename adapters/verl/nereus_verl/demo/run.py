"""`nereus demo`: verl trains with PPO on CPU; actor and critic change their layout meanwhile."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from nereus_cpu.task import make_task
from rich.console import Console

from nereus_plugins.trace.record import RECORDS_FILE, StepRecord, TransitionRecord
from nereus_verl.demo.launch import ENGINES, Job, JobResult, run
from nereus_verl.demo.watch import REWARD, Watcher

MEMORY_PER_RANK_BYTES = 1 << 30
OTHER_MEMORY_BYTES = 5 << 30  # Ray, trainer, rollout server, reward, queue
LEAST_RISE = 0.05  # of mean reward, from the steps before the first transition to the last steps
DEFAULT_STEPS = 20
RANKS = (2, 4)


@dataclass(frozen=True)
class Course:
    """start: a layout as in `Job.layout`; plans: those that follow, as in `nereus.schedule`."""

    start: Mapping[str, int]
    plans: Sequence[Mapping[str, Any]]


COURSES: Mapping[tuple[str, int], Course] = {
    ("megatron", 4): Course({"tp": 2}, [{"pp": 2}, {"dp": 4}]),  # TP2 DP2 -> PP2 DP2 -> DP4
    ("megatron", 2): Course({"tp": 2}, [{"pp": 2}, {"dp": 2}]),
    ("fsdp2", 4): Course({}, [{"shard_size": 2}, {"ulysses": 2}]),  # FSDP4 -> HSDP 2x2 -> Ulysses 2
    ("fsdp2", 2): Course({}, [{"ulysses": 2}, {"dp": 2}]),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if the job failed, a transition did not commit, or reward did not rise;
    130 after Ctrl-C, 143 after SIGTERM."""
    parser = argparse.ArgumentParser(prog="nereus demo", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="megatron")
    parser.add_argument(
        "--ranks", type=int, choices=RANKS, help="worker processes (default: by cores and memory)"
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="PPO iterations (default: %(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, help="where records and log go (default: a new directory)"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    if args.steps < 6:
        parser.error("--steps: at least 6, or there is nothing to see between two transitions")
    if not 0 < args.timeout < float("inf"):
        parser.error("--timeout: a number of seconds above 0")
    directory = args.dir or Path(tempfile.mkdtemp(prefix="nereus-demo-"))
    ranks = args.ranks or _ranks_for_this_machine()
    return _run(Console(width=max(Console().width, 100)), args, ranks, directory.resolve())


def demo_job(engine: str, ranks: int, steps: int, directory: Path) -> Job:
    """The demo's job: two transitions, after a third and after two thirds of the steps."""
    task = make_task(directory / "task", layers=2)
    course = COURSES[engine, ranks]
    at = [round(steps * (i + 1) / (len(course.plans) + 1)) for i in range(len(course.plans))]
    return Job(
        engine=engine,
        ranks=ranks,
        layout=course.start,
        model_dir=task.model_dir,
        train_file=task.train_file,
        test_file=task.test_file,
        reward_file=task.reward_file,
        steps=steps,
        batch_prompts=32,
        mini_batch_prompts=8,
        actor_lr=2e-2,
        critic_lr=3e-3,
        nereus={
            "schedule": dict(zip(at, course.plans, strict=True)),
            "run_dir": directory / "records",
        },
    )


def _run(console: Console, args: argparse.Namespace, ranks: int, directory: Path) -> int:
    console.print(
        "[bold]Nereus demo[/bold]: verl's own PPO trainer with actor and critic on CPU "
        f"({args.engine}, {ranks} ranks).\nA model of random weights learns to answer with 16 "
        "letters, or 16 symbols, as the prompt asks;\nmeanwhile the layout of actor and critic "
        "changes twice. "
        f"Log: {directory / 'job.log'}\n"
    )
    job = demo_job(args.engine, ranks, args.steps, directory)
    watcher = Watcher(console, directory / "records", args.steps)
    began_s = time.monotonic()
    if args.ranks is None and ranks < max(RANKS):
        console.print(
            f"[dim]{ranks} ranks, not {max(RANKS)}: this machine has "
            f"{len(os.sched_getaffinity(0))} core(s) and {_available_bytes() / 2**30:.0f} GiB "
            "free (--ranks sets it)[/dim]"
        )
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        result = run(job, directory, timeout_s=args.timeout, on_line=watcher.on_line)
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        console.print(
            f"\n{'terminated' if terminated else 'interrupted'}: the job and its Ray cluster were "
            f"ended; records so far are in {directory / 'records'}"
        )
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    watcher.finish()
    problems = judge(result, job, watcher.steps, watcher.transitions)
    if watcher.steps:
        console.print(f"\n[bold]{reward_line(watcher.steps, watcher.transitions)}[/bold]")
    console.print(
        f"{time.monotonic() - began_s:.0f} s. Records: {directory / 'records' / RECORDS_FILE}"
    )
    for problem in problems:
        console.print(f"[bold red]{problem}[/bold red]")
    if not problems:
        command = "nereus" if shutil.which("nereus") else "./dev run nereus"
        console.print(f"[dim]{command} records {directory / 'records'}[/dim] shows them again.")
    return 1 if problems else 0


class Terminated(KeyboardInterrupt):
    """SIGTERM came; what was started is ended as after Ctrl-C."""


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def judge(
    result: JobResult,
    job: Job,
    steps: Sequence[StepRecord],
    transitions: Sequence[TransitionRecord],
) -> list[str]:
    """What is wrong with a finished demo, in sentences; nothing if all is well."""
    if result.returncode != 0:
        tail = "\n".join(result.log.read_text(errors="replace").splitlines()[-15:])
        return [f"the job ended with status {result.returncode}; end of {result.log}:\n{tail}"]
    problems = [
        f"the transition after step {t.step} was {t.outcome}: {t.reason}"
        for t in transitions
        if t.outcome != "committed"
    ]
    assert job.nereus is not None
    if len(transitions) != len(job.nereus["schedule"]):
        problems.append(
            f"{len(transitions)} of {len(job.nereus['schedule'])} scheduled transitions took place"
        )
    if len(steps) != job.steps:
        problems.append(f"{len(steps)} of {job.steps} steps were recorded")
    means = segment_rewards(steps, transitions)
    if len(means) < 2 or means[-1] < means[0] + LEAST_RISE:
        problems.append(f"reward did not rise across the transitions: {means}")
    return problems


def segment_rewards(
    steps: Sequence[StepRecord], transitions: Sequence[TransitionRecord]
) -> list[float]:
    """Mean reward before the first transition, between two, and after the last."""
    bounds = [0, *(t.step for t in transitions), max((s.step for s in steps), default=0)]
    segments = [
        [s.metrics[REWARD] for s in steps if low < s.step <= high] for low, high in pairwise(bounds)
    ]
    return [mean(segment) for segment in segments if segment]


def reward_line(steps: Sequence[StepRecord], transitions: Sequence[TransitionRecord]) -> str:
    """Reward before, between and after the transitions."""
    means = segment_rewards(steps, transitions)
    return "mean reward in each layout: " + " -> ".join(f"{value:.3f}" for value in means)


def _ranks_for_this_machine() -> int:
    fits = _available_bytes() >= OTHER_MEMORY_BYTES + 4 * MEMORY_PER_RANK_BYTES
    return 4 if fits and len(os.sched_getaffinity(0)) >= 2 else 2


def _available_bytes() -> int:
    """Memory that Linux could give to new processes, page cache included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
