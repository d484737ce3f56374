"""Logs of verl, OpenRLHF, TensorBoard and W&B as records; what is broken says where."""

import csv
import json
import os
import platform
from pathlib import Path

import numpy as np
import pytest

from nereus_plugins.cli import main
from nereus_plugins.spec import SpecError
from nereus_plugins.trace import importing, installed, logs
from nereus_plugins.trace.record import RunRecord, StepRecord, read_records
from nereus_plugins.trace.steps import read_run

from .test_planner_calibrate import write_events

VERL = (
    "\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - training/global_step:{step} - "
    "critic/score/mean:np.float64(0.25) - actor/entropy:nan - response_length/mean:900.0 - "
    "response_length/max:2048 - prompt_length/mean:100.0 - perf/max_memory_allocated_gb:60.5 - "
    "timing_s/gen:40.0 - timing_s/update_actor:50.0 - timing_s/step:100.0 - "
    "timing_per_token_ms/gen:0.1 - perf/total_num_tokens:64000 - perf/time_per_step:100.0 - "
    "perf/throughput:80.0\n"
)
OPENRLHF = (
    "(PPOTrainer pid=9) INFO 11-30 10:00:00 ppo_trainer.py:551] \u2728 Global step {step}: "
    "{{'policy_loss': 0.1, 'kl': nan, 'total_length': 700.0, 'timing/make_experience': 5.0, "
    "'timing/ppo_train': 30.0, 'timing/broadcast': 1.0, 'rollout/response_length_mean': 500.0, "
    "'rollout/reward_mean': 0.5, 'rollout/num_samples': 128.0, 'timing/generation': 20.0, "
    "'timing/step_total': 56.0}}\n"
)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_verl_console_log(tmp_path: Path) -> None:
    text = "start\nstep:0 - val-core/x/acc:0.1\n" + "".join(
        VERL.format(step=step) for step in (1, 2)
    )
    run, *steps = importing.records("verl", _write(tmp_path / "train.log", text))
    assert isinstance(run, RunRecord)
    assert (run.source, run.world_size) == ("verl", 8)
    first = steps[0]
    assert isinstance(first, StepRecord)
    assert (first.step, first.step_s, first.samples) == (1, 100.0, 64)
    assert first.stages_s == {"gen": 40.0, "update_actor": 50.0, "step": 100.0}
    assert first.tokens == {"prompt": 6400, "response": 57600, "total": 64000}
    assert first.memory_bytes == {"allocated": round(60.5 * 2**30)}
    assert first.metrics["critic/score/mean"] == 0.25
    assert "actor/entropy" not in first.metrics
    assert [s.time_unix_s for s in steps if isinstance(s, StepRecord)] == [100.0, 200.0]


def test_a_log_that_ends_inside_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    whole = VERL.format(step=1)
    cut = VERL.format(step=2)[:-25]
    path = _write(tmp_path / "train.log", whole + cut)
    assert [e.step for e in logs.read("verl", path)] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VERL.format(step=1).replace("timing_s/gen:40.0", "timing_s/gen:4O.0"), r":1: field .*gen"),
        ("nothing\n", "no finished step"),
        (VERL.format(step=1).replace("response_length/mean", "length"), "no mean length"),
        (
            VERL.format(step=1).replace("perf/total_num_tokens", "perf/total"),
            "how many sequences.*--samples",
        ),
        (VERL.format(step=1).replace("perf/throughput", "perf/rate"), "--gpus"),
        (
            VERL.format(step=1).replace("timing_s/step:100.0", "timing_s/step:0.0"),
            "has no seconds",
        ),
        (
            VERL.format(step=1).replace("response_length/mean:900.0", "response_length/mean:1e308"),
            "no mean length of responses: .* from 0 to 1e",
        ),
        (
            VERL.format(step=1).replace("prompt_length/mean:100.0", "prompt_length/mean:1e308"),
            "prompts of 1e.308 tokens|how many sequences",
        ),
    ],
)
def test_what_a_log_lacks_is_named_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        importing.records("verl", _write(tmp_path / "train.log", text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "x"], "train.log: a console's log is of one run: leave --run out"),
        (["--gpus", "9" * 30], "--gpus must be 1 to 131072"),
        (["--samples", "9" * 400], "--samples must be 1 to"),
        (["-o", "{folder}"], "is there and no plain file"),
        (["-o", "{folder}/pipe"], "pipe is there and no plain file"),
        (["-o", "{folder}/none/x.jsonl"], "none is no directory"),
        (["-o", ""], "--out . is there and no plain file"),
        (["--plan", "{folder}/train.log"], "train.log: "),
    ],
)
def test_wrong_use_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    log = _write(tmp_path / "train.log", VERL.format(step=1))
    os.mkfifo(tmp_path / "pipe")
    args = ["trace", "import", "verl", str(log), "-o", str(tmp_path / "out.jsonl")]
    assert main([*args, *(o.format(folder=tmp_path) for o in options)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "train.log"]
    assert (tmp_path / "pipe").is_fifo()


def test_what_a_log_does_not_say_can_be_given(tmp_path: Path) -> None:
    text = VERL.format(step=1).replace("perf/total_num_tokens", "perf/total")
    text = text.replace("timing_s/step:100.0 - ", "").replace("perf/time_per_step:100.0 - ", "")
    run, first = importing.records(
        "verl", _write(tmp_path / "train.log", text), samples=32, gpus=16
    )
    assert isinstance(run, RunRecord)
    assert isinstance(first, StepRecord)
    assert (run.world_size, first.samples, first.step_s) == (16, 32, 90.0)
    assert "sum of its stages" in run.config["assumptions"][0]


def test_openrlhf_log(tmp_path: Path) -> None:
    text = "noise\n" + OPENRLHF.format(step=1) + OPENRLHF.format(step=2)
    run, first, _ = importing.records("openrlhf", _write(tmp_path / "log", text), gpus=8)
    assert isinstance(run, RunRecord)
    assert isinstance(first, StepRecord)
    assert run.source == "openrlhf"
    assert (first.step_s, first.samples, first.tokens["prompt"]) == (56.0, 128, 200 * 128)
    assert first.stages_s["gen"] == 20.0
    assert first.stages_s["ppo_train"] == 30.0


def test_the_software_of_a_job_that_ran_here(tmp_path: Path) -> None:
    """A log does not say what ran; this environment does where the job ran in it."""
    here = {"python": platform.python_version(), "numpy": np.__version__}
    assert installed.versions(("numpy", "no-such-package")) == here
    log, out = _write(tmp_path / "log", OPENRLHF.format(step=1)), tmp_path / "records.jsonl"
    for option, known in (([], set()), (["--ran-here"], {"python"})):
        asked = ["trace", "import", "openrlhf", str(log), "-o", str(out), "--gpus", "8"]
        assert main([*asked, *option]) == 0
        run, *_ = read_records(out)
        assert isinstance(run, RunRecord)
        assert known <= set(run.versions)
        assert bool(run.versions) == bool(known)


def test_an_openrlhf_line_that_is_no_dictionary(tmp_path: Path) -> None:
    path = _write(tmp_path / "log", "x\nGlobal step 3: {'a': 1, 'b' 2}\n")
    with pytest.raises(SpecError, match=r"log:2: .*not a dictionary"):
        logs.read("openrlhf", path)


def test_a_dictionary_in_a_log_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    path = _write(
        tmp_path / "log", f"Global step 1: {{'a': __import__('os').mkdir({str(marker)!r})}}\n"
    )
    with pytest.raises(SpecError):
        logs.read("openrlhf", path)
    assert not marker.exists()


def test_a_chart_exported_from_wandb(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["Step", "a - timing_s/gen", "a - timing_s/gen__MIN", "b - timing_s/gen"])
        out.writerow([1, 40.0, 39.0, 50.0])
        out.writerow([2, "", "", 51.0])
    with pytest.raises(SpecError, match=r"runs a, b: choose one with --run"):
        logs.read("wandb", path)
    assert [dict(e.metrics) for e in logs.read("wandb", path, "a")] == [{"timing_s/gen": 40.0}]
    assert [e.step for e in logs.read("wandb", path, "b")] == [1, 2]
    with pytest.raises(SpecError, match="no run 'c'"):
        logs.read("wandb", path, "c")


def test_a_history_of_wandb(tmp_path: Path) -> None:
    rows = [
        {"_step": 1, "_timestamp": 1.7e9, "timing_s/step": 10.0, "response_length/mean": 5.0},
        {"_step": 1, "prompt_length/mean": 5.0, "perf/total_num_tokens": 80},
        {"_step": 2, "_timestamp": 1.7e9 + 10, "timing_s/step": 11.0, "response_length/mean": 6.0,
         "prompt_length/mean": 4.0, "perf/total_num_tokens": 80, "text": "a note"},
    ]  # fmt: skip
    for name, text in (
        ("h.json", json.dumps(rows)),
        ("h.jsonl", "\n".join(json.dumps(row) for row in rows[:2])),
    ):
        first = importing.records("wandb", _write(tmp_path / name, text.replace("a note", "")),
                                  gpus=4)[1]  # fmt: skip
        assert isinstance(first, StepRecord)
        assert (first.samples, first.time_unix_s) == (8, 1.7e9)
    bad = _write(tmp_path / "bad.jsonl", '{"_step": 1, "timing_s/gen": "fast"}\n')
    with pytest.raises(SpecError, match=r"bad.jsonl:1: column 'timing_s/gen'.*'fast'"):
        logs.read("wandb", bad)
    bad = _write(tmp_path / "bad.jsonl", '{"_step": 1}\n{"_step": \n')
    with pytest.raises(SpecError, match=r"bad.jsonl:2: not valid JSON"):
        logs.read("wandb", bad)


def test_openrlhf_through_wandb_counts_its_own_steps(tmp_path: Path) -> None:
    rows = [
        {"_step": 7, "train/global_step": 1, "train/timing/generation": 2.0,
         "train/timing/ppo_train": 3.0, "train/timing/step_total": 6.0,
         "train/rollout/response_length_mean": 50.0, "train/rollout/num_samples": 16.0},
        {"_step": 8, "eval/global_step": 1, "eval/reward": 1.0},
    ]  # fmt: skip
    run, first = importing.records("wandb", _write(tmp_path / "h.json", json.dumps(rows)), gpus=2)
    assert isinstance(run, RunRecord)
    assert isinstance(first, StepRecord)
    assert (run.source, first.step, first.step_s) == ("openrlhf", 1, 6.0)
    assert "eval/reward" not in first.metrics


def test_tensorboard_files_and_downloads(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    write_events(events, 3)
    run, *steps = importing.records("tensorboard", events, samples=8, gpus=8)
    assert isinstance(run, RunRecord)
    assert [s.step_s for s in steps if isinstance(s, StepRecord)] == [341.0, 342.0, 343.0]
    pages = tmp_path / "pages"
    pages.mkdir()
    _write(pages / "run-x-tag-timing_s_update_actor.csv", "Wall time,Step,Value\n1.7e9,1,30\n")
    _write(pages / "run-x-tag-response_length_mean.json", "[[1.7e9, 1, 77.0]]")
    first = importing.records("tensorboard", pages, samples=8, gpus=8)[1]
    assert isinstance(first, StepRecord)
    assert first.stages_s == {"update_actor": 30.0}
    assert first.tokens["response"] == 77 * 8
    _write(pages / "run-x-tag-timing_s_gen.csv", "Wall time,Step,Value\n1.7e9,one,30\n")
    with pytest.raises(SpecError, match=r"timing_s_gen.csv:2: the step is 'one'"):
        logs.read("tensorboard", pages)
    with pytest.raises(SpecError, match="does not say which tag"):
        logs.read("tensorboard", _write(tmp_path / "x.csv", "Wall time,Step,Value\n"))


def test_an_imported_log_is_a_record_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(VERL.format(step=step) for step in range(1, 6))
    log, out = _write(tmp_path / "train.log", text), tmp_path / "records.jsonl"
    assert main(["trace", "import", "verl", str(log), "-o", str(out)]) == 0
    assert len(list(read_records(out))) == 6
    assert main(["records", str(out)]) == 0
    assert "64,000 tokens" in capsys.readouterr().out
    # It teaches the cost model as a live run's record does.
    assert next(read_run(out)).metrics["timing_s/gen"] == 40.0
    replay = tmp_path / "replay.json"
    args = ["trace", "build", "--records", str(out), "--gpus-max", "8", "--prompts", "8",
            "--samples", "8", "-o", str(replay)]  # fmt: skip
    assert main(args) == 0
    made = json.loads(replay.read_text())
    assert made["gpus"] == [[0.0, 8]]
    assert made["mean_response_tokens"] == [900.0] * 5
    assert made["max_response_tokens"] == 2048
    assert main(["trace", "import", "verl", str(tmp_path / "none"), "-o", str(out)]) == 2
    assert len(list(read_records(out))) == 6
