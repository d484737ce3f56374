"""When which part of a transition ran, as far as its record says: phases one after the other.

A record holds the seconds of each phase in the order in which they ran, and of each unit within a
phase, but not when in a phase a unit began. Units are drawn one after the other where their seconds
fit into the phase, and side by side where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nereus_plugins.gtg.graph import Step
from nereus_plugins.trace.record import TransitionRecord

JOB = "job"
_ORDER = {step.value: index for index, step in enumerate(Step)}


class Bar(NamedTuple):
    """row: "job", or a unit's name. depth: 0 a phase, 1 a part of one. Seconds from when everything
    waited; what was prepared in the background lies before 0."""

    row: str
    phase: str
    begin_s: float
    end_s: float
    depth: int


def bars(record: TransitionRecord) -> list[Bar]:
    """What ran when; see the module's docstring."""
    out: list[Bar] = []
    windows: dict[str, tuple[float, float]] = {}
    hidden_s = float(record.background.get("hidden_s", 0.0))
    now_s = 0.0
    for phase, spent in record.seconds.items():
        if "." in phase:
            continue
        end_s = now_s + spent
        begin_s = now_s - hidden_s if phase == "prepare" else now_s
        out.append(Bar(JOB, phase, begin_s, end_s, 0))
        windows[phase] = (begin_s, end_s)
        _parts(record.seconds, phase, begin_s, end_s - begin_s, out, windows)
        now_s = end_s
    _units(record, windows, out)
    return out


def _parts(
    seconds: Mapping[str, float],
    phase: str,
    begin_s: float,
    spent: float,
    out: list[Bar],
    windows: dict[str, tuple[float, float]],
) -> None:
    inner = {k.partition(".")[2]: v for k, v in seconds.items() if k.startswith(f"{phase}.")}
    total = sum(inner.values())
    scale = min(1.0, spent / total) if total else 0.0
    for part in sorted(inner, key=lambda name: _ORDER.get(name, len(_ORDER))):
        end_s = begin_s + scale * inner[part]
        out.append(Bar(JOB, part, begin_s, end_s, 1))
        windows.setdefault(part, (begin_s, end_s))
        begin_s = end_s


def _units(
    record: TransitionRecord, windows: Mapping[str, tuple[float, float]], out: list[Bar]
) -> None:
    by_unit = {
        name: {p: s for p, s in unit.get("seconds", {}).items() if p in windows and s > 0}
        for name, unit in record.units.items()
        if isinstance(unit, Mapping)
    }
    for phase, (begin_s, end_s) in windows.items():
        spent = {name: each[phase] for name, each in by_unit.items() if phase in each}
        in_turn = sum(spent.values()) <= (end_s - begin_s) * (1 + 1e-9)
        now_s = begin_s
        for name, seconds in spent.items():
            seconds = min(seconds, end_s - begin_s)
            out.append(Bar(name, phase, now_s, now_s + seconds, 0))
            if in_turn:
                now_s += seconds
