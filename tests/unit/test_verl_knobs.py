"""Knobs in a plan: what they mean for verl, what they are checked against, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from nereus_verl import capabilities, jobconfig, knobs
from nereus_verl.config import EngineDefaults, NereusConfig, plan_layouts
from nereus_verl.knobs import Batching

from nereus_plugins.spec import Layout, SpecError
from tests.unit.test_verl_config import FSDP, job, models, put

FOURS = Batching(by_tokens=False, train=4, infer=4)
CRITIC = Batching(by_tokens=True, train=32768, infer=32768)
START = {
    "actor": FOURS,
    "critic": CRITIC,
    "ref": Batching(by_tokens=False, train=None, infer=4),
}


def planned(plan: dict[str, Any], config: dict[str, Any] | None = None) -> dict[str, Batching]:
    config = job() if config is None else config
    units = jobconfig.units(config)
    NereusConfig.from_dict({"schedule": {1: plan}})
    return knobs.plan_batching(plan, config=config, units=units, current=START, where="here")


def check(
    plan: dict[str, Any], config: dict[str, Any] | None = None, layout: Layout = FSDP
) -> None:
    config = job() if config is None else config
    now = dict.fromkeys(jobconfig.units(config), layout)
    batching = START | planned(plan, config)
    capabilities.check_targets(config, models(), now, {}, "plan", batching=batching)


def test_start_is_what_verls_configuration_says() -> None:
    config = job()
    assert {name: knobs.start_batching(config, name) for name in START} == START
    put(config, "actor_rollout_ref.actor.use_dynamic_bsz", True)
    put(config, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 512)
    put(config, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 1024)
    assert knobs.start_batching(config, "actor") == Batching(True, 512, 1024)


@pytest.mark.parametrize(
    ("unit", "batching"),
    [
        ("actor", Batching(True, 512, 1024)),
        ("actor", Batching(False, 2, 8)),
        ("critic", Batching(True, 512, 512)),
        ("ref", Batching(True, None, 512)),
        ("ref", Batching(False, None, 2)),
    ],
)
def test_settings_start_what_they_describe(unit: str, batching: Batching) -> None:
    config = job()
    for path, value in knobs.batching_settings(unit, batching).items():
        put(config, path, value)
    assert knobs.start_batching(config, unit) == batching


def test_engine_values_are_fields_that_verl_lets_change() -> None:
    engine = pytest.importorskip("verl.workers.config.engine")
    for batching in (Batching(True, 512, 1024), FOURS, START["ref"]):
        values = batching.engine_values()
        for kind in (engine.FSDPEngineConfig, engine.McoreEngineConfig):
            assert set(values) <= kind._mutable_fields
    assert Batching(True, 512, 1024).engine_values() == {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 512,
        "infer_max_token_len_per_gpu": 1024,
    }


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({"actor": {"token_budget_tokens": 512}}, {"actor": Batching(True, 512, 512)}),
        ({"actor": {"micro_batch": 2, "ulysses": 2}}, {"actor": Batching(False, 2, 2)}),
        ({"ref": {"micro_batch": 2}}, {"ref": Batching(False, None, 2)}),
        (
            {"token_budget_tokens": 512, "ranks": 2},
            {
                "actor": Batching(True, 512, 512),
                "critic": Batching(True, 512, 512),
                "ref": Batching(True, None, 512),
            },
        ),
        ({"actor": {"micro_batch": None}}, {}),
        ({"shard_size": 2}, {}),
    ],
)
def test_knobs_of_a_plan(plan: dict[str, Any], wanted: dict[str, Batching]) -> None:
    assert planned(plan) == wanted


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({"token_budget_tokens": 512}, {}),
        ({"actor": {"token_budget_tokens": 512}}, {}),
        ({"actor": {"token_budget_tokens": 512, "ulysses": 4}}, {"actor": (1, 4)}),
        ({"actor": {"token_budget_tokens": 512}, "critic": {}}, {"critic": (4, 1)}),
        ({"ranks": 2, "actor": {"token_budget_tokens": 512}}, {"actor": (1, 2), "critic": (1, 2)}),
    ],
)
def test_what_names_knobs_only_keeps_its_layout(plan: dict[str, Any], wanted: Any) -> None:
    units = dict.fromkeys(("actor", "critic"), EngineDefaults())
    current = dict.fromkeys(units, Layout(dp=2, ulysses=2, sharding="fsdp"))
    found = plan_layouts(plan, units=units, current=current, backend="fsdp2", where="here")
    assert {name: (layout.dp, layout.ulysses) for name, layout in found.items()} == wanted


def test_knobs_of_a_global_plan() -> None:
    def stage(**fields: Any) -> dict[str, Any]:
        return {"layout": {"dp": 4, "sharding": "fsdp"}, "knobs": fields}

    plan = {
        "assignments": {
            "actor-train": stage(token_budget_tokens=512),
            "critic-values": stage(token_budget_tokens=1024),
            "critic-train": stage(token_budget_tokens=256),
            "ref-logprob": stage(),
        }
    }
    assert planned(plan) == {
        "actor": Batching(True, 512, 512),
        "critic": Batching(True, 256, 1024),
    }
    # What is in force is no change, also where log-probabilities are cut in another way.
    now = {**START, "actor": Batching(True, 512, 2048)}
    config = job()
    units = jobconfig.units(config)
    del plan["assignments"]["critic-train"], plan["assignments"]["critic-values"]
    assert knobs.plan_batching(plan, config=config, units=units, current=now, where="here") == {}


def test_knobs_that_stay_may_be_said_as_they_are() -> None:
    config = put(job(), "actor_rollout_ref.model.enable_gradient_checkpointing", True)
    put(config, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.5)
    plan = {
        "assignments": {
            "actor-train": {"layout": {"dp": 4}, "knobs": {"recompute": "full"}},
            "actor-generate": {"layout": {"dp": 4}, "knobs": {"rollout_memory_fraction": 0.5}},
        }
    }
    assert planned(plan, config) == {}
    put(config, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.6)
    with pytest.raises(SpecError, match=r"actor-generate: rollout_memory_fraction is 0\.6 and"):
        planned(plan, config)
    put(config, "actor_rollout_ref.model.enable_gradient_checkpointing", False)
    with pytest.raises(SpecError, match="actor-train: recompute is none and cannot become full"):
        planned(plan, config)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"critic": {"micro_batch": 2}}, f"here.critic.micro_batch: {knobs.CRITIC_BY_TOKENS}"),
        ({"actor": {"recompute": "full"}}, f"here.actor.recompute: {knobs.FIXED}"),
        ({"offload_params": True}, f"here.actor.offload_params: {knobs.FIXED}"),
        (
            {"actor": {"micro_batch": 2, "token_budget_tokens": 512}},
            "here.actor: micro_batch and token_budget_tokens both size the micro-batch",
        ),
        ({"actor": {"micro_batch": 0}}, "here.actor: Knobs.micro_batch must be an integer of at"),
    ],
)
def test_knobs_that_cannot_be(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        planned(plan)


def test_a_unit_that_the_job_has_not() -> None:
    config = put(job(), "algorithm.adv_estimator", "grpo")
    with pytest.raises(SpecError, match=r"^here\.critic: this job has no critic; its units are"):
        planned({"critic": {"token_budget_tokens": 512}}, config)


def test_a_misspelt_knob_is_named() -> None:
    with pytest.raises(SpecError, match="unknown key 'microbatch'; did you mean 'micro_batch'"):
        planned({"actor": {"microbatch": 2}})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # 8 prompts of 4 samples over 4 ranks; sequences of up to 64 + 16 tokens.
        (
            {"actor": {"micro_batch": 3}},
            "plan.actor: a rank's share of samples = 8 does not divide by 3",
        ),
        ({"ref": {"micro_batch": 16}}, "plan.ref: a rank's share of samples"),
        (
            {"actor": {"token_budget_tokens": 79}},
            "plan.actor: in layout TP1 PP1 DP4 FSDP a micro-batch holds 79 tokens, a sequence up "
            "to 80; raise token_budget_tokens to at least 80",
        ),
        ({"critic": {"token_budget_tokens": 79}}, "plan.critic: in layout"),
        ({"ref": {"token_budget_tokens": 79}}, "plan.ref: in layout"),
    ],
)
def test_sizes_that_do_not_fit_the_batch(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        check(plan)


def test_sizes_that_fit() -> None:
    check({"actor": {"micro_batch": 8}, "critic": {"token_budget_tokens": 80}})
    two_each = Layout(dp=2, ulysses=2, sharding="fsdp")
    check({"token_budget_tokens": 40}, layout=two_each)
    with pytest.raises(SpecError, match="raise token_budget_tokens to at least 40"):
        check({"token_budget_tokens": 39}, layout=two_each)
