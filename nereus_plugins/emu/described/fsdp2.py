"""An FSDP2 model (1-D, HSDP, or with tensor parallelism) and its Adam as shards and scalars.

Every parameter is a DTensor, whose placements say which box this rank holds; Adam's moments are
DTensors like it. Works on any module with DTensor or plain parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.described import torch_private as private
from nereus_plugins.emu.described.base import (
    DescribedUnit,
    LocalShard,
    Scalars,
    UnsupportedState,
    ensure_adam_state,
    group_scalars,
    load_groups,
    scalar_value,
    set_step,
)

# Wrappers that put themselves into parameter names and may differ between two layouts.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def describe_fsdp2(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    lr_scheduler: Any | None = None,
    grad_scaler: Any | None = None,
) -> DescribedUnit:
    """The live state of an FSDP2 model on this rank.

    Parameters are resharded first (an evaluation may have left the root gathered), and optimizer
    state that does not exist yet is allocated as the zeros the optimizer would start from.

    Args:
        module: the root that `fully_shard` was applied to.
        optimizer: torch's Adam or AdamW over its parameters; None for a model not trained.
        lr_scheduler: a torch LR scheduler, or None.
        grad_scaler: a torch GradScaler, or None.

    Raises:
        UnsupportedState: something is not a box, or its memory is away; names the setting.
    """
    reshard(module)
    if optimizer is not None:
        ensure_adam_state(optimizer)
    shards: list[LocalShard] = []
    steps: dict[str, float] = {}
    for name, param in _named_parameters(module):
        shards += _shard(f"weight/{name}", param)
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in state:
                shards += _shard(f"{kind}/{name}", state[kind])
        if "step" in state:
            steps[name] = float(state["step"])
    for name, buffer in private.persistent_buffers(module):
        shards += _shard(f"buffer/{_clean(name)}", buffer)
    scalars: Scalars = {}
    if optimizer is not None:
        scalars["steps"] = steps
        scalars["groups"] = {
            str(i): group_scalars(group) for i, group in enumerate(optimizer.param_groups)
        }
    if lr_scheduler is not None:
        scalars["lr_scheduler"] = scalar_value(lr_scheduler.state_dict())
    if grad_scaler is not None:
        scalars["grad_scaler"] = scalar_value(grad_scaler.state_dict())
    return DescribedUnit(shards, scalars)


def load_scalars(
    scalars: Mapping[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    lr_scheduler: Any | None = None,
    grad_scaler: Any | None = None,
) -> None:
    """Set a unit's scalars: Adam steps, hyperparameters, LR scheduler, loss scale.

    Args:
        scalars: the union over the source ranks (`base.merge_scalars`).
        module, optimizer, lr_scheduler, grad_scaler: as in `describe_fsdp2`.

    Raises:
        KeyError: the source has no value for a parameter or a parameter group of the target.
    """
    if lr_scheduler is not None and "lr_scheduler" in scalars:
        lr_scheduler.load_state_dict(dict(scalars["lr_scheduler"]))
    if grad_scaler is not None and "grad_scaler" in scalars:
        grad_scaler.load_state_dict(dict(scalars["grad_scaler"]))
    if optimizer is None:
        return
    ensure_adam_state(optimizer)
    load_groups(optimizer, scalars["groups"])
    for name, param in _named_parameters(module):
        if param in optimizer.state and "step" in optimizer.state[param]:
            set_step(optimizer.state[param], scalars["steps"][name])


def ensure_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate both moments and the step counter of every parameter that has none."""
    ensure_adam_state(optimizer)


def reshard(module: torch.nn.Module) -> None:
    """Free gathered parameters, so that `parameters()` are this rank's shards."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, under its first name: tied weights are one tensor."""
    for name, param in module.named_parameters():
        yield _clean(name), param


def _shard(name: str, tensor: torch.Tensor) -> list[LocalShard]:
    """The box of `tensor` on this rank; none where an uneven division leaves it nothing."""
    if isinstance(tensor, DTensor):
        for placement in tensor.placements:
            if placement.is_partial():
                raise UnsupportedState(f"{name} is a partial sum over ranks, not a box")
        local = private.local_tensor(tensor)
        offset, shape = private.local_box(tensor)
        wanted = tensor.device_mesh.device_type
        if local.device.type != wanted:
            raise UnsupportedState(
                f"{name} is on {local.device.type}, its mesh on {wanted}: it is offloaded; load it "
                "first, and set offload_policy=False (FSDP2's CPUOffloadPolicy)"
            )
    else:
        local, offset, shape = tensor, (0,) * tensor.dim(), tuple(tensor.shape)
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedState(
            f"{name} is a {type(local).__name__}, not a plain tensor (fp8 or quantised weights?); "
            "set the parameter dtype to float32 or bfloat16"
        )
    view = local.detach()
    if view.numel() == 0:
        return []
    if view.untyped_storage().nbytes() == 0:
        raise UnsupportedState(f"{name} has no memory: it is offloaded; load it first")
    return [LocalShard(name, Box(offset, shape), tuple(tensor.shape), view)]
