"""The rollout of a running job follows the plan; where it cannot, the one before is back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.gtg.journal import Journal
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

PARTS = {"end", "adapters", "launch", "sync", "check"}


def _run(
    directory: Path,
    name: str,
    schedule: dict[int, Any] | None = None,
    *,
    engine: str = "fsdp2",
    faults: list[str] | None = None,
    timeout_s: float = 60.0,
    **settings: Any,
) -> launch.JobResult:
    """A job on two ranks, which starts with one server for both."""
    nereus = None if schedule is None else {"schedule": schedule, "timeout_s": timeout_s}
    job = small_job(directory / "task", engine, 2, critic=False, nereus=nereus, **settings)
    env = observe.environment(directory / f"{name}.observed")
    if faults is not None:
        file = directory / f"{name}.faults"
        file.write_text("\n".join(faults))
        env[observe.SERVER_FAULTS] = str(file)
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env)


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _journal(directory: Path, name: str) -> Journal:
    return Journal(directory / name / "checkpoints" / "nereus" / "journal.jsonl")


def _check_servers(directory: Path, name: str, replicas: list[int]) -> None:
    """After every transition there are so many servers, and each generates with the weights that
    the actor has: all of them, every bit, by digests that this test takes itself."""
    after = observe.read(directory / f"{name}.observed")[1::2]
    assert [len(line["servers"]) for line in after] == replicas
    for line in after:
        actor = line["units"]["actor"]
        trained = {n.removeprefix("weight/"): d for n, d in actor.items() if n[:7] == "weight/"}
        assert sum("hf_server" in actor for actor in line["actors"]) == len(line["servers"])
        for held in line["servers"].values():
            assert held == trained
    digests = [line["units"]["actor"] for line in after]
    assert all(a != b for a, b in itertools.pairwise(digests)), "training went on"


def _check_parts(transitions: list[Any]) -> None:
    for transition in transitions:
        parts = {n.split(".")[1] for n in transition.seconds if n.startswith("rollout.")}
        assert parts == PARTS
        launched = [one for one in transition.rollout["replicas"] if "seconds" in one]
        assert len(launched) == len(transition.rollout["launched"])
        assert all(one["seconds"]["load"] > 0 for one in launched)
        assert transition.rollout["tensors"] > 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def changed(directory: Path) -> launch.JobResult:
    schedule = {1: {"rollout": {"replicas": 2}}, 2: {"rollout": {"tp": 2}}}
    return _run(directory, "changed", schedule, steps=3).require_success()


def test_tp_and_replicas_change(directory: Path, changed: launch.JobResult) -> None:
    sizes = [
        (m["nereus/actor-generate/tp"], m["nereus/actor-generate/replicas"])
        for m in changed.metrics
    ]
    assert sizes == [(2, 1), (1, 2), (2, 1)]
    transitions = _records(directory, "changed", TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed"] * 2
    assert [(t.rollout["from"]["tp"], t.rollout["to"]["tp"]) for t in transitions] == [
        (2, 1),
        (1, 2),
    ]
    changes = [(t.rollout["kept"], t.rollout["ended"], t.rollout["launched"]) for t in transitions]
    assert changes == [([], [0], [0, 1]), ([], [0, 1], [0])]
    _check_parts(transitions)
    _check_servers(directory, "changed", [2, 1])
    steps = _records(directory, "changed", StepRecord)
    assert [step.epoch for step in steps] == [0, 1, 2]
    assert len({step.memory_bytes["process_groups"] for step in steps[1:]}) == 1
    committed = [(record.kind, record.epoch) for record in _journal(directory, "changed").read()]
    assert committed == [("commit", 1), ("commit", 2)]


@pytest.fixture(scope="module")
def plain(directory: Path) -> launch.JobResult:
    return _run(directory, "plain", steps=7).require_success()


@pytest.mark.full
def test_every_number_is_that_of_a_job_left_alone(
    changed: launch.JobResult, plain: launch.JobResult
) -> None:
    assert differences(changed.metrics, plain.metrics[:3]) == []


@pytest.mark.full
def test_a_failure_brings_the_rollout_before_back(directory: Path, plain: launch.JobResult) -> None:
    """A server does not start, takes no weights, hangs, dies, holds a wrong bit; beside a change of
    training, too; at last it works."""
    faults = ["launch", "sync", "hang", "die", "flip", "launch", ""]
    schedule: dict[int, Any] = {step: {"rollout": {"tp": 1}} for step in range(1, len(faults) + 1)}
    schedule[6] |= {"shard_size": 1}
    failed = _run(
        directory, "failed", schedule, faults=faults, steps=8, timeout_s=10.0
    ).require_success()
    assert differences(failed.metrics[:6], plain.metrics[:6]) == []

    transitions = _records(directory, "failed", TransitionRecord)
    assert [t.outcome for t in transitions] == [*["aborted"] * 5, "committed", "committed"]
    for transition, reason in zip(
        transitions,
        [
            "no memory for a model",
            "no weights today",
            "no answer of a server within 10 s",
            "rank 1: ActorDiedError",
            "replica 1 holds other weights than were synced to it: ",
            "no memory for a model",
            "",
        ],
        strict=True,
    ):
        assert reason in transition.reason
        assert transition.rollout["fell_back"] in transition.reason
        assert bool(transition.rollout["fell_back"]) == bool(reason)
        if reason:
            assert transition.reason.startswith("the rollout stays as it was, TP2: ")
            assert transition.rollout["launched"][-1] == 0
    # Training's part of the sixth is committed: it does not depend on the rollout's.
    sizes = [m["nereus/actor-generate/tp"] for m in failed.metrics]
    assert sizes == [2] * 7 + [1]
    layouts = [s.plan["actor"]["sharding"] for s in _records(directory, "failed", StepRecord)]
    assert layouts == ["fsdp"] * 6 + ["hsdp"] * 2
    _check_servers(directory, "failed", [1] * 6 + [2])
    steps = _records(directory, "failed", StepRecord)
    assert [step.epoch for step in steps] == [0] * 6 + [6, 7]
    kinds = [record.kind for record in _journal(directory, "failed").read()]
    assert kinds == ["commit", "abort"] * 5 + ["commit"] * 2
    actors = [len(line["actors"]) for line in observe.read(directory / "failed.observed")]
    assert actors == [actors[0]] * 13 + [actors[0] + 1]


@pytest.mark.full
def test_the_rollout_follows_ranks_and_tp_at_once(directory: Path) -> None:
    schedule = {
        1: {"ranks": 1, "rollout": {"tp": 1}},
        2: {"ranks": 2},
        3: {"leave": [0], "rollout": {"tp": 2}},
    }
    extra = ["++ray_kwargs.ray_init.num_gpus=3"]
    result = _run(directory, "ranks", schedule, steps=4, extra=extra).require_success()
    sizes = [
        (m["nereus/actor-generate/tp"], m["nereus/actor-generate/replicas"]) for m in result.metrics
    ]
    assert sizes == [(2, 1), (1, 1), (1, 2), (2, 1)]
    transitions = _records(directory, "ranks", TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed"] * 3
    changes = [(t.rollout["kept"], t.rollout["ended"], t.rollout["launched"]) for t in transitions]
    assert changes == [([], [0], [0]), ([0], [], [1]), ([], [0, 1], [0])]
    _check_parts(transitions)
    _check_servers(directory, "ranks", [1, 2, 1])


@pytest.mark.full
def test_megatron_changes_with_its_rollout(directory: Path) -> None:
    schedule = {1: {"tp": 2, "rollout": {"tp": 1}}, 2: {"pp": 2, "rollout": {"replicas": 1}}}
    _run(directory, "megatron", schedule, engine="megatron", steps=3).require_success()
    transitions = _records(directory, "megatron", TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed"] * 2
    assert [t.rollout["launched"] for t in transitions] == [[0, 1], [0]]
    assert all(t.units["actor"]["bytes_wire"] > 0 for t in transitions)
    _check_parts(transitions)
