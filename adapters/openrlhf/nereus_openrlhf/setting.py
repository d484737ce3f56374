"""OpenRLHF's arguments, and the devices they run on, as the controller is told of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_plugins.controller.devices import cluster
from nereus_plugins.controller.setting import JobSetting, first_lengths
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Capabilities
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
        # --train.batch_size counts samples.
        mini_batch_prompts=max(1, args.train.batch_size // args.rollout.n_samples_per_prompt),
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
    """The models, and what runs them (as `nereus check` reads a command)."""
    return JobSpec(
        models["actor"],
        algorithm="ppo" if "critic" in models else "grpo",
        critic=models.get("critic"),
        reward=models.get("reward"),
        reference="ref" in models,
        entropy=args.actor.entropy_coef is not None,  # at 0 too it is computed
        backend="deepspeed",
        attention="fa3" if "3" in args.ds.attn_implementation else "fa2",
        compiled=bool(args.ds.use_liger_kernel),
        packed=bool(args.ds.packing_samples),
        grad_bytes=4 if args.ds.grad_accum_dtype in ("fp32", "float32", "torch.float32") else 2,
        engine_sleeps=bool(args.vllm.enable_sleep) or not args.train.colocate_all,
        updates_together=not args.ds.enable_sleep,
    )
