"""verl's configuration, and the devices it runs on, as the controller is told of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus_plugins.controller.devices import cluster
from nereus_plugins.controller.setting import JobSetting, first_lengths
from nereus_plugins.cost.hardware import CPU
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.spec import LengthDistribution, ModelStage
from nereus_plugins.trace.conditions import Setting
from nereus_verl import jobconfig
from nereus_verl.jobconfig import select
from nereus_verl.preflight import Preflight

_OFFLOADS = ("offload_params", "offload_optimizer")


def job_setting(
    checked: Preflight,
    capabilities: Capabilities,
    device: Mapping[str, Any],
    gpus: int,
    steps: int,
) -> JobSetting:
    """What the controller knows before the first step.

    Args:
        device: of one rank: "name" and "memory_bytes" (`worker.device`).
        gpus: the most that there may ever be. steps: of the whole run.
    """
    config = checked.config
    longest = int(config["data"]["max_response_length"])
    samples = int(select(config, "actor_rollout_ref.rollout.n", 1))
    actor = "actor_rollout_ref.actor"
    mini = int(select(config, f"{actor}.ppo_mini_batch_size", config["data"]["train_batch_size"]))
    setting = Setting(
        job=job_spec(checked),
        cluster=cluster(device, gpus, int(config["trainer"]["n_gpus_per_node"])),
        prompt_tokens=LengthDistribution.fixed(int(config["data"]["max_prompt_length"])),
        prompts_per_step=int(config["data"]["train_batch_size"]),
        samples_per_prompt=samples,
        mini_batch_prompts=mini,
        epochs=int(select(config, f"{actor}.ppo_epochs", 1)),
    )
    if device["name"] == CPU:
        capabilities = _on_cpu(capabilities)
    return JobSetting.of(setting, capabilities, first_lengths(longest), longest, steps)


def job_spec(checked: Preflight) -> JobSpec:
    """The models that ranks hold, and what runs them. A reward model has GPUs or time of its own
    that no plan changes: it is left out."""
    config, models = checked.config, checked.models
    actor = "actor_rollout_ref.actor"
    megatron = checked.units["actor"].strategy == "megatron"
    return JobSpec(
        actor=models["actor"],
        algorithm="ppo" if "critic" in models else "grpo",
        critic=models.get("critic"),
        reference=jobconfig.uses_reference(config),
        entropy=bool(
            select(config, f"{actor}.entropy_coeff", 0.0)
            or select(config, f"{actor}.calculate_entropy", False)
        ),
        backend="megatron" if megatron else "fsdp",
        packed=bool(select(config, "actor_rollout_ref.model.use_remove_padding", False)),
        engine_sleeps=bool(select(config, "actor_rollout_ref.rollout.free_cache_engine", True)),
        rollout_max_sequences=int(select(config, "actor_rollout_ref.rollout.max_num_seqs", 1024)),
    )


def _on_cpu(capabilities: Capabilities) -> Capabilities:
    """What is worth changing there: offload has nowhere to go, and ranks that share a server of the
    CPU rollout divide nothing of its work."""
    stages = {
        stage: StageCapability(can.layout_fields, can.knob_fields - set(_OFFLOADS))
        for stage, can in capabilities.stages.items()
    }
    rollout = stages.get(ModelStage.ACTOR_GENERATE)
    if rollout is not None:
        stages[ModelStage.ACTOR_GENERATE] = dataclasses.replace(
            rollout, layout_fields=rollout.layout_fields - {"tp"}
        )
    return dataclasses.replace(capabilities, stages=stages)
