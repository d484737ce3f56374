"""One attempted transition as a job's driver sees it, on its way to its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nereus_plugins.gtg.report import Timed, merge_unit_reports
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import TransitionRecord, now_s


class TransitionFailed(RuntimeError):
    """State was lost with a dead or broken rank: the job must end; says what to restart from."""


@dataclass(frozen=True)
class Changes:
    """What a transition changes of what is in force.

    Attributes:
        layouts: by unit, before and after.
        knobs: by unit, "from" and "to", as in its record.
        others: what changes besides layouts, in words.
    """

    layouts: Mapping[str, tuple[Layout, Layout]]
    knobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: Sequence[str] = ()

    def words(self) -> list[str]:
        """One text for each change; none: it changes nothing."""
        return [
            *(f"{name} {old} -> {new}" for name, (old, new) in self.layouts.items()),
            *self.others,
        ]


class Attempt:
    """
    Args:
        epoch: that it is for. step: the trainer's, after which it takes place.
        doing: told each phase as it begins, and the step. predicted: as in its record.
    """

    def __init__(
        self,
        epoch: int,
        step: int,
        changes: Changes,
        doing: Callable[[str, int], None] = lambda phase, step: None,
        predicted: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.changes = changes
        self._doing = doing
        self._predicted = predicted
        self.outcome = "committed"
        self.reason = ""
        self.digest = ""
        self.journaled = False  # a commit of it is in the journal, and was not taken back
        self.ranks: dict[str, Any] = {}
        self.units: dict[str, Any] = {}
        self.rollout: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.background: dict[str, Any] = {}

    def timed(self, phase: str) -> Timed:
        self._doing(phase, self.step)
        return Timed(self.seconds, phase)

    def ended(self, outcome: str, reason: str) -> None:
        """Another way than "committed", in which every attempt begins."""
        self.outcome, self.reason = outcome, reason

    def gave_up(self, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the ranks gave up, and with them the transition. Raises: as `given_up`."""
        why = given_up(answers)
        if why:
            self.ended("aborted", why)
        return bool(why)

    def prepared(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Args: groups: of ranks that prepared together, each rank's `PrepareReport.to_dict()`."""
        self.digest = ":".join(reports[0]["digest"] for reports in groups)
        for reports in groups:
            for name in reports[0]["units"]:
                self.units[name] = merge_unit_reports([one["units"][name] for one in reports])
                self.units[name]["mode"] = reports[0]["mode"]
            for phase in reports[0]["seconds"]:
                key = f"prepare.{phase}"
                spent = max(one["seconds"].get(phase, 0.0) for one in reports)
                self.seconds[key] = max(self.seconds.get(key, 0.0), spent)

    def hidden(self, prepare_s: float, waited_s: float) -> None:
        """It was prepared in the background, in so long, and waited for at the end."""
        self.background = {"prepare_s": prepare_s, "hidden_s": max(prepare_s - waited_s, 0.0)}

    def exposed(self, why: str) -> None:
        """It could not be prepared in the background, if there is a reason `why`."""
        if why:
            self.background = {"exposed": why}

    def released(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Args: answers: of ranks: "report", `ReleaseReport.to_dict()` or empty; "failed", why one
        still holds memory of the old layout."""
        for name, unit in self.units.items():
            spent = [a["report"]["units"].get(name, 0.0) for a in answers if a["report"]]
            unit["seconds"]["release"] = max(spent, default=0.0)
        failed = [answer["failed"] for answer in answers if answer["failed"]]
        if failed:
            self.reason = failed[0]

    def record(self) -> TransitionRecord:
        units = self.units or {
            name: {"from": str(old), "to": str(new)}
            for name, (old, new) in self.changes.layouts.items()
        }
        return TransitionRecord(
            step=self.step,
            epoch=self.epoch,
            time_unix_s=now_s(),
            outcome=self.outcome,
            reason=self.reason,
            units=units,
            seconds=self.seconds,
            digest=self.digest,
            ranks=self.ranks,
            rollout=self.rollout,
            knobs={name: dict(change) for name, change in self.changes.knobs.items()},
            background=self.background,
            predicted=dict(self._predicted),
        )

    def listed(self) -> str:
        return ", ".join(self.changes.words()) or "nothing to change"

    def summary(self) -> str:
        if self.outcome == "skipped":
            return f"scheduled transition skipped: {self.reason}"
        if self.outcome == "aborted":
            return f"transition aborted, the old layout trains on: {self.reason}"
        wire = sum(unit.get("bytes_wire", 0) for unit in self.units.values())
        stalled = sum(value for phase, value in self.seconds.items() if "." not in phase)
        note = f"; {self.reason}" if self.reason else ""
        if "hidden_s" in self.background:
            note = f" ({self.background['hidden_s']:.2f} s more in the background){note}"
        elif self.background:
            note = f" (not in the background: {self.background['exposed']}){note}"
        return (
            f"epoch {self.epoch} committed: {self.listed()}; {wire / 1e6:.1f} MB between ranks, "
            f"{stalled:.2f} s{note}"
        )


def given_up(answers: Sequence[Mapping[str, Any]]) -> str:
    """Why the ranks gave up, "" if they did not. Raises: TransitionFailed if only some did."""
    aborted = [answer["aborted"] for answer in answers if "aborted" in answer]
    if not aborted:
        return ""
    first = aborted[0]
    why = f"rank {first['rank']} in {first['phase']}: {first['reason']}"
    if len(aborted) != len(answers):
        raise TransitionFailed(f"only some ranks gave up: {why}")
    return why


def listed(layouts: Mapping[str, Layout]) -> str:
    """Layouts by unit, in words."""
    return ", ".join(f"{name} {layout}" for name, layout in layouts.items())
