"""A node of a live job's Ray cluster is going to go: the controller leaves it in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from nereus_verl.demo import launch

from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S
from tests.e2e.test_nodes import RECIPE, SECOND

NOTICE_S = 60
STEPS = 14


@pytest.mark.full
def test_a_node_that_ray_drains_is_left_within_the_notice(tmp_path: Path) -> None:
    job, run_dir, log = tmp_path / "job", tmp_path / "job" / "records", tmp_path / "log"
    scratch = Path(tempfile.mkdtemp(prefix="drain-"))
    environment = {
        **os.environ,
        **observe.environment(tmp_path / "observed"),
        "PYTHON": sys.executable,
        "SCHEDULE": "{}",
        "TMPDIR": str(scratch),  # where the recipe keeps Ray's files
    }
    with open(log, "w") as out:
        process = subprocess.Popen(
            [
                str(RECIPE), str(job), "nereus.controller.mode=act",
                f"trainer.total_training_steps={STEPS}",
            ],
            env=environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _wait_for_step(2, run_dir, process)
            deadline_s = time.time() + NOTICE_S
            _drain(SECOND, job, log)
            assert process.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
        finally:
            process.terminate()
            process.wait()
    assert launch.processes_of(scratch) == []
    records = list(read_records(run_dir))
    left = [
        record
        for record in records
        if isinstance(record, TransitionRecord)
        and record.outcome == "committed"
        and record.ranks.get("left")
    ]
    assert left, "the node was never left"
    assert SECOND not in left[0].ranks["nodes"]
    assert left[0].time_unix_s < deadline_s
    assert left[0].predicted  # it was the controller's
    steps = [record.step for record in records if isinstance(record, StepRecord)]
    assert steps == list(range(1, STEPS + 1))
    later = [r for r in records if isinstance(r, TransitionRecord) and r.outcome == "committed"]
    assert all(
        SECOND not in record.ranks.get("nodes", ()) for record in later[later.index(left[0]) :]
    )
    seen = observe.read(tmp_path / "observed")
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]


def _wait_for_step(step: int, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if run_dir.exists() and any(
            isinstance(record, StepRecord) and record.step >= step
            for record in (read_records(run_dir) if (run_dir / "records.jsonl").exists() else ())
        ):
            return
        time.sleep(0.5)


def _drain(node: str, job: Path, log: Path) -> None:
    found = re.search(r"existing Ray cluster at address: (\S+?)\.\.\.", log.read_text())
    assert found is not None
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(job / "ray_token"),
    }  # fmt: skip
    subprocess.run(
        [
            sys.executable, "-m", "nereus_plugins.cli", "drain", "--address", found[1],
            "--node-ip", node, "--notice", str(NOTICE_S),
        ],
        env=environment, check=True, timeout=60,
    )  # fmt: skip
