"""The one entry: makes this process's verl run on CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nereus_cpu.checks import CpuPlatformError, expect
from nereus_cpu.post_import import after_import

ROLLOUT_NAME = "hf_cpu"
_installed = False


def install_for_verl() -> None:
    """Registers platform and rollout, and arranges the patches of the engines. Idempotent.

    Raises: CpuPlatformError, where CUDA is present: nothing here may touch a job on GPUs.
    """
    global _installed
    if _installed:
        return
    import torch

    if torch.cuda.is_available():
        raise CpuPlatformError(
            "VERL_PLATFORM=cpu was asked for on a machine with CUDA; nereus_cpu is for machines "
            "without: unset VERL_PLATFORM (or hide the GPUs)"
        )
    from nereus_cpu import mbridge, megatron, memory, platform, vllm

    megatron.install()  # before anything imports megatron.core
    platform.install()
    memory.install(platform.CpuPlatform.device_module)
    vllm.install()
    _register_rollout()
    after_import("verl.workers.engine.base", _watch_memory)
    after_import("verl.workers.engine.fsdp.transformer_impl", _patch_fsdp)
    after_import("mbridge.core.llm_bridge", mbridge.patch_layer_specs)
    after_import("mbridge.core.bridge", mbridge.patch_weight_names)
    after_import("verl.workers.engine.megatron.transformer_impl", _patch_megatron)
    _installed = True


def _register_rollout() -> None:
    # By name: nereus_cpu.rollout imports verl, and may be what is importing verl just now.
    from verl.workers.rollout import base, replica

    expect(
        hasattr(base, "_ROLLOUT_REGISTRY"), "verl.workers.rollout.base._ROLLOUT_REGISTRY is gone"
    )
    base._ROLLOUT_REGISTRY[ROLLOUT_NAME, "async"] = "nereus_cpu.rollout.ServerAdapter"

    def load() -> Any:
        from nereus_cpu.rollout import HFReplica

        return HFReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)


def _watch_memory(module: ModuleType) -> None:
    from nereus_cpu import memory, platform

    memory.watch_passes(module, platform.CpuPlatform.device_module)


def _patch_fsdp(module: ModuleType) -> None:
    from nereus_cpu import fsdp

    fsdp.patch_engine(module)


def _patch_megatron(module: ModuleType) -> None:
    from nereus_cpu import verl_megatron

    verl_megatron.patch_engine(module)
