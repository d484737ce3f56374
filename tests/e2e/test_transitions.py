"""verl's own main_ppo changes layouts while it trains, and nothing is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch
from nereus_verl.stamp import FILE

from nereus_plugins.gtg.journal import Journal
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import RunRecord, StepRecord, TransitionRecord, read_records
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

# Weights are bitwise equal after a transition and sampling is seeded, so the first step in a new
# layout sees the same responses and rewards as in the old one.
SAME_RESPONSES = (
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "response_length/mean",
    "response_length/max",
    "prompt_length/mean",
)
# Log-probabilities, values and gradients of that step differ by rounding. Compute is bf16 (verl's
# default for FSDP2, its only choice for Megatron): 8 bits of mantissa, some tens of roundings.
ROUNDED = ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy")
BF16 = 2e-2


def _run(directory: Path, name: str, engine: str, ranks: int, **settings: Any) -> launch.JobResult:
    settings.setdefault("steps", 4)
    job = small_job(directory / "task", engine, ranks, **settings)
    return launch.run(job, directory / name, timeout_s=TIMEOUT_S)


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def _check_first_step_after(
    moved: list[dict[str, Any]], plain: list[dict[str, Any]], step: int
) -> None:
    """`step` is the first in another layout; the steps before must have been alike."""
    _check_alike(moved[step - 1], plain[step - 1])


def _check_alike(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two steps from the same state, each in its own order of sums."""
    for name in SAME_RESPONSES:
        assert a[name] == b[name], name
    for name in ROUNDED:
        if name in b:
            assert math.isclose(a[name], b[name], rel_tol=BF16), f"{name}: {a[name]} and {b[name]}"


def _check_committed(directory: Path, name: str, moved: launch.JobResult, epochs: int) -> None:
    transitions = _records(directory, name, TransitionRecord)
    assert [t.outcome for t in transitions] == ["committed"] * epochs
    assert all(
        unit["bytes_wire"] + unit["bytes_local"] > 0 for unit in transitions[0].units.values()
    )
    assert all(unit["verified"]["bytes"] > 0 for unit in transitions[0].units.values())
    (run,) = _records(directory, name, RunRecord)
    assert run.world_size == 4
    steps = _records(directory, name, StepRecord)
    assert [s.step for s in steps] == [m["step"] for m in moved.metrics]
    assert [s.epoch for s in steps] == [*range(epochs + 1), epochs]
    for record, metrics in zip(steps, moved.metrics, strict=True):
        assert record.metrics["actor/grad_norm"] == metrics["actor/grad_norm"]
        assert record.tokens["total"] > record.tokens["response"] > 0
        assert record.memory_bytes["host_rss"] > 0
        assert metrics["nereus/epoch"] == record.epoch
        for unit, layout in record.plan.items():
            assert metrics[f"nereus/{unit}/dp"] == Layout.from_dict(layout).dp
    journal = Journal(directory / name / "checkpoints" / "nereus" / "journal.jsonl")
    assert [record.kind for record in journal.read()] == ["commit"] * epochs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transitions")


@pytest.fixture(scope="module")
def fsdp2(directory: Path) -> launch.JobResult:
    """Full shard -> HSDP -> Ulysses 2 for the actor alone -> the critic too, which is saved;
    the last step is trained in it once more."""
    schedule = {
        1: {"shard_size": 2},
        2: {"actor": {"ulysses": 2}},
        3: {"critic": {"ulysses": 2, "shard_size": 2}, "ref": {"dp": 4}},
    }
    return _run(
        directory,
        "fsdp2",
        "fsdp2",
        4,
        reference=True,
        steps=5,
        nereus={"schedule": schedule},
        extra=["trainer.save_freq=4"],
    ).require_success()


@pytest.fixture(scope="module")
def megatron(directory: Path) -> launch.JobResult:
    """TP2 PP2 -> PP2 DP2 -> DP4 -> TP2 DP2, actor and critic together; the last is saved, and
    trained in once more."""
    schedule = {1: {"pp": 2}, 2: {"dp": 4}, 3: {"tp": 2}}
    return _run(
        directory,
        "megatron",
        "megatron",
        4,
        layout={"tp": 2, "pp": 2},
        steps=5,
        nereus={"schedule": schedule},
        extra=["trainer.save_freq=4"],
    ).require_success()


def test_fsdp2_ppo(directory: Path, fsdp2: launch.JobResult) -> None:
    _check_committed(directory, "fsdp2", fsdp2, 3)
    assert [(m["nereus/actor/ulysses"], m["nereus/critic/ulysses"]) for m in fsdp2.metrics] == [
        (1, 1),
        (1, 1),
        (2, 1),
        (2, 2),
        (2, 2),
    ]


@pytest.mark.full  # in the gate Megatron's job is compared with one left alone
def test_fsdp2_ppo_against_a_job_left_alone(directory: Path, fsdp2: launch.JobResult) -> None:
    plain = _run(directory, "fsdp2-plain", "fsdp2", 4, reference=True, steps=2).require_success()
    assert differences(fsdp2.metrics[:1], plain.metrics[:1]) == []
    _check_first_step_after(fsdp2.metrics, plain.metrics, 2)


def test_megatron_ppo(directory: Path, megatron: launch.JobResult) -> None:
    _check_committed(directory, "megatron", megatron, 3)
    assert [
        (m["nereus/actor/tp"], m["nereus/critic/pp"], m["nereus/critic/dp"])
        for m in megatron.metrics
    ] == [(2, 2, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2), (2, 1, 2)]
    plain = _run(
        directory, "megatron-plain", "megatron", 4, layout={"tp": 2, "pp": 2}, steps=2
    ).require_success()
    assert differences(megatron.metrics[:1], plain.metrics[:1]) == []
    _check_first_step_after(megatron.metrics, plain.metrics, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "layout", "schedule"),
    [
        ("fsdp2", {}, {1: {"ulysses": 2}, 2: {"dp": 2}}),
        ("megatron", {"tp": 2}, {1: {"pp": 2}, 2: {"dp": 2}}),
    ],
)
def test_grpo_without_critic(
    directory: Path, engine: str, layout: dict[str, int], schedule: dict[int, Any]
) -> None:
    settings: dict[str, Any] = {"layout": layout, "critic": False, "steps": 3}
    moved = _run(directory, f"{engine}-grpo", engine, 2, nereus={"schedule": schedule}, **settings)
    plain = _run(directory, f"{engine}-grpo-plain", engine, 2, **settings)
    moved.require_success()
    plain.require_success()
    outcomes = [t.outcome for t in _records(directory, f"{engine}-grpo", TransitionRecord)]
    assert outcomes == ["committed", "committed"]
    assert differences(moved.metrics[:1], plain.metrics[:1]) == []
    _check_first_step_after(moved.metrics, plain.metrics, 2)


# -- checkpoints -----------------------------------------------------------------------------------


def _resume(
    directory: Path, saved: str, name: str, engine: str, layout: dict[str, Any], **settings: Any
) -> launch.JobResult:
    extra = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={directory / saved / 'checkpoints' / 'global_step_4'}",
        *settings.pop("extra", []),
    ]
    return _run(directory, name, engine, 4, layout=layout, steps=5, extra=extra, **settings)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_checkpoint_after_transitions_is_stamped(
    engine: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(engine)
    folder = directory / engine / "checkpoints" / "global_step_4"
    stamp = json.loads((folder / FILE).read_text())
    last = _records(directory, engine, StepRecord)[-1]
    assert stamp["layouts"] == last.plan
    assert stamp["epoch"] == 3


def test_checkpoint_loads_in_the_new_layout_without_nereus(
    directory: Path, megatron: launch.JobResult
) -> None:
    resumed = _resume(directory, "megatron", "resumed", "megatron", {"tp": 2}).require_success()
    assert [m["step"] for m in resumed.metrics] == [5]
    # Two updates: the second shows the moments and their counters.
    _check_alike(resumed.metrics[0], megatron.metrics[4])


@pytest.mark.full
def test_a_resumed_job_begins_with_the_transition_of_its_checkpoints_step(
    directory: Path, megatron: launch.JobResult
) -> None:
    nereus = {"schedule": {4: {"pp": 2}}}
    resumed = _resume(directory, "megatron", "pending", "megatron", {"tp": 2}, nereus=nereus)
    resumed.require_success()
    (metrics,) = resumed.metrics
    assert (metrics["step"], metrics["nereus/actor/pp"], metrics["nereus/critic/tp"]) == (5, 2, 1)
    (transition,) = _records(directory, "pending", TransitionRecord)
    assert (transition.step, transition.outcome) == (4, "committed")


@pytest.mark.full
def test_checkpoint_loads_in_the_new_layout_with_nereus(
    directory: Path, fsdp2: launch.JobResult
) -> None:
    settings: dict[str, Any] = {
        "reference": True,
        "extra": [
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            "critic.fsdp.ulysses_sequence_parallel_size=2",
            "critic.fsdp.fsdp_size=2",
        ],
    }
    without = _resume(directory, "fsdp2", "resumed-without", "fsdp2", {}, **settings)
    with_nereus = _resume(directory, "fsdp2", "resumed-with", "fsdp2", {}, nereus={}, **settings)
    without.require_success()
    with_nereus.require_success()
    assert [m["step"] for m in without.metrics] == [5]
    assert differences(without.metrics, with_nereus.metrics) == []
    _check_alike(without.metrics[0], fsdp2.metrics[4])


def test_resuming_in_another_layout_names_what_to_set(
    directory: Path, megatron: launch.JobResult
) -> None:
    refused = _resume(directory, "megatron", "refused", "megatron", {"tp": 2, "pp": 2}, nereus={})
    assert refused.returncode != 0
    text = refused.log.read_text()
    assert "was saved in another layout than this job starts in" in text
    assert "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1" in text
    assert "local Ray instance" not in text  # before anything is started
