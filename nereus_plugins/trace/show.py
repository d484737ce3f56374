"""`nereus records`: what a run's records say, as a table a person reads."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nereus_plugins.spec import Layout, SpecError
from nereus_plugins.trace.record import (
    Record,
    RecordError,
    RunRecord,
    StepRecord,
    TransitionRecord,
    read_records,
)


def lines(records: Iterable[Record]) -> Iterator[str]:
    """One line per step, a short block per transition, below the step that it follows."""
    waiting: list[TransitionRecord] = []
    last_step = 0
    for record in records:
        if isinstance(record, RunRecord):
            versions = ", ".join(f"{k} {v}" for k, v in record.versions.items())
            yield f"run {record.run_id}: {record.source} on {record.world_size} ranks ({versions})"
            if record.plan:
                yield f"  {_plan(record.plan)}"
        elif isinstance(record, StepRecord):
            reward = record.reward
            yield (
                f"step {record.step:5d}  epoch {record.epoch}  {record.step_s:8.2f} s  "
                f"{record.tokens.get('total', 0):>9,.0f} tokens  "
                + (f"reward {reward:.3f}  " if reward is not None else "")
                + _plan(record.plan)
            )
        elif isinstance(record, TransitionRecord):
            # Written at the boundary, before the record of the step that it ends; where it was
            # prepared in the background, after it.
            if record.step == last_step:
                yield from transition_lines(record)
            else:
                waiting.append(record)
        if isinstance(record, StepRecord):
            last_step = record.step
            for transition in waiting:
                yield from transition_lines(transition)
            waiting.clear()
    for transition in waiting:
        yield from transition_lines(transition)


def transition_lines(record: TransitionRecord) -> list[str]:
    """A short block. Raises: RecordError where what it shows is not of the schema."""
    out = [f"transition after step {record.step}: {record.outcome} in {record.stall_s:.2f} s"]
    if record.reason:
        out.append(f"  because {record.reason}")
    for name, part in _PARTS.items():
        try:
            out += part(record)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise RecordError(
                f"transition record after step {record.step}: field {name!r} is not of its schema: "
                f"{error!r}"
            ) from None
    return out


def _predicted(record: TransitionRecord) -> Iterator[str]:
    if "transition_s" in record.predicted:
        said = record.predicted
        then = [
            f"{word} {said[name]:.2f} s"
            for word, name in (("then steps of", "new_step_s"), ("instead of", "step_s"))
            if name in said
        ]
        yield f"  predicted: {said['transition_s']:.2f} s, {' '.join(then)}"


def _background(record: TransitionRecord) -> Iterator[str]:
    if "hidden_s" in record.background:
        yield f"  in the background: {record.background['hidden_s']:.2f} s more"
    elif record.background:
        yield f"  not in the background: {record.background['exposed']}"


def _ranks(record: TransitionRecord) -> Iterator[str]:
    if record.ranks:
        joined, left = (len(record.ranks[key]) for key in ("joined", "left"))
        yield (
            f"  ranks: {record.ranks['from']} -> {record.ranks['to']}, {joined} joined, {left} left"
        )


def _units(record: TransitionRecord) -> Iterator[str]:
    for name, unit in record.units.items():
        moved = unit.get("bytes_wire", 0)
        yield f"  {name}: {unit.get('from')} -> {unit.get('to')}, {moved:,} bytes moved"


def _knobs(record: TransitionRecord) -> Iterator[str]:
    for name, change in record.knobs.items():
        was, now = change["from"], change["to"]
        changed = [f"{k} {was.get(k)} -> {now.get(k)}" for k in now if was.get(k) != now.get(k)]
        yield f"  {name} knobs: {', '.join(changed)}"


def _rollout(record: TransitionRecord) -> Iterator[str]:
    if record.rollout:
        numbers = (
            f"{len(record.rollout[key])} {key}"
            for key in ("kept", "ended", "launched")
            if record.rollout[key]
        )
        yield (
            f"  rollout: tp {record.rollout['from']['tp']} -> {record.rollout['to']['tp']}, "
            f"replicas: {', '.join(numbers)}"
        )


# In the order in which they are shown; by field, so that one that cannot be shown is named.
_PARTS: Mapping[str, Callable[[TransitionRecord], Iterator[str]]] = {
    "predicted": _predicted,
    "background": _background,
    "ranks": _ranks,
    "units": _units,
    "knobs": _knobs,
    "rollout": _rollout,
}


def _plan(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {layout_text(layout)}" for name, layout in plan.items())


def layout_text(value: Any) -> str:
    """A layout in a record, in words."""
    try:
        return str(Layout.from_dict(value))
    except SpecError:  # a plan of another shape: as it stands
        return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nereus records", description=__doc__)
    parser.add_argument("run", help="a run directory, or a records.jsonl")
    parser.add_argument("--json", action="store_true", help="the records as they are, one a line")
    args = parser.parse_args(argv)
    try:
        records = read_records(args.run)
        said = False
        for line in (json.dumps(r.to_dict()) for r in records) if args.json else lines(records):
            print(line)
            said = True
        if not said:
            print(f"nereus records: {args.run}: no record yet", file=sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, RecordError) as error:
        print(f"nereus records: {error}", file=sys.stderr)
        return 2
    return 0
