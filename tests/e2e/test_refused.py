"""A job that Nereus refuses ends before Ray starts, and says why at the end of its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["sft_trainer", "sft_trainer_ray"])
def test_verls_sft_trainers_do_not_run_as_if_nereus_were_on(tmp_path: Path, trainer: str) -> None:
    command = [
        *[sys.executable, "-W", "ignore", "-m", f"verl.trainer.{trainer}", "+nereus=on"],
        *["trainer.device=cpu", f"hydra.run.dir={tmp_path}"],
    ]
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nereus: this job was not started: nereus.enable is true, but this is")
    assert "SFT trainer" in last
