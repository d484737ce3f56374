"""verl's configuration, and the devices it runs on, as the controller is told of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.cost.hardware import CPU, GPU, GPUS, find_gpu
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.spec import (
    ClusterSpec,
    GPUSpec,
    LengthDistribution,
    LinkSpec,
    ModelStage,
)
from nereus_plugins.trace.conditions import Setting
from nereus_verl import jobconfig
from nereus_verl.jobconfig import select
from nereus_verl.preflight import Preflight

# Of one GPU to other nodes, where nobody says: the figure of `nereus plan`.
NETWORK_BYTES_S = 50e9
NETWORK_LATENCY_S = 8e-6
# Before a step was seen: the median of responses as a part of the longest, and the spread of their
# logarithm, as `nereus check` assumes them. What is measured takes their place.
MEDIAN, SIGMA = 0.5, 0.6
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
    responses = LengthDistribution.lognormal(max(1.0, MEDIAN * longest), SIGMA, max_tokens=longest)
    if device["name"] == CPU:
        capabilities = _on_cpu(capabilities)
    return JobSetting.of(setting, capabilities, responses, longest, steps)


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


def cluster(device: Mapping[str, Any], gpus: int, per_node: int) -> ClusterSpec:
    """Nodes of `per_node` such devices that hold `gpus`."""
    known = known_gpu(str(device["name"]), int(device["memory_bytes"]))
    on_cpu = known.name == CPU
    network = known.nvlink_bytes_s if on_cpu else NETWORK_BYTES_S
    return ClusterSpec(
        nodes=-(-gpus // per_node),
        gpus_per_node=per_node,
        gpu=GPUSpec(
            name=known.name,
            memory_bytes=int(device["memory_bytes"]),
            peak_flops=known.bf16_flops,
            memory_bandwidth_bytes_per_s=known.hbm_bytes_s,
        ),
        intra_node=LinkSpec(known.nvlink_bytes_s),
        inter_node=LinkSpec(network, NETWORK_LATENCY_S),
    )


def known_gpu(name: str, memory_bytes: int) -> GPU:
    """The GPU of the cost model that torch calls `name` ("NVIDIA H100 80GB HBM3"); of several with
    that chip, and where none has it, the one whose memory is nearest. What it is off by, the job
    teaches."""
    try:
        return find_gpu(name)
    except KeyError:
        pass
    words = name.lower().replace("-", " ").split()
    compact = "".join(words)
    gpus = [gpu for gpu in GPUS.values() if gpu.name != CPU]
    same = [gpu for gpu in gpus if gpu.name.split("_")[0] in (*words, *_endings(compact))]
    return min(same or gpus, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def _endings(compact: str) -> list[str]:
    """Of "nvidiageforcertx4090": "rtx4090" among them."""
    return [compact[at:] for at in range(len(compact))]


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
