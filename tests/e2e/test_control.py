"""A live verl job is commanded from outside: paused, resumed, sent to other layouts and ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.cli import main
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.e2e.jobs import TIMEOUT_S, small_job

STEPS = 7


@pytest.mark.full
def test_a_live_job_takes_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = small_job(
        tmp_path / "task",
        "fsdp2",
        2,
        steps=STEPS,
        nereus={"schedule": {1: {"ulysses": 2}}},
        extra=["actor_rollout_ref.rollout.tensor_model_parallel_size=1"],
    )
    run_dir = tmp_path / "job" / "checkpoints" / "nereus"
    results: list[launch.JobResult] = []

    def run() -> None:
        results.append(launch.run(job, tmp_path / "job", timeout_s=TIMEOUT_S))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        said = _command(run_dir, tmp_path, thread, capfd)
    finally:
        thread.join()
    results[0].require_success()
    assert "live, pid" in said
    assert "plan of epoch 3, on 1 ranks" in said
    assert "rollout: tp 1 -> 2, replicas: 2 ended, 1 launched" in said

    transitions = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert [t.outcome for t in transitions] == ["skipped", *["committed"] * 3]
    assert transitions[0].step == 1
    assert transitions[0].reason.startswith("the job was paused")
    assert [(t.rollout["from"]["tp"], t.rollout["to"]["tp"]) for t in transitions[2:]] == [
        (1, 2),
        (2, 1),
    ]
    assert (transitions[3].ranks["from"], transitions[3].ranks["to"]) == (2, 1)
    steps = [t.step for t in transitions]
    assert steps == sorted(set(steps))
    metrics = {m["step"]: m for m in results[0].metrics}
    for step in range(1, STEPS + 1):
        changed = 2 if steps[1] < step <= steps[3] else 1
        assert metrics[step]["nereus/actor/ulysses"] == changed
        assert metrics[step]["nereus/critic/ulysses"] == 1
        assert metrics[step]["nereus/world_size"] == (2 if step <= steps[3] else 1)
        assert metrics[step]["nereus/actor-train/micro_batch"] == (8 if step <= steps[3] else 4)
        tp = 2 if steps[2] < step <= steps[3] else 1
        assert metrics[step]["nereus/actor-generate/tp"] == tp

    # The job has ended: nothing is left of its endpoint, and its records still tell.
    assert not (run_dir / ENDPOINT_FILE).exists()
    assert main(["status", str(run_dir)]) == 0
    assert "no live job was reached, this is from its records" in capfd.readouterr().out
    assert main(["pause", str(run_dir)]) == 4


def _command(
    run_dir: Path, directory: Path, job: threading.Thread, capfd: pytest.CaptureFixture[str]
) -> str:
    """Command the job; what `nereus status` said at last."""
    run = str(run_dir)

    def submit(plan: str, *options: str) -> int:
        path = directory / "plan.yaml"
        path.write_text(plan)
        return main(["transition", run, str(path), *options])

    _until(job, lambda: Client(run_dir).call("status"))
    assert main(["pause", run]) == 0
    assert submit("{ulysses: 2}") == 3
    assert "the job is paused" in capfd.readouterr().err
    _until(job, lambda: Client(run_dir).call("status")["job"]["step"] >= 1)
    assert main(["resume", run]) == 0

    assert submit("{actor: {ulysses: 3}}") == 3
    assert "plan.actor" in capfd.readouterr().err
    assert submit("{actor: {ulysses: 2}}") == 0
    said = capfd.readouterr().out
    assert "plan 1: accepted for epoch 0, at the next iteration boundary: actor " in said
    assert "plan 1: committed" in said
    assert submit("{ranks: 1}", "--epoch", "0") == 3
    assert "stale: made for epoch 0, the job is in epoch 1" in capfd.readouterr().err
    assert submit("{rollout: {tp: 3}}") == 3
    assert "plan: a rollout replica is made for 3 ranks" in capfd.readouterr().err
    assert submit("{rollout: {tp: 2}}") == 0
    assert "at the next iteration boundary: rollout TP1 -> TP2" in capfd.readouterr().out
    assert submit("{ranks: 1, actor: {ulysses: 1, micro_batch: 4}}") == 3
    assert "which do not divide 1" in capfd.readouterr().err
    assert submit("{ranks: 1, actor: {ulysses: 1, micro_batch: 4}, rollout: {tp: 1}}") == 0
    said = capfd.readouterr().out
    phases = [said.find(f": {p} ...") for p in ("join", "prepare", "commit", "follow", "rollout")]
    assert -1 not in phases, said
    assert phases == sorted(phases), said
    assert main(["status", run]) == 0
    return capfd.readouterr().out


def _until(job: threading.Thread, holds: Any) -> None:
    while job.is_alive():
        try:
            if holds():
                return
        except NoLiveJob:  # not yet
            pass
        time.sleep(0.2)
    pytest.fail("the job ended too early")
