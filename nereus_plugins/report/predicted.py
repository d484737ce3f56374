"""What a controller expected of its transitions, against what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nereus_plugins.controller.journal import DecisionJournal, DecisionJournalError
from nereus_plugins.spec import SpecError


class Prediction(NamedTuple):
    """One transition that a controller proposed.

    step: how many steps were done. forced: nothing had to be gained. stall_s, measured_stall_s: of
    the transition. saving, measured_saving: of a step's seconds, relative, against the plan that
    was left; None where it could not be said.
    """

    step: int
    forced: bool
    stall_s: float
    measured_stall_s: float
    saving: float | None
    measured_saving: float | None


def predictions(folder: Path) -> list[Prediction]:
    """From the proofs in a run directory's journal; none where no controller wrote one.

    Raises: SpecError: the journal cannot be read.
    """
    if not folder.is_dir():
        return []
    journal = DecisionJournal(folder)
    try:
        proofs = [entry["proof"] for entry in journal.read() if entry["kind"] == "proof"]
        return [_prediction(proof) for proof in proofs]
    except (DecisionJournalError, KeyError, TypeError, ValueError) as error:
        raise SpecError(f"{journal.path}: not a controller's journal: {error}") from None


def _prediction(proof: dict[str, object]) -> Prediction:
    def number(name: str) -> float:
        value = proof[name]
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}")
        return float(value)

    of_s, savings = number("predicted_of_s"), proof["savings"]
    measured = None
    if isinstance(savings, list) and savings:
        measured = sum(float(one) for one in savings) / len(savings)
    return Prediction(
        step=int(number("step")),
        forced=bool(proof["forced"]),
        stall_s=number("predicted_stall_s"),
        measured_stall_s=number("stall_s"),
        saving=number("predicted_s") / of_s if of_s > 0 else None,
        measured_saving=measured,
    )
