"""The controller beside a live job: the loop over real files and sockets, and its process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.control import beside, cli
from nereus_plugins.control.beside import Beside, Launch
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.live import Live, only_one
from nereus_plugins.control.offered import Offered
from nereus_plugins.control.server import Server
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import starting_plan
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Lease
from nereus_plugins.sim.job import capabilities_of
from nereus_plugins.spec import GlobalPlan, LengthDistribution, ModelStage
from nereus_plugins.trace.conditions import Setting
from nereus_plugins.trace.record import (
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
    now_s,
)

S = ModelStage
LEAVE = (Lease(2), Lease(2, until_s=5.0))


@pytest.fixture(scope="module")
def setting() -> JobSetting:
    job = JobSpec(read_model("qwen2.5-1.5b"), reference=False)
    lengths = LengthDistribution.lognormal(500, 0.5, max_tokens=4096)
    inner = Setting(job, cluster_of("h100", 8), LengthDistribution.fixed(100), 64)
    return JobSetting.of(inner, capabilities_of(job), lengths, 4096, 100)


@pytest.fixture(scope="module")
def plan(setting: JobSetting) -> GlobalPlan:
    return starting_plan(setting, 4)


class Job:
    """A job's driver, but for the job: its records, its commands, and what it is asked for."""

    stall_s = 1.0  # of a transition

    def __init__(self, run_dir: Path, plan: GlobalPlan, refuses: str = "") -> None:
        self.run_dir, self.plan, self.refuses = run_dir, plan, refuses
        self.records = RecordWriter(run_dir)
        self.leases: tuple[Lease, ...] = (Lease(4),)
        self.epoch = 0
        self.inbox = Inbox(
            self._check, takes_gpus="",
            more=lambda: {
                "leases": [one.to_dict() for one in self.lent()],
                "global_plan": self.plan.to_dict(),
            },
        )  # fmt: skip
        self.inbox.inform(epoch=0)
        self.server = Server(run_dir, self.inbox, "run", 0)

    def lent(self) -> tuple[Lease, ...]:
        return self.leases

    def _check(self, asked: Mapping[str, Any]) -> str:
        if self.refuses:
            raise ValueError(self.refuses)
        return GlobalPlan.from_dict(asked).name

    def step(self, number: int, seconds: float = 10.0) -> None:
        stages = {"gen": 0.5, "update_actor": 0.4, "old_log_prob": 0.1}
        self.records.write(
            StepRecord(
                step=number,
                epoch=self.epoch,
                time_unix_s=now_s(),
                step_s=seconds,
                stages_s={name: part * seconds for name, part in stages.items()},
                tokens={"prompt": 6400, "response": 32000, "total": 38400},
                samples=64,
                memory_bytes={},
                metrics={"response_length/mean": 500.0},
                plan={"actor": self.plan.assignments[S.ACTOR_TRAIN].layout.to_dict()},
            )
        )

    def boundary(self, number: int) -> TransitionRecord | None:
        """Execute what is pending."""
        submitted = self.inbox.pull(number)
        if submitted is None:
            return None
        record = self.commit(number, GlobalPlan.from_dict(submitted.plan), submitted.predicted)
        self.inbox.answer("committed")
        return record

    def commit(
        self, number: int, plan: GlobalPlan, predicted: Mapping[str, float]
    ) -> TransitionRecord:
        self.plan, self.epoch = plan, self.epoch + 1
        record = TransitionRecord(
            step=number, epoch=self.epoch, time_unix_s=now_s(), outcome="committed", reason="",
            units={}, seconds={"prepare": self.stall_s}, digest="", predicted=predicted,
        )  # fmt: skip
        self.records.write(record)
        self.inbox.inform(epoch=self.epoch)
        self.server.moved_to(self.epoch)
        return record

    def begin_run(self) -> None:
        """A driver that starts, maybe again, in this run directory."""
        self.records.write(
            RunRecord(
                run_id="run",
                time_unix_s=now_s(),
                source="verl",
                versions={},
                world_size=4,
                plan={},
            )
        )

    def close(self) -> None:
        self.server.close()
        self.records.close()


@pytest.fixture
def job(tmp_path: Path, plan: GlobalPlan) -> Iterator[Job]:
    made = Job(tmp_path, plan)
    yield made
    made.close()


def begin(job: Job, setting: JobSetting, **config: Any) -> Live:
    config = {"mode": "act", "dwell_steps": 1, **config}
    Launch(setting, ControllerConfig(**config), job.plan, job.epoch).write(job.run_dir)
    return Live(job.run_dir, os.getppid())


def decisions(job: Job) -> list[dict[str, Any]]:
    entries = DecisionJournal(job.run_dir).read()
    return [entry["decision"] for entry in entries if entry["kind"] == "decision"]


def test_gpus_that_are_granted_are_used(job: Job, setting: JobSetting) -> None:
    """From the record of a step to a committed plan, and what was predicted in its record."""
    live = begin(job, setting)
    job.step(1)
    live.look()
    assert not job.inbox.waiting()  # nothing better on four
    job.leases = (Lease(8),)
    for step in range(2, 8):
        job.step(step)
        live.look()
        if job.inbox.waiting():
            break
    record = job.boundary(step)
    assert record is not None
    assert max(job.plan.devices) == 7
    assert record.predicted["saving_s"] > 0
    assert record.predicted["transition_s"] > 0
    job.step(step + 1, 6.0)
    live.look()
    assert not job.inbox.waiting()
    assert decisions(job)[-1]["epoch"] == 1


def test_gpus_under_notice_are_left(job: Job, setting: JobSetting) -> None:
    live = begin(job, setting)
    job.step(1)
    live.look()
    job.leases = LEAVE
    live.look()  # no step in between: the notice alone is news
    assert job.inbox.waiting()
    job.boundary(1)
    assert max(job.plan.devices) < 2
    assert decisions(job)[-1]["forced"]


def test_a_plan_that_the_job_cannot_run_is_not_proposed_again(
    tmp_path: Path, plan: GlobalPlan, setting: JobSetting
) -> None:
    job = Job(tmp_path, plan, refuses="plan.actor: not this one")
    try:
        live = begin(job, setting)
        job.step(1)
        live.look()
        job.leases = LEAVE
        proposed = []
        for step in range(2, 6):
            job.step(step)
            live.look()
            last = decisions(job)[-1]
            if last["plan"] is not None:
                proposed.append(json.dumps(last["plan"]["assignments"], sort_keys=True))
        assert len(proposed) > 1  # others are tried
        assert len(set(proposed)) == len(proposed)
        assert not job.inbox.waiting()
        refusals = [
            entry["record"]["reason"]
            for entry in DecisionJournal(tmp_path).read()
            if entry["kind"] == "observation" and "reason" in entry["record"]
        ]
        assert refusals[0] == "refused: plan.actor: not this one"
    finally:
        job.close()


def test_a_paused_job_is_asked_again(job: Job, setting: JobSetting) -> None:
    """What was refused for another reason than the plan itself is not held against it."""
    live = begin(job, setting)
    job.step(1)
    live.look()
    job.inbox.pause(0)
    job.leases = LEAVE
    live.look()
    assert not job.inbox.waiting()
    job.inbox.resume(0)
    job.step(2)
    live.look()
    assert job.inbox.waiting()


def test_a_proposal_for_another_epoch_is_refused(job: Job, setting: JobSetting) -> None:
    live = begin(job, setting)
    job.step(1)
    live.look()
    job.leases = LEAVE
    live.look()
    assert job.inbox.waiting()
    job.inbox.inform(epoch=1)  # another transition was faster
    job.server.moved_to(1)
    job.epoch = 1
    assert not job.inbox.waiting()
    job.step(2)
    live.look()
    assert job.inbox.waiting()  # made anew, for the epoch that is
    assert decisions(job)[-1]["epoch"] == 1


def test_a_users_plan_is_followed_though_another_was_proposed(
    job: Job, setting: JobSetting
) -> None:
    live = begin(job, setting, mode="observe")
    job.step(1)
    live.look()
    job.leases = LEAVE
    live.look()
    assert decisions(job)[-1]["kind"] == "propose"
    theirs = starting_plan(setting, 1)
    job.inbox.submit(0, theirs.to_dict())
    job.boundary(1)
    live.look()
    assert live._controller.plan.assignments == theirs.assignments
    assert live._controller.epoch == 1
    assert not live._controller.proofs


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_only_act_submits(job: Job, setting: JobSetting, mode: str) -> None:
    live = begin(job, setting, mode=mode)
    job.step(1)
    live.look()
    job.leases = LEAVE
    live.look()
    assert not job.inbox.waiting()
    assert decisions(job)[-1]["kind"] == "propose"
    assert (job.run_dir / "proposal.json").exists() == (mode == "advise")
    # Model, plans and what runs where are no one else's business.
    for name in ("controller.json", "proposal.json", "decisions.jsonl"):
        if (file := job.run_dir / name).exists():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_was_advised_is_executed_once_approved(
    job: Job, setting: JobSetting, capsys: pytest.CaptureFixture[str]
) -> None:
    live = begin(job, setting, mode="advise")
    job.step(1)
    live.look()
    where = str(job.run_dir)
    assert cli.approve([where]) == cli.USAGE
    assert "has proposed nothing yet" in capsys.readouterr().err
    job.leases = LEAVE
    live.look()
    job.step(2)
    live.look()  # the same plan is the same proposal
    live.look()
    assert Offered.read(job.run_dir).number == 1
    assert cli.approve([where, "7"]) == cli.USAGE
    assert "not the last one, which is 1" in capsys.readouterr().err
    assert cli.approve([where, "1", "--no-wait"]) == cli.DONE
    record = job.boundary(2)
    assert record is not None
    assert "transition_s" in record.predicted
    job.step(3)
    live.look()
    assert live._controller.plan.assignments == job.plan.assignments
    assert len(live._controller.proofs) == 1
    assert cli.approve([where, "1", "--no-wait"]) == cli.NOT_TAKEN  # of an epoch that is over
    assert "stale" in capsys.readouterr().err


def test_what_was_proposed_to_an_earlier_run_cannot_be_approved(
    job: Job, setting: JobSetting, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that ended without a transition, and is in the same epoch again."""
    live = begin(job, setting, mode="advise")
    job.step(1)
    live.look()
    job.leases = LEAVE
    live.look()
    assert (job.run_dir / "proposal.json").exists()
    begin(job, setting, mode="advise")
    assert cli.approve([str(job.run_dir), "--no-wait"]) == cli.USAGE
    assert "has proposed nothing yet" in capsys.readouterr().err
    assert not job.inbox.waiting()


def test_gpus_by_command(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.gpus([str(job.run_dir), "2", "--notice", "30"]) == cli.DONE
    granted = job.inbox.granted()
    assert granted is not None
    assert granted.gpus == 2
    assert cli.gpus([str(job.run_dir), "0"]) == cli.USAGE
    assert cli.gpus([str(job.run_dir), "2", "--notice", "-1"]) == cli.USAGE


def test_gpus_are_lent_by_command(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.inbox.inform(epoch=0, gpus=4)
    where = str(job.run_dir)
    assert cli.gpus([where, "8", "--for", "600", "--spot", "30"]) == cli.DONE
    granted = job.inbox.granted()
    assert granted is not None
    assert (granted.gpus, granted.own, granted.notice_s) == (8, 4, 30)
    assert 590 < granted.until - time.monotonic() <= 600
    assert cli.gpus([where, "4", "--for", "600"]) == cli.NOT_TAKEN
    assert "none would be lent" in capsys.readouterr().err


def test_a_lease_that_ends_earlier_than_it_did_is_news(job: Job, setting: JobSetting) -> None:
    """Within a step; one that runs on is not."""
    live = begin(job, setting)
    job.step(1)
    job.leases = (Lease(2), Lease(2, until_s=5000.0))
    live.look()
    decided = len(decisions(job))
    job.leases = (Lease(2), Lease(2, until_s=4999.9))
    live.look()
    assert len(decisions(job)) == decided
    job.leases = LEAVE
    live.look()
    assert decisions(job)[-1]["forced"]
    assert job.inbox.waiting()


def test_a_controller_that_begins_again_knows_what_it_knew(job: Job, setting: JobSetting) -> None:
    """Killed anywhere, it takes up its journal: no record counts twice, none is lost."""
    live = begin(job, setting)
    for step in range(1, 4):
        job.step(step)
        live.look()
    job.step(4)  # written while no controller ran
    again = Live(job.run_dir, os.getppid())
    again.look()
    observed = [
        e["record"] for e in DecisionJournal(job.run_dir).read() if e["kind"] == "observation"
    ]
    assert [one["step"] for one in observed] == [1, 2, 3, 4]
    assert again._controller.lengths.seen == 4


def test_other_settings_begin_a_journal_of_their_own(job: Job, setting: JobSetting) -> None:
    live = begin(job, setting)
    job.step(1)
    live.look()
    begin(job, dataclasses.replace(setting, steps=200)).look()
    assert (job.run_dir / "decisions.jsonl.1").exists()
    start = DecisionJournal(job.run_dir).read()[0]
    assert start["setting"]["steps"] == 200


@pytest.mark.parametrize("mode", ["observe", "act"])
def test_a_plan_of_others_is_the_plan_in_force(
    job: Job, setting: JobSetting, plan: GlobalPlan, mode: str
) -> None:
    """A user's or a scheduled transition: neither missed, nor taken for what was proposed."""
    live = begin(job, setting, mode=mode)
    job.step(1)
    live.look()
    job.inbox.pause(0)  # what is proposed is not executed
    job.leases = LEAVE
    live.look()
    proposed = decisions(job)[-1]
    assert proposed["kind"] == "propose"
    another = starting_plan(setting, 8)
    job.commit(1, another, {})
    live.look()
    assert live._controller.epoch == 1
    assert live._controller.plan.assignments == another.assignments
    assert not live._controller.proofs  # nothing was predicted of it


def test_a_job_that_is_started_again_is_in_its_own_plan(job: Job, setting: JobSetting) -> None:
    """And goes on from an earlier step: it is decided for again from there on."""
    live = begin(job, setting)
    job.begin_run()
    start = job.plan
    job.step(1)
    live.look()
    job.commit(1, starting_plan(setting, 8), {})
    for step in (2, 3, 4):
        job.step(step)
        live.look()
    assert live._controller.plan.assignments != start.assignments
    # The next driver: the epoch goes on, the plan is that of the configuration.
    job.plan = start
    again = begin(job, setting)
    job.begin_run()
    again.look()
    assert again._controller.plan.assignments == start.assignments
    job.leases = LEAVE
    job.step(2)
    again.look()
    assert decisions(job)[-1]["step"] == 2


def test_steps_of_another_job_in_its_directory_are_not_learned_from(
    job: Job, setting: JobSetting
) -> None:
    job.begin_run()
    job.step(1)
    job.step(2)
    job.begin_run()
    live = begin(job, setting)
    job.step(1, 20.0)
    live.look()
    observed = [e for e in DecisionJournal(job.run_dir).read() if e["kind"] == "observation"]
    assert [one["record"]["step_s"] for one in observed] == [20.0]


def test_a_damaged_journal_is_put_aside(job: Job, setting: JobSetting) -> None:
    (job.run_dir / "decisions.jsonl").write_bytes(b"nothing of the kind\n\n\n")
    live = begin(job, setting)
    job.step(1)
    live.look()
    assert decisions(job)
    assert (job.run_dir / "decisions.jsonl.1").read_bytes().startswith(b"nothing")


def test_a_job_that_cannot_say_how_it_is_is_asked_again(job: Job, setting: JobSetting) -> None:
    live = begin(job, setting)
    job.step(1)
    leases, job.leases = job.leases, None  # type: ignore[assignment]
    live.look()
    job.leases = leases
    live.look()
    assert decisions(job)[-1]["step"] == 1


def test_nothing_is_proposed_to_another_driver(job: Job, setting: JobSetting) -> None:
    """The driver is gone and started again while a plan was made."""
    live = begin(job, setting)
    job.step(1)
    live.look()
    live._parent += 1
    job.leases = LEAVE
    live.look()
    assert decisions(job)[-1]["kind"] == "propose"
    assert not job.inbox.waiting()


# -- the process -----------------------------------------------------------------------------------


def until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def started(job: Job, setting: JobSetting) -> Iterator[tuple[Beside, list[str]]]:
    """The process beside a job, and what it said on the job's console."""
    Launch(setting, ControllerConfig(), job.plan, 0).write(job.run_dir)
    said: list[str] = []
    one = Beside(job.run_dir, said.append)
    one.start()
    try:
        yield one, said
    finally:
        one.close()


def kill(one: Beside, restarts: int) -> None:
    """Once it runs and was started again so often."""
    until(lambda: one.running and one.restarts == restarts)
    assert one._process is not None
    os.kill(one._process.pid, signal.SIGKILL)


def test_a_process_that_dies_is_started_again_and_not_for_ever(
    job: Job, setting: JobSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "BACK_OFF_S", 0.01)
    monkeypatch.setattr(beside, "RESTARTS", 2)
    with started(job, setting) as (one, said):
        for restarts in range(3):
            kill(one, restarts)
            until(lambda restarts=restarts: len(said) > restarts)  # type: ignore[misc]
        assert "started again" in said[0]
        assert "trains on without it" in said[-1]
        until(lambda: not one._thread.is_alive())
        assert not one.running


def test_a_controller_that_ran_well_may_die_any_number_of_times(
    job: Job, setting: JobSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "BACK_OFF_S", 0.01)
    monkeypatch.setattr(beside, "RESTARTS", 1)
    monkeypatch.setattr(beside, "RAN_WELL_S", 0.0)
    with started(job, setting) as (one, said):
        for restarts in range(4):
            kill(one, restarts)
        until(lambda: one.running and one.restarts == 4)
        assert all("(1 of 1)" in line for line in said)


def test_a_second_controller_waits_for_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a driver that was killed may be planning still, and would write what it decides."""
    parent = os.getppid()
    with only_one(tmp_path, parent) as first:
        assert first
        # flock is of the open file: a second one of this process waits like another's.
        got: list[bool] = []
        second = threading.Thread(target=_hold, args=(tmp_path, parent, got), daemon=True)
        second.start()
        until(lambda: "earlier controller" in capsys.readouterr().out)
        assert second.is_alive()
    second.join(20.0)
    assert got == [True]
    with only_one(tmp_path, parent=-1) as without_driver:
        assert not without_driver


def _hold(run_dir: Path, parent: int, got: list[bool]) -> None:
    with only_one(run_dir, parent) as alone:
        got.append(alone)


def test_the_process_follows_the_job_and_ends_with_it(job: Job, setting: JobSetting) -> None:
    with started(job, setting) as (one, said):
        job.step(1)
        until(lambda: (job.run_dir / "decisions.jsonl").exists() and decisions(job))
        assert decisions(job)[0]["step"] == 1
    assert not one.running
    assert not said


def test_the_process_ends_with_a_driver_that_is_killed(
    job: Job, setting: JobSetting, tmp_path: Path
) -> None:
    Launch(setting, ControllerConfig(), job.plan, 0).write(job.run_dir)
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from nereus_plugins.control.beside import Beside\n"
        "one = Beside(Path(sys.argv[1]), print); one.start()\n"
        "while not one.running: time.sleep(0.05)\n"
        "print(one._process.pid, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(gone)
