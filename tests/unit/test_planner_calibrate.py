"""What `nereus calibrate` reads besides console logs: TensorBoard files, the job's own records."""

import struct
from pathlib import Path

import pytest

from nereus_plugins.cli import main
from nereus_plugins.cost.calibrate import read_log
from nereus_plugins.cost.calibration import Calibration
from nereus_plugins.cost.tensorboard_log import read_scalars
from nereus_plugins.spec import Layout, ModelStage
from nereus_plugins.trace.record import RecordWriter, StepRecord
from nereus_plugins.trace.steps import read_run

COMMON = ["--model", "qwen2.5-1.5b", "--gpu", "h100", "--gpus", "8", "--prompts", "64"]


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def event(step: int, tag: str, value: float, *, as_tensor: bool = False) -> bytes:
    """One record of an event file, as TensorBoard's writers lay it out."""
    number = struct.pack("<f", value)
    held = field(8, field(5, number)) if as_tensor else varint(2 << 3 | 5) + number
    summary = field(1, field(1, tag.encode()) + held)
    wall_time = varint(1 << 3 | 1) + struct.pack("<d", 1.7e9)
    data = wall_time + varint(2 << 3 | 0) + varint(step) + field(5, summary)
    return struct.pack("<Q", len(data)) + b"\0" * 4 + data + b"\0" * 4


def write_events(path: Path, steps: int) -> Path:
    file = path / "events.out.tfevents.1700000000.host"
    with file.open("wb") as out:
        for step in range(1, steps + 1):
            out.write(event(step, "timing_s/gen", 40.0 + step))
            out.write(event(step, "timing_s/update_actor", 300.0, as_tensor=True))
            out.write(event(step, "response_length/mean", 900.0))
    return file


def test_event_files_are_read(tmp_path: Path) -> None:
    file = write_events(tmp_path, 300)
    steps = list(read_scalars(tmp_path))
    assert len(steps) == 300
    assert steps[299] == {
        "step": 300.0,
        "timing_s/gen": 340.0,
        "timing_s/update_actor": 300.0,
        "response_length/mean": 900.0,
    }
    assert list(read_scalars(file)) == steps
    assert [one.metrics for one in read_log(tmp_path)] == steps


def test_an_event_file_cut_short_ends_there(tmp_path: Path) -> None:
    file = write_events(tmp_path, 3)
    file.write_bytes(file.read_bytes()[:-30])
    assert list(read_scalars(file))[-1] == {
        "step": 3.0,
        "timing_s/gen": 43.0,
        "timing_s/update_actor": 300.0,
    }


def record(step: int, dp: int, seconds: float) -> StepRecord:
    return StepRecord(
        step=step, epoch=0, time_unix_s=1.0, step_s=100.0,
        stages_s={"gen": 20.0, "update_actor": seconds, "old_log_prob": 5.0, "step": 100.0},
        tokens={"prompt": 64 * 500, "response": 64 * 900, "total": 64 * 1400}, samples=64,
        memory_bytes={}, metrics={},
        plan={"actor": {"tp": 8 // dp, "dp": dp, "sharding": "zero1"}},
    )  # fmt: skip


def test_the_jobs_own_records_teach_each_layout_they_ran_in(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    for step in range(1, 9):
        writer.write(record(step, 8 if step < 5 else 4, 120.0 if step < 5 else 150.0))
    writer.close()
    first = next(read_run(tmp_path))
    assert first.metrics["timing_s/update_actor"] == 120.0
    assert first.metrics["response_length/mean"] == 900.0
    assert first.layouts == {"actor": Layout(dp=8, sharding="zero1")}
    saved = tmp_path / "calibration.json"
    command = ["calibrate", str(tmp_path), "--out", str(saved), *COMMON, "--backend", "megatron"]
    assert main(command) == 0
    known = Calibration.load(saved)
    layouts = {layout for stage, layout in known.seconds_filters if stage is ModelStage.ACTOR_TRAIN}
    assert layouts == {Layout(dp=8, sharding="zero1"), Layout(tp=2, dp=4, sharding="zero1")}


def test_records_that_do_not_follow_the_schema_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_text('{"schema": "nereus.step/99"}\n')
    out = str(tmp_path / "c.json")
    assert main(["calibrate", str(tmp_path), "--out", out, *COMMON]) == 2
    assert "records.jsonl:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "estimate", "check", "calibrate"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"nereus {command}" in capsys.readouterr().out
