"""Leases: what is said of a live job's GPUs, and what plans may be made for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest

from nereus_plugins.control.inbox import Inbox, Refused
from nereus_plugins.control.lent import Granted, leases_of
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import Controller
from nereus_plugins.controller.leases import Level, levels, usable, within
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.controller.transition import TransitionEstimate
from nereus_plugins.job import Lease
from nereus_plugins.sim.job import capabilities_of
from nereus_plugins.spec import GlobalPlan, LengthDistribution, ModelStage, SpecError

from .test_controller_stability import ONE, SHORT, SMALL, TablePlans, plan, run
from .test_sim import SETTING

NOW = 1000.0


@pytest.mark.parametrize(
    ("free", "leaving_s", "granted", "found"),
    [
        (0, [], None, [Lease(4)]),
        (2, [], None, [Lease(6)]),
        (2, [30.0], None, [Lease(3), Lease(1, 30.0)]),  # nothing is offered meanwhile
        (0, [-1.0, 30.0], None, [Lease(2), Lease(1, 30.0), Lease(1, 0.0)]),
        (0, [5.0, 5.0, 5.0, 5.0], None, [Lease(1), Lease(3, 5.0)]),
        (2, [math.inf], None, [Lease(6)]),  # Ray does not say until when
        (9, [], Granted(8, NOW, 8), [Lease(8)]),
        (0, [], Granted(2, NOW + 60, 2), [Lease(2), Lease(2, 60.0)]),
        (0, [10.0], Granted(2, NOW + 60, 2), [Lease(2), Lease(1, 60.0), Lease(1, 10.0)]),
        (9, [], Granted(8, NOW, 4, NOW + 600), [Lease(4), Lease(4, 600.0)]),
        (1, [], Granted(8, NOW, 2, NOW + 600, 30.0), [Lease(2), Lease(3, 600.0, 30.0)]),
        (9, [], Granted(8, NOW, 4, notice_s=30.0), [Lease(4), Lease(4, None, 30.0)]),
        # What was lent has to be given back.
        (9, [], Granted(8, NOW - 600, 2, NOW), [Lease(2), Lease(2, 0.0)]),
    ],
)
def test_leases_of_a_live_job(
    free: int, leaving_s: list[float], granted: Granted | None, found: list[Lease]
) -> None:
    assert list(leases_of(4, free, leaving_s, granted, NOW)) == found


def test_what_is_lent_can_be_lent_for_longer_and_stays_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job has grown onto what was lent to it, and still holds it when that has ended."""
    inbox, now = Inbox(str, takes_gpus=""), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def leases() -> tuple[Lease, ...]:
        return leases_of(8, 4, [], inbox.granted(), now)

    inbox.inform(epoch=0, gpus=4)
    inbox.grant(0, 8, 0.0, lent_s=600.0)
    inbox.inform(epoch=0, gpus=8)
    now = 500.0
    inbox.grant(0, 8, 0.0, lent_s=600.0)
    assert leases() == (Lease(4), Lease(4, 600.0))
    now = 1100.0
    inbox.grant(0, 12, 0.0, lent_s=600.0)
    assert leases() == (Lease(4), Lease(8, 600.0))
    with pytest.raises(Refused, match="4 are the job's own: of 4, none would be lent"):
        inbox.grant(0, 4, 0.0, lent_s=600.0)
    inbox.grant(0, 8, 0.0)  # for good
    inbox.grant(0, 12, 0.0, lent_s=600.0)
    assert leases() == (Lease(8), Lease(4, 600.0))


def test_bad_leases_are_refused() -> None:
    for fields in ({"gpus": 0}, {"gpus": 1, "until_s": -1.0}, {"gpus": 1, "notice_s": math.inf}):
        with pytest.raises(SpecError):
            Lease(**fields)


@pytest.mark.parametrize(
    ("leases", "there", "found"),
    [
        ([Lease(8)], 8, [(8, math.inf)]),
        ([Lease(8), Lease(8, 20.0)], 8, [(8, math.inf)]),
        ([Lease(8), Lease(8, 120.0)], 16, [(8, math.inf), (16, 10.0)]),
        ([Lease(8), Lease(8, 1e6)], 16, [(16, math.inf)]),  # longer than the run
        ([Lease(8, 120.0)], 8, [(8, 10.0)]),
        ([Lease(8), Lease(8, None, 60.0)], 16, [(16, math.inf)]),
        # Taken back faster than they can be left: only where they are held already.
        ([Lease(8), Lease(8, None, 5.0)], 16, [(8, math.inf)]),
        ([Lease(6), Lease(8, None, 5.0)], 14, [(8, math.inf)]),
    ],
)
def test_what_may_be_planned_for(
    leases: list[Lease], there: int, found: list[tuple[int, float]]
) -> None:
    """Leases are left 20 s before they end; steps take 10 s, 100 are wanted, on 8 GPUs now."""
    assert usable(leases, 20.0) == there
    assert levels(leases, 20.0, 10.0, 100.0, 8) == tuple(Level(*one) for one in found)


@pytest.mark.parametrize(
    ("found", "gpus", "kept"),
    [
        ([], 8, []),
        ([(4, math.inf), (8, 15.0)], 8, [(4, math.inf), (8, 15.0)]),
        ([(4, math.inf), (8, 15.0), (16, 5.0)], 8, [(4, math.inf), (8, 15.0)]),
        ([(4, math.inf), (8, 15.0)], 6, [(4, math.inf), (6, 15.0)]),  # it holds some of them
        ([(16, math.inf), (24, 15.0)], 8, [(16, math.inf)]),
    ],
)
def test_what_may_be_planned_for_without_further_gpus(
    found: list[tuple[int, float]], gpus: int, kept: list[tuple[int, float]]
) -> None:
    assert within([Level(*one) for one in found], gpus) == tuple(Level(*one) for one in kept)


def with_budget(one: GlobalPlan) -> GlobalPlan:
    """The same but for a token budget of training."""
    train = one.assignments[ModelStage.ACTOR_TRAIN]
    other = dataclasses.replace(
        train, knobs=dataclasses.replace(train.knobs, token_budget_tokens=8192)
    )
    return GlobalPlan(
        {**one.assignments, ModelStage.ACTOR_TRAIN: other}, name=f"{one.name}, other knobs"
    )


class Filling(TablePlans):
    """The first plan fills a GPU; other knobs, or other layouts, do not."""

    full = True

    def memory(self, chosen: GlobalPlan, mean_tokens: float) -> float:
        return 0.99 if self.full and chosen == self.options[0] else 0.5

    def with_other_knobs(self, current: GlobalPlan, mean_tokens: float) -> Iterator[GlobalPlan]:
        yield with_budget(current)


@pytest.mark.parametrize(
    ("held", "leases", "full", "onto"),
    [
        # The lent GPUs save 54 s a step for 18 steps; other knobs are there in 60 s.
        (8, [Lease(4), Lease(4, 1200.0)], True, "TP2 on 8, other knobs"),
        (
            6,
            [Lease(4), Lease(4, 1200.0)],
            True,
            "TP2 on 6, other knobs",
        ),  # holds half of what is lent
        # For one step, which does not repay that.
        (8, [Lease(4), Lease(4, 123.0)], True, "TP2 on 4"),
        # Further GPUs are faster, but have to be left.
        (8, [Lease(8), Lease(8, 1200.0)], True, "TP2 on 8, other knobs"),
        # Two go; two stay for 23 steps, or for fewer than repay moving twice.
        (8, [Lease(4), Lease(2, 1500.0), Lease(2, 60.0)], False, "TP2 on 6"),
        (8, [Lease(4), Lease(2, 250.0), Lease(2, 60.0)], False, "TP2 on 4"),
    ],
)
def test_what_is_held_and_lent_is_used_while_it_lasts(
    held: int, leases: list[Lease], full: bool, onto: str
) -> None:
    """Where memory fills or GPUs go. A step takes 480 s on one GPU, 10 % more with other knobs;
    other layouts are there in 100 s."""
    options = [plan(2, held), *(plan(2, gpus) for gpus in (4, 6, 8, 16) if gpus != held)]
    setting = JobSetting.of(
        SETTING, capabilities_of(SETTING.job), LengthDistribution.fixed(500), 4096, 1000
    )

    def transition(old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate:
        return TransitionEstimate({"all": 60.0 if old.devices == new.devices else 100.0}, "digest")

    def table(chosen: GlobalPlan, _mean: float) -> float:
        return 480.0 / len(chosen.devices) * (1.1 if "other knobs" in chosen.name else 1.0)

    one = Controller(setting, ControllerConfig(), options[0], 0, transitions=transition)
    one.plans = Filling(one.plans, options, table)
    one.plans.full = full
    found = one.decide(leases, 10)
    assert found.forced
    assert found.plan is not None
    assert found.plan.name == onto


def moves(lease: Lease, steps: int = 100, transition_s: float = 200.0) -> tuple[list[int], float]:
    """A job on 8 GPUs, which 8 more would save a third of a step of 60 s, and which has them by
    this lease from the start.

    Returns: steps at which transitions happened, and seconds of the run against staying.
    """
    spent = 0.0

    def leases(step: int, now: GlobalPlan) -> tuple[Lease, ...]:
        nonlocal spent
        spent += 40.0 if max(now.devices) >= 8 else 60.0
        if lease.until_s is None:
            return Lease(8), lease
        left_s = lease.until_s - spent
        return (Lease(8), Lease(8, left_s)) if left_s > 0 else (Lease(8),)

    found = run(
        [SMALL, ONE], lambda chosen, _mean: 60.0 if chosen == SMALL else 40.0, [SHORT] * steps,
        transition_s=transition_s, gpus=leases,
    )  # fmt: skip
    return sorted(found.unforced + found.forced), found.run_s / found.held_s[0]


def test_what_is_lent_for_long_is_used_and_left_in_time() -> None:
    steps, part = moves(Lease(8, 3000.0))
    assert len(steps) == 2
    assert part < 0.95


def test_what_is_lent_too_short_to_repay_the_way_there_and_back_is_not_used() -> None:
    assert moves(Lease(8, 900.0)) == ([], 1.0)


def test_what_can_be_taken_back_too_suddenly_is_not_used() -> None:
    assert moves(Lease(8, None, 30.0)) == ([], 1.0)
    steps, part = moves(Lease(8, None, 3600.0))
    assert len(steps) == 1
    assert part < 0.9
