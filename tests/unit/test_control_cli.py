"""`nereus transition`, `status`, `pause`, `resume`: what is said, and with which exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.cli import main
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.control.server import Server
from nereus_plugins.trace.record import RecordWriter, RunRecord, StepRecord, TransitionRecord

TP1, TP2 = {"tp": 1, "dp": 4}, {"tp": 2, "dp": 2}


def check(plan: Mapping[str, Any]) -> str:
    if "tp" not in plan:
        raise ValueError("plan: tp is missing")
    return f"actor TP1 -> TP{plan['tp']}"


def step(number: int, epoch: int = 0, plan: dict[str, int] = TP1) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=epoch,
        time_unix_s=1.0,
        step_s=4.5,
        stages_s={"gen": 3.25, "update_actor": 1.0, "step": 4.5},
        tokens={"total": 1000 + number},
        samples=8,
        memory_bytes={"host_rss": 3 << 30, "process_groups": 7},
        metrics={},
        plan={"actor": plan},
    )


def transition(outcome: str, epoch: int, reason: str = "") -> TransitionRecord:
    return TransitionRecord(
        step=2,
        epoch=epoch,
        time_unix_s=1.0,
        outcome=outcome,
        reason=reason,
        units={"actor": {"from": "TP1", "to": "TP2 PP1 DP2", "bytes_wire": 10}},
        seconds={"prepare": 0.5},
        digest="",
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a job that has done two steps and then moved."""
    writer = RecordWriter(tmp_path)
    earlier = RunRecord("earlier", 1.0, "verl", {}, 16, {"actor": TP1, "critic": TP1})
    for record in (
        earlier,
        step(1),
        RunRecord("this", 1.0, "verl", {}, 4, {"actor": TP1}),
        step(1),
        step(2),
        transition("committed", 1),
    ):
        writer.write(record)
    writer.close()
    return tmp_path


@pytest.fixture
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    path.write_text("tp: 2\n")
    return path


@pytest.fixture
def inbox(run_dir: Path) -> Iterator[Inbox]:
    """Of the live job."""
    made = Inbox(check)
    made.inform(epoch=1, step=2, world_size=4, plan={"actor": TP2})
    server = Server(run_dir, made, "this", 1)
    yield made
    server.close()


@contextmanager
def driver(inbox: Inbox, answer: Callable[[], None]) -> Iterator[None]:
    """A driver that reaches a boundary as soon as a plan is there, and answers it."""

    def drive() -> None:
        deadline = time.monotonic() + 20
        while not inbox.waiting() and time.monotonic() < deadline:
            time.sleep(0.01)
        if inbox.pull(3) is not None:
            answer()

    thread = threading.Thread(target=drive)
    thread.start()
    yield
    thread.join(20)


def commit(inbox: Inbox) -> None:
    inbox.inform(epoch=2, step=3, world_size=4, plan={"actor": TP1})
    inbox.answer("committed")


def test_a_transition_is_shown_until_committed(
    inbox: Inbox, run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with driver(inbox, lambda: commit(inbox)):
        assert main(["transition", str(run_dir), str(plan)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "plan 1: accepted for epoch 1, at the next iteration boundary: actor TP1 -> TP2"
    )
    assert said[-1] == "plan 1: committed"


def test_phases_are_shown_while_a_plan_is_executed(
    inbox: Inbox, run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute() -> None:
        for phase in ("claim", "prepare"):
            inbox.doing(phase, 3)
            time.sleep(1.0)
        assert main(["status", str(run_dir)]) == 0
        commit(inbox)
        inbox.doing("")

    with driver(inbox, execute):
        assert main(["transition", str(run_dir), str(plan)]) == 0
    said = capsys.readouterr().out
    first, second = (f"plan 1: executing after step 3: {x} ..." for x in ("claim", "prepare"))
    assert 0 < said.index(first) < said.index(second) < said.index("plan 1: committed")
    assert "now: transition after step 3: prepare" in said
    assert main(["status", str(run_dir)]) == 0
    assert "now:" not in capsys.readouterr().out


def test_a_name_in_ray_takes_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["pause", "ray:my-job"]) == 4
    assert "takes Ray in this environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("nowhere", "at nowhere (RAY_ADDRESS): Invalid address"),
        ("127.0.0.1:1", "at 127.0.0.1:1 (RAY_ADDRESS): [Errno 111] Connection refused"),
        ("local", "RAY_ADDRESS=local starts a new Ray cluster"),
    ],
)
def test_a_ray_address_that_is_none(
    address: str,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["status", "ray:my-job"]) == 4
    said = capsys.readouterr().err
    assert wrong in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("state", ["aborted", "failed"])
def test_a_transition_that_was_not_committed(
    inbox: Inbox, run_dir: Path, plan: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with driver(inbox, lambda: inbox.answer(state, "rank 1 in build: no memory")):
        assert main(["transition", str(run_dir), str(plan)]) == 1
    assert f"plan 1: {state}: rank 1 in build: no memory" in capsys.readouterr().out


def test_a_plan_that_is_refused_after_it_was_accepted(
    inbox: Inbox, run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def move_on() -> None:
        while not inbox.waiting():
            time.sleep(0.01)
        inbox.inform(epoch=2)

    thread = threading.Thread(target=move_on)
    thread.start()
    assert main(["transition", str(run_dir), str(plan)]) == 3
    thread.join()
    assert "plan 1: refused: stale: made for epoch 1" in capsys.readouterr().out


def test_not_waited_for(
    inbox: Inbox, run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transition", str(run_dir), str(plan), "--no-wait"]) == 0
    assert inbox.waiting()
    assert main(["transition", str(run_dir), str(plan), "--no-wait"]) == 3
    assert "refused: another plan is pending (number 1" in capsys.readouterr().err
    assert main(["status", str(run_dir)]) == 0
    assert "pending: plan 1 (accepted): actor TP1 -> TP2" in capsys.readouterr().out


def test_interrupted_while_waiting_it_stays_pending(
    inbox: Inbox, run_dir: Path, plan: Path
) -> None:
    command = [sys.executable, "-m", "nereus_plugins.cli", "transition", str(run_dir), str(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("plan 1: accepted")
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(30) == 130
        assert "plan 1 is still accepted" in waiting.stdout.read()
    assert inbox.waiting()


JOB = """
import sys
from pathlib import Path
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.server import Server
inbox = Inbox(str)
server = Server(Path(sys.argv[1]), inbox, "run", 0)
print("ready", flush=True)
while not inbox.waiting():
    pass
print("pending", flush=True)
sys.stdin.read()
"""


def test_a_job_that_dies_before_it_answers(
    run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", JOB, str(run_dir)]
    codes: list[int] = []
    waiting = threading.Thread(
        target=lambda: codes.append(main(["transition", str(run_dir), str(plan)]))
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        waiting.start()
        assert job.stdout.readline() == b"pending\n"
        job.kill()
        job.wait()
        waiting.join(30)
    assert codes == [4]
    assert capsys.readouterr().err.startswith("nereus transition: ")
    assert main(["status", str(run_dir)]) == 0
    assert f"the job is dead: its process {job.pid} is gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "code", "wrong"),
    [
        ("pp: 2", [], 3, "refused: plan: tp is missing"),
        ("tp: 2", ["--epoch", "0"], 3, "refused: stale: made for epoch 0, the job is in epoch 1"),
        ("- 1", [], 2, "plan.yaml: no plan, which is a mapping like {tp: 2}; got [1]"),
        ("", [], 2, "plan.yaml: no plan, which is a mapping like {tp: 2}; got None"),
        ("? [1]\n: 2", [], 2, "a key must be a text or a number"),
        ("tp: 2", ["--epoch", "-1"], 2, "--epoch must be at least 0"),
        ("tp: [", [], 2, "not valid YAML"),
        ("tp: 1\ntp: 2", [], 2, "given twice"),
        ("at: 2026-01-01", [], 2, "cannot be sent as JSON"),
        ("a: &a [*a]", [], 2, "a value that contains itself"),
    ],
)
def test_plans_that_are_none(
    inbox: Inbox,
    run_dir: Path,
    plan: Path,
    text: str,
    options: list[str],
    code: int,
    wrong: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan.write_text(text)
    assert main(["transition", str(run_dir), str(plan), *options]) == code
    assert wrong in capsys.readouterr().err
    assert not inbox.waiting()


def test_pause_and_resume(
    inbox: Inbox, run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pause", str(run_dir)]) == 0
    assert inbox.paused
    assert main(["transition", str(run_dir), str(plan)]) == 3
    assert "`nereus resume` first" in capsys.readouterr().err
    assert main(["status", str(run_dir)]) == 0
    assert "paused: no transition is executed" in capsys.readouterr().out
    assert main(["resume", str(run_dir)]) == 0
    assert not inbox.paused
    # The endpoint file is of another epoch: a transition is being committed right now.
    inbox.inform(epoch=2)
    assert main(["pause", str(run_dir)]) == 3
    assert not inbox.paused


def test_status_of_a_live_job(
    inbox: Inbox, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "run this (verl): live, pid" in said
    assert "2 steps done" in said
    assert "plan of epoch 1, on 4 ranks\n  actor: TP2 PP1 DP2\n" in said
    rows = [line.split() for line in said.splitlines()]
    assert rows.index(["step", "1", "2"]) < rows.index(["gen", "s", "3.25", "3.25"])
    assert ["tokens", "1,001", "1,002"] in rows
    assert ["host_rss", "GiB", "3.00", "3.00"] in rows
    assert "transition after step 2: committed in 0.50 s" in said
    assert main(["status", str(run_dir), "--json", "--steps", "1"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["live"]
    assert [one["step"] for one in seen["steps"]] == [2]
    assert seen["control"]["job"]["epoch"] == 1


def test_status_of_a_job_that_has_ended(
    run_dir: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RecordWriter(run_dir)
    writer.write(transition("aborted", 2, "rank 1 in build"))
    writer.close()
    assert main(["status", str(run_dir), "--watch"]) == 0
    said = capsys.readouterr().out
    assert "run this (verl): no live job was reached, this is from its records" in said
    assert "it has ended, does not train yet, or runs with nereus.control=false" in said
    assert "plan of epoch 1, on 4 ranks\n  actor: TP2 PP1 DP2\n" in said, "aborted: the old one"
    assert "because rank 1 in build" in said
    for command in (["pause"], ["resume"], ["transition"]):
        arguments = [*command, str(run_dir), *([str(plan)] if command == ["transition"] else [])]
        assert main(arguments) == 4
        assert f"nereus {command[0]}: no live job in {run_dir}" in capsys.readouterr().err


def test_watch_ends_with_the_job(
    inbox: Inbox, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        time.sleep(2.0)
        (run_dir / ENDPOINT_FILE).unlink()

    thread = threading.Thread(target=end)
    thread.start()
    assert main(["status", str(run_dir), "--watch", "--every", "0.1"]) == 0
    thread.join()
    said = capsys.readouterr().out
    assert said.count(": live, pid") > 1
    assert said.count("no live job was") == 1


def test_what_is_no_run_directory(
    tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 2
    assert "has no records.jsonl" in capsys.readouterr().err
    assert main(["transition", str(tmp_path), str(tmp_path / "no.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text("{}\n")
    assert main(["status", str(tmp_path)]) == 2
    assert "not a nereus record" in capsys.readouterr().err
    assert main(["status", "x" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--steps", "0"], "--steps must be 1 to 1000"),
        (["--steps", "9" * 30], "--steps must be 1 to 1000"),
        (["--every", "nan"], "--every must be above 0 and at most 86400"),
        (["--every", "inf"], "--every must be above 0 and at most 86400"),
    ],
)
def test_status_options(
    options: list[str], wrong: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir), *options]) == 2
    assert wrong in capsys.readouterr().err


def test_help_says_what_pausing_means_and_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["pause", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Training goes on." in said
    assert "is skipped for good and recorded so" in said
    assert "3 refused by the job" in said
