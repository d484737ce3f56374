"""A job that Nereus refuses ends before Ray starts, and says why at the end of its output."""

from __future__ import annotations

from pathlib import Path

from nereus_verl.demo import launch

from tests.e2e.jobs import TIMEOUT_S, small_job


def test_a_plan_that_cannot_be_run_is_refused_before_ray_starts(tmp_path: Path) -> None:
    job = small_job(tmp_path / "task", "megatron", 2, nereus={"schedule": {1: {"tp": 3}}})
    refused = launch.run(job, tmp_path / "job", timeout_s=TIMEOUT_S)
    assert refused.returncode == 1
    text = refused.log.read_text()
    last = text.splitlines()[-1]
    assert last.startswith("nereus: this job was not started: nereus.schedule.1.actor: tp*pp")
    assert last.endswith("it may be 1 or 2")
    assert "local Ray instance" not in text
