"""Nereus not asked for, or asked for without a transition, changes no bit of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.trace.record import StepRecord, read_records
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

WITHOUT_NEREUS = "nereus_cpu"  # the plugins that verl loads: the CPU platform alone


def _metrics(directory: Path, name: str, **settings: Any) -> list[dict[str, Any]]:
    job = small_job(directory / "task", "fsdp2", 2, reference=True, **settings)
    result = launch.run(job, directory / name, timeout_s=TIMEOUT_S).require_success()
    assert len(result.metrics) == job.steps
    return result.metrics


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inert")


@pytest.fixture(scope="module")
def without_nereus(directory: Path) -> list[dict[str, Any]]:
    return _metrics(directory, "without", plugins=WITHOUT_NEREUS)


@pytest.mark.full
def test_plain_runs_repeat(directory: Path, without_nereus: list[dict[str, Any]]) -> None:
    again = _metrics(directory, "again", plugins=WITHOUT_NEREUS)
    assert differences(without_nereus, again) == []


@pytest.mark.full  # in the gate the next test shows more: the package is loaded and asked for
def test_flag_off(directory: Path, without_nereus: list[dict[str, Any]]) -> None:
    loaded = _metrics(directory, "off", plugins="auto")
    assert differences(without_nereus, loaded) == []
    assert not any(name.startswith("nereus/") for step in loaded for name in step)


def test_flag_on_without_transition(directory: Path, without_nereus: list[dict[str, Any]]) -> None:
    run_dir = directory / "records"
    on = _metrics(directory, "on", nereus={"run_dir": run_dir})
    assert differences(without_nereus, on) == []
    steps = [record for record in read_records(run_dir) if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [1, 2]
    for record, step in zip(steps, on, strict=True):
        assert record.metrics["actor/pg_loss"] == step["actor/pg_loss"]
