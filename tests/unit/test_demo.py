"""The demo's task, launcher, printing and verdict."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("rich")

from nereus_cpu.reward import compute_score

from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
)


def _job(tmp_path: Path, engine: str = "megatron", **settings: object) -> object:
    from nereus_verl.demo.launch import Job

    files = dict.fromkeys(("model_dir", "train_file", "test_file", "reward_file"), tmp_path / "x")
    return Job(engine=engine, ranks=4, **files, **settings)  # type: ignore[arg-type]


def _step(step: int, reward: float) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        time_unix_s=0.0,
        step_s=2.5,
        stages_s={"step": 2.5, "gen": 1.0, "update_actor": 0.5},
        tokens={"prompt": 1, "response": 2, "total": 3},
        samples=1,
        memory_bytes={},
        metrics={"critic/score/mean": reward},
        plan={"actor": Layout(tp=2, dp=2).to_dict()},
    )


def _transition(step: int, outcome: str = "committed", reason: str = "") -> TransitionRecord:
    unit = {
        "from": "TP2 PP1 DP2",
        "to": "TP1 PP2 DP2",
        "bytes_wire": 3 << 20,
        "bytes_local": 10,
        "seconds": {"build": 0.25, "move": 0.5},
        "verified": {"bytes": 12},
    }
    return TransitionRecord(
        step=step,
        epoch=1,
        time_unix_s=0.0,
        outcome=outcome,
        reason=reason,
        units={"actor": unit},
        seconds={"prepare": 1.0, "prepare.move": 0.5, "commit": 0.25},
        digest="0123456789abcdef",
    )


def test_reward_counts_what_was_asked_for() -> None:
    assert compute_score("", "abcdefghijklmnop", "letters") == 1.0
    assert compute_score("", "0123456789!?+-*/", "symbols") == 1.0
    assert compute_score("", "abcdefgh01234567", "symbols") == 0.5
    assert compute_score("", "ab", "letters") == 2 / 16  # a short answer lacks characters
    assert compute_score("", "é \n", "letters") == 0.0


def test_prints_a_run_from_its_records(tmp_path: Path) -> None:
    from nereus_verl.demo.watch import Watcher
    from rich.console import Console

    out = io.StringIO()
    watcher = Watcher(Console(file=out, width=160), tmp_path, steps=3)
    watcher.on_line("... Started a local Ray instance. ...")
    writer = RecordWriter(tmp_path)
    writer.write(RunRecord("id", 0.0, "verl", {}, 4, {"actor": Layout(tp=2, dp=2).to_dict()}))
    writer.write(_step(1, 0.25))
    watcher.update()
    whole = json.dumps(_transition(1).to_dict()) + "\n"
    with open(tmp_path / RECORDS_FILE, "a") as file:
        file.write(whole[:40])
        file.flush()
        watcher.update()  # half a line is not read
        file.write(whole[40:])
    watcher.update()
    assert "TP1 PP2 DP2" not in out.getvalue()  # recorded before its step, shown after it
    watcher.finish()
    watcher.finish()
    text = out.getvalue()
    for part in ("Ray is up", "4 ranks", "reward 0.250", "gen 1.0", "TP1 PP2 DP2", "3.0 MiB"):
        assert text.count(part) == 1, part
    assert "training waited 1.25 s" in text
    rows = [line.split() for line in text.replace("│", " ").splitlines()]
    assert ["move,", "s", "0.50"] in rows
    assert ["bytes", "checksummed", "at", "both", "ends", "12"] in rows
    assert (len(watcher.steps), len(watcher.transitions)) == (1, 1)


def test_verdict(tmp_path: Path) -> None:
    from nereus_verl.demo.launch import JobResult
    from nereus_verl.demo.run import judge, segment_rewards

    job = _job(tmp_path, steps=6, nereus={"schedule": {2: {}, 4: {}}})
    good = JobResult(0, tmp_path / "job.log", [])
    rising = [_step(i, 0.1 * i) for i in range(1, 7)]
    both = [_transition(2), _transition(4)]
    assert segment_rewards(rising, both) == pytest.approx([0.15, 0.35, 0.55])
    assert judge(good, job, rising, both) == []  # type: ignore[arg-type]

    def problems(*args: object) -> str:
        return " ".join(judge(*args))  # type: ignore[arg-type]

    assert "1 of 2" in problems(good, job, rising, both[:1])
    aborted = [both[0], _transition(4, "aborted", "rank 1 in move")]
    assert "aborted: rank 1 in move" in problems(good, job, rising, aborted)
    flat = [_step(i, 0.2) for i in range(1, 7)]
    assert "did not rise" in problems(good, job, flat, both)
    assert "5 of 6 steps" in problems(good, job, rising[:5], both)
    (tmp_path / "job.log").write_text("the cause\n")
    failed = dataclasses.replace(good, returncode=1)
    assert "the cause" in problems(failed, job, rising, both)


def test_launcher_refuses_what_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine"):
        _job(tmp_path, engine="deepspeed")
    with pytest.raises(ValueError, match="divide by ranks"):
        _job(tmp_path, mini_batch_prompts=1, samples_per_prompt=2)


def test_equal_arguments_make_equal_tasks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from nereus_cpu.task import make_task

    a, b = (make_task(tmp_path / name, layers=2) for name in ("a", "b"))
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (a.model_dir / file).read_bytes() == (b.model_dir / file).read_bytes()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(a.model_dir)
    assert len(tokenizer.encode("\n")) == 1
    assert tokenizer.decode(tokenizer.encode("aé1")) == "aé1"


def test_ends_the_job_and_its_strays(tmp_path: Path) -> None:
    """What carries the Ray directory in its environment or arguments is a process of the job."""
    from nereus_verl.demo.launch import end_session

    ray_dir = tmp_path / "ray"
    ray_dir.mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    job = subprocess.Popen(sleep, text=True, start_new_session=True)
    stray = subprocess.Popen([*sleep, str(ray_dir)], start_new_session=True)
    other = subprocess.Popen(sleep, env={**os.environ, "X": str(tmp_path)}, start_new_session=True)
    try:
        end_session(job, ray_dir)
        assert stray.wait(timeout=10) == -9
        assert job.returncode == -9
        assert other.poll() is None
        assert not ray_dir.exists()
    finally:
        other.kill()
        other.wait()


def test_overrides_fit_verls_configuration(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from nereus_verl.demo.launch import overrides

    cases = [
        overrides(_job(tmp_path, engine, critic=c, reference=r, nereus=n), tmp_path, tmp_path)  # type: ignore[arg-type]
        for engine in ("fsdp2", "megatron")
        for c, r, n in ((True, True, {"schedule": {1: {"tp": 2}}}), (False, False, None))
    ]
    code = """
        import json, sys, verl
        from pathlib import Path
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf
        folder = Path(verl.__file__).parent / "trainer" / "config"
        with initialize_config_dir(str(folder), version_base=None):
            for case in json.load(sys.stdin):
                case = [text for text in case if not text.startswith("hydra.")]
                OmegaConf.to_container(compose("ppo_trainer", overrides=case), resolve=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        input=json.dumps(cases),
        env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
