"""Traces: composed from series, with every source and assumption in the file; the shipped ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nereus_plugins.cli import main
from nereus_plugins.spec import SpecError
from nereus_plugins.trace import series
from nereus_plugins.trace.conditions import NOT_MEASURED_TOGETHER, Trace, find, load, shipped_folder
from nereus_plugins.trace.record import RecordWriter, RunRecord, StepRecord, TransitionRecord

ROOT = Path(__file__).resolve().parents[2]
SERIES = ROOT / "recipes" / "traces" / "series"
ORZ = SERIES / "orz_response_length_digitised.csv"
GCP = SERIES / "bamboo_gcp_a100x1-east1b.csv"
P3 = SERIES / "bamboo_aws_p3_events.csv"
SERVEGEN = SERIES / "servegen_deepseek_r1_hist.csv"
SHIPPED = sorted(p.stem for p in shipped_folder().glob("*.json"))


def built(tmp_path: Path, *args: object) -> Trace:
    out = tmp_path / "made.json"
    base = ["--lengths", ORZ, "--run", "ORZ-32B", "--gpus-max", 64]
    assert main(["trace", "build", "-o", str(out), *map(str, [*base, *args])]) == 0
    return load(out)


def test_a_trace_names_its_sources_and_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = built(tmp_path, "--availability", GCP, "--tail", SERVEGEN, "--steps", 500, "--seed", 3)
    assert {s.what: s.licence for s in made.sources} == {
        "lengths": "MIT", "gpus": "MIT", "tail": "Apache-2.0",
    }  # fmt: skip
    assert all(s.sha256 == series.digest(SERIES / s.file) for s in made.sources)
    assert made.steps == 500
    assert made.seed == 3
    assert made.note == NOT_MEASURED_TOGETHER
    said = capsys.readouterr().out
    assert NOT_MEASURED_TOGETHER in said
    assert "stretched to 500" in said
    assert "5.0, 4.5 h cut out" in said
    assert "1089 steps" in said


def test_lengths_have_the_mean_of_their_step_after_the_cut(tmp_path: Path) -> None:
    made = built(tmp_path, "--tail", SERVEGEN)
    assert made.steps == 1089
    for step in (0, 300, 450, 1000):
        wanted = made.mean_response_tokens[step]
        got = made.conditions(step, 0.0).response_tokens
        assert got.mean_tokens() == pytest.approx(wanted, rel=0.01)
        assert got.max_tokens == made.max_response_tokens == 16384
    # A tail heavier than a log-normal's: as the series has it.
    answer = made.conditions(0, 0.0).response_tokens
    assert answer.quantile(0.99) > 7 * answer.mean_tokens()


def test_gpus_follow_the_series(tmp_path: Path) -> None:
    made = built(tmp_path, "--availability", P3, "--steps", 600, "--gpus-max", 256)
    found = series.read_availability(P3)
    assert found.peak == 32
    for step in (0, 57, 123, 599):
        least = found.least_between(
            step * found.duration_s / 600, (step + 1) * found.duration_s / 600
        )
        assert made.conditions(step, 0.0).gpus == 8 * least
    clock = built(tmp_path, "--availability", P3, "--gpus-max", 256, "--wall-clock")
    assert clock.indexed_by == "wall_clock"
    counts = {clock.conditions(0, t).gpus for t in (0.0, 3000.0, 1e9)}
    assert counts == {8 * found.least_between(t, t + 1e-6) for t in (0.0, 3000.0, 1e9)}


def test_without_gpus_max_the_series_peak_is_the_cluster(tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    args = ["--lengths", ORZ, "--run", "ORZ-32B", "--availability", GCP, "-o", out]
    assert main(["trace", "build", *map(str, args)]) == 0
    assert load(out).setting.cluster.world_size == 64


def test_holes_in_polling_are_cut_out(tmp_path: Path) -> None:
    path = tmp_path / "polled.csv"
    path.write_text("t_s,instances\n0,4\n100,6\n90000,5\n90100,7\n")
    found = series.read_availability(path)
    assert found.points == ((0.0, 4), (100.0, 5), (200.0, 7))
    assert found.holes_s == (89900.0,)


def test_a_tail_from_quantiles_by_window(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_text(
        "window_start_s,field,weight_rate,mean,p1.0,p50.0,p99.0\n"
        "0,output_tokens,3,0,100,200,400\n0,input_tokens,9,0,1,2,3\n"
        "600,output_tokens,1,0,1000,2000,4000\n"
    )
    tail = dict(series.read_tail(path))
    assert tail[1.0] / tail[0.0] == pytest.approx(40.0, rel=1e-4)
    # Three in four are of the first window: its median is near the mixture's 0.4 quantile.
    assert tail[0.4] / tail[0.0] == pytest.approx(2.0, rel=0.1)
    assert tail[0.85] / tail[0.0] == pytest.approx(18.0, rel=0.1)
    path.write_text("field,p50.0,p99.0\noutput_tokens,9,3\n")
    with pytest.raises(SpecError, match=r"windows.csv:2: quantiles .* ascend"):
        series.read_tail(path)


def test_a_live_jobs_records_replay_step_by_step(tmp_path: Path) -> None:
    """A live transition is written before the record of the step that it follows."""

    def step(number: int, mean: int) -> StepRecord:
        tokens = {"prompt": 80, "response": 8 * mean, "total": 80 + 8 * mean}
        return StepRecord(number, 0, 1.0 * number, 1.0, {"gen": 1.0}, tokens, 8, {}, {}, {})

    def ranks(number: int, to: int, outcome: str = "committed") -> TransitionRecord:
        return TransitionRecord(number, 1, 1.0, outcome, "", {}, {}, "", {"to": to})

    writer = RecordWriter(tmp_path)
    for record in (
        RunRecord("r", 0.0, "verl", {}, 2, {}),
        step(1, 10), ranks(2, 4), step(2, 20), step(3, 30), ranks(4, 8, "aborted"), step(4, 40),
        ranks(5, 1), step(5, 50), step(6, 60),
        RunRecord("r", 0.0, "verl", {}, 1, {}), step(6, 61),
    ):  # fmt: skip
        writer.write(record)
    writer.close()
    out = tmp_path / "replay.json"
    args = ["trace", "build", "--records", str(tmp_path), "--gpus-max", "4", "-o", str(out)]
    assert main(args) == 0
    made = load(out)
    assert made.name == "replay"
    assert made.gpus == ((0, 2), (2, 4), (5, 1))
    assert made.mean_response_tokens == (10, 20, 30, 40, 50, 61)
    assert main([*args, "--gpus-max", "2"]) == 2


def test_shapes(tmp_path: Path) -> None:
    plain = built(tmp_path, "--steps", 100).mean_response_tokens
    assert (
        built(tmp_path, "--steps", 100, "--shape", "reversed").mean_response_tokens == plain[::-1]
    )
    assert len(set(built(tmp_path, "--shape", "steady").mean_response_tokens)) == 1
    flips = built(tmp_path, "--steps", 100, "--shape", "oscillating:10").mean_response_tokens
    assert len(set(flips)) == 2
    assert flips[9] != flips[10] == flips[19] != flips[20]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lengths", ORZ], "--gpus-max is required where no series"),
        (["--gpus-max", 8], "--lengths is required"),
        (["--gpus-max", 8, "--lengths", ORZ], "holds runs ORZ-1.5B, ORZ-32B: choose one"),
        (["--gpus-max", 8, "--lengths", ORZ, "--run", "x"], "no run 'x'"),
        (["--gpus-max", 8, "--lengths", GCP], "no column 'step'"),
        (["--gpus-max", 10**30, "--lengths", ORZ], "--gpus-max must be 1 to 131072"),
        (["--gpus-max", 8, "--prompts", 10**30, "--lengths", ORZ], "--prompts must be 1 to"),
        (["--gpus-max", 8, "--steps", 10**7, "--lengths", ORZ], "--steps must be 1 to 1000000"),
        (["--gpus-max", 8, "--seed", -1, "--lengths", ORZ], "--seed must be at least 0"),
        (["--gpus-max", 8, "--records", ".", "--steps", 3], "conditions: leave --steps out"),
        (["--gpus-max", 0, "--lengths", ORZ], "--gpus-max must be 1 to"),
        (["--gpus-max", 8, "--lengths", ORZ, "--run", "ORZ-32B", "--shape", "up"], "--shape"),
        (
            ["--gpus-max", 8, "--lengths", ORZ, "--run", "ORZ-32B", "--max-response", 100],
            "--max-response 100 is below",
        ),
        (
            ["--gpus-max", 8, "--lengths", ORZ, "--run", "ORZ-32B", "--availability", "stairs:9:2"],
            "stairs:FROM:COUNT",
        ),
        (["--gpus-max", 8, "--lengths", ORZ, "--run", "ORZ-32B", "--tail", ORZ], "'field'"),
    ],
)
def test_wrong_use_says_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[object], message: str
) -> None:
    out = tmp_path / "made.json"
    assert main(["trace", "build", "-o", str(out), *map(str, args)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_wrong_value_in_a_series_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("t_s,instances\n0,4\n10,many\n")
    with pytest.raises(SpecError, match=r"a.csv:3: column 'instances' .*'many'"):
        series.read_availability(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "nereus.trace/2"}, "nereus.trace/2"),
        ({"gpus": [[0, 8], [0, 16]]}, "ascend"),
        ({"gpus": [[0, 4096]]}, "cluster"),
        ({"mean_response_tokens": [10.0, 0.0]}, r"mean_response_tokens\[1\]"),
        ({"tail": [[0, 1], [1, 0.5]]}, "tail"),
        ({"gpu": 8}, "unknown key 'gpu'; did you mean 'gpus'"),
    ],
)
def test_a_trace_file_is_checked(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = find("churn").to_dict() | change
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=message):
        load(path)


def test_an_unknown_name_lists_what_ships() -> None:
    with pytest.raises(SpecError, match="growth"):
        find("grwth")


def test_shipped_traces_are_what_the_series_make(tmp_path: Path) -> None:
    script = tmp_path / "nereus"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m nereus_plugins.cli "$@"\n')
    script.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}"}
    out = tmp_path / "traces"
    subprocess.run([ROOT / "recipes" / "traces" / "build.sh", out], check=True, env=env)
    assert sorted(p.stem for p in out.glob("*.json")) == SHIPPED
    for name in SHIPPED:
        assert load(out / f"{name}.json") == find(name), name


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trace_says_what_it_is(name: str) -> None:
    trace = find(name)
    assert trace.note == NOT_MEASURED_TOGETHER
    assert all(source.origin and source.licence for source in trace.sources)
    assert max(count for _, count in trace.gpus) == trace.setting.cluster.world_size
    assert load(shipped_folder() / f"{name}.json") == trace


def test_what_the_shipped_traces_are_for() -> None:
    def counts(name: str) -> list[int]:
        return [count for _, count in find(name).gpus]

    assert max(counts("thousand")) == 1024
    assert find("thousand").steps == 1000
    assert len(counts("churn")) > 50
    for name in ("falling", "oscillating", "stationary", "fixed-gpus"):
        assert len(counts(name)) == 1
    means = find("falling").mean_response_tokens
    assert means[-1] < means[0] / 5
    assert find("growth-by-clock").indexed_by == "wall_clock"
