"""What a job's controller proposed last: `<run-dir>/proposal.json`, replaced in one step.

In mode act the controller submits it itself; in mode advise `nereus approve` does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_plugins.spec import GlobalPlan, Record
from nereus_plugins.spec.record import (
    load_json,
    read_text,
    require,
    require_int,
    require_number,
    shown,
)
from nereus_plugins.trace import files

FILE = "proposal.json"


@dataclasses.dataclass(frozen=True)
class Offered(Record):
    """
    Attributes:
        number: of the run's proposals, from 1.
        epoch: that it was made for.
        plan: the proposed one.
        digest: of the schedule that its transition is predicted to compile to; "" if none moves.
        reason: why, in words.
        predicted: the numbers behind it (`TransitionRecord.predicted`).
        forced: whether the job could not stay.
    """

    number: int
    epoch: int
    plan: GlobalPlan
    digest: str
    reason: str
    predicted: Mapping[str, float]
    forced: bool = False

    def __post_init__(self) -> None:
        require_int("Offered", "number", self.number)
        require_int("Offered", "epoch", self.epoch, minimum=0)
        require(
            isinstance(self.plan, GlobalPlan) and isinstance(self.predicted, Mapping),
            "Offered.plan must be a global plan, and Offered.predicted map names to numbers",
        )
        for name, value in self.predicted.items():
            require_number("Offered.predicted", shown(name), value)

    def fields(self) -> dict[str, Any]:
        """Of the command that submits it."""
        return {
            "epoch": self.epoch,
            "plan": self.plan.to_dict(),
            "predicted": dict(self.predicted),
        }

    def write(self, run_dir: Path) -> None:
        """Raises: OSError."""
        files.replace(run_dir / FILE, [json.dumps(self.to_dict())], private=True)

    @classmethod
    def read(cls, run_dir: Path) -> Offered:
        """Raises: OSError; SpecError if it is not such a file."""
        path = run_dir / FILE
        return cls.from_dict(load_json(read_text(path), str(path)), where=str(path))
