"""What the end-to-end tests share: the task, small jobs, which metrics must be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nereus_cpu.task import make_task
from nereus_verl.demo.launch import Job

TIMEOUT_S = 400.0
# Measurements of time and memory, and what Nereus adds to verl's metrics.
NOT_COMPARED = ("timing_", "perf/", "actor/perf/", "critic/perf/", "nereus/")


def small_job(
    directory: Path, engine: str, ranks: int, *, hidden: int = 64, **settings: Any
) -> Job:
    """A PPO job of two layers and two steps; `settings` are fields of `Job`."""
    task = make_task(directory, layers=2, hidden=hidden)
    fields: dict[str, Any] = {
        "steps": 2,
        "batch_prompts": 8,
        "mini_batch_prompts": 4,
        "model_dir": task.model_dir,
        "train_file": task.train_file,
        "test_file": task.test_file,
        "reward_file": task.reward_file,
    }
    return Job(engine=engine, ranks=ranks, **fields | settings)


def comparable(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that a run with equal seeds repeats: losses, rewards, norms, lengths."""
    return [
        {name: value for name, value in step.items() if not name.startswith(NOT_COMPARED)}
        for step in metrics
    ]


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    """Where two runs' comparable metrics are not the same bits; empty if nowhere."""
    if len(a) != len(b):
        return [f"{len(a)} steps and {len(b)} steps"]
    out = []
    for x, y in zip(comparable(a), comparable(b), strict=True):
        out += [f"step {x['step']}: {name}" for name in sorted(set(x) ^ set(y))]
        out += [
            f"step {x['step']}: {name}: {x[name]!r} and {y[name]!r}"
            for name in sorted(set(x) & set(y))
            if not _same(x[name], y[name])
        ]
    return out


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)
