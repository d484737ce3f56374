"""What a run's records say of it, in figures: the same for a live job and a simulated one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import (
    Record,
    RecordError,
    RunRecord,
    StepRecord,
    TransitionRecord,
    read_records,
)

SIMULATOR = "simulator"
# Metrics of a step: its ranks, where they can change; what a controller added to it.
WORLD_SIZE = "nereus/world_size"
CONTROLLER_MS = "nereus/controller_ms"
OTHER = "other"
# A stall's phases, as graph, driver and simulator name them, by the part that a reader asks for.
PARTS: Mapping[str, tuple[str, ...]] = {
    "planning": ("describe", "plan", "agree", "controller"),
    "groups": ("form_groups", "drop_groups", "groups"),
    "build": ("build",),
    "move": ("move", "verify", "sync_weights", "sync"),
    "snapshot": ("park", "fetch", "save", "load", "snapshot"),
    "ranks": ("claim", "join", "give_back", "follow"),
    "relaunch": ("relaunch", "rollout", "reconcile_rollout", "launch", "end", "adapters"),
}
_PART_OF = {phase: part for part, phases in PARTS.items() for phase in phases}


def read_run(path: Path) -> list[Record]:
    """The records of a run directory or file, of which there is at least a run and a step.

    Raises: SpecError naming the run and what is wrong with it.
    """
    try:
        records = list(read_records(path))
    except RecordError as error:
        raise SpecError(str(error)) from None
    except OSError as error:
        raise SpecError(f"{path}: no records of a run: {error.strerror or error}") from None
    if not any(isinstance(record, RunRecord) for record in records):
        raise SpecError(f"{path}: its records do not say what the run is (no run record)")
    if not any(isinstance(record, StepRecord) for record in records):
        raise SpecError(f"{path}: its records hold no finished step: nothing to compare")
    return records


def source_of(records: Sequence[Record]) -> str:
    """Where the records come from: "simulator", or the framework's name."""
    return next(record.source for record in records if isinstance(record, RunRecord))


def figures(records: Iterable[Record], last_step: int | None = None) -> dict[str, Any]:
    """One run, JSON-able.

    Args:
        last_step: leave out what comes after this step; default: nothing.

    Returns:
        steps: finished ones, those run again after a failure included.
        run_s: from the beginning of the first step to the end of the last, all transitions and
            failures included. run_s_per_step: the same over the number of different steps.
        step_s_mean, step_s_p50, step_s_p99: of steps alone, transitions left out.
        tokens_per_s_per_gpu: tokens of each step once, over the GPU seconds of the ranks in force.
        gpu_hours: of those ranks.
        transitions, restarts: committed ones. aborted: old layout trained on.
        transition_share: stall of both kinds, of run_s. stall_s, stall_parts_s: by phase, by part.
        each_transition: of the committed ones, step, stall_s, and limit_s (None where not known).
        stall_over_limit_mean, stall_over_limit_max: of those whose limit is known; None without.
        oom, failures: steps that ran out of memory, and that failed for any reason.
        failure_s: seconds lost by them until the job ran again, steps run again left out.
        controller_s_mean, controller_s_max: what a controller added to a step; None without one.
        reward_last: mean score over the last tenth of the steps, None where none is recorded.
    """
    kept = _until(list(records), last_step)
    steps = [r for r in kept if isinstance(r, StepRecord)]
    moves = [r for r in kept if isinstance(r, TransitionRecord)]
    committed = [r for r in moves if r.outcome == "committed"]
    restarts = [r for r in committed if "relaunch" in r.seconds]
    failed = [r for r in moves if r.outcome == "failed"]
    stall: dict[str, float] = {}
    for record in committed:
        for phase, spent in record.seconds.items():
            stall[phase] = stall.get(phase, 0.0) + spent
    alone_s = np.array([r.alone_s for r in steps])
    begin_s = steps[0].time_unix_s - steps[0].step_s
    run_s = steps[-1].time_unix_s - begin_s
    tokens = {r.step: r.tokens.get("total", 0) for r in steps}
    gpu_s = _gpu_seconds(kept, begin_s, steps[-1].time_unix_s)
    total_s = sum(r.stall_s for r in committed)
    over_limit = [r.stall_s / r.limit_s for r in committed if r.limit_s]
    controller_s = [r.metrics[CONTROLLER_MS] / 1e3 for r in steps if CONTROLLER_MS in r.metrics]
    begun = [r for r in kept if isinstance(r, RunRecord)]
    # A simulated job writes its restarts as transitions, and a run record after each.
    relaunched = 0 if source_of(kept) == SIMULATOR else len(begun) - 1
    return {
        "steps": len(steps),
        "run_s": run_s,
        "run_s_per_step": run_s / len(tokens),
        "step_s_mean": float(alone_s.mean()),
        "step_s_p50": float(np.quantile(alone_s, 0.5)),
        "step_s_p99": float(np.quantile(alone_s, 0.99)),
        "tokens_per_s_per_gpu": sum(tokens.values()) / gpu_s if gpu_s else 0.0,
        "gpu_hours": gpu_s / 3600.0,
        "transitions": len(committed) - len(restarts),
        "restarts": len(restarts) + relaunched,
        "aborted": sum(r.outcome == "aborted" for r in moves),
        "transition_share": total_s / run_s if run_s else 0.0,
        "stall_s": stall,
        "stall_parts_s": by_part(stall),
        "each_transition": [
            {"step": r.step, "stall_s": r.stall_s, "limit_s": r.limit_s} for r in committed
        ],
        "stall_over_limit_mean": float(np.mean(over_limit)) if over_limit else None,
        "stall_over_limit_max": max(over_limit, default=None),
        "oom": sum("out of memory" in r.reason.lower() for r in failed),
        "failures": len(failed),
        "failure_s": sum(r.stall_s for r in failed),
        "controller_s_mean": float(np.mean(controller_s)) if controller_s else None,
        "controller_s_max": max(controller_s, default=None),
        "reward_last": _reward_last(steps),
    }


def by_part(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase as seconds by part (`PARTS`, "other"); they add up to the stall.

    A phase with parts of its own gives these, as far as they are not longer than itself, and the
    rest of it.
    """
    out: dict[str, float] = {}

    def add(phase: str, spent: float, otherwise: str) -> None:
        part = _PART_OF.get(phase, otherwise)
        out[part] = out.get(part, 0.0) + spent

    for phase, whole in seconds.items():
        if "." in phase:
            continue
        inner = {k.partition(".")[2]: v for k, v in seconds.items() if k.startswith(f"{phase}.")}
        total = sum(inner.values())
        scale = min(1.0, whole / total) if total else 0.0
        part = _PART_OF.get(phase, OTHER)
        for name, spent in inner.items():
            add(name, scale * spent, part)
        add(phase, whole - scale * total, part)
    return {part: spent for part in (*PARTS, OTHER) if (spent := out.get(part, 0.0)) > 0}


def _until(records: Sequence[Record], last_step: int | None) -> Sequence[Record]:
    """Up to the end of `last_step`, where it was last run."""
    if last_step is None:
        return records
    ends = [
        index
        for index, record in enumerate(records)
        if isinstance(record, StepRecord) and record.step <= last_step
    ]
    return records[: ends[-1] + 1]


def _gpu_seconds(records: Iterable[Record], begin_s: float, end_s: float) -> float:
    """Ranks in force times seconds; while they change, the larger number."""
    total, now_s, ranks = 0.0, begin_s, 0
    for record in records:
        after, then_s = ranks, now_s
        if isinstance(record, RunRecord):
            after, then_s = record.world_size, record.time_unix_s
        elif isinstance(record, TransitionRecord):
            then_s = record.time_unix_s
            if record.outcome != "aborted":
                after = int(record.ranks.get("to", ranks))
        elif isinstance(record, StepRecord):
            after, then_s = int(record.metrics.get(WORLD_SIZE, ranks)), record.time_unix_s
        then_s = min(max(then_s, now_s), end_s)
        total += (then_s - now_s) * max(ranks, after)
        now_s, ranks = then_s, after
    return total


def _reward_last(steps: Sequence[StepRecord]) -> float | None:
    found = [r.reward for r in steps if r.reward is not None and np.isfinite(r.reward)]
    if not found:
        return None
    return float(np.mean(found[-max(1, len(found) // 10) :]))
