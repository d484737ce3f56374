"""verl's own main_ppo with Megatron engines of one process in layouts of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch
from nereus_verl.stamp import FILE

from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import RunRecord, StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job
from tests.e2e.test_transitions import SAME_RESPONSES, _check_alike, _check_first_step_after

pytestmark = pytest.mark.full

UNITS = ("actor", "critic", "ref")


def _run(
    directory: Path, name: str, *, env: dict[str, str] | None = None, **settings: Any
) -> launch.JobResult:
    job = small_job(directory / "task", "megatron", 2, layout={"tp": 2}, reference=True, **settings)
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env)


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _sizes(plan: dict[str, Any]) -> list[tuple[int, int, int]]:
    layouts = [Layout.from_dict(plan[unit]) for unit in UNITS]
    return [(layout.tp, layout.pp, layout.dp) for layout in layouts]


TP2, PP2, DP2 = (2, 1, 1), (1, 2, 1), (1, 1, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unequal")


@pytest.fixture(scope="module")
def moved(directory: Path) -> launch.JobResult:
    """The critic alone, twice, the second time with the reference; then the actor, which fails."""
    schedule = {
        1: {"critic": {"dp": 2}},
        2: {"critic": {"pp": 2}, "ref": {"dp": 2}},
        3: {"actor": {"dp": 2}},
    }
    return _run(
        directory,
        "moved",
        steps=5,
        nereus={"schedule": schedule, "timeout_s": 20.0},
        extra=["trainer.save_freq=4"],
        env={
            ENVIRONMENT_VARIABLE: "step=build,rank=1,kind=raise,epoch=3",
            **observe.environment(directory / "observed"),
        },
    ).require_success()


def test_units_change_one_by_one(directory: Path, moved: launch.JobResult) -> None:
    transitions = _records(directory, "moved", TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed", "committed", "aborted"]
    assert [sorted(t.units) for t in transitions] == [["critic"], ["critic", "ref"], ["actor"]]
    assert "injected at build on rank 1" in transitions[2].reason
    steps = _records(directory, "moved", StepRecord)
    # After the failure the job trains on in the layouts that it had.
    last = [TP2, PP2, DP2]
    assert [_sizes(s.plan) for s in steps] == [[TP2] * 3, [TP2, DP2, TP2], last, last, last]
    groups = [s.memory_bytes["process_groups"] for s in steps]
    assert groups[2] == groups[3] == groups[4], groups
    seen = observe.read(directory / "observed")
    assert len(seen) == 6
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"].keys() == set(UNITS)
        assert before["units"] == after["units"]
    for unit in ("actor", "critic"):  # both trained on in between
        assert len({json.dumps(one["units"][unit]) for one in seen[::2]}) == 3

    plain = _run(directory, "plain", steps=2).require_success()
    assert differences(moved.metrics[:1], plain.metrics[:1]) == []
    _check_first_step_after(moved.metrics, plain.metrics, 2)


def test_a_job_starts_and_resumes_in_unequal_layouts(
    directory: Path, moved: launch.JobResult
) -> None:
    folder = directory / "moved" / "checkpoints" / "global_step_4"
    settings = json.loads((folder / FILE).read_text())["settings"]
    resumed = _run(
        directory,
        "resumed",
        steps=5,
        nereus={},
        extra=[
            *(f"{path}={size}" for path, size in settings.items() if "parallel_size" in path),
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={folder}",
        ],
    ).require_success()
    (run,) = _records(directory, "resumed", RunRecord)
    assert _sizes(run.plan) == [TP2, PP2, DP2]
    # It goes on as the job that saved the checkpoint: rollout, values and log-probabilities are the
    # same bits, the updates alike.
    (found,), wanted = resumed.metrics, moved.metrics[4]
    assert found["step"] == wanted["step"] == 5
    for name in (*SAME_RESPONSES, "critic/values/mean", "critic/returns/mean", "actor/entropy"):
        assert found[name] == wanted[name], name
    _check_alike(found, wanted)


def test_ranks_join_and_leave_in_unequal_layouts(directory: Path) -> None:
    schedule = {
        1: {"ranks": 4, "critic": {"pp": 2}},
        2: {"ranks": 2, "actor": {"pp": 2}, "critic": {"dp": 2}},
    }
    _run(
        directory,
        "ranks",
        steps=3,
        nereus={"schedule": schedule},
        extra=["++ray_kwargs.ray_init.num_gpus=4"],
        env=observe.environment(directory / "ranks-observed"),
    ).require_success()
    outcomes = [t.outcome for t in _records(directory, "ranks", TransitionRecord)]
    assert outcomes == ["committed", "committed"]
    plans = [_sizes(s.plan) for s in _records(directory, "ranks", StepRecord)]
    assert plans == [[TP2] * 3, [(2, 1, 2), (1, 2, 2), (2, 1, 2)], [PP2, DP2, TP2]]
    seen = observe.read(directory / "ranks-observed")
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]
