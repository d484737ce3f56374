"""verl's platform interface for CPU and gloo (selected by VERL_PLATFORM=cpu)."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from nereus_cpu.checks import expect


class _CpuDeviceModule(types.ModuleType):
    """torch.cpu, plus the calls that verl makes on torch.cuda. All memory figures are zero, unless
    a rank has a budget (`nereus_cpu.memory`)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device_module() -> types.ModuleType:
    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    module = _CpuDeviceModule("nereus_cpu.device")
    calls: dict[str, Callable[..., Any]] = {
        "is_available": constant(False),
        "device_count": constant(0),
        "current_device": constant("cpu"),
        "get_device_name": constant("cpu"),
        "mem_get_info": constant((0, 1)),  # (free, total): verl divides by the total
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    calls |= dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "ipc_collect"), constant(None)
    )
    calls |= dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
        constant(0),
    )
    calls["reset_peak_memory_stats"] = constant(None)
    vars(module).update(calls)
    return module


class CpuPlatform(PlatformBase):
    """One process is one rank; Ray's logical GPUs (`ray.init(num_gpus=N)`) stand for the ranks."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by verl's own detection, only by VERL_PLATFORM=cpu

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def install() -> None:
    """Registers the platform and lets verl's process groups start on gloo."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)

    # verl asks for f"cpu:gloo,{device}:{backend}" (verl/utils/distributed.py), which with device
    # "cpu" names cpu twice, and torch refuses that.
    start = torch.distributed.init_process_group
    expect(callable(start), "torch.distributed.init_process_group is missing")

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        start("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
