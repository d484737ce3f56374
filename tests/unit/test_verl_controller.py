"""What the controller of a verl job is told, and that the job can run what it then plans."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from nereus_verl import capabilities, jobconfig, knobs
from nereus_verl.config import NereusConfig, check_plan
from nereus_verl.planned import executable
from nereus_verl.preflight import Preflight, plan_targets
from nereus_verl.rollout import global_plan_rollout, start_rollout
from nereus_verl.setting import job_setting

from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.devices import cluster, known_gpu
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.planner import plan
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    LengthDistribution,
    ModelStage,
    SpecError,
)
from tests.unit.test_verl_config import job, models, put

S = ModelStage
CPU = {"name": "cpu", "memory_bytes": 256 << 20}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9}


def by_tokens(engine: str, **settings: Any) -> dict[str, Any]:
    """A job whose micro-batches are cut by token budget."""
    config = job(engine)
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    for path, value in {
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 4096,
        f"{ref}.log_prob_use_dynamic_bsz": True,
        f"{ref}.log_prob_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.rollout.name": "hf_cpu",
        "critic.ppo_infer_max_token_len_per_gpu": 4096,
        **settings,
    }.items():
        put(config, path, value)
    return config


def checked(config: dict[str, Any]) -> Preflight:
    units = jobconfig.units(config)
    return Preflight(
        nereus=NereusConfig(),
        config=config,
        units=units,
        models={name: one for name, one in models().items() if name in units},
        layouts={name: jobconfig.start_layout(config, unit) for name, unit in units.items()},
        targets={},
        leave={},
        knobs={name: knobs.start_knobs(config, unit) for name, unit in units.items()},
        knob_targets={},
        rollout=start_rollout(config),
        rollout_targets={},
        run_dir=Path(),
    )


def described(found: Preflight) -> GlobalPlan:
    """As `VerlJob.describe` has it at the start."""
    assignments = {}
    for name, layout in found.layouts.items():
        fixed = knobs.fixed_knobs(found.config, found.units[name])
        for stage in knobs.STAGES[name]:
            live = found.knobs[name].knobs(stage)
            assignments[stage] = Assignment(layout, Knobs(**fixed, **live))
    world = found.world_size()
    rollout = found.rollout
    assignments[S.ACTOR_GENERATE] = Assignment(rollout.layout(world), rollout.knobs())
    return GlobalPlan(assignments, name="start")


def setting_of(found: Preflight, device: dict[str, Any], gpus: int = 8) -> JobSetting:
    can = capabilities.capabilities(found.config, "0.9.1")
    return job_setting(found, can, device, gpus, 100)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
@pytest.mark.parametrize("device", [CPU, H100])
@pytest.mark.parametrize("gpus", [2, 4, 6, 8])
def test_what_is_planned_with_it_can_be_run(engine: str, device: dict[str, Any], gpus: int) -> None:
    """Of any number of GPUs, for lengths that are short, and as long as they may become."""
    found = checked(by_tokens(engine))
    setting = setting_of(found, device)
    now = described(found)
    for tokens in (4, 16):
        planned = plan(
            setting.setting.job,
            setting.setting.cluster,
            setting.setting.workload(LengthDistribution.fixed(tokens)),
            gpus=gpus,
            capabilities=setting.capabilities(),
            current=now,
        )
        for one in (planned.plan, *(other for other, _ in planned.alternatives)):
            made = executable(one, found.config).to_dict()
            asked = check_plan(made, "plan")
            targets, leave, changed = plan_targets(
                found.config, found.models, asked, found.layouts, found.knobs, "plan"
            )
            world = {layout.world_size for layout in {**found.layouts, **targets}.values()}
            assert world == {one.assignments[S.ACTOR_TRAIN].layout.world_size}
            assert leave == ()
            if device is CPU:
                assert not any(
                    new.offload_params or new.offload_optimizer for new in changed.values()
                )
            global_plan_rollout(
                GlobalPlan.from_dict(made), config=found.config, current=found.rollout,
                world=world.pop(), where="plan",
            )  # fmt: skip


def test_the_plan_in_force_is_a_plan_that_changes_nothing() -> None:
    for engine in ("fsdp2", "megatron"):
        found = checked(by_tokens(engine))
        same = executable(described(found), found.config)
        assert same.assignments == described(found).assignments
        targets, _, changed = plan_targets(
            found.config, found.models, check_plan(same.to_dict(), "plan"), found.layouts,
            found.knobs, "plan",
        )  # fmt: skip
        assert targets == found.layouts
        assert changed == {}


def test_stages_that_do_not_train_have_no_knobs_of_training() -> None:
    found = checked(by_tokens("fsdp2"))
    everywhere = Knobs(token_budget_tokens=4096, recompute="full", offload_optimizer=True)
    asked = GlobalPlan(
        {
            stage: Assignment(one.layout, everywhere)
            for stage, one in described(found).assignments.items()
            if stage is not S.ACTOR_GENERATE
        }
    )
    made = executable(asked, found.config).assignments
    assert made[S.CRITIC_TRAIN].knobs == everywhere
    for stage in (S.CRITIC_VALUES, S.REF_LOGPROB):
        assert made[stage].knobs == Knobs(token_budget_tokens=4096)


def test_the_setting_says_what_verl_does() -> None:
    found = checked(by_tokens("fsdp2"))
    setting = setting_of(found, CPU)
    assert JobSetting.from_json(setting.to_json()) == setting
    inner = setting.setting
    assert (inner.prompts_per_step, inner.samples_per_prompt, inner.mini_batch_prompts) == (8, 4, 8)
    assert inner.job.backend == "fsdp"
    assert inner.job.algorithm == "ppo"
    assert inner.job.reference
    assert inner.job.packed
    assert inner.cluster.gpu.memory_bytes == 256 << 20
    assert setting.max_response_tokens == 16
    can = setting.capabilities()
    assert can.colocated
    assert can.dp_divides == 32
    assert can.least_budget_tokens == 80
    assert not can.devices_fixed
    # On CPU there is nowhere to offload to, and a server that ranks share is no faster.
    assert can.stages[S.ACTOR_GENERATE].layout_fields == {"dp"}
    assert "offload_params" not in can.stages[S.ACTOR_TRAIN].knob_fields
    assert (
        "offload_params" in setting_of(found, H100).capabilities().stages[S.ACTOR_TRAIN].knob_fields
    )


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100_80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_80gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("A card of 2031", 140.0, "h200"),
        ("cpu", 0.25, "cpu"),
    ],
)
def test_a_card_is_known_by_what_torch_calls_it(name: str, gib: float, known: str) -> None:
    assert known_gpu(name, round(gib * 2**30)).name == known


def test_nodes_hold_all_gpus_that_there_may_be() -> None:
    assert cluster(H100, 20, 8).world_size == 24


# -- the settings --------------------------------------------------------------------------------


def test_off_unless_asked_for() -> None:
    assert NereusConfig.from_dict({}).controller is None
    for mode in ("off", False):
        assert NereusConfig.from_dict({"controller": {"mode": mode}}).controller is None
    found = NereusConfig.from_dict({"controller": {"mode": "act", "confidence": 0.9}})
    assert found.controller == ControllerConfig(mode="act", confidence=0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controller": {"mode": "on"}}, r"nereus.controller.mode must be one of off, observe"),
        ({"controller": {"mode": "off", "confidense": 1}}, "did you mean 'confidence'"),
        ({"controller": {"mode": "act", "confidense": 1}}, "did you mean 'confidence'"),
        ({"controller": {"mode": "act", "confidence": 2}}, "confidence"),
        ({"controller": "act"}, r"nereus.controller must be a mapping"),
        ({"controller": {"mode": "act"}, "control": False}, r"set nereus.control=true"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        NereusConfig.from_dict(settings)


def test_ranks_change_where_the_controller_may_change_them() -> None:
    config = by_tokens("fsdp2")

    found = checked(config)
    assert not found.ranks_change()
    acting = NereusConfig(controller=ControllerConfig())
    assert dataclasses.replace(found, nereus=acting).ranks_change()
    fixed = checked(put(config, "actor_rollout_ref.rollout.name", "sglang"))
    assert not dataclasses.replace(fixed, nereus=acting).ranks_change()
