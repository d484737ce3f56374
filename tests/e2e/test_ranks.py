"""Ranks join and leave a running job; where they cannot, the job is as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch
from nereus_verl.stamp import FILE

from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job
from tests.e2e.test_transitions import BF16, ROUNDED, SAME_RESPONSES


def _run(
    directory: Path,
    name: str,
    *,
    engine: str = "fsdp2",
    ranks: int = 2,
    gpus: int = 4,
    nereus: dict[str, Any] | None = None,
    faults: str = "",
    env: dict[str, str] | None = None,
    **settings: Any,
) -> launch.JobResult:
    """A job that starts on `ranks`, one rollout server a rank, in a cluster of `gpus`."""
    arl = "actor_rollout_ref"
    micro = 2  # samples: divides the share of each of eight ranks
    job = small_job(
        directory / "task",
        engine,
        ranks,
        reference=True,
        nereus=nereus,
        extra=[
            f"++ray_kwargs.ray_init.num_gpus={gpus}",
            f"{arl}.rollout.tensor_model_parallel_size=1",
            f"{arl}.actor.ppo_micro_batch_size_per_gpu={micro}",
            f"{arl}.rollout.log_prob_micro_batch_size_per_gpu={micro}",
            f"{arl}.ref.log_prob_micro_batch_size_per_gpu={micro}",
            *settings.pop("extra", []),
        ],
        **settings,
    )
    env = {ENVIRONMENT_VARIABLE: faults, **(env or {})}
    env |= observe.environment(directory / f"{name}.observed")
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env)


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _count(actors: list[str], kind: str) -> int:
    return sum(kind in name for name in actors)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


WORLDS = [2, 4, 1, 2]


def _check_books(directory: Path, name: str, metrics: list[dict[str, Any]]) -> None:
    """Of a job on `WORLDS` ranks: metrics, records and journal say so."""
    assert [m["nereus/world_size"] for m in metrics] == WORLDS
    for one in metrics:
        assert math.isfinite(one["actor/grad_norm"])
        assert math.isfinite(one["critic/grad_norm"])
        tokens, seconds = one["perf/total_num_tokens"], one["perf/time_per_step"]
        per_gpu = tokens / seconds / one["nereus/world_size"]
        assert one["perf/throughput"] == pytest.approx(per_gpu)
    transitions = _records(directory, name, TransitionRecord)
    assert [(t.outcome, t.ranks["from"], t.ranks["to"]) for t in transitions] == [
        ("committed", 2, 4),
        ("committed", 4, 1),
        ("committed", 1, 2),
    ]
    assert [(len(t.ranks["joined"]), len(t.ranks["left"])) for t in transitions] == [
        (2, 0),
        (0, 3),
        (1, 0),
    ]
    rollouts = [(t.rollout["kept"], t.rollout["ended"], t.rollout["launched"]) for t in transitions]
    assert rollouts == [([0, 1], [], [2, 3]), ([0], [1, 2, 3], []), ([0], [], [1])]
    predictions = [u["prediction"] for t in transitions for u in t.units.values()]
    assert predictions == [[]] * 9, "what was built is what was predicted"
    committed = Journal(directory / name / "checkpoints" / "nereus" / "journal.jsonl").read()
    assert [len(record.ranks) for record in committed] == WORLDS[1:]
    first = committed[0].ranks[0]
    assert all(record.ranks[0] == first for record in committed), "rank 0 kept its process"


def _check_state(directory: Path, name: str, kinds: set[str]) -> None:
    """What the units hold is the same before and after every transition, as whole tensors."""
    seen = observe.read(directory / f"{name}.observed")
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"].keys() == {"actor", "critic", "ref"}
        assert {name.split("/")[0] for name in before["units"]["critic"]} == kinds
        assert before["units"] == after["units"]
    # Training went on between the transitions.
    assert seen[1]["units"]["actor"] != seen[2]["units"]["actor"]
    assert seen[1]["units"]["ref"] == seen[-1]["units"]["ref"]


def _check_nothing_is_left(directory: Path, name: str) -> None:
    """Actors and placement groups are those of the ranks there are."""
    seen = observe.read(directory / f"{name}.observed")
    worlds = [2, 4, 4, 1, 1, 2]
    assert [_count(line["actors"], "WorkerDict") for line in seen] == worlds
    assert [_count(line["actors"], "nereus_hf_server") for line in seen] == worlds
    assert [line["groups"] for line in seen] == worlds
    others = [[a for a in line["actors"] if "WorkerDict" not in a] for line in seen]
    assert len(others[0]) == len(others[-1])
    groups = [s.memory_bytes["process_groups"] for s in _records(directory, name, StepRecord)]
    assert groups[2] == groups[3], "on two ranks again, after the third and the fourth step"


@pytest.fixture(scope="module")
def changed(directory: Path) -> launch.JobResult:
    schedule = {1: {"ranks": 4}, 2: {"ranks": 1}, 3: {"dp": 2}}
    # With a budget, targets are predicted first: on the ranks where they will be.
    nereus = {"schedule": schedule, "memory_budget_gib": 4.0}
    return _run(directory, "changed", nereus=nereus, steps=4).require_success()


def test_ranks_join_and_leave(directory: Path, changed: launch.JobResult) -> None:
    assert [m["nereus/critic/dp"] for m in changed.metrics] == WORLDS
    _check_books(directory, "changed", changed.metrics)


def test_state_is_the_same_on_other_ranks(directory: Path, changed: launch.JobResult) -> None:
    _check_state(directory, "changed", {"weight", "exp_avg", "exp_avg_sq", "scalars"})


def test_nothing_is_left_of_ranks_that_left(directory: Path, changed: launch.JobResult) -> None:
    _check_nothing_is_left(directory, "changed")


@pytest.mark.full
def test_megatron_ranks_join_and_leave(directory: Path) -> None:
    schedule = {1: {"ranks": 4, "tp": 2}, 2: {"ranks": 1, "tp": 1}, 3: {"ranks": 2, "pp": 2}}
    nereus = {"schedule": schedule, "memory_budget_gib": 4.0}
    result = _run(directory, "megatron", engine="megatron", nereus=nereus, steps=4)
    result.require_success()
    layouts = [
        (m["nereus/actor/tp"], m["nereus/actor/pp"], m["nereus/actor/dp"]) for m in result.metrics
    ]
    assert layouts == [(1, 1, 2), (2, 1, 2), (1, 1, 1), (1, 2, 1)]
    _check_books(directory, "megatron", result.metrics)
    _check_state(directory, "megatron", {"weight", "master", "exp_avg", "exp_avg_sq", "scalars"})
    _check_nothing_is_left(directory, "megatron")


@pytest.mark.full
def test_other_ranks_with_hsdp_and_sequence_parallelism(directory: Path) -> None:
    """What is sharded, replicated, and split by sequence changes together with the ranks."""
    hsdp = {"shard_size": 2, "ulysses": 2}
    units = {"actor": hsdp, "critic": {"ulysses": 4}, "ref": {"shard_size": 1}}
    schedule = {
        1: {"ranks": 2, "ulysses": 2},
        2: {"ranks": 4, **units},
        3: {"ranks": 1, "ulysses": 1},
        4: {"ranks": 4, "actor": {"shard_size": 1}, "critic": hsdp, "ref": {"shard_size": 2}},
    }
    result = _run(
        directory,
        "hsdp",
        ranks=4,
        layout={"fsdp_size": 2},
        nereus={"schedule": schedule, "memory_budget_gib": 4.0},
        steps=5,
    ).require_success()
    assert [m["nereus/world_size"] for m in result.metrics] == [4, 2, 4, 1, 4]
    plans = [
        [Layout.from_dict(record.plan[unit]) for unit in ("actor", "critic", "ref")]
        for record in _records(directory, "hsdp", StepRecord)
    ]
    assert [tuple((one.dp, one.ulysses, one.shard_size) for one in plan) for plan in plans] == [
        ((4, 1, 2), (4, 1, 2), (4, 1, 2)),
        ((1, 2, None), (1, 2, None), (1, 2, None)),
        ((2, 2, 2), (1, 4, None), (4, 1, 1)),
        ((1, 1, None), (1, 1, None), (1, 1, None)),
        ((4, 1, 1), (2, 2, 2), (4, 1, 2)),
    ]
    for one in result.metrics:
        assert math.isfinite(one["actor/grad_norm"])
        assert math.isfinite(one["critic/grad_norm"])
    transitions = _records(directory, "hsdp", TransitionRecord)
    assert [(t.outcome, t.ranks.get("to")) for t in transitions] == [
        ("committed", 2),
        ("committed", 4),
        ("committed", 1),
        ("committed", 4),
    ]
    predictions = [u["prediction"] for t in transitions for u in t.units.values()]
    assert predictions == [[]] * 12, "what was built is what was predicted"
    _check_state(directory, "hsdp", {"weight", "exp_avg", "exp_avg_sq", "scalars"})
    groups = [s.memory_bytes["process_groups"] for s in _records(directory, "hsdp", StepRecord)]
    assert all(count > 0 for count in groups)


@pytest.fixture(scope="module")
def plain(directory: Path) -> launch.JobResult:
    return _run(directory, "plain", steps=6).require_success()


@pytest.mark.full
def test_the_first_step_on_other_ranks_is_that_of_a_job_left_alone(
    changed: launch.JobResult, plain: launch.JobResult
) -> None:
    assert differences(changed.metrics[:1], plain.metrics[:1]) == []
    a, b = changed.metrics[1], plain.metrics[1]
    for name in SAME_RESPONSES:
        assert a[name] == b[name], name
    for name in ROUNDED:
        assert math.isclose(a[name], b[name], rel_tol=BF16), f"{name}: {a[name]} and {b[name]}"


@pytest.mark.full
def test_a_rank_joins_while_rank_0_leaves(directory: Path, plain: launch.JobResult) -> None:
    """As many ranks in the same layout: every number is that of a job left alone."""
    nereus = {"schedule": {1: {"leave": [0]}}}
    result = _run(directory, "replaced", gpus=3, nereus=nereus, steps=3).require_success()
    assert differences(result.metrics, plain.metrics[:3]) == []
    (transition,) = _records(directory, "replaced", TransitionRecord)
    assert transition.outcome == "committed"
    assert len(transition.ranks["joined"]) == len(transition.ranks["left"]) == 1
    before, after = observe.read(directory / "replaced.observed")
    assert before["units"] == after["units"]
    for line in (before, after):
        assert _count(line["actors"], "WorkerDict") == _count(line["actors"], "hf_server") == 2
        assert line["groups"] == 2
    assert transition.ranks["left"][0] in before["actors"]
    assert transition.ranks["left"][0] not in after["actors"]


@pytest.mark.full
def test_ranks_take_free_seats_of_a_shared_placement_group(directory: Path) -> None:
    """A job that starts in one group for all ranks: a seat left is the job's, and taken again."""
    nereus = {"schedule": {1: {"ranks": 1}, 2: {"ranks": 2}, 3: {"ranks": 3}}}
    settings: dict[str, Any] = {"gpus": 3, "batch_prompts": 6, "mini_batch_prompts": 6, "steps": 4}
    env = {observe.UNEXPECTED: "1"}
    _run(directory, "shared", nereus=nereus, env=env, **settings).require_success()
    transitions = _records(directory, "shared", TransitionRecord)
    assert [(t.outcome, t.ranks["to"]) for t in transitions] == [
        ("committed", 1),
        ("committed", 2),
        ("committed", 3),
    ]
    seen = observe.read(directory / "shared.observed")
    assert [_count(line["actors"], "WorkerDict") for line in seen] == [2, 1, 1, 2, 2, 3]
    assert [line["groups"] for line in seen] == [1, 1, 1, 1, 1, 2]
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]


@pytest.mark.full
def test_ranks_that_cannot_be_had_leave_the_job_as_it_was(
    directory: Path, plain: launch.JobResult
) -> None:
    """Ray has too few; a process fails to build, dies on the way, hangs, or fails at the commit."""
    plans = [{"ranks": 8}, *[{"ranks": 4}] * 4]
    nereus = {
        "schedule": dict(enumerate(plans, start=1)),
        "claim_timeout_s": 5.0,
        "timeout_s": 15.0,
    }
    faults = [
        "step=build,rank=3,kind=raise,epoch=2",
        "step=move,rank=2,kind=kill,epoch=3",
        "step=verify,rank=3,kind=hang,epoch=4",
        "step=commit,rank=0,kind=raise,epoch=5",
    ]
    failed = _run(directory, "failed", nereus=nereus, faults=";".join(faults), steps=6)
    failed.require_success()
    assert differences(failed.metrics, plain.metrics) == []

    transitions = _records(directory, "failed", TransitionRecord)
    assert [t.outcome for t in transitions] == ["aborted"] * 5
    reasons = [t.reason for t in transitions]
    assert "bundles for 2 of 6 further ranks within 5 s" in reasons[0]
    assert "nereus.claim_timeout_s" in reasons[0]
    assert "rank 3 in build" in reasons[1]
    assert "rank(s) 2" in reasons[2] or "rank 2" in reasons[2]
    assert "no vote from rank(s) 3" in reasons[3]
    assert "rank 0 in commit" in reasons[4]
    text = (directory / "failed" / "job.log").read_text()
    assert "warning: nereus.schedule asks for up to 8 ranks, Ray's cluster has 4 GPU" in text
    seen = observe.read(directory / "failed.observed")
    for line in seen:
        assert _count(line["actors"], "WorkerDict") == 2
        assert _count(line["actors"], "nereus_hf_server") == 2
        assert line["groups"] == 2
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]
    groups = {s.memory_bytes["process_groups"] for s in _records(directory, "failed", StepRecord)}
    assert len(groups) == 1


@pytest.mark.full
def test_ranks_that_are_not_needed_may_die_and_are_not_waited_for(directory: Path) -> None:
    """One that was to join, on the way; one that leaves, once its state is where it belongs."""
    nereus = {"schedule": {1: {"ranks": 4}, 2: {"ranks": 1}}, "timeout_s": 120.0}
    faults = "step=move,rank=3,kind=kill,epoch=1;step=release,rank=1,kind=kill,epoch=2"
    _run(directory, "died", nereus=nereus, faults=faults, steps=3).require_success()
    aborted, committed = _records(directory, "died", TransitionRecord)
    assert aborted.outcome == "aborted"
    assert "rank(s) 3" in aborted.reason or "rank 3" in aborted.reason
    assert aborted.seconds["prepare"] < 60
    assert committed.outcome == "committed"
    assert "rank(s) 1" in committed.reason or "rank 1" in committed.reason
    assert committed.seconds["release"] < 60
    steps = _records(directory, "died", StepRecord)
    assert [step.epoch for step in steps] == [0, 0, 2]
    seen = observe.read(directory / "died.observed")
    assert [_count(line["actors"], "WorkerDict") for line in seen] == [2, 2, 2, 1]
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]


@pytest.mark.full
def test_a_rollout_that_cannot_follow_ends_the_job_with_a_checkpoint(directory: Path) -> None:
    nereus = {"schedule": {1: {"ranks": 1}}}
    env = {observe.ROLLOUT_FAILS: "1"}
    result = _run(directory, "deaf", nereus=nereus, env=env, steps=2)
    assert result.returncode not in (0, -9), "the job must end by itself, with an error"
    text = result.log.read_text()
    assert "training state is whole, but the job cannot go on: the rollout did not follow" in text
    assert "MemoryError: none left for a server" in text
    saved = directory / "deaf" / "checkpoints" / "global_step_1"
    assert f"its state is saved in {saved}" in text
    stamp = json.loads((saved / FILE).read_text())
    assert stamp["world_size"] == 1
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    extra = [*resume, "trainer.n_gpus_per_node=1"]
    resumed = _run(directory, "resumed", gpus=1, extra=extra, steps=2).require_success()
    assert [m["step"] for m in resumed.metrics] == [2]
    refused = _run(directory, "refused", nereus={}, extra=resume, steps=2)
    assert refused.returncode != 0
    assert "was saved by 1 ranks, this job has 2" in refused.log.read_text()
