"""How often to take a snapshot: the formula against the model it approximates, and step times."""

from __future__ import annotations

import math

import pytest

from nereus_plugins.snapshot.interval import Due, StepTimes, best_interval_s, steps_between


def lost_share(interval_s: float, cost_s: float, between_failures_s: float) -> float:
    """Time over useful time in Daly's complete model, up to a factor that does not
    depend on the interval."""
    return math.expm1((interval_s + cost_s) / between_failures_s) / interval_s


@pytest.mark.parametrize("between_failures_s", [600.0, 3600.0, 86400.0])
@pytest.mark.parametrize("cost_s", [0.1, 5.0, 60.0, 300.0])
def test_no_other_interval_is_better(cost_s: float, between_failures_s: float) -> None:
    best = lost_share(best_interval_s(cost_s, between_failures_s), cost_s, between_failures_s)
    others = [between_failures_s * 1.01**i for i in range(-1200, 300)]
    least = min(lost_share(other, cost_s, between_failures_s) for other in others)
    # Over the useful time alone (1 / between_failures_s), what both lose.
    useful = 1.0 / between_failures_s
    assert best - useful <= (least - useful) * 1.01


def test_a_cost_beyond_the_time_between_failures() -> None:
    assert best_interval_s(100.0, 40.0) == 40.0
    assert best_interval_s(1e-6, 1e6) == pytest.approx(math.sqrt(2.0), rel=1e-3)
    for wrong in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="above 0"):
            best_interval_s(*wrong)


def test_whole_steps_and_not_while_the_last_is_written() -> None:
    assert steps_between(2.0, 3600.0, 10.0, 0.0) == math.ceil(best_interval_s(2.0, 3600.0) / 10.0)
    assert steps_between(2.0, 3600.0, 10.0, 500.0) == 50
    assert steps_between(2.0, 3600.0, 1e4, 0.0) == 1


def test_steps_beside_a_snapshot_tell_what_it_slows() -> None:
    times = StepTimes()
    assert times.usual_s is None
    for step_s in (1.0, 1.1, 0.9):
        times.add(step_s, beside=False)
    times.begin()
    times.add(1.5, beside=True)
    times.add(1.2, beside=True)
    assert times.usual_s == 1.0
    assert times.slowed_s == pytest.approx(0.7)
    times.begin()
    assert times.slowed_s == pytest.approx(0.7)  # until it is known better
    times.add(1.1, beside=True)
    assert times.slowed_s == pytest.approx(0.1)


def test_due_by_what_snapshots_cost() -> None:
    due = Due(between_failures_s=3600.0)
    assert not due.after_step(1, 0.0)  # how long a step takes is not known
    due.goes_on(1.0, beside=False)
    assert due.after_step(2, 11.0)
    costs = due.costs(2.0, 0.0)
    assert costs == [2.0, 10.0, 0.0]
    due.begun(2, costs)
    steps = steps_between(2.0, 3600.0, 10.0, 0.0)
    assert due.next_step == 2 + steps
    due.goes_on(13.0, beside=True)
    assert not due.after_step(3, 24.0)
    assert due.costs(2.0, 5.0) == [3.0, 10.0, 5.0]  # a second longer beside the last one
    assert due.after_step(2 + steps, 25.0)


def test_what_could_not_be_begun_is_due_again_less_and_less_soon() -> None:
    due, tried = Due(every_steps=1), []
    for step in range(1, 70):
        if due.after_step(step, 0.0):
            tried.append(step)
            due.not_begun(step)
    assert tried == [1, 2, 4, 8, 16, 32, 64]
    due.begun(127, [1.0, 0.0, 0.0])
    due.not_begun(128)
    assert due.next_step == 129
    assert not Due().after_step(1, 0.0)
