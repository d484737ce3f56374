"""What a controller expected of its transitions, against what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nereus_plugins.trace.record import Record


class Prediction(NamedTuple):
    """One transition that a controller proposed.

    step: how many steps were done. stall_s, step_s: expected seconds of the transition, and of a
    step in the new plan; measured_*: what they were (None: nothing to say).
    """

    step: int
    stall_s: float | None
    step_s: float | None
    measured_stall_s: float | None
    measured_step_s: float | None


def predictions(folder: Path, records: Sequence[Record]) -> list[Prediction]:
    """Of a run directory's decisions; none where no controller wrote any."""
    return []
