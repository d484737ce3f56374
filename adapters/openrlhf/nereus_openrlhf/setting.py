"""OpenRLHF's arguments, and the devices they run on, as the controller is told of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_plugins.controller.devices import cluster
from nereus_plugins.controller.setting import JobSetting, first_lengths
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Capabilities
from nereus_plugins.planner.openrlhf_launch import openrlhf_job, prompts_of_update
from nereus_plugins.spec import LengthDistribution, ModelSpec
from nereus_plugins.trace.conditions import Setting


def job_setting(
    args: Any,
    models: Mapping[str, ModelSpec],
    capabilities: Capabilities,
    device: Mapping[str, Any],
    gpus: int,
    per_node: int,
    steps: int,
) -> JobSetting:
    """What the controller knows before the first step.

    Args:
        args: OpenRLHF's. models: those of the job, by name.
        device: of one rank: "name" and "memory_bytes". gpus: the most that there may ever be;
        per_node: on a node. steps: of the whole run.
    """
    prompt, longest = lengths(args)
    setting = Setting(
        job=job_spec(args, models),
        cluster=cluster(device, gpus, per_node),
        prompt_tokens=LengthDistribution.fixed(prompt),
        prompts_per_step=args.rollout.batch_size,
        samples_per_prompt=args.rollout.n_samples_per_prompt,
        mini_batch_prompts=prompts_of_update(
            args.train.batch_size, args.rollout.n_samples_per_prompt, args.rollout.batch_size
        ),
        epochs=args.train.max_epochs,
    )
    return JobSetting.of(setting, capabilities, first_lengths(longest), longest, steps)


def lengths(args: Any) -> tuple[int, int]:
    """(tokens of a prompt, of the longest response). OpenRLHF limits their sum, and perhaps the
    response: without that, half of the sum is assumed, as by `nereus check`."""
    total: int = args.data.max_len
    longest: int = min(args.rollout.max_new_tokens or total - total // 2, total - 1)
    return total - longest, longest


def job_spec(args: Any, models: Mapping[str, ModelSpec]) -> JobSpec:
    """The models, and what runs them."""
    return openrlhf_job(
        models["actor"],
        models.get("critic"),
        models.get("reward"),
        reference="ref" in models,
        entropy=args.actor.entropy_coef is not None,  # at 0 too it is computed
        attention=args.ds.attn_implementation,
        gradients=args.ds.grad_accum_dtype,
        compiled=bool(args.ds.use_liger_kernel),
        packed=bool(args.ds.packing_samples),
        engines_sleep=bool(args.vllm.enable_sleep),
        models_sleep=bool(args.ds.enable_sleep),
        colocate_all=bool(args.train.colocate_all),
        average=bool(args.train.enable_ema),
    )
