"""A job that lost a rank is started again, and goes on from its newest snapshot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.snapshot import folder
from nereus_plugins.trace.record import StepRecord, read_records
from tests.e2e import snapshot_probe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job


def _run(work: Path, engine: str, ranks: int, *, kill_in: int | None = None, **fields: Any) -> Any:
    """One start of the job. Args: kill_in: a step in which rank 1 is killed."""
    observed = work / "observed.jsonl"
    snapshot = {"folder": str(work / "snapshots"), "every": 2}
    job = small_job(
        work / "task",
        engine,
        ranks,
        nereus={"timeout_s": 60.0, "snapshot": snapshot},
        extra=["trainer.resume_mode=auto"],
        **fields,
    )

    killed: list[int] = []

    def on_line(line: str) -> None:
        if kill_in is not None and not killed and f"step:{kill_in - 1} -" in line:
            killed.append(snapshot_probe.read(observed)[-1]["pids"][1])
            os.kill(killed[0], signal.SIGKILL)

    return launch.run(
        job,
        work / "job",
        timeout_s=TIMEOUT_S,
        on_line=on_line,
        env=snapshot_probe.environment(observed),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "layout", "other", "other_ranks"),
    [
        ("fsdp2", {}, {}, 2),
        ("fsdp2", {}, {}, 1),
    ],
    ids=["the_same", "fewer_ranks"],
)
def test_a_job_that_lost_a_rank_goes_on_in_any_layout(
    tmp_path: Path, engine: str, layout: dict[str, int], other: dict[str, int], other_ranks: int
) -> None:
    killed = _run(tmp_path, engine, 2, layout=layout, steps=7, kill_in=6)
    assert killed.returncode not in (0, -9), "the job must end by itself, with an error"
    assert [step["step"] for step in killed.metrics] == [1, 2, 3, 4, 5]
    text = killed.log.read_text()
    assert "the first snapshot, after step 2, is whole" in text
    assert "the newest snapshot is after step 4" in text

    again = _run(tmp_path, engine, other_ranks, layout=other, steps=7).require_success()
    text = again.log.read_text()
    assert "goes on from the snapshot after step 4" in text
    assert "the job had done step 5: 1 step of work lost" in text
    assert [step["step"] for step in again.metrics] == [5, 6, 7]
    same = (other, other_ranks) == (layout, 2)
    if same:  # the step that was lost comes out as before, bit for bit
        assert differences(again.metrics[:1], killed.metrics[4:]) == []

    seen = snapshot_probe.read(tmp_path / "observed.jsonl")
    wanted = [("taken", 2), ("taken", 4), ("restored", 4), ("taken", 6)]
    assert [(one["what"], one["step"]) for one in seen] == wanted
    assert sorted(seen[0]["units"]) == ["actor", "critic"]
    assert (len(seen[1]["pids"]), len(seen[2]["pids"])) == (2, other_ranks)
    assert seen[1]["units"] != seen[0]["units"]
    assert seen[2]["units"] == seen[1]["units"]

    found, passed_over = folder.find(tmp_path / "snapshots")
    assert [one.index.step for one in found] == [4, 6]
    assert not passed_over
    records = read_records(tmp_path / "job" / "checkpoints" / "nereus")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 5, 6, 7]
    waited = {record.step: record.metrics["nereus/snapshot_ms"] for record in steps}
    assert waited[6] > waited[7]
    assert "nereus_snapshot" in steps[-1].stages_s
