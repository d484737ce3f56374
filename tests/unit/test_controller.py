"""The controller: what it learns, when it acts, that it resumes; and the journal it keeps."""

import dataclasses
import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.cli import main
from nereus_plugins.controller.admission import admit, confidence_of
from nereus_plugins.controller.common import Common
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import Controller, starting_plan
from nereus_plugins.controller.decision import Decision
from nereus_plugins.controller.forecast import LengthForecast, Lifetime
from nereus_plugins.controller.journal import DecisionJournal, DecisionJournalError
from nereus_plugins.controller.learned import Learned, Memory
from nereus_plugins.controller.plans import Plans
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.job import Lease, Proposal
from nereus_plugins.sim.job import Failure, SimulatedJob, capabilities_of
from nereus_plugins.sim.nereus import Nereus, RestartElastic
from nereus_plugins.sim.run import through
from nereus_plugins.sim.world import World
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Layout,
    ModelStage,
    SpecError,
)
from nereus_plugins.trace.conditions import Trace
from nereus_plugins.trace.record import StepRecord, TransitionRecord

from .test_sim import SETTING, trace

LEAVE = (Lease(8), Lease(8, until_s=0.0))


def setting_of(one: Trace) -> JobSetting:
    first = one.conditions(0, 0.0)
    return JobSetting.of(
        one.setting,
        capabilities_of(one.setting.job),
        first.response_tokens,
        one.max_response_tokens,
        one.steps,
    )


# Settings.


def test_a_setting_survives_json(tmp_path: Path) -> None:
    made = setting_of(trace())
    path = tmp_path / "setting.json"
    path.write_text(made.to_json(), encoding="utf-8")
    assert JobSetting.load(path) == made
    assert made.capabilities().coupled == capabilities_of(SETTING.job).coupled


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "autopilot"), ("confidence", 1.5), ("least_gain", -1), ("look_ahead_steps", 0)],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"ControllerConfig.{name}"):
        ControllerConfig(**{name: value})


# Admission.


def verdict(**changed: float) -> Any:
    numbers = {
        "step_s": 100.0, "saving_s": 10.0, "spread_s": 4.0, "steps": 50.0, "transition_s": 60.0,
        "again": 0.5, "regret_s": 0.0, "budget_s": 1000.0,
    }  # fmt: skip
    return admit(ControllerConfig(), **{**numbers, **changed})


def test_a_transition_that_pays_is_admitted() -> None:
    assert verdict().admitted
    assert verdict().confidence > 0.95


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"saving_s": -5.0}, "slower"),
        ({"saving_s": 1.0}, "less than"),
        ({"spread_s": 40.0}, "confidence"),
        ({"steps": 4.0}, "confidence"),
        ({"steps": 10.0, "again": 1.0}, "confidence"),
        ({"transition_s": math.inf}, "no order of moves"),
        ({"regret_s": 990.0}, "budget"),
    ],
)
def test_one_that_does_not_is_refused_with_the_reason(changed: dict[str, float], why: str) -> None:
    one = verdict(**changed)
    assert not one.admitted
    assert why in one.reason


def test_confidence_is_of_the_whole_horizon() -> None:
    assert confidence_of(10.0, 4.0, 6.0, 60.0) == pytest.approx(0.5)
    assert confidence_of(10.0, 0.0, 10.0, 60.0) == 1.0
    assert confidence_of(10.0, 4.0, 0.0, 60.0) == 0.0


# Forecasts.


def test_growth_is_forecast_and_damped() -> None:
    one = LengthForecast()
    for step in range(200):
        one.observe(400.0 * 1.01**step)
    now = 400.0 * 1.01**199
    assert now * 1.04 < one.at(10) < now * 1.2
    assert one.at(10_000) < now * 2.0
    assert one.at(10, 2.0) > one.at(10)


def test_one_odd_batch_moves_little_and_a_jump_is_followed() -> None:
    one = LengthForecast()
    for _ in range(50):
        one.observe(1000.0)
    one.observe(4000.0)
    assert one.at(1) < 1100.0
    one.observe(4000.0)
    assert one.at(1) == pytest.approx(4000.0, rel=0.05)


def test_conditions_that_changed_often_are_expected_to_change_again() -> None:
    assert Lifetime(0, 0).expected_steps() == Lifetime.PRIOR_STEPS
    assert Lifetime(1000, 0).expected_steps() > 1000
    assert Lifetime(1000, 99).expected_steps() == pytest.approx(10.3)


# The journal.


def test_what_is_appended_is_read_back_and_private(tmp_path: Path) -> None:
    one = DecisionJournal(tmp_path)
    one.append("observation", {"value": 1})
    one.append("decision", {"value": "\n"})
    assert [e["value"] for e in DecisionJournal(tmp_path).read()] == [1, "\n"]
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600


def test_a_torn_line_is_cut_off_by_the_next(tmp_path: Path) -> None:
    one = DecisionJournal(tmp_path)
    one.append("observation", {"value": 1})
    one.close()
    with one.path.open("ab") as file:
        file.write(b"00000000 {half")
    again = DecisionJournal(tmp_path)
    assert len(again.read()) == 1
    again.append("observation", {"value": 2})
    assert [e["value"] for e in again.read()] == [1, 2]


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    one = DecisionJournal(tmp_path)
    for value in range(3):
        one.append("observation", {"value": value})
    data = bytearray(one.path.read_bytes())
    data[12] ^= 1
    one.path.write_bytes(bytes(data))
    with pytest.raises(DecisionJournalError, match=":1: damaged"):
        DecisionJournal(tmp_path).read()


# The controller.


def test_before_a_step_it_stays_and_says_why() -> None:
    setting = setting_of(trace())
    one = Controller(setting, ControllerConfig(), starting_plan(setting, 16), 0)
    found = one.decide((Lease(16),), 0)
    assert found.kind == "stay"
    assert "no step" in found.reason


def test_gpus_that_leave_are_left_at_once_or_within_the_notice() -> None:
    setting = setting_of(trace())
    one = Controller(setting, ControllerConfig(), starting_plan(setting, 16), 0)
    assert one.decide((Lease(8), Lease(8, until_s=1e6)), 3).kind == "stay"
    found = one.decide(LEAVE, 3)
    assert found.kind == "propose"
    assert found.forced
    assert found.plan is not None
    assert max(found.plan.devices) < 8
    assert Decision.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_gpus_are_left_in_steps_beyond_those_that_were_expected() -> None:
    setting = setting_of(trace())
    one = Controller(setting, ControllerConfig(), starting_plan(setting, 16), 0)
    for step in (setting.steps, setting.steps + 3):
        assert one.decide((Lease(16),), step).reason == "the run is done"
        found = one.decide(LEAVE, step)
        assert found.plan is not None
        assert max(found.plan.devices) < 8


def test_a_restarted_controller_decides_as_the_one_that_ended(tmp_path: Path) -> None:
    world = World(trace(gpus=((0.0, 16), (12.0, 8)), steps=24))
    policy = Nereus(world, journal=DecisionJournal(tmp_path))
    result = through(world, policy)
    assert not result.stopped
    assert result.transitions >= 1
    again = Controller.resume(DecisionJournal(tmp_path), transitions=policy._transition)
    one = policy.controller
    assert again.plan == one.plan
    assert again.epoch == one.epoch
    assert again.learned.to_dict() == one.learned.to_dict()
    assert again.lengths == one.lengths
    assert again.books.to_dict() == one.books.to_dict()


def test_a_journal_without_a_beginning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DecisionJournalError, match="no controller"):
        Controller.resume(DecisionJournal(tmp_path))


def test_more_gpus_are_taken_and_fewer_left_without_a_restart() -> None:
    world = World(trace(gpus=((0.0, 8), (10.0, 16), (70.0, 8)), steps=80))
    policy = Nereus(world)
    result = through(world, policy)
    assert not result.stopped
    assert result.restarts == result.failures == 0
    assert result.transitions >= 2


@pytest.mark.parametrize("policy", [Nereus, RestartElastic])
def test_what_it_proposed_is_proved_however_it_was_executed(policy: type[Nereus]) -> None:
    world = World(trace(gpus=((0.0, 16), (12.0, 8)), steps=24))
    made = policy(world)
    result = through(world, made)
    assert result.transitions + result.restarts >= 1
    assert len(made.controller.proofs) == result.transitions + result.restarts
    assert made.controller.corrected.measured == len(made.controller.proofs)


def test_out_of_memory_is_recovered_from_and_remembered() -> None:
    """Lengths jump tenfold and back: nobody can know the first time; the second time it fits."""
    means = (300.0,) * 6 + (3000.0,) * 6 + (300.0,) * 8 + (3000.0,) * 6
    world = World(trace(steps=26, mean_response_tokens=means, max_response_tokens=16384))
    policy = Nereus(world)
    result = through(world, policy)
    assert not result.stopped
    assert result.oom == 1
    assert policy.controller.learned.memory.factor < 1.1  # lengths were others, not the bytes


def test_what_slows_every_stage_alike_is_no_layouts_fault() -> None:
    one = Common()
    for _ in range(20):
        one.observe([1.01, 0.99, 1.0], 0.03)
    assert one.factor == pytest.approx(1.0, abs=0.02)
    one.observe([1.4, 1.42, 1.38], 0.03)
    assert one.factor < 1.1  # one odd step
    one.observe([1.4, 1.42, 1.38], 0.03)
    assert one.factor == pytest.approx(1.4, rel=0.02)


def test_what_slowed_a_job_may_end_with_a_transition() -> None:
    """Nearer to the usual than to what slowed the steps before: it has ended; the layout is not
    called fast for it."""
    one = Common()
    for ratio in [1.0] * 10 + [1.4] * 3:
        one.observe([ratio] * 4, 0.03)
    one.entered([1.02, 0.97, 1.05, 1.0])
    assert one.factor == pytest.approx(1.0, abs=0.02)


def test_a_layout_that_was_blamed_for_what_ends_is_forgotten() -> None:
    one = Common()
    for ratio in [1.0] * 10:
        one.observe([ratio] * 4, 0.03)
    one.entered([1.4, 1.42, 1.38, 1.4])
    assert one.factor == pytest.approx(1.0, abs=0.02)  # it could be the layout
    # As much ends while the layout stays; its own filter expects 1.4.
    found = [one.observe([1.0 / 1.4] * 4, 0.03, 0.0) for _ in range(2)]
    assert found == [False, True]
    assert one.factor == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("until", [4, 6, 10, 20])
def test_a_slow_rank_across_a_transition_leaves_no_layout_wrong(until: int) -> None:
    """Slow from the fifth step to `until`, the layout changes before the eighth."""
    one = Learned()
    plans = [starting_plan(setting_of(trace()), gpus) for gpus in (16, 8)]
    made = Plans(setting_of(trace()), one)
    for step in range(40):
        plan = plans[step >= 7]
        predicted = made.estimate(plan, 400.0)
        assert predicted is not None
        slow = 1.4 if 4 <= step < until else 1.0
        luck = 1.0 + 0.01 * ((step % 3) - 1)
        measured = {s: slow * luck * e.seconds for s, e in predicted.stages.items()}
        one.observe(plan.assignments, predicted, measured, None)
    assert one.common.factor == pytest.approx(1.0, abs=0.05)
    for plan in plans:
        judged = made.judge(plan, 400.0)
        predicted_s = sum(judged.predicted_s.values())
        assert sum(e.seconds for e in judged.stages.values()) == pytest.approx(
            predicted_s, rel=0.05
        )


def test_gpus_that_come_are_taken_without_a_dwell() -> None:
    """That they are there is no noise: at the boundary at which they are seen, although the plan
    has been in force for two steps only."""
    world = World(trace(gpus=((0.0, 8), (2.0, 16)), steps=180))
    policy = Nereus(world)
    job = SimulatedJob(world, policy.start(world.known))
    while job.step < 3:
        decision = policy.decide(job)
        if decision is not None:
            assert job.step == 2
            job.execute(Proposal(job.epoch(), decision.plan), decision.predicted)
        assert not isinstance(job.advance(), Failure)
    assert max(job.describe().devices) == 15


def test_peaks_that_are_higher_than_predicted_are_learned() -> None:
    one = Memory()
    for _ in range(10):
        one.observe(10e9, 11e9)
    assert one.factor == pytest.approx(1.1, rel=0.02)
    one.observe(10e9, 100e9)  # something else than was predicted
    assert one.factor == pytest.approx(1.1, rel=0.02)
    one.exceeded(70e9, 80e9)
    assert one.factor * 70e9 > 80e9


def test_decisions_are_shown_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = setting_of(trace())
    journal = DecisionJournal(tmp_path)
    one = Controller(setting, ControllerConfig(), starting_plan(setting, 16), 0, journal)
    one.decide((Lease(16),), 0)
    one.decide(LEAVE, 1)
    assert main(["decisions", str(tmp_path), "--alternatives"]) == 0
    shown = capsys.readouterr().out
    assert "stay: no step was observed yet" in shown
    assert "propose (forced): 8 GPUs are leaving" in shown
    assert main(["decisions", str(tmp_path), "--json", "--step", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"][0]["kind"] == "stay"
    assert main(["decisions", str(tmp_path / "nowhere")]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_a_step_that_is_recorded_after_a_transition_is_of_the_plan_before() -> None:
    """As verl does, whose timer of that step holds the transition."""
    one = trace()
    setting = setting_of(one)
    plan = starting_plan(setting, 16)
    controller = Controller(setting, ControllerConfig(), plan, 0)
    layout = plan.assignments[ModelStage.ACTOR_TRAIN].layout.to_dict()

    def step(number: int, epoch: int, stall_s: float = 0.0) -> StepRecord:
        stages = {"gen": 5.0, "update_actor": 4.0, "old_log_prob": 1.0}
        return StepRecord(
            step=number, epoch=epoch, time_unix_s=float(number), step_s=10.0 + stall_s,
            stages_s=stages | {"nereus_transition": stall_s}, tokens={}, samples=256,
            memory_bytes={}, metrics={"response_length/mean": 400.0}, plan={"actor": layout},
        )  # fmt: skip

    controller.observe(step(1, 0))
    assert controller.learned.steps == 1
    other = next(iter(controller.plans.with_other_knobs(plan, 400.0)))
    controller.adopt(other, 1)
    controller.observe(step(2, 0, stall_s=15.0))
    assert controller.learned.steps == 1
    assert controller.lengths.seen == 2  # which no plan changes
    state = controller.to_dict()
    assert state["in_force"] == 0
    assert state["step_s"] == 10.0
    controller.observe(step(3, 1))
    assert controller.learned.steps == 2
    assert controller.to_dict()["in_force"] == 1


# Records and journals that are not as hoped for.


def begun(journal: DecisionJournal | None = None) -> Controller:
    setting = dataclasses.replace(setting_of(trace()), steps=100)
    return Controller(setting, ControllerConfig(), starting_plan(setting, 16), 0, journal)


def step_record(number: int, **changed: Any) -> StepRecord:
    made = StepRecord(
        step=number, epoch=0, time_unix_s=float(number), step_s=10.0,
        stages_s={"gen": 5.0, "ref": 1.0, "update_actor": 4.0}, tokens={"response": 256 * 400},
        samples=256, memory_bytes={"allocated": 10**10},
        metrics={"response_length/mean": 400.0}, plan={},
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def answer(decision: Decision, outcome: str, **changed: Any) -> TransitionRecord:
    made = TransitionRecord(
        step=decision.step, epoch=decision.epoch + (outcome == "committed"), time_unix_s=0.0,
        outcome=outcome, reason="", units={}, seconds={"move": 1.0}, digest="",
        predicted=decision.predicted(),
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": {"response_length/mean": math.nan}},
        {"metrics": {"response_length/mean": -1.0}},
        {"metrics": {}, "tokens": {}},
        {"step_s": math.nan},
        {"step_s": math.inf},
        {"stages_s": {"gen": math.nan, "update_actor": math.inf}},
        {"stages_s": {}},
        {"memory_bytes": {"allocated": math.nan}},
        {"samples": 0, "metrics": {}},
    ],
)
def test_what_cannot_be_learned_from_is_passed_over(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """It ends no controller, nor one that takes up the journal, and spoils nothing."""
    one = begun(DecisionJournal(tmp_path))
    for number in (1, 2):
        one.observe(step_record(number))
    one.observe(step_record(3, **changed))
    one.observe(step_record(4))
    assert "NaN" not in json.dumps(one.to_dict())
    assert "Infinity" not in json.dumps(one.to_dict())
    one.decide((Lease(16),), 4)
    again = Controller.resume(DecisionJournal(tmp_path))
    assert again.lengths == one.lengths
    assert again.learned.to_dict() == one.learned.to_dict()


def test_what_was_aborted_and_proposed_survives_a_restart(tmp_path: Path) -> None:
    one = begun(DecisionJournal(tmp_path))
    first = one.decide(LEAVE, 3)
    assert first.plan is not None
    one.observe(answer(first, "aborted"))
    second = one.decide(LEAVE, 3)
    assert second.plan is not None
    assert second.plan.assignments != first.plan.assignments
    for number in range(4, 54):  # the state is written, and what was before it is not read again
        one.observe(step_record(number))
    states = [e["kind"] for e in DecisionJournal(tmp_path).read()]
    assert states.count("state") == 1
    again = Controller.resume(DecisionJournal(tmp_path))
    found = again.decide(LEAVE, 52)
    assert found.plan is None or found.plan.assignments != first.plan.assignments
    later = again.decide(LEAVE, 55)
    assert later.plan is not None
    assert later.plan.assignments == first.plan.assignments
    # Approved late, it is still the proposal that it was.
    again.observe(answer(second, "committed"))
    assert again.plan == second.plan
    assert again.epoch == 1
    assert len(again.proofs) == 1


def test_a_plan_that_was_not_proposed_here_is_not_taken_for_the_proposal() -> None:
    one = begun()
    before = one.plan
    found = one.decide(LEAVE, 3)
    assert found.plan is not None
    one.observe(answer(found, "committed", epoch=4, predicted={}))  # a user's
    assert one.plan == before
    assert not one.proofs
    assert one.epoch == 0  # until it is told what is in force
    one.adopt(starting_plan(one.setting, 8), 4)
    assert one.epoch == 4
    one.observe(answer(found, "aborted", epoch=4))  # of an epoch that is over
    assert one.decide((Lease(16),), 4).epoch == 4


def test_where_the_rollout_fell_back_the_proposal_is_not_in_force() -> None:
    one = begun()
    before = one.plan
    found = one.decide(LEAVE, 3)
    assert found.plan is not None
    one.observe(answer(found, "committed", rollout={"fell_back": "a server did not start"}))
    assert (one.plan, one.epoch, one.proofs) == (before, 0, [])
    again = one.decide(LEAVE, 4)
    assert again.plan is None or again.plan.assignments != found.plan.assignments
    mixed = GlobalPlan(
        {
            **found.plan.assignments,
            ModelStage.ACTOR_GENERATE: before.assignments[ModelStage.ACTOR_GENERATE],
        },
        name="mixed",
    )
    one.adopt(mixed, 1)  # as the job says
    assert (one.plan, one.epoch) == (mixed, 1)


def test_a_proposal_is_known_after_later_decisions_to_stay() -> None:
    """As one that waits for its approval."""
    one = begun()
    found = one.decide(LEAVE, 3)
    assert found.plan is not None
    assert one.decide((Lease(16),), 4).kind == "stay"
    one.observe(answer(found, "committed", step=4))
    assert one.plan == found.plan
    assert one.proofs[-1].step == 4


def test_a_journal_with_two_beginnings_is_the_second_ones(tmp_path: Path) -> None:
    first = begun(DecisionJournal(tmp_path))
    first.observe(step_record(1))
    first.adopt(starting_plan(first.setting, 8), 3)
    second = begun(DecisionJournal(tmp_path))
    second.observe(step_record(1, metrics={"response_length/mean": 900.0}))
    again = Controller.resume(DecisionJournal(tmp_path))
    assert again.plan == second.plan
    assert again.epoch == 0
    assert again.lengths == second.lengths


def test_a_state_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    journal = DecisionJournal(tmp_path)
    begun(journal)
    journal.append("state", {"state": {"plan": {}}})
    with pytest.raises(DecisionJournalError, match="cannot be resumed from"):
        Controller.resume(DecisionJournal(tmp_path))


def test_a_plan_that_the_cost_model_does_not_know_is_not_left_for_that() -> None:
    one = begun()
    layout = Layout(tp=16, sequence_parallel=True, sharding="zero1")  # 12 heads
    odd = GlobalPlan(dict.fromkeys(one.plan.assignments, Assignment(layout)), name="odd")
    assert one.plans.estimate(odd, 400.0) is None
    one.adopt(odd, 0)
    one.observe(step_record(1))
    found = one.decide((Lease(16),), 1)
    assert found.kind == "stay"
    assert "cost model" in found.reason
    found = one.decide(LEAVE, 1)
    assert found.forced
    assert "can be reached" in found.reason


def test_what_a_transition_brought_stands_beside_its_proposal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a live job a step ends between the two."""
    one = begun(DecisionJournal(tmp_path))
    one.observe(step_record(1))
    found = one.decide(LEAVE, 1)
    assert found.plan is not None
    one.observe(step_record(2))
    one.observe(answer(found, "committed", step=2))
    for number in range(3, 14):
        one.observe(step_record(number, epoch=1))
    assert main(["decisions", str(tmp_path), "--proposals"]) == 0
    assert capsys.readouterr().out.count("stall predicted") == 1
    # A crash before the proof was written loses nothing.
    path = tmp_path / "decisions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"kind":"proof"' in line)
    path.write_bytes(b"".join(lines[:at]))
    for _ in range(2):
        Controller.resume(DecisionJournal(tmp_path))
    assert main(["decisions", str(tmp_path), "--proposals"]) == 0
    assert capsys.readouterr().out.count("stall predicted") == 1
    assert path.read_bytes().count(b'"kind":"proof"') == 1
