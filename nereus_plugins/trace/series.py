"""Public series as CSV: GPUs over time, lengths over steps, a distribution of lengths.

A value that is not what its column says raises `SpecError` with file, line and column.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nereus_plugins.spec import SpecError

# A stretch of a polled series without an entry longer than this is a hole and cut out.
HOLE_S = 4 * 3600.0
# What the column of mean lengths may be called.
LENGTH_COLUMNS = ("mean_response_tokens", "response_length/mean")
# Points at which a distribution is kept: closer where it is steep.
PROBABILITIES = (
    0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97,
    0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 1.0,
)  # fmt: skip


class Availability(NamedTuple):
    """Instances over time. points: (second from 0, instances) ascending; holes: seconds cut out."""

    points: tuple[tuple[float, int], ...]
    duration_s: float
    holes_s: tuple[float, ...]

    @property
    def peak(self) -> int:
        return max(count for _, count in self.points)

    def least_between(self, start_s: float, end_s: float) -> int:
        """The fewest instances at any moment from `start_s` up to `end_s`."""
        least = self.points[0][1]
        for at, count in self.points:
            if at <= start_s:
                least = count
            elif at < end_s:
                least = min(least, count)
            else:
                break
        return least


class Lengths(NamedTuple):
    """Mean lengths of one run, in the order of steps."""

    run: str
    steps: tuple[int, ...]
    mean_tokens: tuple[float, ...]


def read_availability(path: Path) -> Availability:
    """Columns t_s and instances (polled), or t_s and instances_after_event (events, of which the
    last of a second counts).

    Raises: SpecError; OSError.
    """
    polled = True
    points: dict[float, int] = {}
    holes: list[float] = []
    before = 0.0
    shift = None
    for where, row in _rows(path, ("t_s",)):
        polled = "instances" in row
        column = "instances" if polled else "instances_after_event"
        if column not in row:
            raise SpecError(f"{path}:1: no column 'instances' or 'instances_after_event'")
        at = _number(row["t_s"], where, "t_s", 0.0)
        count = _number(row[column], where, column, 0.0)
        if count != int(count):
            raise SpecError(f"{where}: {column} must be a whole number, got {row[column]!r}")
        if shift is None:
            shift, before = at, at
        if at < before:
            raise SpecError(f"{where}: t_s={at:g} is before the line above it: sort the file")
        if polled and at - before > HOLE_S:
            holes.append(at - before)
            shift += at - before
        before = at
        points[at - shift] = int(count)
    if not points:
        raise SpecError(f"{path}: no row: nothing to read")
    listed = tuple(sorted(points.items()))
    if max(points.values()) == 0:
        raise SpecError(f"{path}: there is never an instance")
    return Availability(listed, listed[-1][0], tuple(holes))


def read_lengths(path: Path, run: str | None) -> Lengths:
    """Columns step and one of `LENGTH_COLUMNS`; run where the file holds several.

    Raises: SpecError naming the runs where none was chosen; OSError.
    """
    column = ""
    runs: dict[str, dict[int, float]] = {}
    for where, row in _rows(path, ("step",)):
        here = [name for name in LENGTH_COLUMNS if name in row]
        if not here:
            raise SpecError(f"{path}:1: no column {' or '.join(map(repr, LENGTH_COLUMNS))}")
        column = here[0]
        if not row[column]:
            continue
        step = _number(row["step"], where, "step", 0.0)
        if step != int(step):
            raise SpecError(f"{where}: step must be a whole number, got {row['step']!r}")
        mean = _number(row[column], where, column, 0.0)
        runs.setdefault(row.get("run", ""), {})[int(step)] = max(1.0, mean)
    if not runs:
        raise SpecError(f"{path}: no row with a length: nothing to read")
    names = sorted(runs)
    if run is None and len(runs) > 1:
        raise SpecError(f"{path}: holds runs {', '.join(names)}: choose one with --run")
    name = names[0] if run is None else run
    if name not in runs:
        held = ", ".join(filter(None, names))
        listed = f"holds {held}" if held else "names none: leave --run out"
        raise SpecError(f"{path}: no run {run!r}; the file {listed}")
    steps = sorted(runs[name])
    return Lengths(name, tuple(steps), tuple(runs[name][s] for s in steps))


def read_tail(path: Path, field: str = "output_tokens") -> tuple[tuple[float, float], ...]:
    """(probability, length over the mean) from a histogram (field, len_lo, len_hi_excl, share), or
    from quantiles by window (field, a column weight..., p1.0, p5.0, ...), mixed by weight.

    Raises: SpecError; OSError.
    """
    header = next(iter(_rows(path, ("field",))), None)
    if header is not None and any(_PERCENTILE.fullmatch(name) for name in header[1]):
        return _tail_of_quantiles(path, field)
    bins: list[tuple[float, float, float]] = []
    for where, row in _rows(path, ("field", "len_lo", "len_hi_excl", "share")):
        if row["field"] != field:
            continue
        low = _number(row["len_lo"], where, "len_lo", 0.0)
        high = _number(row["len_hi_excl"], where, "len_hi_excl", 0.0)
        share = _number(row["share"], where, "share", 0.0)
        if high <= low or (bins and low < bins[-1][1]):
            raise SpecError(f"{where}: bins must ascend and not overlap, got {low:g} to {high:g}")
        bins.append((low, high, share))
    total = sum(share for _, _, share in bins)
    if not total:
        raise SpecError(f"{path}: no share of field {field!r}: nothing to read")
    mean = sum(share * (low + high) / 2 for low, high, share in bins) / total
    out, passed, at = [], 0.0, 0
    for probability in PROBABILITIES:
        while at < len(bins) - 1 and (passed + bins[at][2]) / total < probability - 1e-12:
            passed += bins[at][2]
            at += 1
        low, high, share = bins[at]
        inside = (probability * total - passed) / share if share else 1.0
        length = low + (high - low) * min(1.0, max(0.0, inside))
        out.append((probability, round(length / mean, 5)))
    return tuple(out)


_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


def _tail_of_quantiles(path: Path, field: str) -> tuple[tuple[float, float], ...]:
    """The mixture of the windows' distributions, each linear between its quantiles."""
    windows: list[tuple[float, list[float], list[float]]] = []
    for where, row in _rows(path, ("field",)):
        if row["field"] != field:
            continue
        weights = [name for name in row if name.startswith("weight")]
        weight = _number(row[weights[0]], where, weights[0], 0.0) if weights else 1.0
        points = sorted(
            (float(match[1]) / 100.0, _number(row[name], where, name, 0.0))
            for name in row
            if (match := _PERCENTILE.fullmatch(name)) and 0 < float(match[1]) < 100
        )
        lengths = [length for _, length in points]
        if not points or lengths != sorted(lengths) or lengths[-1] <= 0:
            raise SpecError(f"{where}: quantiles p... must ascend and end above 0")
        shares = [p for p, _ in points]
        windows.append((weight, [0.0, *shares, 1.0], [lengths[0], *lengths, lengths[-1]]))
    total = sum(weight for weight, _, _ in windows)
    if not total:
        raise SpecError(f"{path}: no quantiles of field {field!r}: nothing to read")
    grid = np.unique(np.concatenate([lengths for _, _, lengths in windows]))
    grid = np.unique(np.concatenate([grid, np.geomspace(max(1.0, grid[0]), grid[-1], 400)]))
    below = sum(
        weight / total * np.interp(grid, lengths, shares, left=0.0, right=1.0)
        for weight, shares, lengths in windows
    )
    out = np.interp(PROBABILITIES, np.maximum.accumulate(below), grid)
    middle = (np.arange(4000) + 0.5) / 4000
    mean = float(np.interp(middle, PROBABILITIES, out).mean())
    return tuple(
        (p, round(float(length) / mean, 5)) for p, length in zip(PROBABILITIES, out, strict=True)
    )


def resampled(values: Sequence[float], count: int) -> list[float]:
    """`count` values, linear in between, from the first to the last."""
    if count == 1 or len(values) == 1:
        return [float(values[0])] * count
    out = []
    for i in range(count):
        at = i * (len(values) - 1) / (count - 1)
        low = min(int(at), len(values) - 2)
        out.append(values[low] + (values[low + 1] - values[low]) * (at - low))
    return out


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            for column in columns:
                if column not in names:
                    found = ", ".join(map(repr, names))[:200] or "none: the file is empty"
                    raise SpecError(f"{path}:1: no column {column!r}; it has {found}")
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise SpecError(f"{where}: {len(names)} values are expected")
                yield where, dict(row)
    except csv.Error as error:
        raise SpecError(f"{path}: not CSV: {error}") from None


def _number(text: str, where: str, column: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= 1e15):
        raise SpecError(f"{where}: column {column!r} must be a number of at least {least:g}, "
                        f"got {text[:60]!r}")  # fmt: skip
    return value
