"""The controller beside a real job: it changes the plan by itself, and cannot hurt the job."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nereus_cpu.memory import VARIABLE
from nereus_cpu.task import make_task
from nereus_verl.demo import launch

from nereus_plugins.control import cli
from nereus_plugins.control.driver import JOURNAL_FILE
from nereus_plugins.control.offered import FILE as PROPOSAL_FILE
from nereus_plugins.controller.controller import Controller
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.controllers import controllers
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

ARL = "actor_rollout_ref"


def _by_tokens(budget: int, critic: bool = False) -> list[str]:
    """Micro-batches by token budget, one rollout server a rank."""
    critics = [f"+critic.ppo_infer_max_token_len_per_gpu={budget}"] if critic else []
    return [
        f"{ARL}.rollout.tensor_model_parallel_size=1",
        f"{ARL}.actor.use_dynamic_bsz=True",
        f"{ARL}.actor.ppo_max_token_len_per_gpu={budget}",
        f"{ARL}.rollout.log_prob_use_dynamic_bsz=True",
        f"{ARL}.rollout.log_prob_max_token_len_per_gpu={budget}",
        *critics,
    ]


def _records(work: Path, kind: type[Any]) -> list[Any]:
    run_dir = work / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _decisions(work: Path) -> list[dict[str, Any]]:
    entries = DecisionJournal(work / "checkpoints" / "nereus").read()
    return [entry["decision"] for entry in entries if entry["kind"] == "decision"]


def test_a_job_leaves_a_gpu_that_is_taken_from_it(tmp_path: Path) -> None:
    """The plan, and when, are the controller's own; what it was told is the notice alone."""
    work = tmp_path / "job"
    run_dir = work / "checkpoints" / "nereus"
    job = small_job(
        tmp_path / "task",
        "fsdp2",
        2,
        critic=False,
        steps=6,
        nereus={"controller": {"mode": "act"}},
        extra=_by_tokens(4096),
    )
    told: list[int] = []

    def watch(line: str) -> None:
        if "step:1 - " in line and not told:
            told.append(cli.gpus([str(run_dir), "1", "--notice", "1"]))

    result = launch.run(job, work, timeout_s=TIMEOUT_S, on_line=watch).require_success()
    assert told == [cli.DONE]
    worlds = [one["nereus/world_size"] for one in result.metrics]
    assert worlds[0] == 2
    assert worlds[-1] == 1
    (record,) = _records(work, TransitionRecord)
    assert record.outcome == "committed"
    assert (record.ranks["from"], record.ranks["to"]) == (2, 1)
    assert record.step <= 4
    assert record.predicted["transition_s"] > 0
    (proposed,) = [one for one in _decisions(work) if one["kind"] == "propose"]
    assert proposed["forced"]
    assert "GPUs are leaving" in proposed["reason"]
    steps = _records(work, StepRecord)
    spent = [one.metrics["nereus/controller_ms"] for one in steps if one.step != record.step]
    assert len(spent) == 5
    assert max(spent) < 5.0
    assert not controllers(work)
    assert "the controller ended" not in result.log.read_text()


@contextmanager
def _meanwhile(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Inside, `act` runs in a thread, until the event that it is given is set."""
    over = threading.Event()
    thread = threading.Thread(target=act, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _killing(work: Path) -> Iterator[list[int]]:
    """Inside, every controller of the job is killed shortly after it begins."""
    killed: list[int] = []

    def kill(over: threading.Event) -> None:
        while not over.wait(0.1):
            for pid in controllers(work):
                time.sleep(0.5)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    with _meanwhile(kill):
        yield killed


@pytest.mark.full
def test_a_controller_that_is_killed_again_and_again_changes_no_bit(tmp_path: Path) -> None:
    def run(name: str, nereus: dict[str, Any] | None) -> launch.JobResult:
        job = small_job(
            tmp_path / "task", "fsdp2", 2, steps=6, nereus=nereus, extra=_by_tokens(4096, True)
        )
        return launch.run(job, tmp_path / name, timeout_s=TIMEOUT_S).require_success()

    off = run("off", None)
    with _killing(tmp_path / "killed") as killed:
        on = run("killed", {"controller": {"mode": "act", "dwell_steps": 1}})
    assert len(set(killed)) >= 3
    assert differences(off.metrics, on.metrics) == []
    assert "the controller ended" in on.log.read_text()


KILLS = 50
KILLED_STEPS = 26


@contextmanager
def _hunting(work: Path) -> Iterator[list[int]]:
    """Inside, controllers of the job are killed, until there were so many: each at a time of its
    own, or in the very moment that it proposes something, before or after the job has it."""
    killed: list[int] = []
    proposal = work / "checkpoints" / "nereus" / PROPOSAL_FILE
    chance = random.Random(1)

    def proposed() -> int:
        return proposal.stat().st_mtime_ns if proposal.exists() else 0

    def hunt(over: threading.Event) -> None:
        while len(killed) < KILLS and not over.is_set():
            found = [pid for pid in controllers(work) if pid not in killed]
            if not found:
                over.wait(0.05)
                continue
            before, until = proposed(), time.monotonic() + chance.uniform(0.0, 1.6)
            while time.monotonic() < until and proposed() == before:
                time.sleep(0.002)
            time.sleep(chance.choice([0.0, 0.002, 0.01]))
            with suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])

    with _meanwhile(hunt):
        yield killed


@pytest.mark.full
def test_fifty_deaths_of_the_controller_change_no_bit(tmp_path: Path) -> None:
    """Its job leaves a GPU meanwhile, by a proposal of one of them; and is run again without any
    controller, the same transition in its schedule."""
    work = tmp_path / "killed"
    run_dir = work / "checkpoints" / "nereus"

    def run(name: str, nereus: dict[str, Any], **more: Any) -> launch.JobResult:
        job = small_job(
            tmp_path / "task", "fsdp2", 2, critic=False, steps=KILLED_STEPS, nereus=nereus,
            extra=_by_tokens(4096),
        )  # fmt: skip
        # Many steps, and fifty processes that import the core and are killed.
        limit_s = 2 * TIMEOUT_S
        return launch.run(job, tmp_path / name, timeout_s=limit_s, **more).require_success()

    told: list[int] = []

    def watch(line: str) -> None:
        if "step:4 - " in line and not told:
            told.append(cli.gpus([str(run_dir), "1", "--notice", "1"]))

    with _hunting(work) as killed:
        env = {observe.RESTARTS_AT_ONCE: "1", **observe.loaded()}
        # Nothing is proposed but what has to be.
        acting = {"controller": {"mode": "act", "budget": 0.0, "least_gain": 1.0}}
        on = run("killed", acting, on_line=watch, env=env)
    assert told == [cli.DONE]
    assert len(set(killed)) == KILLS

    # Proposed again and again, executed once.
    (record,) = _records(work, TransitionRecord)
    assert record.outcome == "committed"
    assert record.predicted
    assert (record.ranks["from"], record.ranks["to"], record.knobs) == (2, 1, {})
    (commit,) = Journal(run_dir / JOURNAL_FILE).read()
    assert (commit.kind, commit.epoch, commit.step) == ("commit", record.epoch, record.step)
    # And what they wrote is whole: every step was learned from once.
    journal = DecisionJournal(run_dir)
    learned = [e["record"] for e in journal.read() if e["kind"] == "observation"]
    steps = [one["step"] for one in learned if one["schema"].startswith("nereus.step/")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= KILLED_STEPS - 1  # the last one may come after its end
    assert Controller.resume(journal).epoch == record.epoch

    off = run("scheduled", {"schedule": {record.step: {"ranks": 1}}})
    assert differences(off.metrics, on.metrics) == []


STEPS, PROMPTS = 16, 8


def _growing(directory: Path, name: str, nereus: dict[str, Any] | None, budget_mib: int) -> Any:
    """A job whose responses grow from 32 to 256 tokens, and whose ranks have so much memory."""
    limits = [32 + 224 * step // (STEPS - 1) for step in range(STEPS) for _ in range(PROMPTS)]
    task = make_task(directory / "task", layers=4, hidden=128, response_limits=limits)
    job = launch.Job(
        engine="fsdp2",
        ranks=2,
        model_dir=task.model_dir,
        train_file=task.train_file,
        test_file=task.test_file,
        reward_file=task.reward_file,
        critic=False,
        steps=STEPS,
        batch_prompts=PROMPTS,
        mini_batch_prompts=PROMPTS,
        response_tokens=256,
        nereus=nereus,
        extra=["data.shuffle=False", *_by_tokens(16384)],
    )
    env = {VARIABLE: str(budget_mib)}
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env)


def _lengths(metrics: Sequence[dict[str, Any]]) -> list[float]:
    return [one["response_length/mean"] for one in metrics]


@pytest.mark.full
def test_a_job_leaves_a_plan_before_it_runs_out_of_memory(tmp_path: Path) -> None:
    """The same job without a controller dies of it."""
    fixed = _growing(tmp_path, "fixed", None, BUDGET_MIB)
    assert fixed.returncode != 0
    assert "CPU rank out of memory" in fixed.log.read_text()
    assert 1 < len(fixed.metrics) < STEPS

    acting = {"controller": {"mode": "act", "dwell_steps": 2, "look_ahead_steps": 8}}
    result = _growing(tmp_path, "act", acting, BUDGET_MIB).require_success()
    assert len(result.metrics) == STEPS
    assert _lengths(result.metrics)[: len(fixed.metrics)] == _lengths(fixed.metrics)
    records = _records(tmp_path / "act", TransitionRecord)
    assert all(record.outcome == "committed" for record in records)
    assert records[0].step <= len(fixed.metrics)
    proposed = [one for one in _decisions(tmp_path / "act") if one["kind"] == "propose"]
    assert any(one["forced"] for one in proposed)
    assert "memory is forecast to fill" in " ".join(one["reason"] for one in proposed)


BUDGET_MIB = 90
