"""The controller beside a real OpenRLHF job on CPU: what it changes, and what it leaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs the OpenRLHF environment: ./dev env openrlhf")

from nereus_cpu.openrlhf import LOGICAL_GPUS

from nereus_plugins.cli import main
from nereus_plugins.control import cli
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.trace.record import StepRecord, read_records
from tests.e2e.controllers import controllers
from tests.e2e.test_openrlhf import LOSSES, run, transitions

pytestmark = pytest.mark.full
USED = 5  # by actor and critic, two each, and an engine


def words(folder: Path, mode: str) -> list[str]:
    """No plan is to be preferred for its seconds, which are noise here: GPUs alone count."""
    given = f"--nereus.enable --nereus.run_dir {folder / 'nereus'} --nereus.controller.mode {mode}"
    return [*given.split(), "--nereus.controller.least_gain", "0.9"]


def status(run_dir: Path) -> dict[str, Any] | None:
    try:
        return Client(run_dir).call("status")
    except NoLiveJob:
        return None


def available(run_dir: Path) -> int:
    """GPUs that the job could use, by its own word; 0 once it has ended."""
    job = status(run_dir)
    return 0 if job is None else sum(one["gpus"] for one in job["leases"])


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Inside, `work` is done in a thread; what it raises is raised at the end."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    yield
    thread.join(60)
    if raised:
        raise raised[0]


def wait_for(found: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)


def take_a_gpu(run_dir: Path) -> None:
    """Say that the job may use what it uses, and once it has trained a step, one less."""
    wait_for(lambda: status(run_dir) is not None)
    assert main(["gpus", str(run_dir), str(USED)]) == cli.DONE
    wait_for(lambda: (status(run_dir) or {"job": {"step": 99}})["job"]["step"] >= 1)
    assert main(["gpus", str(run_dir), str(USED - 1), "--notice", "1"]) == cli.DONE


def decisions(run_dir: Path) -> list[dict[str, Any]]:
    entries = DecisionJournal(run_dir).read()
    return [entry["decision"] for entry in entries if entry["kind"] == "decision"]


def proposed(run_dir: Path) -> list[dict[str, Any]]:
    if not (run_dir / "decisions.jsonl").exists():
        return []
    return [one for one in decisions(run_dir) if one["kind"] == "propose"]


def step_records(run_dir: Path) -> list[StepRecord]:
    return [record for record in read_records(run_dir) if isinstance(record, StepRecord)]


def gpus_of(log: dict[str, Any]) -> int:
    return round(log["nereus/world_size"] + log["nereus/vllm_engines"])


def test_a_gpu_that_is_taken_is_left_without_approval(tmp_path: Path) -> None:
    """The plan, and when, are the controller's own; what it was told is the notice alone."""
    run_dir = tmp_path / "nereus"

    def take() -> None:
        take_a_gpu(run_dir)
        wait_for(lambda: len(transitions(tmp_path)) == 1)
        # Ray has it back: the job could use all that there are.
        assert main(["gpus", str(run_dir), str(2 * LOGICAL_GPUS)]) == cli.DONE
        wait_for(lambda: available(run_dir) == LOGICAL_GPUS, 30.0)

    with beside(take):
        logs = run(tmp_path, *words(tmp_path, "act"), steps=12)
    assert len(logs) == 12
    assert gpus_of(logs[0]) == USED
    assert gpus_of(logs[-1]) == USED - 1
    (record,) = transitions(tmp_path)
    assert record.outcome == "committed"
    assert record.ranks["from"] == 4
    assert len(record.ranks["left"]) >= 1
    assert record.predicted["transition_s"] > 0
    (forced,) = proposed(run_dir)
    assert forced["forced"]
    assert "GPUs are leaving" in forced["reason"]
    steps = step_records(run_dir)
    spent = [one.metrics["nereus/controller_ms"] for one in steps if one.step != record.step]
    assert len(spent) == 11
    assert max(spent) < 50.0
    assert {"gen", "update_actor", "update_critic", "values"} <= set(steps[0].stages_s)
    assert not controllers(tmp_path)
    assert "the controller ended" not in (tmp_path / "log.txt").read_text()


def test_a_proposal_waits_for_approval(tmp_path: Path) -> None:
    run_dir = tmp_path / "nereus"

    def approve() -> None:
        take_a_gpu(run_dir)
        wait_for(lambda: (run_dir / "proposal.json").exists())
        assert main(["approve", str(run_dir)]) == cli.DONE

    with beside(approve):
        logs = run(tmp_path, *words(tmp_path, "advise"), steps=8)
    assert gpus_of(logs[-1]) == USED - 1
    (record,) = transitions(tmp_path)
    assert record.outcome == "committed"


def test_one_that_observes_changes_nothing(tmp_path: Path) -> None:
    """It says what it would do; the losses are those of OpenRLHF alone."""
    plain = run(tmp_path / "plain", steps=4)
    folder = tmp_path / "observed"
    with beside(lambda: take_a_gpu(folder / "nereus")):
        observed = run(folder, *words(folder, "observe"), steps=4)
    assert proposed(folder / "nereus")
    assert transitions(folder) == []
    assert {gpus_of(log) for log in observed} == {USED}
    for ours, theirs in zip(observed, plain, strict=True):
        assert {name: ours[name] for name in LOSSES} == {name: theirs[name] for name in LOSSES}


def test_plans_of_others_are_known_to_it(tmp_path: Path) -> None:
    """Ranks and engines leave and join, each on a GPU that Ray gets back."""
    run_dir = tmp_path / "nereus"
    schedule = {
        1: {"actor": {"dp": 1}, "rollout": {"replicas": 2}},
        2: {"actor": {"dp": 2}, "rollout": {"replicas": 1}},
    }

    def look() -> None:
        wait_for(lambda: (run_dir / "records.jsonl").exists() and len(transitions(tmp_path)) == 2)
        wait_for(lambda: available(run_dir) == LOGICAL_GPUS, 30.0)

    with beside(look):
        given = [*words(tmp_path, "observe"), "--nereus.schedule", json.dumps(schedule)]
        logs = run(tmp_path, *given, steps=8)
    done = transitions(tmp_path)
    assert [(one.outcome, one.rollout["fell_back"]) for one in done] == [("committed", "")] * 2
    assert [round(log["nereus/vllm_engines"]) for log in logs[:4]] == [1, 2, 1, 1]
    assert [round(log["nereus/actor/dp"]) for log in logs[:4]] == [2, 1, 2, 2]
    states = [e["state"] for e in DecisionJournal(run_dir).read() if e["kind"] == "state"]
    assert states[-1]["epoch"] == 2
    assert states[-1]["plan"]["assignments"]["actor-train"]["layout"]["dp"] == 2
