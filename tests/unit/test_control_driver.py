"""What every live job's driver keeps: records, journal, epochs, answers to commands; and the order
in which they are written, also where they cannot be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.control.attempt import Attempt, Changes, TransitionFailed, given_up
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.driver import JOURNAL_FILE, Driver, Scheduled
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.control.schedule import check_schedule
from nereus_plugins.gtg.journal import Journal, JournalError
from nereus_plugins.job import Proposal, StaleProposal
from nereus_plugins.spec import Assignment, GlobalPlan, Layout, ModelStage, SpecError
from nereus_plugins.trace.record import (
    RunRecord,
    StepRecord,
    TransitionRecord,
    read_records,
)

BEFORE, AFTER = Layout(dp=4), Layout(tp=2, dp=2)
CHANGES = Changes({"actor": (BEFORE, AFTER)})
PLAN = {"actor": AFTER.to_dict()}


def check(plan: Any) -> str:
    """What the job says of a submitted plan: all fit."""
    return f"to {plan}"


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    one = Driver(tmp_path, Inbox(check), lambda: {"world_size": 4, "nodes": ["here"], "plan": PLAN})
    one.inform()
    yield one
    one.close()
    with suppress(OSError):  # some tests leave in it what could not be written
        one.records.close()


def no_space_for_records(driver: Driver) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, driver.records._file.fileno())
    os.close(full)


def no_journal(driver: Driver) -> None:
    """None that could be opened."""
    driver.journal.path.unlink(missing_ok=True)
    driver.journal.path.mkdir()


def committed(driver: Driver, attempt: Attempt) -> TransitionRecord:
    """A transition that goes well."""
    assert driver.commit(attempt, PLAN, ["rank-0"])
    driver.epoch = attempt.epoch
    return driver.finished(attempt)


def kinds(driver: Driver) -> list[tuple[str, int, str]]:
    return [(one.kind, one.epoch, one.reason) for one in driver.journal.read()]


def test_what_a_job_is_and_what_became_of_it_are_recorded_in_order(driver: Driver) -> None:
    driver.begin(source="verl", packages=("nereus-plugins", "no-such-package"), world_size=4,
                 plan=PLAN, config={"enable": True})  # fmt: skip
    step = StepRecord(3, 0, 0.0, 1.0, {}, {}, 1, {}, {}, PLAN)
    assert driver.last is None
    driver.write_step(step)
    assert (driver.last, driver.step) == (step, 3)
    record = committed(driver, driver.attempt(CHANGES, predicted={"saving_s": 1.0}))
    run, *others = read_records(driver.records.path)
    assert isinstance(run, RunRecord)
    assert run.run_id == driver.run_id
    assert set(run.versions) == {"python", "nereus-plugins"}
    assert others == [step, record]
    assert (record.step, record.epoch, record.outcome) == (3, 1, "committed")
    assert record.predicted == {"saving_s": 1.0}
    assert driver.inbox.status()["job"]["epoch"] == 1


def test_epochs_go_on_from_an_earlier_run(tmp_path: Path, driver: Driver) -> None:
    """Also from one that was taken back: each attempt takes one."""
    driver.next_attempt()
    attempt = driver.attempt(CHANGES)
    driver.commit(attempt, PLAN, [])
    driver.take_back(attempt)
    again = Driver(tmp_path, Inbox(check), dict)
    assert (again.epoch, again.next_attempt()) == (2, 3)
    again.records.close()


def test_a_proposal_for_another_epoch_is_stale(driver: Driver) -> None:
    plan = GlobalPlan({ModelStage.ACTOR_TRAIN: Assignment(BEFORE)})
    driver.require_epoch(Proposal(0, plan))
    with pytest.raises(StaleProposal, match="for epoch 1, the job is in epoch 0"):
        driver.require_epoch(Proposal(1, plan))


# -- the journal -----------------------------------------------------------------------------------


def test_a_commit_says_what_will_be_in_force(driver: Driver) -> None:
    driver.step = 7
    attempt = driver.attempt(CHANGES)
    attempt.digest = "d"
    assert driver.commit(attempt, PLAN, ["rank-0", "rank-1"])
    (one,) = driver.journal.read()
    assert (one.kind, one.epoch, one.step, one.digest) == ("commit", 1, 7, "d")
    assert (one.plan, one.ranks) == (PLAN, ["rank-0", "rank-1"])
    assert driver.epoch == 0, "no rank has switched"
    assert "journal" in attempt.seconds


def test_where_the_journal_cannot_be_written_nothing_is_committed(driver: Driver) -> None:
    no_journal(driver)
    attempt = driver.attempt(CHANGES)
    assert not driver.commit(attempt, PLAN, [])
    record = driver.finished(attempt)
    assert (record.outcome, driver.epoch) == ("aborted", 0)
    assert record.reason.startswith("the journal was not written: ")
    assert list(read_records(driver.records.path)) == [record]


def test_where_the_epoch_is_there_already_nothing_is_committed(
    tmp_path: Path, driver: Driver
) -> None:
    other = Journal(tmp_path / JOURNAL_FILE)
    other.commit(epoch=1, plan={}, digest="", step=0)
    attempt = driver.attempt(CHANGES)
    assert not driver.commit(attempt, PLAN, [])
    assert attempt.outcome == "aborted"
    assert "epoch 1 is stale" in attempt.reason
    assert not attempt.journaled
    assert len(other.read()) == 1


def test_a_damaged_journal_is_not_written_behind(tmp_path: Path, driver: Driver) -> None:
    driver.journal.path.write_text("damaged\n")
    attempt = driver.attempt(CHANGES)
    assert not driver.commit(attempt, PLAN, [])
    assert "damaged line" in attempt.reason
    with pytest.raises(JournalError, match="damaged line"):
        Driver(tmp_path, Inbox(check), dict)


def test_what_was_not_switched_to_is_taken_back(driver: Driver) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    assert attempt.gave_up([{"aborted": {"phase": "commit", "rank": 1, "reason": "E"}}])
    driver.take_back(attempt)
    why = "rank 1 in commit: E"
    assert kinds(driver) == [("commit", 1, ""), ("abort", 1, why)]
    assert driver.journal.current() is None
    assert driver.finished(attempt).reason == why


def test_what_cannot_be_taken_back_is_said(driver: Driver) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    no_journal(driver)
    attempt.ended("aborted", "E")
    driver.take_back(attempt)
    assert attempt.reason.startswith("E; the journal still says that it was committed: ")


# -- a job that ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_failed_attempt_leaves_no_commit_that_is_not_in_force(
    driver: Driver, taken_back: bool
) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    if taken_back:
        driver.take_back(attempt)
    attempt.ended("failed", "rank 1 died")
    assert driver.failed(attempt) == ""
    assert [kind for kind, *_ in kinds(driver)] == ["commit", "abort"]
    (record,) = read_records(driver.records.path)
    assert isinstance(record, TransitionRecord)
    assert (record.outcome, record.reason) == ("failed", "rank 1 died")


def test_what_fails_after_the_switch_stays_committed(driver: Driver) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    driver.epoch = attempt.epoch
    attempt.ended("failed", "rank 1 died in 'release'")
    assert driver.failed(attempt) == ""
    assert kinds(driver) == [("commit", 1, "")]


def test_last_words_say_what_records_lack(driver: Driver) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    no_space_for_records(driver)
    attempt.ended("failed", "rank 1 died")
    assert driver.failed(attempt).startswith(" (the records lack this: ")
    assert driver.journal.current() is None  # it has room, and nothing that is not in force


def test_last_words_say_what_the_journal_still_has(driver: Driver) -> None:
    attempt = driver.attempt(CHANGES)
    assert driver.commit(attempt, PLAN, [])
    no_journal(driver)
    attempt.ended("failed", "rank 1 died")
    assert driver.failed(attempt).startswith(" (the journal still says that it was committed: ")
    (record,) = read_records(driver.records.path)
    assert isinstance(record, TransitionRecord)
    assert record.outcome == "failed"


def test_a_full_disk_ends_no_job_that_can_train_on(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    no_space_for_records(driver)
    committed(driver, driver.attempt(CHANGES))
    said = capsys.readouterr().out
    assert f"nereus: step 0: epoch 1 committed: actor {BEFORE} -> {AFTER}" in said
    assert "step 0: not in the records, which could not be written: " in said
    assert driver.inbox.status()["job"]["epoch"] == 1
    driver.write_step(StepRecord(1, 1, 0.0, 1.0, {}, {}, 1, {}, {}, PLAN))
    assert "step 1: not in the records" in capsys.readouterr().out


# -- at a boundary ---------------------------------------------------------------------------------


def ran(driver: Driver) -> Callable[..., TransitionRecord]:
    """Runs what is asked for."""
    return lambda *_: committed(driver, driver.attempt(CHANGES))


def never(*_: Any) -> TransitionRecord:
    raise AssertionError("this is not due")


def not_now(*_: Any) -> TransitionRecord:
    raise SpecError("plan.tp: does not fit")


def test_scheduled_goes_first(driver: Driver) -> None:
    driver.inbox.submit(0, {"tp": 2})
    record = driver.at_boundary(1, Scheduled(CHANGES, ran(driver)), never)
    assert record is not None
    assert (record.step, record.epoch) == (1, 1)
    (stale,) = driver.inbox.status()["answered"]
    assert stale["state"] == "refused"
    assert "stale" in stale["reason"]
    assert driver.at_boundary(2, None, never) is None


def test_what_is_scheduled_while_paused_is_skipped(driver: Driver) -> None:
    driver.inbox.pause(0)
    record = driver.at_boundary(1, Scheduled(CHANGES, never), never)
    assert record is not None
    assert (record.outcome, record.epoch) == ("skipped", 0)
    assert record.units == {"actor": {"from": str(BEFORE), "to": str(AFTER)}}
    assert list(read_records(driver.records.path)) == [record]
    assert driver.next_attempt() == 1, "it took none"


def test_what_is_scheduled_and_no_longer_fits_is_aborted(driver: Driver) -> None:
    record = driver.at_boundary(1, Scheduled(CHANGES, not_now), never)
    assert record is not None
    assert (record.outcome, record.epoch) == ("aborted", 1)
    assert record.reason == "plan.tp: does not fit"
    assert driver.epoch == 0


def test_a_submitted_plan_is_answered_once_its_record_is_written(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    answer = driver.inbox.answer

    def answer_and_look(state: str, *args: Any, **kwargs: Any) -> None:
        written.extend(read_records(driver.records.path))
        answer(state, *args, **kwargs)

    def run(submitted: Submitted) -> TransitionRecord:
        assert (submitted.plan, submitted.state) == ({"tp": 2}, "executing")
        assert driver.step == 1
        return ran(driver)()

    monkeypatch.setattr(driver.inbox, "answer", answer_and_look)
    driver.inbox.submit(0, {"tp": 2})
    record = driver.at_boundary(1, None, run)
    assert written == [record]
    (answered,) = driver.inbox.status()["answered"]
    assert (answered["state"], answered["step"]) == ("committed", 1)
    assert driver.inbox.status()["doing"] == ""


def test_a_submitted_plan_that_the_job_cannot_run_is_refused(driver: Driver) -> None:
    driver.inbox.submit(0, {"tp": 2})
    assert driver.at_boundary(1, None, not_now) is None
    (answered,) = driver.inbox.status()["answered"]
    assert (answered["state"], answered["by_plan"]) == ("refused", True)
    assert list(read_records(driver.records.path)) == []


def test_a_failure_is_told_before_the_job_ends(driver: Driver) -> None:
    def fail(submitted: Submitted) -> TransitionRecord:
        raise TransitionFailed("rank 1 died; start again")

    driver.inbox.submit(0, {"tp": 2})
    with pytest.raises(TransitionFailed):
        driver.at_boundary(1, None, fail)
    (answered,) = driver.inbox.status()["answered"]
    assert (answered["state"], answered["reason"]) == ("failed", "rank 1 died; start again")


def test_commands_are_taken_until_the_job_is_over(
    tmp_path: Path, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="a job is found by its name in Ray too")
    driver.listen("experiment")
    assert f"takes commands: nereus status {tmp_path}" in capsys.readouterr().out
    status = Client(tmp_path).call("status")
    assert status["job"] == {
        "epoch": 0, "step": 0, "world_size": 4, "nodes": ["here"], "plan": PLAN,
    }  # fmt: skip
    committed(driver, driver.attempt(CHANGES))
    client = Client(tmp_path)
    assert (client.endpoint.epoch, client.endpoint.run_id) == (1, driver.run_id)
    driver.close()
    with pytest.raises(NoLiveJob):
        Client(tmp_path)


def test_a_job_that_cannot_listen_trains_on(
    tmp_path: Path, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ENDPOINT_FILE).mkdir()
    driver.listen("experiment")
    assert "takes no commands while it runs (nereus.control): " in capsys.readouterr().out
    committed(driver, driver.attempt(CHANGES))
    assert driver.epoch == 1


# -- an attempt ------------------------------------------------------------------------------------


def report(digest: str, seconds: float, received: int) -> dict[str, Any]:
    """Of a rank that prepared one unit, as far as it is looked at."""
    unit = {
        "from": "a", "to": "b", "bytes_wire": received, "bytes_sent": 0, "bytes_local": 0,
        "bytes_parked": 0, "messages": 1, "seconds": {"move": seconds}, "verified": {},
        "prediction": None, "prediction_error": "",
    }  # fmt: skip
    return {
        "mode": "intact",
        "digest": digest,
        "units": {f"unit of {digest}": unit},
        "seconds": {"move": seconds},
    }


def test_groups_that_prepared_by_themselves_are_one_transition() -> None:
    attempt = Attempt(1, 5, Changes({}))
    attempt.prepared(
        [[report("d", 1.0, 10**7), report("d", 3.0, 2 * 10**7)], [report("e", 2.0, 5 * 10**6)]]
    )
    with attempt.timed("commit"):
        pass
    released = [{"unit of d": 2.0}, {"unit of d": 3.0}, {"unit of e": 1.0}]
    attempt.released([{"report": {"units": units}, "failed": ""} for units in released])
    record = attempt.record()
    assert record.digest == "d:e"
    assert record.seconds["prepare.move"] == 3.0
    assert [unit["seconds"]["release"] for unit in record.units.values()] == [3.0, 1.0]
    assert record.units["unit of d"]["bytes_wire"] == 3 * 10**7
    assert record.units["unit of e"]["mode"] == "intact"
    assert attempt.summary().startswith("epoch 1 committed: nothing to change; 35.0 MB between")


def test_what_it_says_of_itself() -> None:
    layouts = {"actor": (BEFORE, AFTER)}
    attempt = Attempt(2, 5, Changes(layouts, others=("rollout TP1 -> TP2",)))
    assert attempt.listed() == f"actor {BEFORE} -> {AFTER}, rollout TP1 -> TP2"
    held = "rank 1 still holds the old layout"
    attempt.released([{"report": {}, "failed": why} for why in ("", held)])
    attempt.exposed("")
    assert attempt.summary().endswith("s; rank 1 still holds the old layout")
    attempt.hidden(prepare_s=3.0, waited_s=1.0)
    assert "(2.00 s more in the background); rank 1" in attempt.summary()
    attempt.exposed("another plan was prepared")
    assert "(not in the background: another plan was prepared)" in attempt.summary()
    attempt.ended("aborted", "E")
    assert attempt.summary() == "transition aborted, the old layout trains on: E"
    attempt.ended("skipped", "E")
    assert attempt.summary() == "scheduled transition skipped: E"


def test_ranks_give_up_together_or_not_at_all() -> None:
    lost = {"aborted": {"phase": "move", "rank": 2, "reason": "KeyError"}}
    attempt = Attempt(1, 5, CHANGES)
    assert not attempt.gave_up([{}, {}])
    assert attempt.outcome == "committed"
    assert attempt.gave_up([lost, lost])
    assert (attempt.outcome, attempt.reason) == ("aborted", "rank 2 in move: KeyError")
    with pytest.raises(TransitionFailed, match="only some ranks gave up: rank 2 in move"):
        given_up([{}, lost])


# -- the schedule ----------------------------------------------------------------------------------


def plan_of(plan: Any, where: str) -> Any:
    if plan == "wrong":
        raise SpecError(f"{where}: no plan")
    return plan


def test_steps_are_numbers_in_order() -> None:
    found = check_schedule({"10": {"tp": 2}, 5: {"tp": 1}}, plan_of, "{5: {tp: 2}}")
    assert list(found.items()) == [(5, {"tp": 1}), (10, {"tp": 2})]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([1], r"must map steps to plans, like \{5: \{tp: 2\}\}, got \[1\]"),
        ({0: {}}, "a step is a whole number from 1, got 0"),
        ({True: {}}, "a step is a whole number from 1, got True"),
        ({"1e3": {}}, "a step is a whole number from 1, got '1e3'"),
        ({"9" * 19: {}}, "a step is a whole number from 1, got '999"),
        ({5: {"tp": 1}, "5": {"tp": 2}}, r"nereus.schedule.5: this step is given twice"),
        ({5: "wrong"}, r"nereus.schedule.5: no plan"),
    ],
)
def test_wrong_schedules_are_named(schedule: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_schedule(schedule, plan_of, "{5: {tp: 2}}")
