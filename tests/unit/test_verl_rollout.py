"""The rollout in a plan: what it may become, what stays, and how its weights are compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nereus_verl import capabilities, preflight, rollout_worker, verl_private
from nereus_verl.config import check_plan, plan_layouts
from nereus_verl.reconcile import kept
from nereus_verl.rollout import RolloutPlan, global_plan_rollout, plan_rollout, start_rollout
from nereus_verl.rollout_backends import HFBackend

from nereus_plugins.cli import main
from nereus_plugins.control.workers import brief
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.transport import fingerprint

from .test_verl_config import elastic_job, job, put
from .test_verl_preflight import _job as job_with_model

ARL = "actor_rollout_ref.rollout"
TP = f"{ARL}.tensor_model_parallel_size"


def cpu_job(tp: int = 2) -> dict[str, Any]:
    """On four ranks."""
    return put(put(elastic_job(), TP, tp), f"{ARL}.gpu_memory_utilization", 0.5)


def planned(plan: dict[str, Any], world: int = 4, config: Any = None) -> RolloutPlan:
    config = config or cpu_job()
    return plan_rollout(
        check_plan(plan, "plan"),
        config=config,
        current=start_rollout(config),
        world=world,
        where="plan",
    )


def test_what_a_plan_says_of_the_rollout() -> None:
    assert start_rollout(cpu_job()) == RolloutPlan(tp=2)  # its servers take no memory fraction
    assert planned({"rollout": {"tp": 1}}) == RolloutPlan(tp=1)
    assert planned({"rollout": {"replicas": 4}}) == RolloutPlan(tp=1)
    assert planned({"rollout": {"replicas": 1}, "tp": 2}) == RolloutPlan(tp=4)
    assert planned({"rollout": {"replicas": 2}, "ranks": 8}, world=8) == RolloutPlan(tp=4)
    assert planned({"ranks": 8}, world=8) == RolloutPlan(tp=2)
    assert planned({"rollout": {"tp": 1, "replicas": 4}}).replicas(4) == 4
    with_dp = put(cpu_job(), f"{ARL}.data_parallel_size", 2)
    assert planned({"rollout": {"replicas": 2}}, config=with_dp).ranks == 2


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"rollout": {"tp": 3}}, r"made for 3 ranks .*do not divide 4; .* 1, 2 or 4"),
        (
            {"rollout": {"replicas": 3}},
            r"plan\.rollout: 3 replicas do not divide the job's 4 ranks",
        ),
        ({"rollout": {"replicas": 4, "tp": 2}}, "take 8 ranks, the job has 4; leave one of them"),
        ({"rollout": {"memory_fraction": 0.6}}, "rollout.name=hf_cpu take no memory fraction"),
        ({"rollout": {"memory_fraction": 1.5}}, "memory_fraction"),
        ({"rollout": {"tp": 0}}, r"plan\.rollout.*tp"),
        ({"rollout": {"tps": 2}}, r"plan\.rollout.*tps.*tp"),
        ({"rollout": {}}, "must be a mapping with some of tp, replicas, memory_fraction"),
        ({"rollout": 2}, "must be a mapping"),
        ({"rollou": {"tp": 2}}, "rollout"),
    ],
)
def test_wrong_plans_are_named(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planned(plan)


def test_ranks_that_a_replica_does_not_divide() -> None:
    with pytest.raises(SpecError, match=r"made for 2 ranks .*tensor_model_parallel.*divide 1"):
        planned({"ranks": 1}, world=1)
    assert planned({"ranks": 1, "rollout": {"tp": 1}}, world=1) == RolloutPlan(tp=1)


def test_other_rollouts_stay_as_they_are() -> None:
    config = put(cpu_job(), f"{ARL}.name", "sglang")
    assert planned({"tp": 2}, config=config) == RolloutPlan(tp=2, memory_fraction=0.5)
    for change in ({"tp": 1}, {"memory_fraction": 0.6}):
        with pytest.raises(SpecError, match="SGLang or TensorRT-LLM"):
            planned({"rollout": change}, config=config)
    with pytest.raises(SpecError, match=r"from TP2 with 0\.5 of memory to TP2 with"):
        in_global_plan(of(Layout(tp=2, dp=2), rollout_memory_fraction=0.6), config)
    in_global_plan(of(Layout(tp=2, dp=2), rollout_memory_fraction=0.5), config)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("quantization", "fp8"), ("data_parallel_size", 2), ("disaggregation.enabled", True)],
)
def test_vllm_changes_but_in_some_of_its_forms(setting: str, value: Any) -> None:
    config = put(cpu_job(), f"{ARL}.name", "vllm")
    less = {"rollout": {"replicas": 1, "memory_fraction": 0.3}}
    assert planned(less, config=config) == RolloutPlan(tp=4, memory_fraction=0.3)
    config = put(config, f"{ARL}.{setting}", value)
    with pytest.raises(SpecError, match="quantised, disaggregated or data-parallel"):
        planned({"rollout": {"memory_fraction": 0.3}}, config=config)


def test_a_replica_fills_whole_nodes() -> None:
    config = put(cpu_job(), f"{ARL}.n_gpus_per_node", 2)
    assert planned({"rollout": {"tp": 4}}, config=config).tp == 4
    config = put(config, f"{ARL}.n_gpus_per_node", 3)
    with pytest.raises(SpecError, match="does not fill whole nodes of 3"):
        planned({"rollout": {"tp": 4}}, config=config)


def of(layout: Layout, **knobs: Any) -> GlobalPlan:
    return GlobalPlan({ModelStage.ACTOR_GENERATE: Assignment(layout, Knobs(**knobs))})


def in_global_plan(plan: GlobalPlan, config: Any = None) -> RolloutPlan:
    config = config or cpu_job()
    return global_plan_rollout(
        plan, config=config, current=start_rollout(config), world=4, where="plan"
    )


def test_a_global_plan_has_the_rollout_too() -> None:
    assert in_global_plan(of(Layout(tp=4))) == RolloutPlan(tp=4)
    assert in_global_plan(of(Layout(dp=4))) == RolloutPlan(tp=1)
    assert in_global_plan(of(Layout(tp=2, dp=2))) == RolloutPlan(tp=2)
    train = GlobalPlan({ModelStage.ACTOR_TRAIN: Assignment(Layout(dp=4))})
    assert in_global_plan(train) == RolloutPlan(tp=2)
    whole = planned(of(Layout(dp=4)).to_dict())
    assert whole == RolloutPlan(tp=1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (of(Layout(dp=2)), "takes 2 ranks; all of the job's 4 generate"),
        (of(Layout(pp=2, dp=2)), "cannot be; of the rollout this adapter changes tp"),
        (of(Layout(dp=4, sharding="fsdp")), "cannot be"),
        (of(Layout(dp=4), rollout_memory_fraction=0.5), "take no memory fraction"),
    ],
)
def test_what_a_rollout_cannot_be(plan: GlobalPlan, message: str) -> None:
    with pytest.raises(SpecError, match=f"plan: .*{message}"):
        in_global_plan(plan)


def test_what_the_planner_says_of_the_rollout_is_executed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--model", "qwen2.5-7b", "--algorithm", "grpo", "--gpu", "h100", "--gpus", "8"]
    assert main(["plan", *asked, "--backend", "fsdp", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    generate = plan["assignments"]["actor-generate"]
    assert generate["knobs"].keys() == {"rollout_memory_fraction"}
    config = put(job(ranks=8), f"{ARL}.name", "hf_cpu")
    with pytest.raises(SpecError, match="take no memory fraction"):
        planned(plan, world=8, config=put(config, TP, 2))
    del generate["knobs"]
    for tp in (1, 2, 4):
        found = planned(plan, world=8, config=put(config, TP, tp))
        assert found == RolloutPlan(tp=generate["layout"].get("tp", 1))
        assert found.replicas(8) == generate["layout"]["dp"]


def test_units_stay_where_a_plan_is_of_the_rollout_alone() -> None:
    current = {"actor": Layout(dp=4, sharding="fsdp")}
    plan = check_plan({"rollout": {"tp": 1}}, "plan")
    assert plan_layouts(plan, units={}, current=current, backend="fsdp2", where="plan") == {}


def test_the_schedule_is_followed_step_by_step(tmp_path: Path) -> None:
    config = put(put(job_with_model(tmp_path), f"{ARL}.name", "hf_cpu"), TP, 2)
    schedule = {
        1: {"rollout": {"tp": 1}},
        2: {"shard_size": 2},
        3: {"ranks": 1},
        4: {"ranks": 4, "rollout": {"replicas": 2}},
    }
    found = preflight.run(put(config, "nereus", {"schedule": schedule}))
    assert found.rollout == RolloutPlan(tp=2)
    assert [plan.tp for plan in found.rollout_targets.values()] == [1, 1, 1, 2]
    with pytest.raises(SpecError, match=r"nereus\.schedule\.1: a rollout replica is made for 2"):
        preflight.run(put(config, "nereus", {"schedule": {1: {"ranks": 1}}}))


def test_capabilities_name_the_rollout() -> None:
    stages = capabilities.capabilities(cpu_job(), "0.9.1").stages
    assert stages[ModelStage.ACTOR_GENERATE].layout_fields == {"tp", "dp"}
    assert stages[ModelStage.ACTOR_GENERATE].knob_fields == frozenset()
    other = put(job(), f"{ARL}.name", "sglang")
    assert ModelStage.ACTOR_GENERATE not in capabilities.capabilities(other, "0.9.1").stages


# -- which replicas stay -------------------------------------------------------------------------


def test_replicas_stay_where_their_ranks_do() -> None:
    one, two = {0: ["a"]}, {0: ["a"], 1: ["b"]}
    assert kept(one, two, True) == [0]
    assert kept(two, one, True) == [0]
    assert kept(two, two, True) == [0, 1]
    assert kept(two, two, False) == [], "another memory fraction: launched anew"
    assert kept({0: ["a", "b"]}, two, True) == []
    assert kept(two, {0: ["b"], 1: ["c"]}, True) == [], "rank 0 left: all others have new numbers"
    assert kept({0: ["a", "b"], 1: ["c", "d"]}, {0: ["a", "b"], 1: ["c", "e"]}, True) == [0]


# -- fingerprints --------------------------------------------------------------------------------


def test_fingerprints_tell_every_bit_apart() -> None:
    weight = torch.arange(12, dtype=torch.float32).view(3, 4)
    same = fingerprint.of_tensor(weight)
    assert fingerprint.of_tensor(weight.clone().t().contiguous().t()) == same, "strides are no bits"
    for other in (weight.view(4, 3), weight.bfloat16(), weight + 1, -weight, weight.view(-1)):
        assert fingerprint.of_tensor(other) != same
    flipped = weight.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    assert fingerprint.of_tensor(flipped) != same
    assert fingerprint.of_tensor(torch.tensor(1.0)).startswith("float32[]:")


def test_differences_name_tensors() -> None:
    a = {"x": "1", "y": "2", "z": "3"}
    assert fingerprint.differences(a, dict(reversed(a.items()))) == []
    assert fingerprint.of_all(a) == fingerprint.of_all(dict(reversed(a.items())))
    found = {"y": "5", "z": "3", "w": "4"}
    assert fingerprint.differences(a, found) == [
        "x is missing",
        "w is not of the model",
        "y is 5, should be 2",
    ]
    assert fingerprint.of_all(a) != fingerprint.of_all(found)


# -- failures -------------------------------------------------------------------


def test_an_error_of_another_process_is_said_in_one_line() -> None:
    assert brief(ValueError("no weights")) == "ValueError: no weights"
    assert brief(KeyError()) == "KeyError: "
    text = "\x1b[36mray::Server.load()\x1b[39m (pid=7)\n  File x, line 3\nValueError: no weights\n"
    told = "RuntimeError: ray::Server.load() (pid=7) ... ValueError: no weights"
    assert brief(RuntimeError(text)) == told


def test_all_weights_are_walked_though_a_fingerprint_fails() -> None:
    """Producing a weight is collective: peers would wait for a rank that stopped."""

    class Backend(HFBackend):
        def as_held(self, weight: torch.Tensor) -> torch.Tensor:
            if weight.numel() == 2:
                raise RuntimeError("out of memory")
            return weight

    taken: list[str] = []

    class Rollout:
        async def resume(self) -> None:
            return

        async def update_weights(self, weights: Any) -> None:
            taken.extend(name for name, _ in weights)

    role = SimpleNamespace(rollout=Rollout())
    watch = rollout_worker._Watch(role, Backend(), timeout_s=10.0)
    weights = ((name, torch.zeros(size)) for name, size in (("a", 1), ("b", 2), ("c", 3)))
    asyncio.run(role.rollout.update_weights(weights))
    watch.end()
    assert taken == ["a", "b", "c"]
    assert watch.failed == "no fingerprint of b: RuntimeError: out of memory"
    assert list(watch.sent) == ["a"]


def test_a_launch_that_failed_is_ended_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []

    class Replica:
        def __init__(self, replica_rank: int, **settings: Any) -> None:
            self.replica_rank = replica_rank
            self.servers = [f"server {replica_rank}"]

        async def init_hybrid(self, group: Any) -> None:
            if self.replica_rank == 1:
                raise RuntimeError("no room")

        async def sleep(self) -> None:
            return

    manager = SimpleNamespace(
        rollout_replica_class=Replica,
        rollout_config=SimpleNamespace(n_gpus_per_node=2),
        model_config=None,
    )
    trainer = SimpleNamespace(llm_server_manager=manager, actor_rollout_wg=None)
    monkeypatch.setattr("ray.util.list_named_actors", list)
    monkeypatch.setattr(verl_private, "end_actor", lambda server: done.append(("kill", server)))

    def end(replicas: Sequence[Any]) -> None:
        done.append(("end", [one.replica_rank for one in replicas]))

    with pytest.raises(RuntimeError, match="no room"):
        verl_private.launch_replicas(trainer, [0, 1], 10.0, end)
    assert done == [("end", [0, 1]), ("kill", "server 0"), ("kill", "server 1")]
