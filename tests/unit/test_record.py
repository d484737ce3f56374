"""The record of a job: what is written is read back; what is broken says where."""

import dataclasses
import json
import stat
from pathlib import Path

import pytest

from nereus_plugins.cli import main
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    NewRecords,
    RecordError,
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
    parse_record,
    read_records,
)
from nereus_plugins.trace.show import main as show


def _records() -> list:
    return [
        RunRecord("r1", 1.0, "verl", {"verl": "0.9.1"}, 4, {"actor": {"tp": 2, "dp": 2}}),
        StepRecord(
            step=1, epoch=0, time_unix_s=2.0, step_s=3.5, stages_s={"gen": 1.0},
            tokens={"prompt": 10, "response": 20, "total": 30}, samples=8,
            memory_bytes={"allocated": 5}, metrics={"reward": 0.25}, plan={"actor": {"tp": 2}},
        ),
        TransitionRecord(
            step=1, epoch=1, time_unix_s=3.0, outcome="committed", reason="",
            units={"actor": {"from": "TP2", "to": "TP1", "bytes_wire": 10}},
            seconds={"prepare": 0.5, "prepare.move": 0.3}, digest="ab",
            knobs={"critic": {
                "from": {"train": 4, "recompute": "none"}, "to": {"train": 4, "recompute": "full"},
            }},
        ),
    ]  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    for record in _records():
        writer.write(record)
    writer.close()
    assert list(read_records(tmp_path)) == _records()
    assert stat.S_IMODE((tmp_path / RECORDS_FILE).stat().st_mode) == 0o600


def test_a_step_alone_is_without_what_ran_at_its_boundary() -> None:
    stages = {"gen": 1.0, "nereus_transition": 0.5, "nereus_snapshot": 0.25}
    assert dataclasses.replace(_records()[1], stages_s=stages).alone_s == 2.75


def test_torn_last_line_is_passed_over_and_never_written_behind(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write(_records()[0])
    writer.close()
    with open(tmp_path / RECORDS_FILE, "a") as file:
        file.write('{"schema":"nereus.st')
    assert list(read_records(tmp_path)) == _records()[:1]
    writer = RecordWriter(tmp_path)
    writer.write(_records()[1])
    writer.close()
    assert list(read_records(tmp_path)) == _records()[:2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "nereus.step/99"}, "not known"),
        ({"schema": "other.step/1"}, "not known"),
        ({"step": "one"}, "'step'"),
        ({"samples": True}, "'samples'"),
        ({"tokens": 7}, "'tokens'"),
        ({"surprise": 1}, "'surprise'"),
        ({"step_s": None}, "'step_s'"),
        ({"step_s": 10**400}, "'step_s' must hold numbers"),
        ({"stages_s": {"gen": "1"}}, "'stages_s' must hold numbers, got '1'"),
        ({"tokens": {"total": None}}, "'tokens' must hold numbers"),
        ({"memory_bytes": {"allocated": [1]}}, "'memory_bytes' must hold numbers"),
        ({"metrics": {"critic/score/mean": "high"}}, "'metrics' must hold numbers"),
    ],
)
def test_broken_records_name_the_field(change: dict, message: str) -> None:
    data = json.loads(json.dumps(_records()[1].to_dict())) | change
    with pytest.raises(RecordError, match=message):
        parse_record(data)


@pytest.mark.parametrize(
    "change",
    [
        {"units": {"actor": 5}},
        {"units": {"actor": {"to": "TP2", "bytes_wire": "many"}}},
        {"ranks": {"from": 4}},
        {"knobs": {"actor": {"from": {}}}},
        {"rollout": {"from": {"tp": 1}}},
        {"background": {"hidden_s": "long"}},
        {"background": {"other": 1}},
    ],
)
@pytest.mark.parametrize("command", ["records", "status"])
def test_a_transition_of_another_shape_is_said_not_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, change: dict
) -> None:
    data = _records()[2].to_dict() | change
    (tmp_path / RECORDS_FILE).write_text(json.dumps(data) + "\n")
    assert main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    where = f"nereus {command}: transition record after step {data['step']}"
    assert f"{where}: field {next(iter(change))!r} is not of its schema" in said


def test_missing_field_and_bad_line_name_file_and_line(tmp_path: Path) -> None:
    data = _records()[1].to_dict()
    del data["epoch"]
    with pytest.raises(RecordError, match="epoch"):
        parse_record(data)
    (tmp_path / RECORDS_FILE).write_text(json.dumps(_records()[0].to_dict()) + "\nnot json\n")
    with pytest.raises(RecordError, match=rf"{RECORDS_FILE}:2: not JSON"):
        list(read_records(tmp_path))


def test_show_prints_every_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RecordWriter(tmp_path)
    for record in _records():
        writer.write(record)
    assert show([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step     1" in out
    assert "actor TP2" in out
    assert "TP2 -> TP1" in out
    assert "critic knobs: recompute none -> full\n" in out
    assert out.index("step     1") < out.index("committed in 0.50 s")
    assert show([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


def test_new_records_are_read_once(tmp_path: Path) -> None:
    records = NewRecords(tmp_path)
    with pytest.raises(FileNotFoundError):
        list(records.read())
    writer = RecordWriter(tmp_path)
    writer.write(_records()[0])
    assert list(records.read()) == _records()[:1]
    assert list(records.read()) == []
    with open(writer.path, "a") as file:
        file.write('{"schema":')
        file.flush()
        assert list(records.read()) == []  # a line that is being written
        file.write("1}\n")
    with pytest.raises(RecordError, match=r"records.jsonl:2: not a nereus record"):
        list(records.read())
    writer.close()
    writer.path.unlink()
    writer = RecordWriter(tmp_path)  # another run, started anew
    writer.write(_records()[0])
    writer.close()
    assert list(records.read()) == _records()[:1]


def test_show_says_what_was_hidden(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, step, transition = _records()
    hidden = {"prepare_s": 0.5, "hidden_s": 0.4}
    writer = RecordWriter(tmp_path)
    writer.write(step)
    writer.write(dataclasses.replace(transition, background=hidden))
    writer.write(dataclasses.replace(step, step=2))
    writer.write(dataclasses.replace(transition, step=2, background={"exposed": "no room"}))
    assert show([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    places = [out.index(text) for text in ("step     1", "0.40 s more", "step     2", "no room")]
    assert places == sorted(places)


def test_a_phases_own_parts_are_not_waited_for_twice() -> None:
    record = TransitionRecord(
        step=1, epoch=1, time_unix_s=0.0, outcome="committed", reason="", units={}, digest="",
        seconds={"prepare": 3.0, "prepare.build": 1.0, "prepare.move": 2.0, "commit": 0.5},
    )  # fmt: skip
    assert record.stall_s == 3.5
