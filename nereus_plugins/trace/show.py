"""`nereus records`: what a run's records say, as a table a person reads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from nereus_plugins.trace.record import (
    Record,
    RecordError,
    RunRecord,
    StepRecord,
    TransitionRecord,
    read_records,
)


def lines(records: Iterable[Record]) -> Iterable[str]:
    """One line per step, a short block per transition."""
    for record in records:
        if isinstance(record, RunRecord):
            versions = ", ".join(f"{k} {v}" for k, v in record.versions.items())
            yield f"run {record.run_id}: {record.source} on {record.world_size} ranks ({versions})"
            yield f"  plan {_plan(record.plan)}"
        elif isinstance(record, StepRecord):
            yield (
                f"step {record.step:5d}  epoch {record.epoch}  {record.step_s:8.2f} s  "
                f"{record.tokens.get('total', 0):>9d} tokens  {_plan(record.plan)}"
            )
        elif isinstance(record, TransitionRecord):
            total = sum(record.seconds.values())
            yield f"transition after step {record.step}: {record.outcome} in {total:.2f} s"
            if record.reason:
                yield f"  because {record.reason}"
            for name, unit in record.units.items():
                moved = unit.get("bytes_wire", 0)
                yield f"  {name}: {unit.get('from')} -> {unit.get('to')}, {moved:,} bytes moved"


def _plan(plan: Any) -> str:
    return ", ".join(f"{name} {layout}" for name, layout in plan.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nereus records", description=__doc__)
    parser.add_argument("run", help="a run directory, or a records.jsonl")
    parser.add_argument("--json", action="store_true", help="the records as they are, one a line")
    args = parser.parse_args(argv)
    try:
        if args.json:
            for record in read_records(args.run):
                print(json.dumps(record.to_dict()))
        else:
            for line in lines(read_records(args.run)):
                print(line)
    except (OSError, RecordError) as error:
        print(f"nereus records: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0
