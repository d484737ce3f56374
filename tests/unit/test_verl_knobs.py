"""Knobs in a plan: what they mean for verl, what they are checked against, what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from nereus_verl import capabilities, jobconfig, knobs
from nereus_verl.config import EngineDefaults, NereusConfig, plan_layouts
from nereus_verl.knobs import Batching, UnitKnobs

from nereus_plugins.spec import Layout, SpecError
from tests.unit.test_verl_config import FSDP, job, models, put

FOURS = Batching(by_tokens=False, train=4, infer=4)
CRITIC = Batching(by_tokens=True, train=32768, infer=32768)
REF = Batching(by_tokens=False, train=None, infer=4)
START = {"actor": UnitKnobs(FOURS), "critic": UnitKnobs(CRITIC), "ref": UnitKnobs(REF)}


def start(config: dict[str, Any]) -> dict[str, UnitKnobs]:
    return {name: knobs.start_knobs(config, one) for name, one in jobconfig.units(config).items()}


def planned(plan: dict[str, Any], config: dict[str, Any] | None = None) -> dict[str, UnitKnobs]:
    config = job() if config is None else config
    units = jobconfig.units(config)
    NereusConfig.from_dict({"schedule": {1: plan}})
    return knobs.plan_knobs(plan, config=config, units=units, current=start(config), where="here")


def sized(**batching: Batching) -> dict[str, UnitKnobs]:
    return {name: dataclasses.replace(START[name], batching=b) for name, b in batching.items()}


def check(
    plan: dict[str, Any], config: dict[str, Any] | None = None, layout: Layout = FSDP
) -> None:
    config = job() if config is None else config
    now = dict.fromkeys(jobconfig.units(config), layout)
    after = start(config) | planned(plan, config)
    capabilities.check_targets(config, models(), now, {}, "plan", unit_knobs=after)


def test_start_is_what_verls_configuration_says() -> None:
    config = job()
    assert start(config) == START
    put(config, "actor_rollout_ref.actor.use_dynamic_bsz", True)
    put(config, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 512)
    put(config, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 1024)
    assert start(config)["actor"] == UnitKnobs(Batching(True, 512, 1024))


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
    for batching in (Batching(True, 512, 1024), FOURS, REF):
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
        ({"actor": {"token_budget_tokens": 512}}, sized(actor=Batching(True, 512, 512))),
        ({"actor": {"micro_batch": 2, "ulysses": 2}}, sized(actor=Batching(False, 2, 2))),
        ({"ref": {"micro_batch": 2}}, sized(ref=Batching(False, None, 2))),
        (
            {"token_budget_tokens": 512, "ranks": 2},
            sized(
                actor=Batching(True, 512, 512),
                critic=Batching(True, 512, 512),
                ref=Batching(True, None, 512),
            ),
        ),
        (
            {"recompute": "full", "offload_optimizer": True},
            {
                "actor": UnitKnobs(FOURS, recompute="full", offload_optimizer=True),
                "critic": UnitKnobs(CRITIC, recompute="full", offload_optimizer=True),
            },
        ),
        (
            {"critic": {"offload_params": True, "token_budget_tokens": 512}},
            {"critic": UnitKnobs(Batching(True, 512, 512), offload_params=True)},
        ),
        ({"actor": {"micro_batch": None}}, {}),
        ({"shard_size": 2}, {}),
    ],
)
def test_knobs_of_a_plan(plan: dict[str, Any], wanted: dict[str, UnitKnobs]) -> None:
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
    assert planned(plan) == sized(actor=Batching(True, 512, 512), critic=Batching(True, 256, 1024))
    # What is in force is no change, also where log-probabilities are cut in another way.
    now = START | sized(actor=Batching(True, 512, 2048))
    config = job()
    units = jobconfig.units(config)
    del plan["assignments"]["critic-train"], plan["assignments"]["critic-values"]
    assert knobs.plan_knobs(plan, config=config, units=units, current=now, where="here") == {}


def test_knobs_that_stay_may_be_said_as_they_are() -> None:
    config = put(job(), "actor_rollout_ref.model.enable_activation_offload", True)
    put(config, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.5)
    plan = {
        "assignments": {
            "actor-train": {"layout": {"dp": 4}, "knobs": {"offload_activations": True}},
            "actor-generate": {"layout": {"dp": 4}, "knobs": {"rollout_memory_fraction": 0.5}},
        }
    }
    assert planned(plan, config) == {}
    put(config, "actor_rollout_ref.model.enable_activation_offload", False)
    with pytest.raises(SpecError, match="actor-train: offload_activations is False and cannot"):
        planned(plan, config)


def _global(**knobs_of: dict[str, Any]) -> dict[str, Any]:
    """A global plan that gives stages (underscores for hyphens) these knobs."""
    layout = {"dp": 4, "sharding": "fsdp"}
    stages = {name.replace("_", "-"): given for name, given in knobs_of.items()}
    return {"assignments": {s: {"layout": layout, "knobs": k} for s, k in stages.items()}}


def test_a_global_plan_switches_recompute_and_offload_off_as_well() -> None:
    config = job()
    put(config, "actor_rollout_ref.model.enable_gradient_checkpointing", True)
    put(config, "actor_rollout_ref.actor.fsdp_config.optimizer_offload", True)
    put(config, "critic.fsdp.param_offload", True)
    sizes = {"token_budget_tokens": 32768}
    as_it_is = {"offload_params": True, **sizes}
    plan = _global(actor_train={"micro_batch": 4}, critic_values=as_it_is, critic_train=as_it_is)
    assert planned(plan, config) == {"actor": UnitKnobs(FOURS)}
    plan = _global(actor_train={}, critic_values=sizes, critic_train={**sizes, "recompute": "full"})
    assert planned(plan, config) == {"critic": UnitKnobs(CRITIC, recompute="full")}
    # Values are computed without gradients and without an optimizer.
    plan = _global(critic_values={**as_it_is, "recompute": "full", "offload_optimizer": True})
    assert planned(plan, config) == {}
    with pytest.raises(SpecError, match="critic-values and critic-train share one engine"):
        planned(_global(critic_values=as_it_is, critic_train=sizes), config)


def test_where_verl_keeps_the_reference_is_no_change() -> None:
    config = put(job(), "trainer.device", "cuda")
    assert start(config)["ref"].offload_params
    for said in (True, False):
        plan = _global(ref_logprob={"micro_batch": 4, "offload_params": said})
        assert planned(plan, config) == {}


@pytest.mark.parametrize(
    ("engine", "recompute"),
    [
        *(("fsdp2", recompute) for recompute in ("none", "full")),
        *(("megatron", recompute) for recompute in ("none", "full", "selective")),
    ],
)
def test_settings_start_the_knobs_they_describe(engine: str, recompute: str) -> None:
    config = job(engine)
    for name, unit in jobconfig.units(config).items():
        trains = name != "ref"
        wanted = UnitKnobs(
            START[name].batching,
            recompute=recompute if trains else "none",
            offload_params=trains or engine == "megatron",
            offload_optimizer=trains,
        )
        for path, value in knobs.knob_settings(config, unit, wanted).items():
            put(config, path, value)
        assert knobs.start_knobs(config, unit) == wanted


def test_full_recompute_of_megatron_is_divided_as_configured() -> None:
    config = job("megatron")
    unit = jobconfig.units(config)["actor"]
    path = "actor_rollout_ref.actor.megatron.override_transformer_config"
    values = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert knobs.recompute_values(config, unit, "full") == values
    put(config, f"{path}.recompute_method", "block")
    put(config, f"{path}.recompute_num_layers", 2)
    values |= {"recompute_method": "block", "recompute_num_layers": 2}
    assert knobs.recompute_values(config, unit, "full") == values
    for other, granularity in (("none", None), ("selective", "selective")):
        values = dict.fromkeys(values) | {"recompute_granularity": granularity}
        assert knobs.recompute_values(config, unit, other) == values


@pytest.mark.parametrize(
    ("engine", "setting", "plan", "message"),
    [
        ("fsdp2", None, {"actor": {"recompute": "selective"}}, str(knobs.NOT_SELECTIVE)),
        (
            "fsdp2",
            ("critic.model.enable_activation_offload", True),
            {"critic": {"recompute": "full"}},
            str(knobs.BESIDE_OFFLOADED_ACTIVATIONS),
        ),
        (
            "megatron",
            ("critic.megatron.override_transformer_config.cpu_offloading", True),
            {"recompute": "full"},
            str(knobs.BESIDE_OFFLOADED_ACTIVATIONS),
        ),
        (
            "megatron",
            ("critic.megatron.override_transformer_config.recompute_modules", ["mlp"]),
            {"critic": {"recompute": "selective"}},
            str(knobs.OTHER_MODULES),
        ),
        ("fsdp2", None, {"offload_params": True}, str(knobs.REFERENCE_ON_HOST)),
        ("megatron", None, {"ref": {"recompute": "full"}}, "the reference computes no gradients"),
        ("megatron", None, {"ref": {"offload_optimizer": True}}, "leave offload_optimizer of ref"),
    ],
)
def test_what_cannot_be_switched_is_refused_by_name(
    engine: str, setting: tuple[str, Any] | None, plan: dict[str, Any], message: str
) -> None:
    config = job(engine) if setting is None else put(job(engine), *setting)
    with pytest.raises(SpecError, match=re.escape(message)):
        planned(plan, config)


def test_the_planner_is_told_which_knobs_can_change() -> None:
    stages = capabilities.capabilities(job("megatron"), "0").stages
    assert {
        stage.value: stages[stage].knob_fields - {"token_budget_tokens"} for stage in stages
    } == {
        "actor-train": {"micro_batch", "recompute", "offload_params", "offload_optimizer"},
        "critic-train": {"recompute", "offload_params", "offload_optimizer"},
        "critic-values": {"offload_params"},
        "ref-logprob": {"micro_batch", "offload_params"},
    }


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"critic": {"micro_batch": 2}}, f"here.critic.micro_batch: {knobs.CRITIC_BY_TOKENS}"),
        (
            {"actor": {"offload_activations": True}},
            f"here.actor.offload_activations: {knobs.FIXED}",
        ),
        ({"rollout_memory_fraction": 0.5}, "here.actor.rollout_memory_fraction: a knob of the rol"),
        ({"actor": {"recompute": "all"}}, "here.actor: Knobs.recompute must be one of"),
        ({"actor": {"offload_params": 1}}, "here.actor: Knobs.offload_params must be true or"),
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
