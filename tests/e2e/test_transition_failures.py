"""A failed transition leaves the job as it was; a dead rank ends it with a clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

# One attempt after each step, each failing in another phase, on one rank or the other.
FAULTS = (
    ("free_gradients", "raise"),
    ("describe", "raise"),
    ("plan", "raise"),
    ("agree", "raise"),
    ("build", "raise"),
    ("move", "raise"),
    ("verify", "raise"),
    ("verify", "corrupt"),
    ("commit", "raise"),
)


def _run(
    directory: Path,
    name: str,
    engine: str,
    *,
    schedule: dict[int, Any] | None = None,
    faults: list[str] | None = None,
    background: bool = False,
    **settings: Any,
) -> launch.JobResult:
    nereus: dict[str, Any] | None = None
    if schedule:
        nereus = {"timeout_s": 20.0, "schedule": schedule, "background": background}
    job = small_job(directory / "task", engine, 2, critic=False, nereus=nereus, **settings)
    env = {ENVIRONMENT_VARIABLE: ";".join(faults or [])}
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env)


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


@pytest.mark.parametrize(
    ("engine", "target", "background"),
    [
        # In the gate tests/dist and tests/faults have failures in every phase.
        pytest.param("fsdp2", {"shard_size": 1}, False, marks=pytest.mark.full),
        pytest.param("fsdp2", {"shard_size": 1}, True, marks=pytest.mark.full),
        pytest.param("megatron", {"tp": 2}, False, marks=pytest.mark.full),
        pytest.param("megatron", {"tp": 2}, True, marks=pytest.mark.full),
    ],
)
def test_a_failure_in_any_phase_changes_no_number(
    tmp_path: Path, engine: str, target: dict[str, Any], background: bool
) -> None:
    steps = len(FAULTS) + 1
    # What fails in the background is attempted once more, and fails there too; a commit is one.
    attempts = 2 if background else 1
    faults = [
        f"step={step},rank={i % 2},kind={kind},epoch={i * attempts + attempt}"
        for i, (step, kind) in enumerate(FAULTS)
        for attempt in range(1, attempts + 1)
    ]
    schedule = {i + 1: target for i in range(len(FAULTS))}
    failed = _run(
        tmp_path,
        "failed",
        engine,
        schedule=schedule,
        faults=faults,
        background=background,
        steps=steps,
    )
    failed.require_success()
    plain = _run(tmp_path, "plain", engine, steps=steps).require_success()
    assert differences(failed.metrics, plain.metrics) == []

    transitions = _records(tmp_path, "failed", TransitionRecord)
    assert [t.outcome for t in transitions] == ["aborted"] * len(FAULTS)
    for i, ((step, kind), transition) in enumerate(zip(FAULTS, transitions, strict=True)):
        assert step in transition.reason, transition.reason
        if kind == "raise":
            assert f"rank {i % 2} in" in transition.reason
    if background:
        *twice, last = transitions
        for (step, _), transition in zip(FAULTS, twice, strict=False):
            assert step in transition.background["exposed"]
        assert last.background["hidden_s"] > 0
    assert "checksum" in transitions[FAULTS.index(("verify", "corrupt"))].reason.lower()
    text = failed.log.read_text()
    assert text.count("transition aborted, the old layout trains on") == len(FAULTS)
    steps_recorded = _records(tmp_path, "failed", StepRecord)
    assert {record.epoch for record in steps_recorded} == {0}
    groups = [record.memory_bytes["process_groups"] for record in steps_recorded]
    assert groups[0] == groups[-1], groups
    # The last attempt was in the journal before the ranks went back: it was taken back there.
    journal = Journal(tmp_path / "failed" / "checkpoints" / "nereus" / "journal.jsonl")
    assert [record.kind for record in journal.read()] == ["commit", "abort"]
    assert journal.current() is None


@pytest.mark.full  # in the gate tests/dist and tests/faults kill ranks in these phases
@pytest.mark.parametrize("phase", ["move", "commit"])
def test_a_killed_rank_ends_the_job(tmp_path: Path, phase: str) -> None:
    killed = _run(
        tmp_path,
        "killed",
        "fsdp2",
        schedule={2: {"shard_size": 1}},
        faults=[f"step={phase},rank=1,kind=kill"],
        steps=3,
        extra=["trainer.save_freq=1"],
    )
    assert killed.returncode not in (0, -9), "the job must end by itself, with an error"
    text = killed.log.read_text()
    assert "the worker process of rank 1 died in" in text
    assert "the newest checkpoint is" in text
    assert "global_step_2" in text
    (transition,) = _records(tmp_path, "killed", TransitionRecord)
    assert transition.outcome == "failed"
    saved = tmp_path / "killed" / "checkpoints" / "global_step_2" / "nereus_layout.json"
    assert saved.exists()
