"""One scenario, from the start of a job to what became of it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_plugins.selftest.cases import Case
from nereus_plugins.spec import Layout
from tests.faults.job import Driver, Lost, Ranks, after
from tests.faults.scenario import STEP_TIMEOUT_S, TIMEOUT_S, Scenario

BEFORE, AFTER = 2, 2  # steps before the transition and after it
SNAPSHOT_AFTER = 1
# Votes of a phase, its exchange, and giving up, one after the other; or one wait of a step.
LIMIT_S = STEP_TIMEOUT_S + 8 * TIMEOUT_S
GRACE_S = 2 * TIMEOUT_S


@dataclass(frozen=True)
class Plain:
    """What a case's job is without any fault.

    Attributes:
        digests: of the whole state after each step, in the old layout; of the start at 0.
        moved: after each step of a job that changes layout after BEFORE.
        seconds: of each moment.
    """

    digests: dict[int, str]
    moved: dict[int, str]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        how: "committed", "aborted" (trains on in the old layout), or "restarted" from the snapshot.
        steps_lost: of work, where it was restarted.
        recovery_s: from the fault's being noticed until the job trained again.
        said: what the job said of it.
    """

    how: str
    steps_lost: int
    recovery_s: float
    said: str = ""


def plain(case: Case, staged: bool) -> Plain:
    """Two jobs that no fault strikes: one that stays, one that changes its layout."""
    digests, moved, seconds = {}, {}, {}
    for moves in (False, True):
        ranks = Ranks(case, case.source, LIMIT_S, GRACE_S)
        try:
            found = moved if moves else digests
            for step in range(BEFORE + AFTER):
                begin = time.perf_counter()
                ranks.all("train", step)
                seconds["train"] = time.perf_counter() - begin
                found[step + 1] = _one(ranks.all("digest"))
                if step + 1 == BEFORE and moves:
                    if staged:
                        ranks.all("limit", case.target.to_dict())
                    for moment, arguments in (
                        ("prepare", (case.target.to_dict(), 1)),
                        ("commit", ()),
                        ("release", ()),
                    ):
                        begin = time.perf_counter()
                        ranks.all(moment, *arguments)
                        seconds[moment] = time.perf_counter() - begin
                    assert _one(ranks.all("digest")) == found[BEFORE]
        finally:
            ranks.close()
    return Plain(digests, moved, seconds)


def strike(it: Scenario, known: Plain, folder: Path) -> Outcome:
    """Run the scenario.

    Raises: AssertionError: a hang, a torn layout, a wrong number, a job that does not go on, or
        another end than this fault may have.
    """
    outcome = _struck(it, known, folder)
    assert outcome.how in it.promised, (outcome, sorted(it.promised))
    return outcome


def _struck(it: Scenario, known: Plain, folder: Path) -> Outcome:
    case, driver, snapshot = it.case, Driver(folder), folder / "snapshot"
    ranks = Ranks(case, case.source, LIMIT_S, GRACE_S)
    done = 0
    try:
        for step in range(BEFORE):
            ranks.all("train", step)
            done = step + 1
            if done == SNAPSHOT_AFTER:
                ranks.all("save", str(snapshot), SNAPSHOT_AFTER)
        if it.staged:
            ranks.all("limit", case.target.to_dict())
        try:
            how = _through(it, known, driver, ranks)
            done = BEFORE + (it.where == "train")
            # All ranks together: who was stopped as it was over is missed here.
            found = _one(ranks.all("digest"))
        except Lost as lost:
            begin = time.perf_counter()
            ranks.close()
            return _start_again(it, known, driver, snapshot, done, begin, str(lost))
        in_force = case.target if how == "committed" else case.source
        assert _layouts(ranks) == [in_force] * case.ranks, "ranks are in different layouts"
        expected = known.moved if how == "committed" else known.digests
        assert found == expected[done], f"the state is neither the old one nor the new: {how}"
        for step in range(done, BEFORE + AFTER):
            ranks.all("train", step)
        found = _one(ranks.all("digest"))
        assert found == expected[BEFORE + AFTER], f"it trains on otherwise: {how}"
        if it.fault == "torn line":
            return _start_again(it, known, driver, snapshot, done, time.perf_counter(), "")
        return Outcome(how, 0, 0.0)
    finally:
        ranks.close()


def _through(it: Scenario, known: Plain, driver: Driver, ranks: Ranks) -> str:
    """The transition (and a step after it, where the fault strikes a step), under the fault."""
    if it.rank >= 0 and it.where not in known.seconds:  # a phase
        kind = "hang" if it.fault == "delay" else it.fault
        struck = f"rank={it.rank},epoch=1"
        text = f"step={it.where},{struck},kind={kind},seconds={it.seconds}"
        if it.where == "fetch":  # what is parked comes back after an abort only
            text += f";step=move,{struck},kind=raise"
        ranks.all("arm", text)
    timers = []
    if it.rank >= 0 and it.where in known.seconds:
        passed = known.seconds
        wait_s = it.part * passed[it.where]
        if it.where in ("commit", "release"):
            wait_s += passed["prepare"]
        if it.where == "release":
            wait_s += passed["commit"]
        number = signal.SIGKILL if it.fault == "kill" else signal.SIGSTOP
        timers.append(after(wait_s, lambda: ranks.signal(it.rank, number)))
        if it.fault == "pause":
            goes_on = wait_s + it.seconds
            timers.append(after(goes_on, lambda: ranks.signal(it.rank, signal.SIGCONT)))
    try:
        if it.where == "train":
            ranks.all("train", BEFORE)
            return "aborted"  # there was no transition
        how = driver.transition(ranks, it.case.target, BEFORE, full_disk=it.fault == "full disk")
        if it.fault == "torn line":
            _tear(driver, it.part)
        return how
    finally:
        for timer in timers:
            timer.join()  # a fault that comes late strikes what follows


def _tear(driver: Driver, part: float) -> None:
    """The driver died as it wrote what comes next: half a line is at the journal's end."""
    line = driver.journal.path.read_bytes().splitlines(keepends=True)[-1]
    with open(driver.journal.path, "ab") as file:
        file.write(line[: max(1, int(part * (len(line) - 1)))])


def _start_again(
    it: Scenario, known: Plain, driver: Driver, snapshot: Path, done: int, begin: float, said: str
) -> Outcome:
    """All ranks anew, in the layout that the journal says, from the snapshot."""
    layout = driver.layout_in_force(it.case.source)
    assert layout in (it.case.source, it.case.target)
    ranks = Ranks(it.case, layout, LIMIT_S, GRACE_S)
    try:
        assert _one(ranks.all("load", str(snapshot))) == SNAPSHOT_AFTER
        assert _one(ranks.all("digest")) == known.digests[SNAPSHOT_AFTER]
        ranks.all("train", SNAPSHOT_AFTER)
        recovery_s = time.perf_counter() - begin
        if layout == it.case.source:
            assert _one(ranks.all("digest")) == known.digests[SNAPSHOT_AFTER + 1]
        assert _layouts(ranks) == [layout] * it.case.ranks
    finally:
        ranks.close()
    return Outcome("restarted", done - SNAPSHOT_AFTER, recovery_s, said)


def _layouts(ranks: Ranks) -> list[Layout]:
    return [Layout.from_dict(one) for one in ranks.all("layout")]


def _one(values: list[Any]) -> Any:
    """What all ranks say. Raises: AssertionError where they differ."""
    (value,) = set(values)
    return value
