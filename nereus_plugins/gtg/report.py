"""What a transition did on one rank, JSON-able."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class UnitReport:
    """One unit's part, on this rank.

    source, target: layouts. bytes_*: of state; `parked` went to host memory. seconds: by phase.
    verified: what was checked: bytes and messages compared at both ends, tensors whose tiling was
    checked, scalars found again in the target. prediction: pairs of ranks, with this rank as one of
    them, for which the predicted table moves other bytes than the described one, beyond
    `gtg.execute.PREDICTION_TOLERANCE`; None without a prediction, or where it cannot be compared:
    prediction_error says why.
    """

    source: str
    target: str
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_local: int = 0
    bytes_parked: int = 0
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    prediction: list[dict[str, int]] | None = None
    prediction_error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "from": self.source,
            "to": self.target,
            "bytes_wire": self.bytes_received,
            "bytes_sent": self.bytes_sent,
            "bytes_local": self.bytes_local,
            "bytes_parked": self.bytes_parked,
            "messages": self.messages,
            "seconds": dict(self.seconds),
            "verified": dict(self.verified),
            "prediction": self.prediction,
            "prediction_error": self.prediction_error,
        }


@dataclass
class PrepareReport:
    """How `prepare` went on this rank.

    mode: "intact", "staged", or "unchanged" (no unit changes its layout: nothing was done).
    digest: of the schedule that all ranks agreed on. seconds: by phase, all units, votes included.
    """

    epoch: int
    rank: int
    mode: str
    digest: str
    units: dict[str, UnitReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "rank": self.rank,
            "mode": self.mode,
            "digest": self.digest,
            "units": {name: unit.to_dict() for name, unit in self.units.items()},
            "seconds": dict(self.seconds),
        }


@dataclass
class ReleaseReport:
    """How commit and release went on this rank; seconds by phase and, for release, by unit."""

    epoch: int
    rank: int
    seconds: dict[str, float] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "rank": self.rank,
            "seconds": dict(self.seconds),
            "units": dict(self.units),
        }


def merge_unit_reports(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One unit over all ranks, from each rank's `UnitReport.to_dict()`: bytes, messages and what
    was verified are summed, seconds are the slowest rank's, predictions are joined."""
    first = parts[0]
    out: dict[str, Any] = {"from": first["from"], "to": first["to"]}
    for key in ("bytes_wire", "bytes_sent", "bytes_local", "bytes_parked", "messages"):
        out[key] = sum(part[key] for part in parts)
    phases = {phase for part in parts for phase in part["seconds"]}
    out["seconds"] = {p: max(part["seconds"].get(p, 0.0) for part in parts) for p in sorted(phases)}
    items = {item for part in parts for item in part["verified"]}
    out["verified"] = {i: sum(part["verified"].get(i, 0) for part in parts) for i in sorted(items)}
    if all(part["prediction"] is None for part in parts):
        out["prediction"] = None
    else:
        pairs = {(d["src"], d["dst"]): d for part in parts for d in part["prediction"] or []}
        out["prediction"] = [pairs[key] for key in sorted(pairs)]
    out["prediction_error"] = max(part["prediction_error"] for part in parts)
    return out


class Timed:
    """Adds the seconds spent inside to `seconds[phase]`."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self.seconds = seconds
        self.phase = phase

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.begin
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
