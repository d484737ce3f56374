"""Everything of verl's that has no public name, each wrapped once.

Written against and tested with the versions in `TESTED`; `check_version` refuses others, because a
change in any of these would otherwise show as wrong numbers rather than as an error.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

TESTED = ("0.9.1",)


class UnsupportedVerl(RuntimeError):
    """An installed verl that this adapter was not tested with."""


def verl_version() -> str:
    return version("verl")


def check_version() -> None:
    """Raises: UnsupportedVerl naming the versions that work."""
    found = verl_version()
    if found not in TESTED:
        raise UnsupportedVerl(
            f"Nereus works with verl {', '.join(TESTED)}; found {found}. Install "
            f"verl=={TESTED[-1]}, or run without +nereus=on"
        )


# -- where a worker's data goes ----------------------------------------------------------------


def set_dispatch(worker: Any, mesh: str, dp_rank: int, is_collect: bool) -> None:
    """Replace what a worker registered for a mesh; verl itself refuses a second registration.

    A worker that never registered `mesh` is left alone.
    """
    dispatch, collect = worker._Worker__dispatch_dp_rank, worker._Worker__collect_dp_rank
    if mesh in dispatch:
        dispatch[mesh] = dp_rank
        collect[mesh] = is_collect


def forget_dispatch(worker_group: Any) -> None:
    """Drop the driver's copy of the workers' registrations; verl asks again at the next use."""
    worker_group._dispatch_info.clear()
    worker_group._collect_info.clear()


@contextmanager
def dispatched_over(worker_group: Any, mesh: str, dp: int) -> Iterator[None]:
    """Inside, verl's driver takes `mesh` to have `dp` data-parallel ranks; for planning only."""
    info = worker_group._dispatch_info
    before = dict(info)
    info[mesh] = list(range(dp))
    try:
        yield
    finally:
        info.clear()
        info.update(before)


def workers_of(worker_group: Any) -> list[Any]:
    """Ray handles of the group's processes, by rank."""
    return list(worker_group._workers)


def call_worker(handle: Any, function: Any, *args: Any) -> Any:
    """Run `function(worker, *args)` in a worker process; returns Ray's reference to the result.

    By a method of verl's own Worker, because that runs in the thread that runs the engines. Ray's
    `__ray_call__` runs in another one where an actor has coroutines, as verl's workers have; and
    DTensor's caches and the current CUDA device belong to a thread.
    """
    return handle.execute_with_func_generator.remote(function, *args)


def roles_of(worker_dict: Any) -> dict[str, Any]:
    """The role workers inside one colocated process, by role name."""
    return dict(worker_dict.worker_dict)


# -- building an engine without reading the pretrained weights ----------------------------------
#
# A target layout's weights are all overwritten by moves, so reading them from disk (or the
# network) first would only cost time.


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: owner.__dict__[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def fsdp_without_weights(engine_cls: type) -> Iterator[None]:
    """Inside, an FSDP2 engine is built with allocated, unfilled parameters and without waiting.

    Buffers that are not part of the state dict (rotary frequencies) are computed as always. The
    barrier that verl has between loading and sharding is left out, so that a rank which fails
    while building cannot leave its peers waiting in a collective of the job's own world group.
    """
    from accelerate import init_empty_weights
    from transformers import PreTrainedModel

    module: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    if not issubclass(engine_cls, module.FSDPEngine):
        raise TypeError(f"{engine_cls.__name__} is not verl's FSDP engine")

    def init_context(use_meta_tensor: bool = True, mesh: Any = None) -> Any:
        return init_empty_weights if use_meta_tensor else (lambda: torch.device("cpu"))

    def from_config(cls: Any, path: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        chosen = {
            key: kwargs[key] for key in ("attn_implementation",) if kwargs.get(key) is not None
        }
        return cls._from_config(copy.deepcopy(config), dtype=dtype, **chosen)

    with (
        _replaced(
            module,
            get_init_weight_context_manager=init_context,
            fsdp2_load_full_state_dict=_allocate,
        ),
        _replaced(PreTrainedModel, from_pretrained=classmethod(from_config)),
        _replaced(torch.distributed, barrier=lambda *args, **kwargs: None),
    ):
        yield


@torch.no_grad()
def _allocate(
    model: torch.nn.Module, full_state: Any, device_mesh: Any = None, cpu_offload: Any = None
) -> None:
    """Stands in for verl's `fsdp2_load_full_state_dict`: places the model, fills no parameter."""
    from verl.utils.device import get_device_id

    device = get_device_id()
    buffers = {name: b for name, b in model.named_buffers() if not b.is_meta}
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu" if cpu_offload is not None else device)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    else:
        # Tied weights: verl builds them on the CPU, since meta tensors would lose the tie.
        model.to(device="cpu" if cpu_offload is not None else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


@contextmanager
def megatron_without_weights(engine: Any) -> Iterator[None]:
    """Inside, `engine.initialize()` builds the model but does not load pretrained weights."""
    module: ModuleType = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    build_config = engine._build_tf_config

    def build_config_then_hold_loading() -> None:
        build_config()
        bridge = engine.bridge
        if hasattr(bridge, "load_weights"):  # mbridge; saving needs the index that loading opens
            bridge.load_weights = lambda models, path, **kwargs: setattr(
                bridge, "safetensor_io", bridge._get_safetensor_io(path)
            )
        if hasattr(bridge, "load_hf_weights"):  # Megatron-Bridge
            bridge.load_hf_weights = lambda *args, **kwargs: None

    engine._build_tf_config = build_config_then_hold_loading
    try:
        with _replaced(module, load_mcore_dist_weights=lambda *args, **kwargs: None):
            yield
    finally:
        del engine._build_tf_config
        if getattr(engine, "bridge", None) is not None:
            for name in ("load_weights", "load_hf_weights"):
                vars(engine.bridge).pop(name, None)


@contextmanager
def optimizer_groups_of(old_optimizer: Any) -> Iterator[None]:
    """Inside, a Megatron optimizer is built without asking all ranks for their parameter groups.

    Megatron gathers the groups' keys over the job's world group, where a rank that failed to build
    would leave its peers waiting. The result is the same in every layout of a model, and
    `old_optimizer` was built from it, so each rank can tell it by itself.
    """
    known = _group_keys(old_optimizer)

    def gather(out: list[Any], value: Any, group: Any = None) -> None:
        if group is not None:
            raise RuntimeError("Megatron's optimizer gathers over another group than is known of")
        missing = [key for key in value if key not in known]
        if missing:
            raise RuntimeError(
                f"parameter groups {missing} of the target are not among those of the optimizer "
                f"in force, {known}"
            )
        out[:] = [known] * len(out)

    with _replaced(torch.distributed, all_gather_object=gather):
        yield


def _group_keys(optimizer: Any) -> list[Any]:
    """The keys by which Megatron made the parameter groups of `optimizer`."""
    from megatron.core.optimizer_param_scheduler import param_group_override_to_tuple

    if optimizer is None:
        return []
    keys = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        config = part.config
        defaults = {"wd_mult": 1.0, "max_lr": config.lr, "min_lr": config.min_lr}
        for group in part.param_groups:
            override = {k: group[k] for k, usual in defaults.items() if group[k] != usual}
            key = (
                param_group_override_to_tuple(override) if override else None,
                group["is_expert_parallel"],
            )
            if key not in keys:
                keys.append(key)
    return keys


def set_config(config: Any, **values: Any) -> None:
    """Set fields of one of verl's frozen engine configurations; unknown fields are refused."""
    for name, value in values.items():
        if not hasattr(config, name):
            raise AttributeError(f"{type(config).__name__} has no field {name!r}")
        object.__setattr__(config, name, value)
