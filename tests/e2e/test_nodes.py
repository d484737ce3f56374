"""The two-node recipe: ranks on Ray nodes that were there, then on one that joins later."""

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

from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "verl_two_nodes_cpu" / "run.sh"
FIRST, SECOND, THIRD = (f"127.0.0.{n}" for n in (2, 3, 4))


@pytest.mark.full
def test_a_job_over_two_nodes_moves_to_a_third(tmp_path: Path) -> None:
    job, run_dir, log = tmp_path / "job", tmp_path / "job" / "records", tmp_path / "log"
    scratch = Path(tempfile.mkdtemp(prefix="nodes-"))
    environment = {
        **os.environ,
        **observe.environment(tmp_path / "observed"),
        "PYTHON": sys.executable,
        "TMPDIR": str(scratch),  # where the recipe keeps Ray's files
    }
    with open(log, "w") as out:
        process = subprocess.Popen(
            [str(RECIPE), str(job), "trainer.experiment_name=over-nodes"],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            said = _ask_by_name(job, process, log)
            assert process.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
        finally:
            process.terminate()
            process.wait()
    assert launch.processes_of(scratch) == []
    assert list(scratch.iterdir()) == []
    scratch.rmdir()
    assert "live, pid" in said
    assert re.search(rf"nodes: (?=.*{FIRST} \(1\))(?=.*{SECOND} \(1\))", said), said

    text = log.read_text()
    assert "asks for up to 4 ranks, Ray's cluster has 2 GPU" in text
    joined, left = (r for r in read_records(run_dir) if isinstance(r, TransitionRecord))
    assert (joined.outcome, left.outcome) == ("committed", "committed")
    assert sorted(joined.ranks["nodes"]) == [FIRST, SECOND, THIRD, THIRD]
    assert sorted(joined.ranks["nodes"][:2]) == [FIRST, SECOND]
    assert (len(left.ranks["left"]), left.ranks["nodes"]) == (2, [THIRD, THIRD])
    steps = [r.step for r in read_records(run_dir) if isinstance(r, StepRecord)]
    assert steps == [1, 2, 3, 4]
    metrics = launch.read_metrics(job / "metrics.jsonl")
    assert [m["nereus/world_size"] for m in metrics] == [2, 2, 4, 2]

    seen = observe.read(tmp_path / "observed")
    assert len(seen) == 4
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]
    assert [line["groups"] for line in seen] == [2, 4, 4, 2]
    assert not (run_dir / ENDPOINT_FILE).exists()
    assert not (job / "ray_token").exists()


def _ask_by_name(job: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """What `nereus status` says of the live job, which it finds by its name in Ray."""
    while process.poll() is None and not (job / "records" / ENDPOINT_FILE).exists():
        time.sleep(0.2)
    found = re.search(r"existing Ray cluster at address: (\S+?)\.\.\.", log.read_text())
    assert found is not None, log.read_text()[-4000:]
    environment = {
        **os.environ,
        "RAY_ADDRESS": found[1],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(job / "ray_token"),
    }

    def status(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nereus_plugins.cli", "status", name]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    named = status("ray:over-nodes")
    assert named.returncode == 0, named.stdout + named.stderr
    other = status("ray:another")
    assert other.returncode == 4
    assert "of live jobs called 'another' in this Ray cluster there is none" in other.stderr
    assert str(job / "records") in other.stderr
    return named.stdout
