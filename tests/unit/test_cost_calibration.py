"""Calibration: it converges, forgets, is not moved by a stall, and beats naive prediction."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_plugins.cost.calibrate import main, measured_seconds, read_log
from nereus_plugins.cost.calibration import Calibration, Filter, NextStep, layout_distance
from nereus_plugins.cost.cli import main as estimate_main
from nereus_plugins.spec import Assignment, Layout, ModelStage, SpecError

S = ModelStage
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def taught(
    steps: int = 60, *, factor: float = 1.5, fixed: float = 20.0, noise: float = 0.01
) -> tuple[Filter, np.random.Generator]:
    """A filter that saw measured = factor * predicted + fixed, with noise."""
    rng = np.random.default_rng(1)
    known = Filter()
    for _ in range(steps):
        predicted = float(rng.uniform(50, 150))
        truth = factor * predicted + fixed
        known.observe(predicted, truth * (1 + noise * rng.standard_normal()))
    return known, rng


def test_slope_and_level_are_found() -> None:
    known, _ = taught()
    for predicted in (50.0, 100.0, 150.0):
        expected, spread = known.predict(predicted)
        assert expected == pytest.approx(1.5 * predicted + 20, rel=0.01)
        assert spread < 0.03 * expected


def test_a_stall_of_hours_moves_nothing() -> None:
    known, _ = taught()
    before = known.predict(100.0)[0]
    assert known.observe(100.0, 22544.0)
    assert known.predict(100.0)[0] == pytest.approx(before, rel=0.01)


def test_a_lasting_change_is_followed() -> None:
    known, rng = taught()
    for _ in range(6):
        known.observe(100.0, 250.0 * (1 + 0.01 * rng.standard_normal()))
    assert known.predict(100.0)[0] == pytest.approx(250, rel=0.05)


def test_a_slow_drift_is_followed() -> None:
    known, _ = taught()
    for step in range(100):
        known.observe(100.0, 170.0 * (1 + 0.003 * step))
    assert known.predict(100.0)[0] == pytest.approx(170 * 1.297, rel=0.02)


def test_the_scale_of_predictions_does_not_matter() -> None:
    small, large = Filter(), Filter()
    for tokens, seconds in ((1e6, 60.0), (2e6, 110.0), (3e6, 160.0), (1.5e6, 85.0)) * 4:
        small.observe(tokens / 1e6, seconds)
        large.observe(tokens, seconds)
    assert small.predict(2.5)[0] == pytest.approx(large.predict(2.5e6)[0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_make_no_sense_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Filter().observe(10.0, value)


def assignments(layout: Layout) -> dict[ModelStage, Assignment]:
    return {S.ACTOR_TRAIN: Assignment(layout)}


def test_a_plan_never_tried_inherits_from_its_neighbours() -> None:
    known = Calibration()
    assert known.seconds(S.ACTOR_TRAIN, Assignment(Layout(tp=2, dp=4)), 100.0) == 100.0
    assert known.with_spread(S.ACTOR_TRAIN, Assignment(Layout(tp=2, dp=4)), 100.0)[1] > 40
    for _ in range(20):
        known.observe(
            assignments(Layout(tp=4, dp=2)), {S.ACTOR_TRAIN: 100.0}, {S.ACTOR_TRAIN: 150.0}
        )
        known.observe(assignments(Layout(pp=8)), {S.ACTOR_TRAIN: 100.0}, {S.ACTOR_TRAIN: 300.0})
    near, spread = known.with_spread(S.ACTOR_TRAIN, Assignment(Layout(tp=2, dp=4)), 100.0)
    # Between the two, nearer to the nearer one, less sure than of what was tried.
    assert 150 < near < 225
    tried = known.with_spread(S.ACTOR_TRAIN, Assignment(Layout(tp=4, dp=2)), 100.0)
    assert tried[0] == pytest.approx(150, rel=0.02)
    assert tried[1] / tried[0] < spread / near < 0.4
    assert layout_distance(Layout(tp=4, dp=2), Layout(tp=2, dp=4)) == 2


def test_other_stages_are_not_touched() -> None:
    known = Calibration()
    known.observe(assignments(Layout(dp=8)), {S.ACTOR_TRAIN: 10.0}, {S.ACTOR_TRAIN: 20.0})
    assert known.seconds(S.CRITIC_TRAIN, Assignment(Layout(dp=8)), 10.0) == 10.0


def test_the_first_steps_after_a_transition_count_for_little() -> None:
    def after(settles: bool) -> float:
        known = Calibration()
        stage = {S.ACTOR_TRAIN: 100.0}
        for _ in range(20):
            known.observe(assignments(Layout(dp=8)), stage, {S.ACTOR_TRAIN: 120.0})
        if settles:
            known.after_transition()
        known.observe(assignments(Layout(dp=8)), stage, {S.ACTOR_TRAIN: 126.0})
        return known.seconds(S.ACTOR_TRAIN, Assignment(Layout(dp=8)), 100.0)

    assert 120 < after(True) < after(False)


def test_measured_memory_sets_factor_and_margin() -> None:
    known = Calibration()
    layout = Assignment(Layout(dp=8))
    assert known.bytes(S.ACTOR_TRAIN, layout, 60e9) == 60e9
    rng = np.random.default_rng(0)
    for _ in range(30):
        measured = 66e9 * (1 + 0.01 * rng.standard_normal())
        known.observe(
            {S.ACTOR_TRAIN: layout},
            {},
            {},
            predicted_bytes={S.ACTOR_TRAIN: 60e9},
            measured_bytes={S.ACTOR_TRAIN: measured},
        )
    assert 66e9 < known.bytes(S.ACTOR_TRAIN, layout, 60e9) < 70e9


def test_saved_and_loaded_the_same(tmp_path: Path) -> None:
    known = Calibration()
    for seconds in (120.0, 130.0, 125.0):
        known.observe(
            assignments(Layout(tp=2, dp=4, sequence_parallel=True)),
            {S.ACTOR_TRAIN: 100.0},
            {S.ACTOR_TRAIN: seconds},
        )
    known.after_transition()
    path = tmp_path / "calibration.json"
    known.save(path)
    assert Calibration.load(path) == known
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(SpecError, match="schema 99"):
        Calibration.load(path)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import calibration_accuracy

        yield calibration_accuracy
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_one_step_ahead_beats_both_naive_predictors(benchmark: Any) -> None:
    """Median error, both runs, every stage, and in the FSDP run's jump in length by itself."""
    result = benchmark.run(benchmark.SHIPPED)
    assert len(result) == 2
    for name, questions in result.items():
        for stage, parts in questions["stage"].items():
            for part, values in parts.items():
                best = min(values["same_as_last"]["median"], values["last_per_token"]["median"])
                assert values["calibrated"]["median"] < best, (name, stage, part)
    train = result["verl_gpg_qwen2-7b_math_fsdp"]["stage"]["update_actor"]
    assert train["all"]["calibrated"]["mean"] < 0.5 * train["all"]["same_as_last"]["mean"]


def test_one_step_ahead_without_knowing_the_lengths(benchmark: Any) -> None:
    """Median error of every stage of both runs; in the jump in length nobody knows, the mean."""
    result = benchmark.run(benchmark.SHIPPED)
    for name, questions in result.items():
        for stage, parts in questions["step"].items():
            everything = parts["all"]
            assert everything["calibrated"]["median"] < everything["same_as_last"]["median"], (
                name, stage,
            )  # fmt: skip
            if "length_jump" in parts:
                jump = parts["length_jump"]
                assert jump["calibrated"]["mean"] < jump["same_as_last"]["mean"], (name, stage)


def test_the_next_steps_work_follows_its_trend_and_no_stall() -> None:
    with pytest.raises(ValueError, match="nothing was observed"):
        NextStep().predict()
    blind = NextStep()
    for step in range(40):
        blind.observe(1000.0 + 20.0 * step, 10.0 + 0.2 * step)
    assert blind.predict() == pytest.approx(10.0 + 0.2 * 40, rel=0.01)
    blind.observe(1800.0, 20000.0)
    assert blind.predict() < 25.0


LOG = """\
(TaskRunner pid=1) \x1b[36mTraining Progress\x1b[0m: 10%
(TaskRunner pid=1) step:1 - actor/entropy:0.35 - timing_s/gen:60.5 - timing_s/ref:12.0 - \
timing_s/old_log_prob:20.1 - timing_s/update_actor:80.2 - response_length/mean:300.0 - \
response_length/max:1024.0 - prompt_length/mean:np.float64(100.5) - perf/throughput:1e3
a line in between
step:2 - val/acc:0.5
step:3 - timing_s/gen:nan - timing_s/update_actor:81.0 - response_length/mean:310.0
"""


def test_verl_logs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(LOG)
    first, third = (step.metrics for step in read_log(path))
    assert first["step"] == 1
    assert first["prompt_length/mean"] == 100.5
    assert measured_seconds(first) == {
        S.ACTOR_GENERATE: 60.5,
        S.REF_LOGPROB: 12.0,
        S.ACTOR_TRAIN: pytest.approx(100.3),
    }
    assert measured_seconds(third) == {S.ACTOR_TRAIN: 81.0}


def test_only_a_reward_models_own_timer_is_learned_from() -> None:
    """verl's `reward` holds functions that score, too."""
    metrics = {"timing_s/reward": 9.0, "timing_s/ref": 2.0}
    assert measured_seconds(metrics) == {S.REF_LOGPROB: 2.0}
    metrics["timing_s/reward_score"] = 3.0
    assert measured_seconds(metrics) == {S.REF_LOGPROB: 2.0, S.REWARD_SCORE: 3.0}


COMMON = ["--model", "qwen2.5-1.5b", "--gpu", "h100", "--gpus", "8", "--prompts", "64"]


def test_the_command_learns_and_estimate_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "run.log", tmp_path / "calibration.json"
    log.write_text(LOG)
    assert main([str(log), "--out", str(out), *COMMON]) == 0
    assert "2 steps" in capsys.readouterr().out
    estimate_main([*COMMON, "--json"])
    plain = capsys.readouterr().out
    estimate_main([*COMMON, "--json", "--calibration", str(out)])
    assert capsys.readouterr().out != plain


def test_a_log_without_steps_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "empty.log"
    log.write_text("nothing\n")
    assert main([str(log), "--out", str(tmp_path / "c.json"), *COMMON]) == 2
    assert "has no step" in capsys.readouterr().err
    assert main([str(tmp_path / "no.log"), "--out", str(tmp_path / "c.json"), *COMMON]) == 2


def test_others_inherit_what_was_measured_at_the_lengths_of_now() -> None:
    """Far from these, at the first step's lengths, the line that was learned may lie below zero."""
    calibration = Calibration()
    known = Filter(predicted=10.0, measured=10.0, slope=3.0, level=-4.0, seen=20)
    calibration.seconds_filters[S.ACTOR_TRAIN, Layout(tp=2)] = known
    known.observe(100.0, 260.0)
    inherited = calibration.seconds(S.ACTOR_TRAIN, Assignment(Layout(tp=4)), 100.0)
    assert inherited == pytest.approx(260.0, rel=0.01)
