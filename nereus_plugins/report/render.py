"""Pages from comparisons and from runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.trace import files
from nereus_plugins.trace.record import Record

from .journal import read_journal, with_records
from .page import page
from .series import series_of

# By name, a run directory and its records.
Drawn = Mapping[str, tuple[Path, Sequence[Record]]]


def write_page(
    out: Path, kind: str, title: str, runs: Drawn, found: Mapping[str, Any] | None
) -> None:
    """Write the page of `runs`, with the figures of `found` where it is a comparison.

    Raises: OSError; SpecError: a controller's journal that cannot be read.
    """
    journals = [read_journal(path) for path, _ in runs.values()]
    series = [
        series_of(name, records, journal.capacity_bytes)
        for (name, (_, records)), journal in zip(runs.items(), journals, strict=True)
    ]
    text = page(
        kind,
        title,
        _subtitle(series[0].source, found, {one.name: len(one.step) for one in series}),
        _notes(found, series[0].run.config),
        series,
        found,
        [
            with_records(journal.predictions, records)
            for (_, records), journal in zip(runs.values(), journals, strict=True)
        ],
    )
    files.replace(out, (text,))


def _subtitle(source: str, found: Mapping[str, Any] | None, steps: Mapping[str, int]) -> str:
    if found and (trace := found.get("trace")):
        by = "step" if trace.get("indexed_by", "step") == "step" else "wall clock"
        seeds = found["seeds"]
        many = f"{len(seeds)} seeds from {seeds[0]}" if len(seeds) > 1 else f"seed {seeds[0]}"
        return (
            f"{trace['steps']:,} steps, conditions by {by}; {many}. Curves, plans and transitions "
            "are of the first seed."
        )
    listed = ", ".join(f"{name}: {count:,} steps" for name, count in steps.items())
    return f"{source}; {listed}"


def _notes(found: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[str]:
    note = (found or {}).get("trace", {}).get("note") or config.get("note")
    return [str(note)] if note else []
