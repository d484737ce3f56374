"""What the controller of an OpenRLHF job is told, and that the job can run what it then plans."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from nereus_openrlhf import capabilities, openrlhf_private, preflight
from nereus_openrlhf.config import check_plan, split
from nereus_openrlhf.planned import as_written, described
from nereus_openrlhf.setting import job_setting, lengths

from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import Controller
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.controller.transition import GraphEstimator, apart
from nereus_plugins.job import Lease
from nereus_plugins.planner import plan
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelSpec,
    ModelStage,
    SpecError,
)
from nereus_plugins.trace.record import StepRecord, TransitionRecord
from tests.unit.test_openrlhf_config import arguments

S = ModelStage
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9}
MODEL = ModelSpec.from_hf_config(
    {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's environment has no OpenRLHF to ask for its version."""
    monkeypatch.setattr(openrlhf_private, "openrlhf_version", lambda: openrlhf_private.TESTED)


def job(**changes: Any) -> SimpleNamespace:
    """Arguments of a PPO job: actor, critic and reference on two GPUs each, an engine on one."""
    args = arguments(algo__kl__init_coef=0.01)
    args.actor.gradient_checkpointing_enable = False
    args.actor.entropy_coef = None
    args.vllm.gpu_memory_utilization = 0.95
    args.vllm.enable_sleep = False
    args.data.max_len = 2048
    args.rollout.max_new_tokens = 1024
    args.rollout.batch_size = args.train.batch_size = 64
    args.train.max_epochs = 1
    args.ds.attn_implementation = "flash_attention_2"
    args.ds.use_liger_kernel = args.ds.packing_samples = False
    args.ds.grad_accum_dtype = None
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = args
        for name in parents:
            at = getattr(at, name)
        setattr(at, last, value)
    return args


def in_force(args: Any, **layouts: Layout) -> dict[str, Layout]:
    start = {unit: capabilities.start_layout(args, unit) for unit in capabilities.units(args)}
    return {**start, **layouts}


def setting_of(args: Any, device: dict[str, Any] = H100, gpus: int = 16) -> JobSetting:
    models = dict.fromkeys(capabilities.units(args), MODEL)
    can = capabilities.capabilities(args)
    return job_setting(args, models, can, device, gpus, min(8, gpus), 100)


def planned(args: Any, gpus: int, tokens: int = 512, replicas: int = 1) -> list[GlobalPlan]:
    """What the planner has for the job on so many GPUs, best first."""
    setting = setting_of(args)
    found = plan(
        setting.setting.job,
        setting.setting.cluster,
        setting.setting.workload(LengthDistribution.fixed(tokens)),
        gpus=gpus,
        capabilities=setting.capabilities(),
        current=described(args, in_force(args), replicas, "now"),
        alternatives=8,
    )
    return [found.plan, *(other for other, _ in found.alternatives)]


SHARING = {
    "each its own": {},
    "actor with reference": {"train__colocate_actor_ref": True},
    "sleeping": {"ds__enable_sleep": True},
    "AutoTP": {"ds__tensor_parallel_size": 2},
    "without a critic": {"critic__model_name_or_path": None},
}


@pytest.mark.parametrize("changes", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("gpus", [7, 12, 16])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_what_is_planned_can_be_run(changes: dict[str, Any], gpus: int, tokens: int) -> None:
    args = job(**changes)
    now = described(args, in_force(args), 1, "now")
    plans = planned(args, gpus, tokens)
    assert len(plans) > 1 or gpus == 7  # of which AutoTP leaves none to move
    for one in plans:
        asked = check_plan(as_written(one, now, "plan"), "plan")
        targets, replicas = preflight.plan_targets(args, asked, in_force(args), 1, "plan")
        after = {**in_force(args), **targets}
        assert described(args, after, replicas, one.name).assignments == one.assignments
        assert len(one.devices) <= gpus
        # While models grow, those that shrink and the engines have their GPUs still.
        groups = {one.assignments[s].devices: now.assignments[s].devices for s in one.assignments}
        engines = one.assignments[S.ACTOR_GENERATE].devices
        held = sum(max(len(a), len(b)) for a, b in groups.items() if a != engines)
        assert held + 1 <= max(gpus, len(now.devices))


def test_of_more_gpus_models_and_engines_get_some() -> None:
    best = planned(job(), 16, 1024)[0]
    assert len(best.devices) > 7
    assert best.assignments[S.ACTOR_GENERATE].layout.dp > 1


def test_where_all_models_share_gpus_only_sharding_changes() -> None:
    args = job(
        train__colocate_all=True,
        vllm__num_engines=2,
        vllm__enable_sleep=True,
        vllm__gpu_memory_utilization=0.5,
        ds__enable_sleep=True,
    )
    plans = planned(args, 2, replicas=2)
    assert len({one.assignments[S.ACTOR_TRAIN].layout.sharding for one in plans}) > 1
    for one in plans:
        for stage, assignment in one.assignments.items():
            assert assignment.devices == (0, 1), stage
        written = as_written(one, described(args, in_force(args), 2, "now"), "plan")
        assert written["rollout"] == {"replicas": 2}
        assert {fields["dp"] for name, fields in written.items() if name != "rollout"} == {2}


def test_beside_autotp_no_other_zero_stage_is_proposed() -> None:
    args = job(ds__tensor_parallel_size=2)
    for one in planned(args, 16):
        assert {a.layout.tp for s, a in one.assignments.items() if s is not S.ACTOR_GENERATE} == {2}
        assert one.assignments[S.ACTOR_TRAIN].layout.sharding == "zero2"


def test_the_plan_in_force_is_a_plan_that_changes_nothing() -> None:
    args = job()
    now = described(args, in_force(args), 1, "now")
    assert now.assignments[S.ACTOR_TRAIN].devices == (0, 1)
    assert now.assignments[S.CRITIC_VALUES].devices == (2, 3)
    assert now.assignments[S.CRITIC_TRAIN].devices == (2, 3)
    assert now.assignments[S.REF_LOGPROB].devices == (4, 5)
    assert now.assignments[S.ACTOR_GENERATE].devices == (6,)
    asked = check_plan(as_written(now, now, "plan"), "plan")
    targets, replicas = preflight.plan_targets(args, asked, in_force(args), 1, "plan")
    assert (targets, replicas) == (in_force(args), 1)


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        (S.ACTOR_GENERATE, Assignment(Layout(tp=2), devices=(6, 7)), "vLLM's engines: tp stays 1"),
        (S.ACTOR_TRAIN, Assignment(Layout(dp=1, pp=2, sharding="zero2")), "pp stays 1"),
        (S.ACTOR_TRAIN, Assignment(Layout(dp=2, sharding="zero2"), Knobs(micro_batch=4)), "micro-"),
        (S.CRITIC_TRAIN, Assignment(Layout(dp=2, sharding="zero3"), devices=(2, 3)), "one layout"),
        (S.REF_LOGPROB, Assignment(Layout(dp=2, sharding="none")), "which models share GPUs"),
        (S.REWARD_SCORE, Assignment(Layout()), "this job has no reward-score"),
    ],
)
def test_what_openrlhf_cannot_change_is_refused(
    stage: ModelStage, change: Assignment, said: str
) -> None:
    args = job()
    now = described(args, in_force(args), 1, "now")
    with pytest.raises(SpecError, match=said):
        as_written(GlobalPlan({**now.assignments, stage: change}), now, "plan")


def test_ranks_that_stay_are_the_first_of_each_model() -> None:
    """A transition is estimated as the adapter executes it: a model beside one that shrinks does
    not move."""
    args = job()
    now = described(args, in_force(args), 1, "now")
    smaller = in_force(args, actor=Layout(dp=1, sharding="zero2"))
    after = described(args, smaller, 2, "after")
    old, new = apart(now, after)
    assert [old.assignments[s].devices for s in (S.ACTOR_TRAIN, S.CRITIC_TRAIN, S.REF_LOGPROB)] == [
        (0, 1), (2, 3), (4, 5),
    ]  # fmt: skip
    assert new.assignments[S.ACTOR_TRAIN].devices == (0,)
    assert new.assignments[S.CRITIC_TRAIN] == old.assignments[S.CRITIC_TRAIN]
    assert new.assignments[S.ACTOR_GENERATE].devices == (6, 7)
    inner = setting_of(args, gpus=8).setting
    found = GraphEstimator(inner, sharing_fixed=True)(now, after)
    assert found is not None
    assert found.seconds["rollout"] > 0  # another engine is started
    alone = described(args, smaller, 1, "after")
    without = GraphEstimator(inner, sharing_fixed=True)(now, alone)
    assert without is not None
    assert "rollout" not in without.seconds


def step(number: int, args: Any, layouts: dict[str, Layout], epoch: int) -> StepRecord:
    return StepRecord(
        step=number, epoch=epoch, time_unix_s=float(number), step_s=50.0,
        stages_s={"gen": 30.0, "update_actor": 10.0, "update_critic": 8.0, "ref": 3.0,
                  "values": 3.0, "old_log_prob": 3.0},
        tokens={"prompt": 64 * 1024, "response": 64 * 512, "total": 64 * 1536}, samples=64,
        memory_bytes={"allocated": 0}, metrics={},
        plan={name: layout.to_dict() for name, layout in layouts.items()},
    )  # fmt: skip


def test_a_controller_leaves_gpus_that_are_taken() -> None:
    """Seven GPUs, of which three go; then what it proposed is in force, and it stays."""
    args, layouts = job(), in_force(job())
    now = described(args, layouts, 1, "epoch-0")
    controller = Controller(setting_of(args, gpus=8), ControllerConfig(), now, 0)
    controller.observe(step(1, args, layouts, 0))
    assert controller.learned.calibration.seconds_filters  # OpenRLHF's records teach it
    assert {s for s, _ in controller.learned.calibration.seconds_filters} >= {
        S.ACTOR_GENERATE, S.ACTOR_TRAIN, S.CRITIC_TRAIN, S.CRITIC_VALUES, S.REF_LOGPROB,
    }  # fmt: skip
    decision = controller.decide((Lease(4), Lease(3, until_s=1.0)), 1)
    assert (decision.kind, decision.forced) == ("propose", True)
    assert decision.plan is not None
    assert len(decision.plan.devices) == 4
    written = as_written(decision.plan, now, "plan")
    assert {name: fields["dp"] for name, fields in written.items() if name != "rollout"} == {
        "actor": 1, "critic": 1, "ref": 1,
    }  # fmt: skip
    controller.observe(
        TransitionRecord(
            step=2, epoch=1, time_unix_s=2.0, outcome="committed", reason="", units={},
            seconds={"prepare": 1.0}, digest="", predicted=decision.predicted(),
        )
    )  # fmt: skip
    assert controller.plan.assignments == decision.plan.assignments
    assert controller.decide((Lease(4),), 2).kind == "stay"


def test_a_reward_models_seconds_are_learned() -> None:
    args = job(reward__remote_url=None, reward__model_name_or_path="m")
    layouts = in_force(args)
    now = described(args, layouts, 1, "epoch-0")
    controller = Controller(setting_of(args), ControllerConfig(), now, 0)
    made = step(1, args, layouts, 0)
    scored = {**made.stages_s, "reward_score": 2.0}
    controller.observe(dataclasses.replace(made, stages_s=scored))
    known = controller.learned.calibration.seconds_filters
    assert (S.REWARD_SCORE, layouts["reward"]) in known


def test_of_fewer_gpus_than_models_and_engines_nothing_is_proposed() -> None:
    args = job()
    assert capabilities.fewest_gpus(args) == 4
    assert capabilities.fewest_gpus(job(train__colocate_actor_ref=True)) == 3
    now = described(args, in_force(args), 1, "epoch-0")
    controller = Controller(setting_of(args), ControllerConfig(), now, 0)
    controller.observe(step(1, args, in_force(args), 0))
    decision = controller.decide((Lease(3), Lease(4, until_s=1.0)), 1)
    assert decision.kind == "stay"
    assert "no plan that fits can be reached" in decision.reason


@pytest.mark.parametrize(
    ("prompts", "batch", "episodes", "steps"), [(8, 4, 2, 4), (10, 4, 2, 6), (3, 4, 5, 5)]
)
def test_steps_of_a_run(prompts: int, batch: int, episodes: int, steps: int) -> None:
    """Every episode trains on what is left of its prompts, too."""
    args = job(train__num_episodes=episodes)
    args.rollout.batch_size = batch
    trainer = SimpleNamespace(args=args, prompts_dataloader=range(prompts))
    assert openrlhf_private.steps_of(trainer) == steps


def test_the_setting_says_what_openrlhf_does() -> None:
    setting = setting_of(job())
    assert JobSetting.from_json(setting.to_json()) == setting
    inner = setting.setting
    assert (inner.prompts_per_step, inner.samples_per_prompt) == (64, 1)
    assert inner.mini_batch_prompts == 64
    assert (inner.job.backend, inner.job.algorithm) == ("deepspeed", "ppo")
    assert inner.job.reference
    assert inner.job.updates_together
    assert not inner.job.packed
    assert setting.max_response_tokens == 1024
    can = setting.capabilities()
    assert can.sharing_fixed
    assert can.dp_divides == 32
    assert not can.devices_fixed
    assert can.stages[S.ACTOR_TRAIN].layout_fields == {"dp", "sharding"}
    assert can.stages[S.ACTOR_GENERATE].layout_fields == {"dp"}
    averaging = setting_of(job(train__enable_ema=True))
    assert averaging.setting.job.average
    assert averaging.capabilities().stages[S.ACTOR_TRAIN].layout_fields == {"dp"}
    assert averaging.capabilities().stages[S.CRITIC_TRAIN].layout_fields == {"dp", "sharding"}
    assert all(not one.knob_fields for one in can.stages.values())
    assert lengths(job(rollout__max_new_tokens=None)) == (1024, 1024)


# -- the settings --------------------------------------------------------------------------------


def test_flags_of_the_controller() -> None:
    assert split([])[0].controller is None
    assert split(["--nereus.controller.mode", "off"])[0].controller is None
    words = ["--nereus.controller.mode", "act", "--nereus.controller.dwell_steps=2"]
    found = split([*words, "--nereus.controller.budget", "1", "--nereus.enable"])[0]
    assert found.controller == ControllerConfig(mode="act", dwell_steps=2, budget=1.0)
    assert found.enable
