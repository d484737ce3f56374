"""Jobs that have run, side by side, from their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import Record, RunRecord, StepRecord, TransitionRecord

from .figures import SIMULATOR, figures, read_run, source_of

# What run time is counted by.
CLOCK = "clock"
TIMERS = "timers of steps: some records have no time of day, so nothing between steps is counted"

# By name, the run directories (or records) of its runs; those of one place are a pair.
Named = Mapping[str, Sequence[Path]]
# By name, the records of its runs.
Read = Mapping[str, Sequence[Sequence[Record]]]


def named_runs(given: Sequence[str], named: Sequence[str]) -> dict[str, list[Path]]:
    """Names and paths from the command line.

    Args:
        given: run directories, each a name of its own.
        named: "name=dir[,dir...]".

    Raises: SpecError: a name twice, a run that has no name or no path.
    """
    out: dict[str, list[Path]] = {}
    for text in given:
        path = Path(text)
        name = path.resolve().parent.name if path.is_file() else path.resolve().name
        if name in out:
            raise SpecError(f"two runs are called {name!r}: use --runs NAME=DIR --runs NAME=DIR")
        out[name] = [path]
    for text in named:
        name, _, paths = text.partition("=")
        found = [Path(part) for part in paths.split(",") if part]
        if not name.strip() or not found:
            raise SpecError(f"--runs {text!r}: must be NAME=DIR, or NAME=DIR,DIR for several seeds")
        if name.strip() in out:
            raise SpecError(f"--runs: two runs are called {name.strip()!r}: join them as NAME=A,B")
        out[name.strip()] = found
    return out


def read_all(named: Named) -> tuple[str, Read]:
    """("measured" or "simulated", records by name).

    Raises: SpecError: records that cannot be read, or measured and simulated ones together.
    """
    records = {name: [read_run(path) for path in paths] for name, paths in named.items()}
    kinds: dict[str, str] = {}
    for name, runs in records.items():
        for path, run in zip(named[name], runs, strict=True):
            kind = "simulated" if source_of(run) == SIMULATOR else "measured"
            kinds.setdefault(kind, str(path))
    if len(kinds) > 1:
        raise SpecError(
            f"{kinds['simulated']} was simulated and {kinds['measured']} was measured: the two are "
            "never put side by side; compare each kind for itself"
        )
    return next(iter(kinds)), records


def last_common_step(records: Read) -> int:
    """The last step that every run has finished.

    Raises: SpecError: there is none.
    """
    each = [
        {r.step for r in run if isinstance(r, StepRecord)}
        for runs in records.values()
        for run in runs
    ]
    common = set.intersection(*each)
    if not common:
        raise SpecError("these runs have no step in common: nothing can be compared")
    return max(common)


def figures_of(records: Read) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """(what time is counted by, by name the figures of each run up to the last step that all have).

    Time is the clock's; where a run has none (a console log's import), that of the frameworks'
    timers of steps, for all runs alike. `ended_early` says of a run that others went on, else "".
    """
    last = last_common_step(records)
    every = [run for runs in records.values() for run in runs]
    ends = max(_last_step(run) for run in every)
    by = CLOCK if all(_has_clock(run) for run in every) else TIMERS
    found: dict[str, list[dict[str, Any]]] = {}
    for name, runs in records.items():
        found[name] = []
        for run in runs:
            own = _last_step(run)
            early = f"its last step was {own}, another run's {ends}" if own < ends else ""
            counted = run if by == CLOCK else retimed(run)
            found[name].append(figures(counted, last) | {"ended_early": early})
    return by, found


def _last_step(run: Sequence[Record]) -> int:
    return max(r.step for r in run if isinstance(r, StepRecord))


def _has_clock(run: Sequence[Record]) -> bool:
    """Imports of logs without times of day count from 0; so do simulated runs, whose clock is
    their own."""
    first = next(r for r in run if isinstance(r, RunRecord))
    return first.source == SIMULATOR or first.time_unix_s > 0.0


def retimed(run: Sequence[Record]) -> list[Record]:
    """The records with the times that they have if nothing passes between steps."""
    out: list[Record] = []
    now_s = 0.0
    for record in run:
        if isinstance(record, StepRecord):
            now_s += record.step_s
        if isinstance(record, (RunRecord, StepRecord, TransitionRecord)):
            record = dataclasses.replace(record, time_unix_s=now_s)
        out.append(record)
    return out


def described(named: Named, records: Read) -> dict[str, Any]:
    """By name, what each run says of itself: path, source, versions, ranks, plan, configuration."""
    out: dict[str, Any] = {}
    for name, runs in records.items():
        out[name] = []
        for path, run in zip(named[name], runs, strict=True):
            first = next(r for r in run if isinstance(r, RunRecord))
            steps = [r.step for r in run if isinstance(r, StepRecord)]
            out[name].append(
                {
                    "path": str(path),
                    "run_id": first.run_id,
                    "source": first.source,
                    "versions": dict(first.versions),
                    "world_size": first.world_size,
                    "plan": dict(first.plan),
                    "config": dict(first.config),
                    "steps": [min(steps), max(steps)],
                }
            )
    return out
