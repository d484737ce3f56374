"""The `nereus` group, what is refused, and what a plan is checked against. No verl, no workers."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from nereus_verl import capabilities, jobconfig, stamp
from nereus_verl.config import EngineDefaults, NereusConfig, global_plan_layouts, plan_layouts
from nereus_verl.rollout import TP, RolloutPlan

from nereus_plugins.spec import GlobalPlan, Layout, ModelSpec, ModelStage, SpecError

HF = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
}
FSDP = Layout(dp=4, sharding="fsdp")


def job(engine: str = "fsdp2", ranks: int = 4) -> dict[str, Any]:
    """The parts of verl's resolved configuration that are read, as a PPO job with all units."""
    name = "megatron" if engine == "megatron" else "fsdp_config"
    section: dict[str, Any] = {"strategy": engine, name: {}, "optim": {"optimizer": "AdamW"}}
    model = {"path": "model", "use_remove_padding": True, "lora_rank": 0, "lora": {"rank": 0}}
    critic = copy.deepcopy(section)
    critic["fsdp" if engine == "fsdp2" else "megatron"] = critic.pop(name)
    return {
        "trainer": {
            "n_gpus_per_node": ranks,
            "nnodes": 1,
            "device": "cpu",
            "use_v1": True,
            "v1": {"trainer_mode": "sync"},
            "default_local_dir": "checkpoints",
        },
        "data": {"train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 16},
        "algorithm": {"adv_estimator": "gae"},
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "model": model,
            "actor": section
            | {
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
                "use_kl_loss": True,
                "use_dynamic_bsz": False,
            },
            "ref": copy.deepcopy(section) | {"log_prob_micro_batch_size_per_gpu": 4},
            "rollout": {
                "n": 4,
                "log_prob_micro_batch_size_per_gpu": 4,
                "tensor_model_parallel_size": 1,
            },
        },
        "critic": critic | {"model": copy.deepcopy(model), "ppo_mini_batch_size": 8},
    }


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    node = config
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return config


def models() -> dict[str, ModelSpec]:
    return {name: capabilities.check_model(name, HF) for name in ("actor", "critic", "ref")}


# -- the group ---------------------------------------------------------------------------------


def test_defaults() -> None:
    config = NereusConfig.from_dict({"enable": True})
    assert config.enable
    assert config.schedule == {}
    assert config.checksum
    assert config.memory_budget_gib is None


def test_schedule_is_sorted_and_takes_steps_as_text() -> None:
    config = NereusConfig.from_dict({"schedule": {"10": {"tp": 2}, 3: {"actor": {"pp": 2}}}})
    assert list(config.schedule) == [3, 10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shedule": {}}, "unknown key 'shedule'; did you mean 'schedule'"),
        ({"enable": "yes"}, ".enable must be true or false"),
        ({"timeout_s": 0}, "timeout_s must be a number above 0"),
        ({"background": 1}, "background must be true or false"),
        ({"background_share": 0}, "background_share must be a number above 0"),
        ({"background_share": 1.5}, "background_share is a part of the time"),
        ({"staging_mib": 0}, ".staging_mib must be an integer of at least 1"),
        ({"claim_timeout_s": 0}, "claim_timeout_s must be a number above 0"),
        ({"step_timeout_s": 0}, "step_timeout_s must be a number above 0"),
        ({"schedule": {1: {"ranks": 0}}}, ".schedule.1.ranks must be an integer of at least 1"),
        ({"schedule": {1: {"leave": [0, 0]}}}, ".schedule.1.leave must list ranks"),
        ({"schedule": {1: {"leave": 0}}}, ".schedule.1.leave must list ranks"),
        ({"schedule": {1: {"rnks": 2}}}, ".schedule.1: unknown key 'rnks'; did you mean 'ranks'"),
        ({"schedule": {1: {"actor": {"ranks": 2}}}}, ".1.actor: ranks is of the whole job"),
        ({"schedule": {1: {"ref": {"rollout": {"tp": 2}}}}}, ".1.ref: rollout is of the whole job"),
        ({"schedule": {1: {"ranks": 10**12, "tp": 3}}}, ".schedule.1.ranks must be at most 131072"),
        ({"schedule": {"9" * 5000: {"tp": 2}}}, "a step is a whole number from 1"),
        ({"timeout_s": 10**400}, ".timeout_s must be a number above 0"),
        ({"memory_budget_gib": 10**400}, ".memory_budget_gib must be a number above 0"),
        (
            {"schedule": {1: {"assignments": {"actor-train": {"dp": 2}}, "leave": [0]}}},
            ".schedule.1: leave cannot stand beside assignments",
        ),
        (
            {"schedule": {1: {"assignments": {"actor-train": {"dp": 10**11}}}}},
            ".schedule.1.assignments.actor-train.layout: a layout has at most 131072 ranks",
        ),
        ({"memory_budget_gib": -1.0}, ".memory_budget_gib must be a number above 0"),
        ({"run_dir": ""}, ".run_dir must be a directory or null"),
        ({"schedule": [3]}, ".schedule must map steps to plans"),
        ({"schedule": {0: {"tp": 2}}}, "a step is a whole number from 1, got 0"),
        ({"schedule": {"x": {"tp": 2}}}, "a step is a whole number from 1, got 'x'"),
        (
            {"schedule": {1: {"tp": 2}, "1": {"tp": 4}}},
            ".schedule.1: this step is given twice",
        ),
        ({"schedule": {1: {}}}, ".schedule.1 must be fields of layout or knobs"),
        ({"schedule": {1: {"tpp": 2}}}, ".schedule.1: unknown key 'tpp'; did you mean 'tp'"),
        (
            {"schedule": {1: {"actor": {"tp": 2}, "crtic": {"tp": 2}}}},
            ".schedule.1: unknown key 'crtic'; did you mean 'critic'",
        ),
        (
            {"schedule": {1: {"actr": {"tp": 2}}}},
            ".schedule.1: unknown key 'actr'; did you mean 'actor'",
        ),
        ({"schedule": {1: {"actor": 2}}}, ".schedule.1.actor must be fields of layout or knobs"),
        (
            {"schedule": {1: {"critic": {"ulises": 2}}}},
            ".schedule.1.critic: unknown key 'ulises'; did you mean 'ulysses'",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^nereus.*{re.escape(message)}"):
        NereusConfig.from_dict(settings)


# -- plans -------------------------------------------------------------------------------------


def layouts_of(plan: dict[str, Any], backend: str = "fsdp2", world: int = 4) -> dict[str, Layout]:
    units = dict.fromkeys(("actor", "critic", "ref"), EngineDefaults())
    now = Layout(dp=world, sharding="fsdp" if backend == "fsdp2" else "zero1")
    current = dict.fromkeys(units, now)
    return plan_layouts(plan, units=units, current=current, backend=backend, where="here")


def test_a_bare_layout_is_for_every_unit() -> None:
    wanted = Layout(dp=4, sharding="hsdp", shard_size=2)
    assert layouts_of({"shard_size": 2}) == dict.fromkeys(("actor", "critic", "ref"), wanted)


def test_units_left_out_stay() -> None:
    assert layouts_of({"critic": {"ulysses": 2}}) == {
        "critic": Layout(dp=2, ulysses=2, sharding="fsdp")
    }


def test_megatron_fills_in_dp_and_optimizer_sharding() -> None:
    assert layouts_of({"tp": 2}, "megatron")["actor"] == Layout(tp=2, dp=2, sharding="zero1")


HSDP = Layout(dp=4, sharding="hsdp", shard_size=2)


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({"ranks": 2}, {"actor": Layout(dp=2, sharding="fsdp")}),
        ({"ranks": 8}, {"actor": Layout(dp=8, sharding="hsdp", shard_size=2)}),
        ({"ranks": 4, "ulysses": 2}, {"actor": Layout(dp=2, ulysses=2, sharding="fsdp")}),
        ({"dp": 8}, {"actor": Layout(dp=8, sharding="fsdp")}),
        ({"actor": {"dp": 3, "ulysses": 2}}, {"actor": Layout(dp=3, ulysses=2, sharding="fsdp")}),
        ({"ranks": 4, "leave": [1]}, {"actor": HSDP}),
        ({"leave": [1]}, {}),
    ],
)
def test_plans_that_change_the_number_of_ranks(
    plan: dict[str, Any], wanted: dict[str, Layout]
) -> None:
    """Of a job on four ranks: `ranks` beside the layouts, or what a layout with dp takes."""
    NereusConfig.from_dict({"schedule": {1: plan}})
    units = {"actor": EngineDefaults()}
    found = plan_layouts(plan, units=units, current={"actor": HSDP}, backend="fsdp2", where="here")
    assert found == wanted


def test_units_left_out_follow_to_other_ranks_by_dp() -> None:
    units = dict.fromkeys(("actor", "critic"), EngineDefaults())
    current = {"actor": HSDP, "critic": Layout(dp=2, ulysses=2, sharding="fsdp")}
    plan = {"ranks": 8, "actor": {"shard_size": 4}}
    assert plan_layouts(plan, units=units, current=current, backend="fsdp2", where="here") == {
        "actor": Layout(dp=8, sharding="hsdp", shard_size=4),
        "critic": Layout(dp=4, ulysses=2, sharding="fsdp"),
    }


def test_a_global_plan_gives_each_unit_its_layout() -> None:
    plan = {"assignments": {"actor-train": {"tp": 2, "dp": 2}, "actor-generate": {"dp": 4}}}
    assert layouts_of(plan, "megatron") == {"actor": Layout(tp=2, dp=2)}


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            {"reward-score": {"dp": 4}},
            r"reward-score has no unit .* leave it out \(.* actor, critic",
        ),
        ({"actor-train": {"layout": {"dp": 4}, "devices": "4-7"}}, "devices cannot be chosen"),
        ({"actor-train": {"layout": {"dp": 4}, "devices": "3-0"}}, "devices must be a list or a"),
        ({"actor-train": {"layout": {"dp": 4}, "devices": "0-99999999999"}}, "devices must be a "),
        ({"actor-train": {"layout": {"dp": 4}, "devices": "9" * 5000}}, "devices must be a list"),
    ],
)
def test_global_plans_that_cannot_be(assignments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^here.*{message}"):
        layouts_of({"assignments": assignments})


def test_stages_of_one_unit_must_agree() -> None:
    plan = GlobalPlan.from_dict(
        {"assignments": {"critic-train": {"dp": 4}, "critic-values": {"tp": 2, "dp": 2}}}
    )
    with pytest.raises(SpecError, match="critic share one set of weights"):
        global_plan_layouts(plan, {"critic": True}, "here")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": 3}, "= 3 must divide 4 ranks; it may be 1, 2 or 4$"),
        ({"ranks": 4, "dp": 2}, "takes 2 ranks, the plan says 4; leave dp out"),
        ({"ranks": 6, "ulysses": 4}, "must divide 6 ranks"),
        ({"shard_size": 3}, "shard_size=3 must divide"),
        ({"tp": 0}, "must be an integer of at least 1"),
    ],
)
def test_layouts_that_do_not_fit_the_job(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^here.actor.*{message}"):
        layouts_of(plan)


# -- reading verl's configuration --------------------------------------------------------------


def test_start_layouts() -> None:
    config = put(job(), "critic.fsdp.fsdp_size", 2)
    put(config, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", 2)
    units = jobconfig.units(config)
    found = {name: jobconfig.start_layout(config, unit) for name, unit in units.items()}
    assert found == {
        "actor": Layout(dp=2, ulysses=2, sharding="fsdp"),
        "critic": Layout(dp=4, sharding="hsdp", shard_size=2),
        "ref": FSDP,
    }


def test_units_follow_the_algorithm() -> None:
    config = put(
        put(job(), "algorithm.adv_estimator", "grpo"), "actor_rollout_ref.actor.use_kl_loss", 0
    )
    assert list(jobconfig.units(config)) == ["actor"]


def test_layout_settings_start_what_they_describe() -> None:
    config = job("megatron")
    unit = jobconfig.units(config)["actor"]
    wanted = Layout(tp=2, pp=2, sharding="zero1")
    for path, value in jobconfig.layout_settings(unit, wanted).items():
        put(config, path, value)
    assert jobconfig.start_layout(config, unit) == wanted


def test_sequence_parallelism_is_carried_as_verl_sets_it() -> None:
    config = put(job("megatron"), "actor_rollout_ref.actor.megatron.sequence_parallel", True)
    unit = jobconfig.units(config)["actor"]
    units = {"actor": jobconfig.engine_defaults(config, unit)}
    found = plan_layouts(
        {"tp": 2},
        units=units,
        current={"actor": Layout(dp=4)},
        backend="megatron",
        where="here",
    )
    assert found["actor"].sequence_parallel
    override = "actor_rollout_ref.actor.megatron.override_transformer_config.sequence_parallel"
    assert not jobconfig.engine_defaults(put(config, override, False), unit).sequence_parallel


# -- refusals ----------------------------------------------------------------------------------


def test_plain_jobs_are_not_refused() -> None:
    for engine in ("fsdp2", "megatron"):
        assert capabilities.refused_by(job(engine)) == []


ARL = "actor_rollout_ref"
MEGATRON = f"{ARL}.actor.megatron"


@pytest.mark.parametrize(
    ("engine", "path", "value", "named"),
    [
        ("megatron", f"{MEGATRON}.context_parallel_size", 2, "context parallelism"),
        ("megatron", f"{MEGATRON}.dynamic_context_parallel", True, "context parallelism"),
        ("megatron", f"{MEGATRON}.expert_model_parallel_size", 2, "expert parallelism"),
        ("megatron", f"{MEGATRON}.virtual_pipeline_model_parallel_size", 2, "virtual pipeline"),
        ("megatron", f"{MEGATRON}.override_transformer_config.fp8", "e4m3", "fp8"),
        (
            "megatron",
            f"{MEGATRON}.override_transformer_config.cuda_graph_impl",
            "local",
            "CUDA graphs",
        ),
        (
            "megatron",
            f"{MEGATRON}.override_transformer_config.enable_cuda_graph",
            True,
            "CUDA graphs",
        ),
        (
            "megatron",
            f"{MEGATRON}.override_transformer_config.hidden_dropout",
            0.1,
            "dropout with Megatron",
        ),
        ("megatron", "critic.megatron.use_megatron_fsdp", True, "Megatron-FSDP"),
        ("megatron", f"{ARL}.actor.optim.use_precision_aware_optimizer", True, "precision-aware"),
        (
            "megatron",
            "critic.optim.override_optimizer_config.optimizer_cpu_offload",
            True,
            "CPU-offloaded optimizer",
        ),
        ("megatron", "critic.optim.optimizer", "muon", "optimizer other than Adam"),
        (
            "fsdp2",
            f"{ARL}.actor.optim.optimizer_impl",
            "torchao.optim",
            "optimizer other than Adam",
        ),
        ("fsdp2", f"{ARL}.actor.fsdp_config.offload_policy", True, "CPU offload policy"),
        ("fsdp2", f"{ARL}.model.lora_rank", 8, "LoRA"),
        ("megatron", f"{ARL}.model.lora.rank", 8, "LoRA"),
        ("fsdp2", f"{ARL}.actor.ema", {"decay": 0.99}, "EMA"),
        ("fsdp2", f"{ARL}.actor.fsdp_config.qat.enable", True, "quantisation-aware"),
        ("fsdp2", f"{ARL}.model.mtp.enable", True, "multi-token"),
        ("fsdp2", "trainer.v1.trainer_mode", "separate_async", "asynchronous trainers"),
        ("fsdp2", "trainer.v1.trainer_mode", "colocate_async", "asynchronous trainers"),
        ("fsdp2", "trainer.use_v1", False, "legacy trainer"),
        ("fsdp2", f"{ARL}.hybrid_engine", False, "other GPUs"),
        ("fsdp2", f"{ARL}.actor.strategy", "fsdp", "engine other than FSDP2"),
        ("fsdp2", "critic.strategy", "megatron", "different engines"),
    ],
)
def test_refused_by_name_with_a_remedy(engine: str, path: str, value: Any, named: str) -> None:
    found = capabilities.refused_by(put(job(engine), path, value))
    assert any(named in text for text in found), found
    assert all(
        text.rstrip().count("set ") + text.count("leave ") + text.count("give ") for text in found
    )


def test_every_refusal_is_declared() -> None:
    declared = capabilities.capabilities(job(), "0.9.1")
    assert len({refusal.feature for refusal in declared.refused}) == len(declared.refused) >= 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_moe", "num_experts": 4}, "."),
        ({"vision_config": {"depth": 2}}, "images"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_models_that_were_not_tested(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(capabilities.Refused, match=message):
        capabilities.check_model("actor", HF | changes)


def test_a_models_own_dropout_is_refused_with_megatron() -> None:
    model = HF | {"attention_dropout": 0.1}
    with pytest.raises(capabilities.Refused, match=r"dropout with Megatron.*dropout=0\.1"):
        capabilities.check_model("actor", model, megatron=True)
    capabilities.check_model("actor", model)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_the_stages_of_one_unit_are_coupled(engine: str) -> None:
    assert capabilities.capabilities(job(engine), "0.9.1").coupled == (
        frozenset({ModelStage.CRITIC_VALUES, ModelStage.CRITIC_TRAIN}),
    )


def test_the_reference_on_accelerators() -> None:
    on_gpu = put(job(), "trainer.device", "cuda")
    stages = capabilities.capabilities(on_gpu, "0.9.1").stages
    assert stages[ModelStage.REF_LOGPROB].layout_fields == frozenset()
    assert stages[ModelStage.REF_LOGPROB].knob_fields == {"micro_batch", "token_budget_tokens"}
    switched = {"recompute", "offload_params", "offload_optimizer"}
    assert stages[ModelStage.CRITIC_TRAIN].knob_fields == {"token_budget_tokens", *switched}
    assert capabilities.capabilities(job(), "0.9.1").stages[ModelStage.REF_LOGPROB].layout_fields


# -- checking a transition ---------------------------------------------------------------------


def check(config: dict[str, Any], current: Layout, **targets: Layout) -> int:
    now = dict.fromkeys(jobconfig.units(config), current)
    return capabilities.check_targets(config, models(), now, targets, "plan")


def test_a_plan_that_fits() -> None:
    check(job(), FSDP, actor=Layout(dp=2, ulysses=2, sharding="fsdp"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            1,
            r"actor.ppo_mini_batch_size \* rollout.n",
        ),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 5, "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 3, "log_prob_micro_batch"),
        ("data.train_batch_size", 9, "data.train_batch_size"),
    ],
)
def test_batches_that_do_not_divide_name_the_setting(path: str, value: int, message: str) -> None:
    config = put(put(job(ranks=8), "actor_rollout_ref.rollout.n", 2), path, value)
    if path != "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu":
        put(config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1)
    with pytest.raises(SpecError, match=message):
        check(config, Layout(dp=4, ulysses=2, sharding="fsdp"), actor=Layout(dp=8, sharding="fsdp"))


@pytest.mark.parametrize("shuffled", ["actor_rollout_ref.actor", "critic"])
def test_shuffling_needs_data_parallelism_to_stay(shuffled: str) -> None:
    config = put(job(), f"{shuffled}.shuffle", True)
    unit = shuffled.rpartition(".")[2]
    check(config, FSDP, **{unit: Layout(dp=4, sharding="hsdp", shard_size=2)})
    check(config, FSDP, ref=Layout(dp=2, ulysses=2, sharding="fsdp"))
    with pytest.raises(SpecError, match=rf"plan\.{unit}: shuffled mini-batches"):
        check(config, FSDP, **{unit: Layout(dp=2, ulysses=2, sharding="fsdp")})


def test_token_budgets_must_hold_a_sequence() -> None:
    config = put(job(), "critic.ppo_infer_max_token_len_per_gpu", 40)
    check(config, FSDP, critic=Layout(dp=2, ulysses=2, sharding="fsdp"))
    with pytest.raises(
        SpecError, match=r"raise critic.ppo_infer_max_token_len_per_gpu to at least 80"
    ):
        check(config, Layout(dp=2, ulysses=2, sharding="fsdp"), critic=FSDP)


def test_ulysses_needs_packed_sequences() -> None:
    config = put(job(), "critic.model.use_remove_padding", False)
    with pytest.raises(SpecError, match=r"set critic.model.use_remove_padding=True"):
        check(config, FSDP, critic=Layout(dp=2, ulysses=2, sharding="fsdp"))


def test_the_model_must_divide() -> None:
    with pytest.raises(SpecError, match=r"^plan\.actor: .*key-value heads = 2"):
        check(job("megatron"), Layout(dp=4, sharding="zero1"), actor=Layout(tp=4, sharding="zero1"))


def test_fields_of_the_other_engine_are_refused() -> None:
    with pytest.raises(SpecError, match="tp cannot change from 1 to 2; with fsdp2"):
        check(job(), FSDP, actor=Layout(tp=2, dp=2, sharding="fsdp"))


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero3"])
def test_fsdp2_is_not_asked_for_other_shardings(sharding: str) -> None:
    with pytest.raises(SpecError, match=r"^plan\.actor: .* set sharding to fsdp, or to hsdp with"):
        check(job(), FSDP, actor=Layout(dp=4, sharding=sharding))


def test_a_plan_may_name_the_unit_that_cannot_change_as_it_is() -> None:
    """As a global plan does: on accelerators FSDP2's reference stays."""
    config = put(job(), "trainer.device", "cuda")
    hsdp = Layout(dp=4, sharding="hsdp", shard_size=2)
    check(config, FSDP, actor=hsdp, ref=FSDP)
    with pytest.raises(SpecError, match=r"^plan\.ref: this unit cannot change\. verl keeps"):
        check(config, FSDP, ref=hsdp)


def test_megatron_units_change_one_by_one() -> None:
    dp4, tp2 = Layout(dp=4, sharding="zero1"), Layout(tp=2, dp=2, sharding="zero1")
    check(job("megatron"), dp4, actor=tp2)
    check(job("megatron"), dp4, actor=tp2, critic=Layout(tp=2, pp=2, sharding="zero1"), ref=dp4)


# -- the stamp ---------------------------------------------------------------------------------


def test_stamp_passes_its_own_layout_and_names_settings_otherwise(tmp_path: Any) -> None:
    config = job("megatron")
    saved = dict.fromkeys(("actor", "critic", "ref"), Layout(tp=2, dp=2, sharding="zero1"))
    written = stamp.write(tmp_path, saved, {}, config, 3, RolloutPlan(tp=2))
    assert json.loads(written.read_text())["settings"][TP] == 2
    stamp.check(tmp_path, saved, config)
    with pytest.raises(
        stamp.LayoutMismatch,
        match=r"saved actor TP2.*now actor TP1.*actor\.megatron\.tensor_model_parallel_size=2",
    ):
        stamp.check(tmp_path, dict.fromkeys(saved, Layout(dp=4, sharding="zero1")), config)


def test_stamp_of_another_world_size(tmp_path: Any) -> None:
    stamp.write(tmp_path, {"actor": FSDP}, {}, job(), 0, RolloutPlan())
    with pytest.raises(stamp.LayoutMismatch, match=r"saved by 4 ranks, this job has 8"):
        stamp.check(tmp_path, {"actor": Layout(dp=8, sharding="fsdp")}, job(ranks=8))


def test_a_checkpoint_without_a_stamp_passes(tmp_path: Any) -> None:
    stamp.check(tmp_path, {"actor": FSDP}, job())


# -- the number of ranks -----------------------------------------------------------------------


def elastic_job(engine: str = "fsdp2") -> dict[str, Any]:
    return put(job(engine), "actor_rollout_ref.rollout.name", "hf_cpu")


def everywhere(layout: Layout) -> dict[str, Layout]:
    return dict.fromkeys(("actor", "critic", "ref"), layout)


def test_the_number_of_ranks_can_change() -> None:
    assert check(elastic_job(), FSDP, **everywhere(Layout(dp=2, sharding="fsdp"))) == 2
    assert check(elastic_job(), FSDP, **everywhere(Layout(dp=8, sharding="fsdp"))) == 8
    assert check(elastic_job(), FSDP) == 4
    assert check(elastic_job("megatron"), DP4, **everywhere(Layout(dp=8, sharding="zero1"))) == 8
    assert not capabilities.capabilities(elastic_job(), "0.9.1").devices_fixed


DP4 = Layout(dp=4, sharding="zero1")
EIGHT = Layout(dp=8, sharding="fsdp")


@pytest.mark.parametrize(
    ("config", "targets", "message"),
    [
        (elastic_job(), {"actor": EIGHT}, "actor 8, critic 4, ref 4; write `ranks`"),
        (elastic_job(), everywhere(Layout(dp=3, sharding="fsdp")), "does not divide by 3"),
        (job(), everywhere(EIGHT), "SGLang or TensorRT-LLM"),
        (
            put(elastic_job(), "trainer.device", "cuda"),
            {"actor": EIGHT, "critic": EIGHT},
            "verl keeps the FSDP2 reference in host memory",
        ),
    ],
)
def test_ranks_that_cannot_be_are_named(
    config: dict[str, Any], targets: dict[str, Layout], message: str
) -> None:
    with pytest.raises(SpecError, match=f"^plan.*{message}"):
        check(config, FSDP, **targets)


@pytest.mark.parametrize("leave", [[4], [0, 1, 2, 3]])
def test_ranks_that_leave_are_ranks_of_the_job_and_not_all(leave: list[int]) -> None:
    now = everywhere(FSDP)
    with pytest.raises(SpecError, match=r"plan\.leave: .*at least one of them must stay"):
        capabilities.check_targets(elastic_job(), models(), now, {}, "plan", leave)
    assert capabilities.check_targets(elastic_job(), models(), now, {}, "plan", [0]) == 4
    with pytest.raises(SpecError, match="vLLM"):
        capabilities.check_targets(job(), models(), now, {}, "plan", [0])
