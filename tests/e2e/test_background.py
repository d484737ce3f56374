"""A verl job prepares transitions while its rollout generates: the same numbers, a shorter wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

LAYOUTS = {
    "fsdp2": ({}, {1: {"shard_size": 1}, 2: {"actor": {"ulysses": 2}}, 3: {"dp": 2}}),
    "megatron": ({"tp": 2}, {1: {"pp": 2}, 2: {"dp": 2}, 3: {"tp": 2}}),
}


def _run(directory: Path, name: str, engine: str, nereus: Any, **settings: Any) -> launch.JobResult:
    env = settings.pop("env", {})
    job = small_job(directory / "task", engine, 2, nereus=nereus, **settings)
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env).require_success()


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _waited_s(record: TransitionRecord) -> float:
    return sum(seconds for phase, seconds in record.seconds.items() if "." not in phase)


@pytest.mark.full
def test_hidden_or_why_not(tmp_path: Path) -> None:
    """After step 1 all is well, after 2 the state is trained meanwhile, after 3 a rank fails, after
    4 a step begins that is profiled, after 5 the job is paused meanwhile."""
    schedule = {step: {"shard_size": 1 if step % 2 else 2} for step in (1, 2, 3, 4, 5)}
    seen = tmp_path / "seen"
    env = observe.environment(seen) | {
        observe.TRAINS_MEANWHILE: "2",
        observe.PAUSES_MEANWHILE: "5",
        ENVIRONMENT_VARIABLE: "step=move,rank=1,kind=raise,epoch=4",
    }
    nereus = {"background": True, "timeout_s": 20.0, "schedule": schedule}
    extra = ["global_profiler.steps=[5]"]
    run = _run(tmp_path, "run", "fsdp2", nereus, critic=False, steps=6, env=env, extra=extra)

    transitions = _records(tmp_path, "run", TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed"] * 4 + ["skipped"]
    assert [t.step for t in transitions] == [1, 2, 3, 4, 5]
    hidden, stale, failed, profiled, skipped = transitions
    assert hidden.background["hidden_s"] > 0
    assert hidden.background["prepare_s"] >= hidden.background["hidden_s"]
    # The ranks' own part of it was over before anybody waited.
    assert _waited_s(hidden) < hidden.background["prepare_s"]
    assert stale.background == {"exposed": "actor was trained or loaded meanwhile"}
    assert failed.background["exposed"].startswith("rank 1 in move: InjectedFault")
    assert profiled.background == skipped.background == {}
    # What the ranks held when the batch was there is what they trained on, in whatever layout.
    before, after = (observe.read(seen)[i::2] for i in (0, 1))
    assert [line["units"] for line in before] == [line["units"] for line in after]
    assert before[0]["units"] != before[1]["units"]
    # The batch that was generated meanwhile is trained on in the new layout.
    steps = _records(tmp_path, "run", StepRecord)
    assert [s.epoch for s in steps] == [0, 1, 3, 5, 6, 6]
    assert [s.plan["actor"].get("shard_size") for s in steps] == [None, 1, None, 1, None, None]
    # What is prepared after a step is the next one's, but where that is profiled.
    assert [m.get("nereus/transition/committed") for m in run.metrics] == [None, 1, 1, 2, None, 0]
    groups = [s.memory_bytes["process_groups"] for s in steps]
    assert groups[0] == groups[-1], groups  # of what was dropped too
    journal = Journal(tmp_path / "run" / "checkpoints" / "nereus" / "journal.jsonl")
    assert [(r.kind, r.epoch) for r in journal.read()] == [("commit", e) for e in (1, 3, 5, 6)]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_the_numbers_are_those_of_blocking_transitions(tmp_path: Path, engine: str) -> None:
    layout, schedule = LAYOUTS[engine]
    runs = {
        background: _run(
            tmp_path,
            str(background),
            engine,
            {"background": background, "schedule": schedule},
            layout=layout,
            reference=True,
            steps=5,
            extra=["trainer.test_freq=2", "trainer.save_freq=2"],
        )
        for background in (False, True)
    }
    assert differences(runs[False].metrics, runs[True].metrics) == []
    blocking, hidden = (_records(tmp_path, str(b), TransitionRecord) for b in (False, True))
    assert [t.outcome for t in hidden] == ["committed"] * 3
    assert [t.digest for t in hidden] == [t.digest for t in blocking]
    assert all(t.background["hidden_s"] > 0 for t in hidden)
    assert all(t.background == {} for t in blocking)
    plans = [[s.plan for s in _records(tmp_path, str(b), StepRecord)] for b in (False, True)]
    assert plans[0] == plans[1]
