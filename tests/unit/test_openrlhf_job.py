"""The trainer's side of an OpenRLHF job: what it runs when, and what it writes before what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nereus_cpu.deepspeed
import pytest

nereus_cpu.deepspeed.install()

from nereus_openrlhf import openrlhf_private, preflight  # noqa: E402
from nereus_openrlhf.config import NereusConfig  # noqa: E402
from nereus_openrlhf.engines import EnginesLost  # noqa: E402
from nereus_openrlhf.job import OpenRlhfJob  # noqa: E402
from nereus_openrlhf.ranks import Change, Seats, UnitRanks  # noqa: E402
from nereus_openrlhf.stage_times import StageTimes  # noqa: E402

from nereus_plugins.control import ray_private  # noqa: E402
from nereus_plugins.control.attempt import TransitionFailed  # noqa: E402
from nereus_plugins.control.driver import JOURNAL_FILE  # noqa: E402
from nereus_plugins.control.workers import WorkersFailed  # noqa: E402
from nereus_plugins.controller.config import ControllerConfig  # noqa: E402
from nereus_plugins.cost.calibrate import measured_seconds  # noqa: E402
from nereus_plugins.gtg.journal import Journal  # noqa: E402
from nereus_plugins.job import Lease  # noqa: E402
from nereus_plugins.spec import (  # noqa: E402
    Assignment,
    GlobalPlan,
    Layout,
    ModelStage,
    SpecError,
)
from nereus_plugins.trace.record import TransitionRecord, read_records  # noqa: E402
from nereus_plugins.trace.show import transition_lines  # noqa: E402
from tests.unit.test_openrlhf_config import arguments, space  # noqa: E402

ZERO2, ZERO3 = Layout(dp=2, sharding="zero2"), Layout(dp=2, sharding="zero3")


class Group:
    """A model's group of two actors, as far as the job touches it."""

    def __init__(self) -> None:
        self._actor_handlers = ["rank 0", "rank 1"]

    def set_handles(self, handles: Sequence[Any]) -> None:
        self._actor_handlers = list(handles)


def started(
    folder: Path,
    schedule: dict[int, Any],
    *,
    controller: ControllerConfig | None = None,
    **changes: Any,
) -> OpenRlhfJob:
    """A job of actor and critic on two ranks each, with one engine. Args: as `arguments`."""
    args = arguments(**changes)
    args.ckpt = space(path=str(folder / "checkpoints"))
    layouts = {"actor": ZERO2, "critic": ZERO2}
    nereus = NereusConfig(schedule=schedule, controller=controller)
    targets: dict[int, Mapping[str, Layout]] = {}
    replicas: dict[int, int] = {}
    for step, plan in nereus.schedule.items():
        targets[step], replicas[step] = preflight.plan_targets(args, plan, layouts, 1, "schedule")
    checked = preflight.Preflight(nereus, {}, layouts, targets, replicas, folder)
    trainer = SimpleNamespace(args=args, vllm_engines=["engine"], max_steps=10)
    job = OpenRlhfJob(checked, trainer)
    for name in layouts:
        seats = Seats([(None, 0), (None, 1)])
        job._ranks[name] = ranks = UnitRanks(name, Group(), seats, 1.0)
        ranks.hosts = ["here", "here"]
    job._driver.inform()
    return job


def report(name: str) -> dict[str, Any]:
    unit = {
        "from": "a", "to": "b", "bytes_wire": 1, "bytes_sent": 1, "bytes_local": 0,
        "bytes_parked": 0, "messages": 1, "seconds": {}, "verified": {}, "prediction": None,
        "prediction_error": "",
    }  # fmt: skip
    return {"mode": "intact", "digest": name, "units": {name: unit}, "seconds": {"move": 1.0}}


class Ranks:
    """Answers for all ranks.

    Attributes:
        asked: phases, in order, with the kinds of what the journal held.
        gives_up: (phase, model) in which all its ranks do. dies: phase in which one is lost.
    """

    def __init__(self, job: OpenRlhfJob, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.gives_up: set[tuple[str, str]] = set()
        self.dies = ""
        self._journal = Journal(job.checked.run_dir / JOURNAL_FILE)
        monkeypatch.setattr("nereus_openrlhf.job.call", self.call)
        monkeypatch.setattr("nereus_openrlhf.job.join", lambda changes, timeout_s: None)

    def call(
        self,
        changes: Sequence[Change],
        phase: str,
        function: Any,
        arguments: Callable[[Change], Sequence[Any]],
        **how: Any,
    ) -> list[list[Any]]:
        self.asked.append((phase, [one.kind for one in self._journal.read()]))
        if phase == self.dies:
            raise WorkersFailed(f"actor: the worker process of rank 1 died in {phase!r}")
        return [[self._answer(change.name, phase)] * len(arguments(change)) for change in changes]

    def _answer(self, name: str, phase: str) -> dict[str, Any]:
        if (phase, name) in self.gives_up:
            lost = {"phase": phase, "rank": 1, "reason": f"{name} failed", "lost_ranks": []}
            return {"aborted": lost}
        if phase == "release":
            return {"report": {"units": {name: 0.5}}, "failed": ""}
        return {"report": report(name), "failed": ""}


def journal(job: OpenRlhfJob) -> list[tuple[str, int, str]]:
    records = Journal(job.checked.run_dir / JOURNAL_FILE).read()
    return [(one.kind, one.epoch, one.reason) for one in records]


def written(job: OpenRlhfJob) -> TransitionRecord:
    """The one transition that is in the records."""
    (one,) = read_records(job.checked.run_dir)
    assert isinstance(one, TransitionRecord)
    return one


def test_a_scheduled_transition_is_journaled_before_ranks_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    ranks = Ranks(job, monkeypatch)
    assert job.is_due(1)
    record = job.at_boundary(1)
    assert record == written(job)
    assert (record.outcome, record.epoch, record.digest) == ("committed", 1, "actor:critic")
    assert set(record.units) == {"actor", "critic"}
    assert record.seconds["prepare.move"] == 1.0
    assert all(unit["seconds"]["release"] == 0.5 for unit in record.units.values())
    phases = ["prepare", "commit", "release", "follow"]
    assert ranks.asked == [(p, ["commit"] if p != "prepare" else []) for p in phases]
    assert job.layout("actor") == job.layout("critic") == ZERO3
    (commit,) = Journal(tmp_path / JOURNAL_FILE).read()
    assert commit.ranks == ["actor-0", "actor-1", "critic-0", "critic-1"]
    assert job.epoch() == 1


def test_models_that_prepared_are_aborted_where_another_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    ranks = Ranks(job, monkeypatch)
    ranks.gives_up = {("prepare", "critic")}
    record = job.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.reason) == ("aborted", "rank 1 in prepare: critic failed")
    assert [phase for phase, _ in ranks.asked] == ["prepare", "abort", "withdraw"]
    assert journal(job) == []
    assert job.layout("actor") == ZERO2


def test_a_commit_that_no_model_switched_to_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    Ranks(job, monkeypatch).gives_up = {("commit", "actor"), ("commit", "critic")}
    record = job.at_boundary(1)
    assert record is not None
    why = "rank 1 in commit: critic failed"
    assert (record.outcome, record.reason) == ("aborted", why)
    assert journal(job) == [("commit", 1, ""), ("abort", 1, why)]
    assert (job.epoch(), job.layout("actor")) == (0, ZERO2)


def test_where_only_some_models_switched_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    Ranks(job, monkeypatch).gives_up = {("commit", "critic")}
    with pytest.raises(TransitionFailed) as failed:
        job.at_boundary(1)
    words = str(failed.value)
    assert "only some models switched to their new layout: rank 1 in commit" in words
    assert f"restart it with --ckpt.load_enable from what is saved in {tmp_path}" in words
    assert words.endswith(f"Records: {tmp_path / 'records.jsonl'}"), "they lack nothing"
    assert [kind for kind, *_ in journal(job)] == ["commit", "abort"]
    assert written(job).outcome == "failed"


@pytest.mark.parametrize(
    ("phase", "kinds"), [("prepare", []), ("commit", ["commit", "abort"]), ("follow", ["commit"])]
)
def test_a_rank_that_is_lost_ends_the_job_with_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, kinds: list[str]
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    Ranks(job, monkeypatch).dies = phase
    words = f"after step 1 .* failed: actor: the worker process of rank 1 died in '{phase}'"
    with pytest.raises(TransitionFailed, match=words):
        job.at_boundary(1)
    assert [kind for kind, *_ in journal(job)] == kinds
    assert written(job).outcome == "failed"


def test_where_the_journal_cannot_be_written_the_old_layout_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {1: {"sharding": "zero3"}})
    ranks = Ranks(job, monkeypatch)
    Journal(tmp_path / JOURNAL_FILE).commit(epoch=1, plan={}, digest="", step=0)  # another driver's
    record = job.at_boundary(1)
    assert record is not None
    assert record.reason.startswith("the journal was not written: ")
    assert "epoch 1 is stale" in record.reason
    assert [phase for phase, _ in ranks.asked] == ["prepare", "abort", "withdraw"]
    assert job.layout("actor") == ZERO2


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({1: {"critic": {"sharding": "zero3"}}}, "actor and critic share GPUs"),
        ({1: {"rollout": {"replicas": 1}}}, "under --train.colocate_all the engines"),
    ],
)
def test_what_no_longer_fits_is_aborted(
    tmp_path: Path, schedule: dict[int, Any], said: str
) -> None:
    job = started(tmp_path, schedule, train__colocate_all=True)
    job._layouts["actor"] = Layout(dp=1, sharding="zero2")  # it was not so when that was checked
    if "critic" not in schedule[1]:
        job._layouts["critic"] = job._layouts["actor"]
    record = job.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.epoch) == ("aborted", 1)
    assert said in record.reason
    assert job.at_boundary(2) is None


def test_a_submitted_plan_is_run_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {})
    Ranks(job, monkeypatch)
    inbox = job._driver.inbox
    assert not job.is_due(1)
    plan = {"actor": {"sharding": "zero3"}, "rollout": {"replicas": 1}}
    assert inbox.submit(0, plan)["what"] == f"actor {ZERO2} -> {ZERO3}"
    assert job.is_due(1)
    record = job.at_boundary(1)
    assert record is not None
    assert record.outcome == "committed"
    status = inbox.status()
    assert [one["state"] for one in status["answered"]] == ["committed"]
    assert (status["doing"], status["job"]["epoch"]) == ("", 1)
    with pytest.raises(RuntimeError, match=r"nothing to change: actor .* ZERO3"):
        inbox.submit(1, plan)


@pytest.mark.parametrize("alone", [False, True])
def test_engines_that_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Alone it is a transition that is taken back; after a model's it is said beside its commit."""
    plan = {"rollout": {"replicas": 2}} | ({} if alone else {"sharding": "zero3"})
    job = started(tmp_path, {1: plan})
    Ranks(job, monkeypatch)
    monkeypatch.setattr(job._engines, "change_to", lambda *_: "no room for another")
    record = job.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.reason) == (
        "aborted" if alone else "committed", "no room for another",
    )  # fmt: skip
    assert record.rollout == {
        "from": {"tp": 1, "replicas": 1}, "to": {"tp": 1, "replicas": 2},
        "kept": [0], "ended": [], "launched": [], "replicas": [],
        "fell_back": "no room for another",
    }  # fmt: skip
    assert "  rollout: tp 1 -> 1, replicas: 1 kept" in transition_lines(record)
    assert journal(job)[1:] == ([("abort", 1, "no room for another")] if alone else [])
    assert job.epoch() == (0 if alone else 1)


def test_without_an_engine_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = started(tmp_path, {1: {"rollout": {"replicas": 2}}})

    def lose(*_: Any) -> str:
        raise EnginesLost("none is left")

    monkeypatch.setattr(job._engines, "change_to", lose)
    with pytest.raises(TransitionFailed, match=r"vLLM engines 1 -> 2\) failed: none is left"):
        job.at_boundary(1)
    assert [kind for kind, *_ in journal(job)] == ["commit", "abort"]


def test_a_wrong_plan_is_refused_by_its_setting(tmp_path: Path) -> None:
    job = started(tmp_path, {})
    with pytest.raises(SpecError, match=r"plan\.actor: .*pp"):
        job._check_submitted({"actor": {"pp": 2}})


# -- with a controller ---------------------------------------------------------------------------

ACTS = ControllerConfig(mode="act")
KNOBS = {"actor__gradient_checkpointing_enable": False, "vllm__gpu_memory_utilization": 0.9}


def test_a_controllers_plan_is_run_as_a_submitted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = started(tmp_path, {}, controller=ACTS, **KNOBS)
    Ranks(job, monkeypatch)
    ended: list[Any] = []
    monkeypatch.setattr("ray.kill", ended.append)
    now = job.describe()
    layout = Layout(dp=1, sharding="zero2")
    stage = ModelStage.ACTOR_TRAIN
    smaller = Assignment(layout, now.assignments[stage].knobs, (0,))
    plan = GlobalPlan({**now.assignments, stage: smaller}, name="smaller")
    inbox = job._driver.inbox
    assert inbox.submit(0, plan.to_dict(), {"transition_s": 2.0})["what"] == (
        f"actor {ZERO2} -> {layout}"
    )
    assert job.is_due(1)
    record = job.at_boundary(1)
    assert record is not None
    assert (record.outcome, record.predicted) == ("committed", {"transition_s": 2.0})
    assert (record.ranks["from"], record.ranks["to"]) == (4, 3)
    assert ended == ["rank 1"]
    assert job.layout("actor") == layout
    assert [one.devices for one in job.describe().assignments.values()] == [
        (0,), (1, 2), (1, 2), (3,),
    ]  # fmt: skip
    engines = now.assignments[ModelStage.ACTOR_GENERATE]
    wider = Assignment(Layout(tp=2), engines.knobs, (3, 4))
    wrong = GlobalPlan({ModelStage.ACTOR_GENERATE: wider}, name="wrong")
    with pytest.raises(RuntimeError, match="vLLM's engines: tp stays 1"):
        inbox.submit(1, wrong.to_dict(), {"transition_s": 2.0})


def test_gpus_that_the_job_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private, "draining", lambda: {"b": 1.0})
    nodes = {"a": {"GPU": 3.5}, "b": {"GPU": 8.0}}  # of which one goes
    monkeypatch.setattr(ray_private, "free_by_node", lambda: nodes)
    job = started(tmp_path, {}, controller=ACTS, **KNOBS)
    inbox = job._driver.inbox
    assert job.leases() == (Lease(8),)  # its five, and what Ray has free
    inbox.grant(0, 6, 0.0)
    assert job.leases() == (Lease(6),)
    inbox.grant(0, 4, 60.0)
    kept, taken = job.leases()
    assert (kept, taken.gpus) == (Lease(4), 1)
    assert taken.until_s is not None
    assert 50 < taken.until_s <= 60
    with pytest.raises(RuntimeError, match="cannot go on with fewer than 3 GPUs"):
        inbox.grant(0, 2, 0.0)


@pytest.mark.parametrize(
    ("controller", "shared", "said"),
    [
        (None, False, r"has no controller \(nereus.controller.mode=off\)"),
        (ACTS, True, "the set of ranks of this job cannot change"),
    ],
)
def test_who_cannot_be_told_which_gpus_to_use(
    tmp_path: Path, controller: ControllerConfig | None, shared: bool, said: str
) -> None:
    job = started(tmp_path, {}, controller=controller, train__colocate_all=shared, **KNOBS)
    with pytest.raises(RuntimeError, match=said):
        job._driver.inbox.grant(0, 4, 0.0)


class Placed:
    """A placement group."""

    def __init__(self, number: int) -> None:
        self.id = number


def test_seats_of_their_own_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("ray.util.remove_placement_group", given.append)
    groups = [Placed(0), Placed(1), Placed(2)]
    seats = Seats.of(groups)
    seats.give_back(1)
    assert given == [groups[2], groups[1]]
    assert len(seats) == 1
    together = Seats.of([groups[0]] * 3)
    together.give_back(1)
    assert len(together) == 3
    assert len(given) == 2


def test_a_stage_takes_until_all_ranks_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are asked at the same time each have their own."""
    answered = {"slow": threading.Event(), "fast": threading.Event()}

    def wait(answers: Sequence[str], **_: Any) -> None:
        for one in answers:
            assert answered[one].wait(10)

    monkeypatch.setattr("ray.wait", wait)
    times = StageTimes()
    times.watch("actor", "fit", ["fast", "slow"])
    times.watch("critic", "fit", ["fast"])
    times.watch("reward", "forward", ["fast"])
    times.watch("critic", "append", ["never asked about"])
    answered["fast"].set()
    while len(times._seconds) < 2:
        time.sleep(0.01)
    answered["slow"].set()
    times.watch("actor", "offload_states", ["fast"])
    seconds = times.take()
    assert set(seconds) == {"update_actor", "update_critic", "reward_score"}
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    assert set(measured_seconds(metrics)) == {
        ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN, ModelStage.REWARD_SCORE,
    }  # fmt: skip
    assert 0 < seconds["update_critic"] < seconds["update_actor"]
    assert times.take() == {}


@pytest.mark.parametrize("prompts", [8, 10, 3])
def test_steps_of_an_episode_are_openrlhfs_own(prompts: int) -> None:
    """Counted by its generator of samples, whose engines' part is left out."""
    from openrlhf.trainer.ppo_utils import samples_generator

    class Generator(samples_generator.SamplesGenerator):
        def _generate_vllm(
            self, dataloader_iter: Any, num_prompts: int, **_: Any
        ) -> tuple[list[Any], int, bool]:
            found, *_, exhausted = samples_generator._collect_prompt_batch(
                dataloader_iter, num_prompts
            )
            return found, len(found), exhausted

    args = arguments(train__num_episodes=1, rollout__batch_size=4)
    args.vllm.enable_sleep = args.algo.dynamic_filtering_enable = False
    loader = [("", ["prompt"], [""], [None])] * prompts
    generator = Generator(SimpleNamespace(args=args), loader, None, None, [])
    steps, exhausted = 0, False
    while not exhausted:  # as its trainer's `fit` does
        samples, _, _, exhausted = generator.generate_samples()
        steps += bool(samples)
    trainer = SimpleNamespace(args=args, prompts_dataloader=loader)
    assert openrlhf_private.steps_of(trainer) == steps
