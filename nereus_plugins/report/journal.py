"""What a controller's journal says: what it expected of transitions and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nereus_plugins.controller.journal import DecisionJournal, DecisionJournalError
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.spec import SpecError
from nereus_plugins.spec.record import shown
from nereus_plugins.trace.record import Record, TransitionRecord


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


class Journal(NamedTuple):
    """Of one run. capacity_bytes: of a device, None where no controller wrote anything."""

    predictions: tuple[Prediction, ...] = ()
    capacity_bytes: int | None = None


def read_journal(folder: Path) -> Journal:
    """The journal in a run directory; empty where no controller wrote one.

    Raises: SpecError: the journal cannot be read.
    """
    if not folder.is_dir():
        return Journal()
    journal = DecisionJournal(folder)
    try:
        entries = journal.read()
        proofs = tuple(_prediction(e["proof"]) for e in entries if e["kind"] == "proof")
        starts = [entry["setting"] for entry in entries if entry["kind"] == "start"]
        gpus = [JobSetting.from_dict(one).setting.cluster.gpu for one in starts]
    except (DecisionJournalError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(f"{journal.path}: not a controller's journal: {error}") from None
    return Journal(proofs, gpus[-1].memory_bytes if gpus else None)


def with_records(predictions: Sequence[Prediction], records: Sequence[Record]) -> list[Prediction]:
    """And those that only the records hold: a proof needs some steps after its transition, or the
    journal may be elsewhere."""
    proved = {one.step for one in predictions}
    out = list(predictions)
    for record in records:
        if not isinstance(record, TransitionRecord) or record.outcome != "committed":
            continue
        if record.step not in proved and "transition_s" in record.predicted:
            said = record.predicted["transition_s"]
            out.append(Prediction(record.step, False, said, record.stall_s, None, None))
    return out


def _prediction(proof: dict[str, object]) -> Prediction:
    def number(name: str) -> float:
        value = proof[name]
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {shown(value)}")
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
