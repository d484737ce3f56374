"""The driver's side of a verl job: what it runs when, and what it says when it must end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nereus_verl import asked, background, last_words, preflight, setting, stamp
from nereus_verl.answers import Answers
from nereus_verl.background import Window
from nereus_verl.job import VerlJob
from nereus_verl.preparing import Started
from nereus_verl.ranks import Change, staying

from nereus_plugins.control.attempt import Attempt, TransitionFailed
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.job import Proposal
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.unit.test_verl_config import HF, job, put

NEWEST = "latest_checkpointed_iteration.txt"
HSDP = Layout(dp=4, sharding="hsdp", shard_size=2)


def checked(directory: Path, schedule: dict[int, Any], **layout: Any) -> preflight.Preflight:
    """A four-rank job without reference that resumes from `directory`, where a checkpoint is."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(HF))
    config = job()
    put(config, "trainer.default_local_dir", str(directory))
    put(config, "actor_rollout_ref.actor.use_kl_loss", False)
    put(config, "nereus", {"schedule": schedule, "run_dir": str(directory / "run")})
    for path in ("actor_rollout_ref.model.path", "critic.model.path"):
        put(config, path, str(model))
    for name, value in layout.items():
        put(config, f"actor_rollout_ref.actor.fsdp_config.{name}", value)
        put(config, f"critic.fsdp.{name}", value)
    return preflight.run(config)


def test_a_run_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a directory")
    with pytest.raises(SpecError, match=r"nereus\.run_dir: .*cannot be written to"):
        checked(tmp_path, {})


class NoRanks:
    """The processes of a job that has none."""

    current = ()
    groups = ()
    names = ()
    trainer = SimpleNamespace(total_training_steps=10)

    def in_cluster(self) -> int:
        return 4

    def __len__(self) -> int:
        return 4

    def change_to(self, world: int, leave: tuple[int, ...]) -> None:
        assert (world, leave) == (4, ())


def test_a_checkpoint_comes_before_its_steps_transition(tmp_path: Path) -> None:
    schedule = {50: {"shard_size": 2}, 100: {"dp": 4}}
    start = checked(tmp_path, schedule)
    assert list(start.targets) == [50, 100]
    now = (start.knobs, start.config)
    stamp.write(tmp_path / "global_step_50", start.layouts, *now, 0, start.rollout)
    (tmp_path / NEWEST).write_text("50")
    resumed = checked(tmp_path, schedule)
    assert list(resumed.targets) == [50, 100]
    assert resumed.targets[50]["actor"] == HSDP

    # One step on, the checkpoint is in the new layout.
    changed = dict.fromkeys(start.layouts, HSDP)
    stamp.write(tmp_path / "global_step_51", changed, *now, 1, start.rollout)
    (tmp_path / NEWEST).write_text("51")
    with pytest.raises(stamp.LayoutMismatch, match="fsdp_size=2"):
        checked(tmp_path, schedule)
    assert list(checked(tmp_path, schedule, fsdp_size=2).targets) == [100]


def test_a_plan_that_no_longer_fits_is_aborted(tmp_path: Path) -> None:
    """It counted on an earlier transition, which was aborted."""
    run = VerlJob(checked(tmp_path, {2: {"actor": {"ulysses": 2}}}), NoRanks())
    run._transitions.layouts["actor"] = Layout(tp=4)
    record = run.at_boundary(2)
    assert record is not None
    assert record.outcome == "aborted"
    assert "nereus.schedule.2.actor: tp cannot change from 4 to 1" in record.reason
    assert list(read_records(tmp_path / "run")) == [record]
    assert run.layout("actor") == Layout(tp=4)
    assert run.at_boundary(3) is None


def test_a_job_that_the_controller_cannot_plan_for_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checked(tmp_path, {})
    nereus = dataclasses.replace(found.nereus, controller=ControllerConfig())
    run = VerlJob(dataclasses.replace(found, nereus=nereus), NoRanks())
    device = {"name": "cpu", "memory_bytes": 1 << 30}
    monkeypatch.setattr(run._answers, "call", lambda ranks, *_: [device])

    def job_setting(*_: Any) -> Any:
        raise SpecError("JobSpec: a model that no table has")

    monkeypatch.setattr(setting, "job_setting", job_setting)
    run._controller.begin(run._setting, run.describe(), run.epoch())
    assert "no controller: JobSpec: a model" in capsys.readouterr().out
    assert run.controller_ms() is None


def execute_at_once(run: VerlJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transitions of `run` are committed without workers."""

    def execute(attempt: Attempt, wanted: Any, ranks: Any) -> None:
        run._transitions.layouts.update(wanted.layouts)
        run._driver.epoch = attempt.epoch

    monkeypatch.setattr(run._transitions, "_execute", execute)


def listening(run: VerlJob, directory: Path) -> Client:
    run._driver.listen("run")
    return Client(directory / "run")


def test_a_submitted_plan_runs_at_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VerlJob(checked(tmp_path, {9: {"dp": 4}}), NoRanks())
    execute_at_once(run, monkeypatch)
    client = listening(run, tmp_path)
    assert not run.is_due(1)
    # What the schedule accepts for a step: by unit, for all units, as a global plan.
    for wrong, named in (
        ({"shard_sizes": 2}, "plan: unknown"),
        ({"actor": {"shard_size": 3}}, "plan.actor: "),
        ({"ref": {"shard_size": 2}}, "plan.ref: this job has no ref"),
        ({"shard_size": 4}, "nothing to change: actor "),
        ({"ranks": 8}, "plan: the set of ranks cannot change"),
        ({"dp": 65536}, "plan: the set of ranks cannot change"),
        ({"tp": 131072}, "must divide 4 ranks"),
        ({"assignments": {"actor-train": {"tp": 1, "dp": 3, "sharding": "fsdp"}}}, "plan: all un"),
    ):
        reply = client.call("submit", epoch=0, plan=wrong)
        assert reply["state"] == "refused"
        assert named in reply["reason"]
        assert not run.is_due(1)
    assert client.call("submit", epoch=0, plan={"shard_size": 2})["state"] == "accepted"
    assert run.is_due(1)
    record = run.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.step, record.epoch) == ("committed", 1, 1)
    assert list(read_records(tmp_path / "run")) == [record]
    assert not run.is_due(2)
    ended = client.call("wait", number=1, seen="accepted", timeout_s=0)
    assert (ended["state"], ended["step"]) == ("committed", 1)
    # The epoch that commands are made for has moved on, in the file too.
    reply = client.call("submit", epoch=0, plan={"dp": 4})
    assert "stale: made for epoch 0, the job is in epoch 1" in reply["reason"]
    client = Client(tmp_path / "run")
    assert client.endpoint.epoch == 1
    status = client.call("status")
    assert status["job"]["plan"] == run.layouts()
    layout = {"dp": 4, "sharding": "fsdp"}
    plan = {"assignments": {"actor-train": layout, "critic-train": layout}}
    assert client.call("submit", epoch=1, plan=plan)["what"].count("->") == 2
    run.close()
    with pytest.raises(NoLiveJob):
        Client(tmp_path / "run")


def test_scheduled_goes_before_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = VerlJob(checked(tmp_path, {1: {"shard_size": 2}, 2: {"dp": 4}}), NoRanks())
    execute_at_once(run, monkeypatch)
    client = listening(run, tmp_path)
    plan = {"critic": {"shard_size": 2}}
    assert client.call("submit", epoch=0, plan=plan)["state"] == "accepted"
    record = run.at_boundary(1)
    assert record is not None
    assert set(record.units) == {"actor", "critic"}
    ended = client.call("wait", number=1, seen="accepted", timeout_s=0)
    assert ended["state"] == "refused"
    assert "stale" in ended["reason"]
    run.close()


def test_what_is_scheduled_while_paused_is_skipped_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VerlJob(checked(tmp_path, {1: {"shard_size": 2}, 2: {"ulysses": 2}}), NoRanks())
    execute_at_once(run, monkeypatch)
    client = listening(run, tmp_path)
    client.call("pause", epoch=0)
    skipped = run.at_boundary(1)
    assert skipped is not None
    assert (skipped.outcome, skipped.epoch) == ("skipped", 0)
    assert skipped.reason.startswith("the job was paused")
    assert run.layout("actor") == Layout(dp=4, sharding="fsdp")
    client.call("resume", epoch=0)
    record = run.at_boundary(2)
    assert record is not None
    assert (record.outcome, record.epoch) == ("committed", 1)
    assert list(read_records(tmp_path / "run")) == [skipped, record]
    run.close()


def test_a_failure_of_a_submitted_plan_is_told_before_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VerlJob(checked(tmp_path, {}), NoRanks())

    def lose_a_worker(*args: Any) -> None:
        raise WorkersFailed("the worker process of rank 1 died in 'prepare'")

    monkeypatch.setattr(run._transitions, "_execute", lose_a_worker)
    client = listening(run, tmp_path)
    client.call("submit", epoch=0, plan={"shard_size": 2})
    with pytest.raises(TransitionFailed):
        run.at_boundary(1)
    ended = client.call("wait", number=1, seen="accepted", timeout_s=0)
    assert ended["state"] == "failed"
    assert "rank 1 died in 'prepare'" in ended["reason"]
    run.close()


def test_a_job_that_cannot_listen_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = VerlJob(checked(tmp_path, {}), NoRanks())
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(OSError(28, "full")))
    run._driver.listen("run")
    assert "takes no commands while it runs (nereus.control): " in capsys.readouterr().out
    assert not run.is_due(1)
    run.close()


def test_knobs_alone_are_a_transition_without_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = {1: {"actor": {"micro_batch": 2}}, 3: {"actor": {"token_budget_tokens": 512}}}
    run = VerlJob(checked(tmp_path, schedule), NoRanks())
    assert run.describe().assignments[ModelStage.ACTOR_TRAIN].knobs == Knobs(micro_batch=4)
    record = run.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.epoch, record.units) == ("committed", 1, {})
    others = {"recompute": "none", "offload_params": False, "offload_optimizer": False}
    assert record.knobs == {
        "actor": {
            "from": {"by_tokens": False, "train": 4, "infer": 4, **others},
            "to": {"by_tokens": False, "train": 2, "infer": 2, **others},
        }
    }
    in_force = run.describe()
    assert in_force.assignments[ModelStage.ACTOR_TRAIN].knobs == Knobs(micro_batch=2)
    assert in_force.assignments[ModelStage.CRITIC_VALUES].knobs.token_budget_tokens == 32768
    (commit,) = Journal(tmp_path / "run" / "journal.jsonl").read()
    assert commit.plan["knobs"]["actor"]["train"] == 2

    # What is described can be executed: it changes nothing, and then only what is asked for.
    assert run.execute(Proposal(1, in_force)).knobs == {}
    asked = Assignment(run.layout("actor"), Knobs(micro_batch=8))
    plan = GlobalPlan({ModelStage.ACTOR_TRAIN: asked})
    assert set(run.execute(Proposal(1, plan)).knobs) == {"actor"}
    assert run.unit_knobs("actor").batching.train == 8

    def no_space(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._driver.journal, "_append", no_space)
    record = run.at_boundary(3)
    assert record is not None
    assert record.outcome == "aborted"
    assert "the journal was not written" in record.reason
    assert run.unit_knobs("actor").batching.train == 8


def test_what_a_scheduled_plan_leaves_out_stays_as_it_is_in_force(tmp_path: Path) -> None:
    """Also where a submitted plan has changed it since the schedule was checked."""
    schedule = {2: {"actor": {"token_budget_tokens": 512}}, 3: {"rollout": {"tp": 1}}}
    start = checked(tmp_path, schedule)
    put(start.config, "actor_rollout_ref.rollout.name", "hf_cpu")
    run = VerlJob(start, NoRanks())
    run._transitions.knobs["actor"] = dataclasses.replace(
        run._transitions.knobs["actor"], recompute="full"
    )
    run._transitions.rollout.plan = generate = dataclasses.replace(
        run._transitions.rollout.plan, tp=4
    )
    record = run.at_boundary(2)
    assert record is not None
    assert (record.outcome, record.rollout) == ("committed", {})
    assert run.unit_knobs("actor").recompute == "full"
    assert run.unit_knobs("actor").batching.train == 512
    assert run.rollout() == generate
    (commit,) = Journal(tmp_path / "run" / "journal.jsonl").read()
    assert "rollout" not in commit.plan, "it may still fall back"
    assert asked.scheduled(start, run._transitions.in_force(), 3).rollout.tp == 1


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Window:
    """One whose ranks are gone, with their store."""
    monkeypatch.setattr(background, "CONNECT_S", 0.1)
    return Window(0.5, "127.0.0.1", 1, "window")


def lose_rank_1(*args: Any, **kwargs: Any) -> Any:
    raise WorkersFailed("the worker process of rank 1 died")


def test_ranks_that_are_lost_in_the_window_end_the_job_with_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Window
) -> None:
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())
    monkeypatch.setattr(run._answers, "call", lose_rank_1)
    monkeypatch.setattr(run._answers, "collect", lose_rank_1)
    words = r"after step \d .*rank 1 died.*there is no checkpoint yet"
    with pytest.raises(TransitionFailed, match=words):
        run.begin_window(2)
    # What is asked for on the way is answered too, if nothing is due.
    run._collecting = {"answer of rank 0": 0}
    with pytest.raises(TransitionFailed, match=words):
        run.end_window()
    run._preparing._started = Started(1, {}, window, {"answer of rank 0": 0}, "")
    with pytest.raises(TransitionFailed, match=words):  # its plan is not due any more
        run.at_boundary(1)


@pytest.mark.parametrize("again", [False, True])
def test_what_failed_in_the_background_is_prepared_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Window, again: bool
) -> None:
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())
    out_of_memory = {"phase": "build", "rank": 1, "reason": "OutOfMemoryError", "lost_ranks": []}
    failed: list[Any] = [{"aborted": out_of_memory}] * 2
    prepared = {"report": {"mode": "intact", "digest": "d", "units": {}, "seconds": {}}}
    answers = {
        "free_memory": [None] * 2,
        "prepare": failed if again else [prepared] * 2,
        "commit": [{}] * 2,
        "release": [{"report": {}, "failed": ""}] * 2,
    }
    asked = []

    def call(ranks: Any, phase: str, function: Any, *args: Any, **where: Any) -> list[Any]:
        asked.append(phase)
        return answers[phase]

    monkeypatch.setattr(run._answers, "call", call)
    monkeypatch.setattr(run._answers, "collect", lambda *args: failed)
    targets = run.checked.targets[2]
    run._preparing._started = Started(
        run._driver.next_attempt(), targets, window, {"answer of rank 0": 0}, ""
    )
    record = run.at_boundary(2)
    assert record is not None
    assert record.background == {"exposed": "rank 1 in build: OutOfMemoryError"}
    assert (record.outcome, record.epoch) == ("aborted" if again else "committed", 2)
    assert asked.count("prepare") == 1
    assert run.layout("actor") == (Layout(dp=4, sharding="fsdp") if again else HSDP)


def test_what_was_prepared_for_another_plan_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Window
) -> None:
    """By the boundary another one is due, or none."""
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())
    execute_at_once(run, monkeypatch)
    given_up = []
    monkeypatch.setattr(run._answers, "call", lambda ranks, phase, *_: given_up.append(phase))
    monkeypatch.setattr(run._answers, "collect", lambda *args: [{"report": {}}])
    other = Started(run._driver.next_attempt(), {"actor": HSDP}, window, {"answer": 0}, "")
    run._preparing._started = other
    record = run.at_boundary(2)
    assert record is not None
    assert record.background == {"exposed": "another plan was prepared"}
    assert (record.outcome, record.epoch) == ("committed", 2)
    run._preparing._started = other
    run._driver.inbox.doing("prepare, in the background", 3)
    assert run.at_boundary(3) is None
    assert given_up == ["abort", "abort"]
    assert run._driver.inbox.status()["doing"] == ""


def test_last_words_are_said_where_records_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())

    def lose_a_worker(*args: Any) -> None:
        raise WorkersFailed("the worker process of rank 1 died in 'prepare'")

    def no_space(record: TransitionRecord) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._transitions, "_execute", lose_a_worker)
    monkeypatch.setattr(run._driver.records, "write", no_space)
    with pytest.raises(TransitionFailed) as failed:
        run.at_boundary(2)
    assert "rank 1 died in 'prepare'" in str(failed.value)
    assert "there is no checkpoint yet" in str(failed.value)
    assert "No space left on device" in str(failed.value)


def test_what_is_not_in_force_is_taken_back_before_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for them may fail."""
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())
    report = {"mode": "intact", "digest": "d", "units": {}, "seconds": {}}

    def call(ranks: Any, phase: str, function: Any, *args: Any, **where: Any) -> list[Any]:
        return lose_rank_1() if phase == "commit" else [{"report": report}]

    def no_words(*args: Any) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run._answers, "call", call)
    monkeypatch.setattr(last_words, "of_attempt", no_words)
    with pytest.raises(OSError, match="Input/output"):
        run.at_boundary(2)
    (record,) = read_records(tmp_path / "run")
    assert record.outcome == "failed"
    assert Journal(tmp_path / "run" / "journal.jsonl").current() is None


def test_a_full_disk_ends_no_job_that_can_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal took the commit, a rank failed before any switched, and then there is no room."""
    run = VerlJob(checked(tmp_path, {2: {"shard_size": 2}}), NoRanks())
    report = {"mode": "intact", "digest": "d", "units": {}, "seconds": {}}
    aborted = {"phase": "commit", "rank": 1, "reason": "KeyError: 'x'", "lost_ranks": []}
    answers = {"prepare": [{"report": report}], "commit": [{"aborted": aborted}]}

    def call(ranks: Any, phase: str, function: Any, *args: Any, **where: Any) -> list[Any]:
        if phase == "commit":
            monkeypatch.setattr(run._driver.records, "write", no_space)
            monkeypatch.setattr(run._driver.journal, "_append", no_space)
        return answers.get(phase, [None])

    def no_space(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._answers, "call", call)
    record = run.at_boundary(2)
    assert record is not None
    assert record.outcome == "aborted"
    assert record.reason.startswith("rank 1 in commit: KeyError: 'x'; the journal still says")
    assert run.layout("actor") == Layout(dp=4, sharding="fsdp")
    said = capsys.readouterr().out
    assert "the old layout trains on: rank 1 in commit: KeyError: 'x'" in said
    assert "step 2: not in the records, which could not be written" in said


@pytest.mark.parametrize("phase", ["free_memory", "prepare", "commit", "abort"])
def test_a_rank_that_was_to_join_may_die_before_the_commit(phase: str) -> None:
    answers = Answers(1.0)
    watching = answers.watching(phase, Change(NoRanks(), (), 2), 1)
    answer = watching["without"](1, "the worker process of rank 1 died")
    assert watching["hopeless"](answer) == ""
    aborted = {"phase": phase, "rank": 1, "reason": "no answer", "lost_ranks": [1]}
    assert watching["hopeless"]({"aborted": aborted}) == ""
    needed = answers.watching(phase, None, 1)
    assert "rank(s) 1 are dead or hung" in needed["hopeless"]({"aborted": aborted})
    with pytest.raises(WorkersFailed):
        needed["without"](1, "the worker process of rank 1 died")


@pytest.mark.parametrize(
    ("count", "world", "leave", "stay"),
    [
        (4, 4, (), (0, 1, 2, 3)),
        (2, 4, (), (0, 1)),
        (4, 2, (), (0, 1)),
        (4, 4, (0, 2), (1, 3)),
        (4, 2, (1,), (0, 2)),
        (4, 3, (3,), (0, 1, 2)),
    ],
)
def test_which_ranks_stay(count: int, world: int, leave: tuple[int, ...], stay: Any) -> None:
    assert staying(count, world, leave) == stay
