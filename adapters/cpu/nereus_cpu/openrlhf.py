"""What OpenRLHF with DeepSpeed and vLLM needs to run on CPU and gloo: one process is one rank.

    python -m nereus_cpu.openrlhf <the arguments of openrlhf.cli.train_ppo_ray>

runs OpenRLHF as it is on a machine without GPUs; `nereus-openrlhf` calls the same functions where
DS_ACCELERATOR=cpu asks for it. Never active with CUDA.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from nereus_cpu import deepspeed, flash_attention
from nereus_cpu.checks import CpuPlatformError, expect
from nereus_cpu.gloo_group import form
from nereus_cpu.post_import import after_import

LAUNCHER = "openrlhf.cli.train_ppo_ray"
SETUP_HOOK = "nereus_cpu.openrlhf.install"  # run by Ray in every worker process
LOGICAL_GPUS = 16  # Ray's, which stand for ranks
KV_CACHE_BYTES = 64 << 20
EXTENSION = "nereus_cpu.vllm_extension.CpuWorkerWrap"
_installed = False


def install() -> None:
    """Makes this process's OpenRLHF run on CPU. Idempotent.

    Raises: CpuPlatformError, where CUDA is present: nothing here may touch a job on GPUs.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise CpuPlatformError(
            "DS_ACCELERATOR=cpu was asked for on a machine with CUDA; nereus_cpu is for machines "
            "without: unset DS_ACCELERATOR (or hide the GPUs)"
        )
    deepspeed.install()
    flash_attention.install()
    _replace_device_calls()
    after_import("openrlhf.utils.deepspeed.deepspeed", _strategy_on_cpu)
    after_import("openrlhf.utils.distributed_util", _sync_over_gloo)
    after_import("openrlhf.trainer.ray.vllm_engine", _engines_on_cpu)
    _installed = True


class _Device(str):
    """What OpenRLHF takes for the number of its CUDA device: "cpu" where it is used as a device, 0
    where it becomes a part of a device's name."""

    def __format__(self, spec: str) -> str:
        return "0"


def _replace_device_calls() -> None:
    """OpenRLHF calls torch.cuda without asking whether there is any."""
    cpu = _Device("cpu")

    def current_device() -> Any:
        return cpu

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    torch.cuda.current_device = current_device
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, nothing)


def _strategy_on_cpu(strategy: ModuleType) -> None:
    """Its mesh is one of CUDA devices, and its moving average is computed on one."""
    expect(hasattr(strategy, "init_device_mesh"), f"{strategy.__name__}.init_device_mesh is gone")
    make = strategy.init_device_mesh
    kind = strategy.DeepspeedStrategy
    expect(hasattr(kind, "moving_average"), f"{kind.__name__}.moving_average is gone")
    average = kind.moving_average

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make("cpu", *args, **kwargs)

    def moving_average(self: Any, model: Any, model_ema: Any, beta: float, device: str) -> None:
        average(self, model, model_ema, beta, "cpu")

    strategy.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]
    kind.moving_average = moving_average


def _sync_over_gloo(util: ModuleType) -> None:
    """The group by which weights reach vLLM is NCCL's own, beside torch's."""
    name = "stateless_init_process_group"
    expect(hasattr(util, name), f"{util.__name__}.{name} is gone")

    def stateless_init_process_group(
        master_address: str, master_port: int, rank: int, world_size: int, device: Any
    ) -> Any:
        return form(master_address, master_port, rank, world_size)

    setattr(util, name, stateless_init_process_group)


def _engines_on_cpu(engines: ModuleType) -> None:
    """vLLM's CPU build has no sleep mode, no Ray executor, and asks for gigabytes of cache.

    It generates one sequence at a time: which others are in a batch, a matter of timing, changes
    last bits, and with them what is sampled, and a job is to be the same when it is run again.
    """
    actor = engines.RolloutRayActor
    options = actor.options

    def with_options(*args: Any, **kwargs: Any) -> Any:
        handle = options(*args, **kwargs)
        start = handle.remote

        def remote(**settings: Any) -> Any:
            settings |= {
                "worker_extension_cls": EXTENSION,
                "kv_cache_memory_bytes": KV_CACHE_BYTES,
                "enable_sleep_mode": False,
                "max_num_seqs": 1,
            }
            if settings.get("distributed_executor_backend") == "ray":
                settings["distributed_executor_backend"] = "mp"
            return start(**settings)

        handle.remote = remote
        return handle

    actor.options = with_options


def environment() -> dict[str, str]:
    """Variables for every process of a job on CPU; what is set already stays."""
    usual = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # DeepSpeed compiles its Adam at first use: 2 GB for each compiler that runs.
        "MAX_JOBS": "1",
        "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions"),
    }
    variables = {name: os.environ.get(name, value) for name, value in usual.items()}
    # `ninja` of this environment, which may not have been activated.
    programs = os.path.dirname(sys.executable)
    path = os.environ["PATH"]
    inside = path.split(os.pathsep)[0] == programs
    variables["PATH"] = path if inside else programs + os.pathsep + path
    variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    return variables


def prepare() -> None:
    """Make this process one in which OpenRLHF can be imported and its arguments read.

    Raises: as `install`.
    """
    os.environ.update(environment())
    install()


@contextmanager
def ray_on_cpu() -> Iterator[None]:
    """Inside, Ray runs on this machine with logical GPUs, and its workers are set up for CPU.
    OpenRLHF uses a Ray that is there already."""
    import ray

    prepare()
    folder = tempfile.mkdtemp(prefix="nereus-ray-")
    ray.init(
        num_cpus=2 * LOGICAL_GPUS,
        num_gpus=LOGICAL_GPUS,
        include_dashboard=False,
        object_store_memory=256 << 20,
        _temp_dir=folder,
        runtime_env={"env_vars": environment(), "worker_process_setup_hook": SETUP_HOOK},
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """OpenRLHF itself, unchanged, on CPU."""
    with ray_on_cpu():
        sys.argv[0] = LAUNCHER
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
