"""The plan against every plan of small random jobs (`benchmarks/planning_exhaustive`)."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Cases that run every time, and in the full run.
FEW, MANY = 40, 240


@pytest.fixture(scope="module")
def brute() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import planning_exhaustive

        yield planning_exhaustive
    finally:
        sys.path.remove(str(BENCHMARKS))


def check(brute: Any, seed: int) -> Any:
    case = brute.random_case(seed)
    outcome = brute.solve(case)
    if outcome.best_s is None:
        # On fewer GPUs something may fit that does not on all: nothing more can be said.
        return outcome
    assert outcome.gap is not None
    assert outcome.gap <= 0.01, case
    # The stated gap is a bound: nothing on shared GPUs that brute force finds is below it.
    if outcome.together_s is not None:
        assert outcome.bound_s is not None
        assert outcome.together_s >= outcome.bound_s * (1.0 - 1e-9), case
    return outcome


@pytest.mark.parametrize("block", range(4))
def test_the_plan_is_within_one_percent_of_brute_force(brute: Any, block: int) -> None:
    size = FEW // 4
    outcomes = [check(brute, seed) for seed in range(block * size, (block + 1) * size)]
    assert sum(o.best_s is not None for o in outcomes) > size // 2


@pytest.mark.full
def test_hundreds_of_whole_jobs_against_brute_force(brute: Any) -> None:
    outcomes = [check(brute, seed) for seed in range(FEW, MANY)]
    found = brute.summary(outcomes)
    print(found)
    assert found["missed"] == 0
    assert found["solved"] >= 150
    assert found["exact"] > 0.9 * found["solved"]
    assert found["planner_faster"] < 0.1 * found["solved"]
    assert math.isfinite(found["gap_largest"])
