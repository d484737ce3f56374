"""The `--nereus.*` flags of `nereus-openrlhf`: what they take, and what is refused by its flag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nereus_openrlhf import capabilities, preflight
from nereus_openrlhf.config import NereusConfig, split

from nereus_plugins.spec import Layout, SpecError


def space(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def arguments(**changes: Any) -> SimpleNamespace:
    """OpenRLHF's arguments, as far as they are looked at. Args: changes: "ds.zpg" as ds__zpg."""
    gpus = {"num_nodes": 1, "num_gpus_per_node": 2}
    args = space(
        actor=space(**gpus, model_name_or_path="m", optim="adam"),
        critic=space(**gpus, model_name_or_path="m", optim="adam"),
        ref=space(**gpus, offload=False),
        reward=space(**gpus, remote_url=["f.py"], model_name_or_path=None, offload=False),
        ds=space(
            zero_stage=2,
            param_dtype="bf16",
            ring_attn_size=1,
            tensor_parallel_size=1,
            adam_offload=False,
            enable_sleep=False,
            lora=space(rank=0),
            load_in_4bit=False,
            deepcompile=False,
            zpg=1,
        ),
        train=space(
            async_enable=False,
            dynamic_batch_enable=False,
            enable_ema=False,
            colocate_all=False,
            colocate_actor_ref=False,
            colocate_critic_reward=False,
            batch_size=8,
            micro_batch_size=2,
        ),
        rollout=space(batch_size=8, n_samples_per_prompt=1, micro_batch_size=2),
        algo=space(kl=space(init_coef=0.0)),
        vllm=space(num_engines=1, tensor_parallel_size=1),
        data=space(max_images_per_prompt=0),
    )
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = args
        for name in parents:
            at = getattr(at, name)
        setattr(at, last, value)
    return args


def test_flags_are_told_apart() -> None:
    words = ["--nereus.enable", "--actor.optim", "adam", "--nereus.timeout_s=30"]
    words += ["--nereus.schedule", "{2: {dp: 1, sharding: zero3}}", "--ds.zero_stage", "2"]
    nereus, rest = split(words)
    assert rest == ["--actor.optim", "adam", "--ds.zero_stage", "2"]
    assert nereus.enable
    assert nereus.timeout_s == 30.0
    assert dict(nereus.schedule[2]) == {"dp": 1, "sharding": "zero3"}
    assert split(rest) == (NereusConfig(), rest)
    assert not split(["--nereus.enable", "false"])[0].enable


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nereus.enabel"], "did you mean --nereus.enable"),
        (["--nereus.enable", "maybe"], "enable"),
        (["--nereus.timeout_s", "0"], "timeout_s"),
        (["--nereus.schedule", "{"], "--nereus.schedule: not valid YAML"),
        (["--nereus.schedule", "{2: {dp: 1}, 2: {dp: 2}}"], "key 2 is given twice"),
        (["--nereus.schedule", "{2: {dp: 1, dp: 2}}"], "key 'dp' is given twice"),
        (["--nereus.schedule", "{0: {dp: 1}}"], "nereus.schedule"),
        (["--nereus.schedule", "{1: {dp: 1.5}}"], "nereus.schedule.1"),
        (["--nereus.schedule", "{1: {dq: 1}}"], "dp"),
        (["--nereus.schedule", "{1: {sharding: zero4}}"], "sharding"),
        (["--nereus.schedule", "{1: {actr: {dp: 1}}}"], "actor"),
        (["--nereus.schedule", "{1: {rollout: {tp: 2}}}"], "replicas"),
        (["--nereus.checksum", "--nereus.checksum"], "twice"),
        (["--nereus.controller.mode", "on"], "controller.mode must be one of off, observe"),
        (["--nereus.controller.mod", "act"], "did you mean --nereus.controller.mode"),
        (["--nereus.controller", "act"], "is not a flag of Nereus"),
        (["--nereus.controller.mode=act", "--nereus.controller.confidence=2"], "confidence"),
        (["--nereus.controller.mode=act", "--nereus.control=false"], "--nereus.control true"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        split(words)


def targets(plan: dict[str, Any], **changes: Any) -> tuple[dict[str, Layout], int]:
    args = arguments(**changes)
    layouts = {unit: capabilities.start_layout(args, unit) for unit in capabilities.units(args)}
    return preflight.plan_targets(args, plan, layouts, 1, "here")


def test_a_plan_says_what_changes() -> None:
    zero2 = Layout(dp=2, sharding="zero2")
    assert targets({"dp": 1}) == (dict.fromkeys(("actor", "critic"), Layout(sharding="zero2")), 1)
    layouts, engines = targets({"critic": {"sharding": "zero3"}, "rollout": {"replicas": 2}})
    assert layouts == {"critic": Layout(dp=2, sharding="zero3")}
    assert engines == 2
    assert capabilities.start_layout(arguments(), "actor") == zero2
    # AutoTP is one for all, also for those that do not train; ranks are dp * tp.
    layouts, _ = targets({"tp": 2, "dp": 1}, algo__kl__init_coef=0.1)
    assert layouts == {
        "actor": Layout(tp=2, sharding="zero2"),
        "critic": Layout(tp=2, sharding="zero2"),
        "ref": Layout(dp=2, tp=2),
    }
    cut = capabilities.start_layout(arguments(ds__tensor_parallel_size=2), "actor")
    assert cut == Layout(tp=2, sharding="zero2")
    # Models that do not train are not cut, but under stage 3.
    assert capabilities.start_layout(arguments(), "ref") == Layout(dp=2)
    three = arguments(ds__zero_stage=3)
    assert capabilities.start_layout(three, "ref") == Layout(dp=2, sharding="zero3")


@pytest.mark.parametrize(
    ("plan", "changes", "said"),
    [
        ({"dp": 3}, {}, "rollout.micro_batch_size"),
        ({"actor": {"dp": 4}}, {"train__micro_batch_size": 4}, "train.batch_size"),
        ({"ref": {"dp": 1}}, {}, "no ref"),
        (
            {"ref": {"sharding": "zero1"}},
            {"algo__kl__init_coef": 0.1},
            "does not train",
        ),
        (
            {"actor": {"dp": 1}},
            {"algo__kl__init_coef": 0.1, "train__colocate_actor_ref": True},
            "share GPUs",
        ),
        ({"rollout": {"replicas": 2}}, {"train__colocate_all": True}, "train.colocate_all"),
        ({"actor": {"sharding": "none"}}, {"ds__enable_sleep": True}, "--ds.enable_sleep"),
        ({"actor": {"tp": 2}}, {}, "one --ds.tensor_parallel_size for all models"),
        ({"tp": 2, "sharding": "zero3"}, {}, "cannot gather"),
        ({"tp": 2}, {"ds__param_dtype": "fp16"}, "--ds.param_dtype bf16"),
        (
            {"sharding": "zero3"},
            {"train__enable_ema": True},
            "moving average of --train.enable_ema",
        ),
        ({"tp": 2, "dp": 2}, {"train__colocate_all": True}, "number of ranks"),
        ({"dp": 1}, {"ds__tensor_parallel_size": 4}, "must divide by --ds.tensor_parallel_size 4"),
    ],
)
def test_a_layout_that_openrlhf_would_not_run_is_refused(
    plan: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        targets(plan, **changes)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"train__async_enable": True}, "--train.async_enable"),
        ({"ds__ring_attn_size": 2}, "--ds.ring_attn_size"),
        ({"ds__adam_offload": True}, "--ds.adam_offload"),
        ({"critic__optim": "muon"}, "--critic.optim"),
        ({"ds__zpg": 8}, "--ds.zpg"),
    ],
)
def test_what_is_not_carried_is_refused_by_its_flag(change: dict[str, Any], flag: str) -> None:
    assert capabilities.refused_by(arguments()) == []
    (said,) = capabilities.refused_by(arguments(**change))
    assert flag in said
