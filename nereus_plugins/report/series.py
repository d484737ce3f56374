"""A run's records as what a page draws: columns by step, spans of plans, events."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.trace.record import (
    SNAPSHOT_TIMER,
    TRANSITION_TIMER,
    Record,
    RunRecord,
    StepRecord,
    TransitionRecord,
)
from nereus_plugins.trace.show import layout_text

from .figures import WORLD_SIZE, source_of

Column = NDArray[np.float64]

# Timers that do not hold each other, in the order in which they run: verl's, and `reward_score`, of
# a reward model alone.
STAGES = (
    "gen",
    "reward",
    "reward_score",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
)
OTHER_STAGE, AGAIN = "rest of the step", "steps run again"
TRANSITIONS, RESTARTS, FAILURES = "transitions", "restarts", "failures"


class Span(NamedTuple):
    """Steps `first` to `last` (both included) in one layout. fields: as the record has it."""

    first: int
    last: int
    text: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """One run.

    Attributes:
        name, source: of the run.
        step: int[n], ascending; of a step that was run again, the last time counts.
        columns: float64[n] each, nan where a step does not say: "step_s", "response_mean",
            "response_max", "gpus_used", "gpus_there", "memory_bytes", "headroom_bytes", "reward".
        capacity_bytes: of a device; None where nothing says.
        stages_s: where the time of all steps went, by stage, failures and stalls included.
        plan: by unit, spans in order.
        transitions: of every outcome, in order.
        run: the first run record.
    """

    name: str
    source: str
    step: NDArray[np.int64]
    columns: Mapping[str, Column]
    capacity_bytes: float | None
    stages_s: Mapping[str, float]
    plan: Mapping[str, Sequence[Span]]
    transitions: Sequence[TransitionRecord]
    run: RunRecord


def series_of(name: str, records: Sequence[Record], capacity_bytes: float | None = None) -> Series:
    """Of records with a run and a step (`figures.read_run`).

    capacity_bytes: of a device, where the records do not say.
    """
    every = [r for r in records if isinstance(r, StepRecord)]
    last = {r.step: r for r in every}
    steps = [last[step] for step in sorted(last)]
    moves = [r for r in records if isinstance(r, TransitionRecord)]
    run = next(r for r in records if isinstance(r, RunRecord))
    capacity = run.config.get("device_memory_bytes", capacity_bytes)
    return Series(
        name=name,
        source=source_of(records),
        step=np.array([r.step for r in steps]),
        columns=_columns(steps, _ranks(records), capacity),
        capacity_bytes=capacity,
        stages_s=_stages(every, steps, moves),
        plan=_plan(steps),
        transitions=moves,
        run=run,
    )


def _columns(
    steps: Sequence[StepRecord], ranks: Mapping[int, int], capacity_bytes: float | None
) -> dict[str, Column]:
    def metric(*names: str) -> Column:
        return np.array(
            [next((r.metrics[n] for n in names if n in r.metrics), np.nan) for r in steps], float
        )

    used = np.array([r.metrics.get(WORLD_SIZE, ranks[r.step]) for r in steps], float)
    # A job that says nothing of other GPUs has those that it uses.
    there = metric("nereus/gpus_there")
    peaks = [r.memory_bytes.get("reserved", r.memory_bytes.get("allocated")) for r in steps]
    memory = np.array([peak or np.nan for peak in peaks], float)  # 0: nothing was counted
    return {
        "step_s": np.array([r.alone_s for r in steps], float),
        "response_mean": metric("response_length/mean", "rollout/response_length_mean"),
        "response_max": metric("response_length/max"),
        "gpus_used": used,
        "gpus_there": np.where(np.isnan(there), used, there),
        "memory_bytes": memory,
        "headroom_bytes": (np.nan if capacity_bytes is None else capacity_bytes) - memory,
        "reward": np.array([np.nan if r.reward is None else r.reward for r in steps], float),
    }


def _ranks(records: Sequence[Record]) -> dict[int, int]:
    """Ranks of every step, from the run's record and what transitions changed."""
    out: dict[int, int] = {}
    now = 0
    for record in records:
        if isinstance(record, RunRecord):
            now = record.world_size
        elif isinstance(record, TransitionRecord) and record.outcome == "committed":
            now = int(record.ranks.get("to", now))
        elif isinstance(record, StepRecord):
            out[record.step] = now
    return out


def _stages(
    every: Sequence[StepRecord], steps: Sequence[StepRecord], moves: Sequence[TransitionRecord]
) -> dict[str, float]:
    out = dict.fromkeys((*STAGES, OTHER_STAGE), 0.0)
    for record in steps:
        rest = record.alone_s
        # Stages that run side by side take together what the step took.
        each = {n: record.stages_s[n] for n in STAGES if record.stages_s.get(n, 0.0) > 0}
        scale = min(1.0, rest / total) if (total := sum(each.values())) else 1.0
        for name, spent in each.items():
            out[name] += scale * spent
            rest -= scale * spent
        out[OTHER_STAGE] += max(0.0, rest) + record.stages_s.get(SNAPSHOT_TIMER, 0.0)
    out[AGAIN] = sum(r.step_s for r in every) - sum(r.step_s for r in steps)
    committed = [r for r in moves if r.outcome == "committed"]
    restarts = [r for r in committed if "relaunch" in r.seconds]
    out[RESTARTS] = sum(r.stall_s for r in restarts)
    out[TRANSITIONS] = sum(r.stall_s for r in committed) - out[RESTARTS]
    out[FAILURES] = sum(r.stall_s for r in moves if r.outcome == "failed")
    # What verl's timer holds of transitions that did not commit.
    timed = sum(r.stages_s.get(TRANSITION_TIMER, 0.0) for r in every)
    out[TRANSITIONS] = max(out[TRANSITIONS], timed)
    least = 1e-6 * sum(out.values())
    return {name: spent for name, spent in out.items() if spent > least}


def _plan(steps: Sequence[StepRecord]) -> dict[str, list[Span]]:
    out: dict[str, list[Span]] = {}
    for record in steps:
        for unit, fields in record.plan.items():
            spans = out.setdefault(unit, [])
            if spans and spans[-1].last == record.step - 1 and spans[-1].fields == fields:
                spans[-1] = spans[-1]._replace(last=record.step)
            else:
                spans.append(Span(record.step, record.step, layout_text(fields), fields))
    return out


class Bins(NamedTuple):
    """Columns of a series in at most so many bins. step: the middle one of each bin."""

    step: Column
    mean: Column
    low: Column
    high: Column


def binned(step: NDArray[np.int64], values: Column, most: int) -> Bins:
    """Least, mean and greatest of neighbouring steps, steps without a finite value left out."""
    there = np.isfinite(values)
    step, values = step[there], values[there]
    size = max(1, -(-len(step) // most))
    starts = np.arange(0, len(step), size)
    if not len(starts):
        none = np.zeros(0)
        return Bins(none, none, none, none)
    counts = np.diff(np.append(starts, len(step)))
    return Bins(
        np.add.reduceat(step.astype(float), starts) / counts,
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
