"""Runs as a Chrome trace (JSON object format), which Perfetto and chrome://tracing open.

A process is a run; its threads are steps, each stage, transitions, and each unit of a transition.
Stages' begins are not recorded: they are drawn in the order in which the frameworks run them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nereus_plugins.trace.record import (
    TRANSITION_TIMER,
    Record,
    RunRecord,
    StepRecord,
    TransitionRecord,
)

from .figures import WORLD_SIZE, source_of
from .series import STAGES
from .timeline import JOB, bars

_STEPS, _TRANSITIONS = "steps", "transitions"


def chrome_trace(runs: Mapping[str, Sequence[Record]], kind: str) -> dict[str, Any]:
    """The trace, JSON-able. Times are microseconds from the beginning of each run."""
    events = [
        event
        for process, (name, records) in enumerate(runs.items(), start=1)
        for event in _events(process, name, records)
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "kind": kind,
            "note": "order of stages within a step, and of units within a phase, is assumed",
        },
    }


def text(runs: Mapping[str, Sequence[Record]], kind: str) -> Iterator[str]:
    """As JSON, an event a line."""
    whole = chrome_trace(runs, kind)
    events = whole.pop("traceEvents")
    yield json.dumps(whole)[:-1] + ', "traceEvents": [\n'
    yield ",\n".join(json.dumps(event, separators=(",", ":"), default=str) for event in events)
    yield "\n]}\n"


class _Threads:
    """Numbers of a process's threads, in order of appearance."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._number: dict[str, int] = {}

    def span(
        self, thread: str, name: str, begin_s: float, spent_s: float, **details: Any
    ) -> dict[str, Any]:
        number = self._number.setdefault(thread, len(self._number) + 1)
        return {
            "ph": "X",
            "pid": self.process,
            "tid": number,
            "name": name,
            "ts": round(begin_s * 1e6, 3),
            "dur": round(spent_s * 1e6, 3),
            "args": details,
        }

    def counter(self, name: str, at_s: float, **values: float) -> dict[str, Any]:
        return {
            "ph": "C",
            "pid": self.process,
            "name": name,
            "ts": round(at_s * 1e6, 3),
            "args": values,
        }

    def names(self, process: str) -> Iterator[dict[str, Any]]:
        yield _name(self.process, 0, "process_name", process)
        for thread, number in self._number.items():
            yield _name(self.process, number, "thread_name", thread)


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _events(process: int, name: str, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    threads = _Threads(process)
    start_s = _start_s(records)
    for record in records:
        if isinstance(record, StepRecord):
            yield from _step(threads, record, start_s)
        elif isinstance(record, TransitionRecord):
            yield from _transition(threads, record, start_s)
    yield from threads.names(f"{name} ({source_of(records)})")


def _start_s(records: Sequence[Record]) -> float:
    """The earliest begin of anything."""
    starts = [r.time_unix_s - r.step_s for r in records if isinstance(r, StepRecord)]
    starts += [r.time_unix_s - r.stall_s for r in records if isinstance(r, TransitionRecord)]
    starts += [r.time_unix_s for r in records if isinstance(r, RunRecord)]
    return min(starts)


def _step(threads: _Threads, record: StepRecord, start_s: float) -> Iterator[dict[str, Any]]:
    end_s = record.time_unix_s - start_s
    begin_s = end_s - record.step_s
    yield threads.span(
        _STEPS, f"step {record.step}", begin_s, record.step_s,
        epoch=record.epoch, tokens=dict(record.tokens), plan=dict(record.plan),
    )  # fmt: skip
    now_s = begin_s + record.stages_s.get(TRANSITION_TIMER, 0.0)
    for stage in STAGES:
        spent_s = record.stages_s.get(stage, 0.0)
        if spent_s > 0:
            # Stages that run side by side do not reach beyond their step.
            at_s = max(begin_s, min(now_s, end_s - spent_s))
            yield threads.span(stage, stage, at_s, spent_s, step=record.step)
            now_s = at_s + spent_s
    gpus = {
        what: float(record.metrics[metric])
        for what, metric in (("used", WORLD_SIZE), ("there", "nereus/gpus_there"))
        if metric in record.metrics
    }
    if gpus:
        yield threads.counter("GPUs", begin_s, **gpus)
    if "response_length/mean" in record.metrics:
        mean = float(record.metrics["response_length/mean"])
        yield threads.counter("mean response tokens", begin_s, tokens=mean)
    if record.memory_bytes:
        peaks = {k: float(v) for k, v in record.memory_bytes.items() if k != "process_groups"}
        yield threads.counter("peak memory, bytes", begin_s, **peaks)


def _transition(
    threads: _Threads, record: TransitionRecord, start_s: float
) -> Iterator[dict[str, Any]]:
    whole_s = record.stall_s
    begin_s = record.time_unix_s - start_s - whole_s
    yield threads.span(
        _TRANSITIONS, f"{record.outcome} after step {record.step}", begin_s, whole_s,
        reason=record.reason, epoch=record.epoch,
        units={n: f"{u.get('from')} -> {u.get('to')}" for n, u in record.units.items()
               if isinstance(u, Mapping)},
    )  # fmt: skip
    for bar in bars(record):
        thread = f"{_TRANSITIONS}: {'phases' if bar.row == JOB else bar.row}"
        yield threads.span(thread, bar.phase, begin_s + bar.begin_s, bar.end_s - bar.begin_s)
