"""A Megatron-core model and its optimizer as shards and scalars.

Weights come from the model's own `sharded_state_dict()`. A distributed optimizer's checkpoint
formats are not boxes, but it records which flat range of each parameter it owns, and a flat range
of a row-major tensor is a few boxes. Works with `parallel_state` initialised (verl) or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from nereus_plugins.emu.boxes import Box, flat_range_to_boxes
from nereus_plugins.emu.described import megatron_private as private
from nereus_plugins.emu.described.base import (
    DescribedUnit,
    FreedGradients,
    LocalShard,
    Scalars,
    UnsupportedState,
    ensure_adam_state,
    group_scalars,
    load_group_scalars,
    scalar_value,
    set_step,
)

# Identify a parameter group across layouts: Megatron's own checkpoints match groups by the first
# four; the learning-rate bounds tell apart groups made by config overrides.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")


def describe_megatron(
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    *,
    dp_cp_group: dist.ProcessGroup,
    lr_scheduler: Any | None = None,
) -> DescribedUnit:
    """The live state of a Megatron-core model on this rank.

    Optimizer state that does not exist yet (no step taken) is allocated as zeros, which is what the
    optimizer itself would start from.

    Args:
        model_chunks: the rank's chunks (one, or several with virtual pipeline stages), wrapped in
            DDP and Float16Module or not.
        optimizer: what `get_megatron_optimizer` returned; None for a model that is not trained.
        dp_cp_group: the data-parallel group with context parallel ranks.
        lr_scheduler: Megatron's OptimizerParamScheduler, or None.

    Raises:
        UnsupportedState: something is not a box, or its memory is away; names the setting.
        megatron_private.UntestedVersion: private names of this megatron-core were not checked.
    """
    private.check_version()
    _refuse_unsupported(model_chunks, optimizer)
    if optimizer is not None:
        ensure_optimizer_state(optimizer)
    owners = _owners(optimizer)
    shards: list[LocalShard] = []
    steps: dict[str, float] = {}
    for chunk in model_chunks:
        params, objects = private.sharded_model_state(unwrap(chunk), dp_cp_group)
        for entry in objects:
            _refuse_extra_state(entry)
        for param in params:
            _check_pieces(param)
            kind = "weight" if isinstance(param.data, torch.nn.Parameter) else "buffer"
            shards += _whole(kind, param.pieces, param.data)
            owner = owners.get(id(param.data))
            if owner is None:
                continue
            for kind, tensor, start in owner.states(param.data):
                shards += _flat(kind, param.pieces, tensor, start)
            if owner.step is not None:
                steps[_param_name(param.pieces[0])] = owner.step
    _refuse_offloaded(shards)
    return DescribedUnit(shards, _scalars(optimizer, lr_scheduler, steps))


def load_scalars(
    scalars: Mapping[str, Any],
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any | None,
    *,
    dp_cp_group: dist.ProcessGroup,
    lr_scheduler: Any | None = None,
) -> None:
    """Set a unit's scalars: Adam steps, hyperparameters, LR scheduler, loss scale.

    Args:
        scalars: the union over the source ranks (`base.merge_scalars`).
        model_chunks, optimizer, dp_cp_group, lr_scheduler: as in `describe_megatron`.

    Raises:
        KeyError: the source has no value for a parameter or a parameter group of the target.
    """
    if lr_scheduler is not None and "lr_scheduler" in scalars:
        lr_scheduler.num_steps = 0  # load_state_dict adds to it
        lr_scheduler.load_state_dict(dict(scalars["lr_scheduler"]))
    if optimizer is None:
        return
    ensure_optimizer_state(optimizer)
    # After the scheduler, which recomputes lr and weight decay: the source's bits are kept.
    for part in private.split_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            load_group_scalars(group, _group_values(scalars, group))
        _load_grad_scaler(part, scalars.get("grad_scaler"))
    owners = _owners(optimizer)
    for chunk in model_chunks:
        for param in private.sharded_model_state(unwrap(chunk), dp_cp_group)[0]:
            owner = owners.get(id(param.data))
            if owner is not None and owner.step is not None:
                set_step(owner.adam_state, scalars["steps"][_param_name(param.pieces[0])])


def ensure_optimizer_state(optimizer: Any) -> None:
    """Allocate both moments and the step counter of every parameter that has none."""
    for part in private.split_optimizers(optimizer):
        ensure_adam_state(part.optimizer)


def free_gradients(
    model_chunks: Sequence[torch.nn.Module], optimizer: Any | None
) -> FreedGradients:
    """Free the gradients of DDP-wrapped chunks. They are dead at an iteration boundary.

    Before the model trains again (after an aborted transition), call `restore()` on the result.
    """
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    return FreedGradients(private.gradient_buffers(model_chunks))


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's DDP and Float16Module wrappers."""
    while not hasattr(chunk, "decoder"):
        inner = getattr(chunk, "module", None)
        if not isinstance(inner, torch.nn.Module):
            break
        chunk = inner
    return chunk


# -- optimizer state ---------------------------------------------------------------------------


@dataclass
class _Owner:
    """The optimizer state of one model parameter on this rank.

    `main` is what the optimizer updates: the parameter itself, its fp32 copy, or this rank's flat
    range of either. `start` is where that range begins in the flat parameter.
    """

    main: torch.Tensor
    adam_state: dict[str, Any]
    start: int

    @property
    def step(self) -> float | None:
        value = self.adam_state.get("step")
        return None if value is None else float(value)

    def states(self, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(kind, flat tensor, start of its range in the flat parameter)."""
        # Not by address: that of any storage without memory is 0.
        same = self.main.untyped_storage()._cdata == param.untyped_storage()._cdata
        if not same or self.main.dtype != param.dtype:
            yield "master", self.main, self.start
        for kind in ("exp_avg", "exp_avg_sq"):
            yield kind, self.adam_state[kind], self.start


def _owners(optimizer: Any | None) -> dict[int, _Owner]:
    """Optimizer state by `id` of the model parameter."""
    owners: dict[int, _Owner] = {}
    if optimizer is None:
        return owners
    for part in private.split_optimizers(optimizer):
        state = part.optimizer.state
        groups = part.optimizer.param_groups
        if isinstance(part, DistributedOptimizer):
            for param, (group, order) in part.model_param_group_index_map.items():
                owned = private.owned_range(part, param)
                if owned is not None and owned[1] > owned[0]:
                    main = groups[group]["params"][order]
                    owners[id(param)] = _Owner(main, state[main], owned[0])
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for params, mains in pairs:
                for param, main in zip(params, mains, strict=True):
                    owners[id(param)] = _Owner(main, state[main], 0)
            for params in part.fp32_from_fp32_groups:
                for param in params:
                    owners[id(param)] = _Owner(param, state[param], 0)
        else:
            for group in groups:
                for param in group["params"]:
                    owners[id(param)] = _Owner(param, state[param], 0)
    return owners


# -- boxes -------------------------------------------------------------------------------------


def _box(piece: ShardedTensor, offset: Sequence[int], shape: Sequence[int]) -> Box:
    """A box of the local tensor of `piece`, placed in the global tensor.

    The global tensor has `prepend_axis_num` leading dims (the layers, stacked) the local one lacks.
    """
    n = piece.prepend_axis_num
    base = tuple(piece.global_offset)
    inner = tuple(b + o for b, o in zip(base[n:], offset, strict=True))
    return Box(base[:n] + inner, (1,) * n + tuple(shape))


def _shard(kind: str, piece: ShardedTensor, box: Box, view: torch.Tensor) -> LocalShard:
    return LocalShard(
        f"{kind}/{piece.key}", box, tuple(piece.global_shape), view.detach().view(box.shape)
    )


def _whole(kind: str, pieces: Sequence[ShardedTensor], data: torch.Tensor) -> list[LocalShard]:
    return [_shard(kind, p, _box(p, (0,) * p.data.dim(), p.data.shape), p.data) for p in pieces]


def _flat(
    kind: str, pieces: Sequence[ShardedTensor], tensor: torch.Tensor, start: int
) -> list[LocalShard]:
    """Boxes of a flat range of a parameter: `tensor` holds elements from `start` on."""
    shards = []
    flat = tensor.detach().view(-1)
    end = start + flat.numel()
    base = 0
    for piece in pieces:
        shape = tuple(piece.data.shape)
        size = piece.data.numel()
        low, high = max(start, base), min(end, base + size)
        if low < high:
            for cut in flat_range_to_boxes(shape, low - base, high - base):
                view = flat[base + cut.lo - start : base + cut.hi - start]
                box = _box(piece, cut.box.offset, cut.box.shape)
                shards.append(_shard(kind, piece, box, view))
        base += size
    return shards


def _param_name(piece: ShardedTensor) -> str:
    """One parameter's name: the stacked tensor's, and the layer where layers are stacked."""
    stacked = piece.global_offset[: piece.prepend_axis_num]
    return piece.key + "".join(f"[{i}]" for i in stacked)


def _check_pieces(param: private.ShardedParam) -> None:
    """Pieces must be consecutive views of the parameter, or flat ranges would land elsewhere."""
    data = param.data
    if not data.is_contiguous():
        raise UnsupportedState(f"{param.pieces[0].key} is not contiguous in memory")
    address = data.data_ptr()
    for piece in param.pieces:
        if piece.data.data_ptr() != address or piece.flattened_range is not None:
            raise UnsupportedState(f"{piece.key} is not a view of its parameter's memory")
        address += piece.data.numel() * piece.data.element_size()


# -- scalars -----------------------------------------------------------------------------------


def _scalars(
    optimizer: Any | None, lr_scheduler: Any | None, steps: Mapping[str, float]
) -> Scalars:
    scalars: Scalars = {}
    if optimizer is not None:
        scalars["groups"] = {}
        scalars["steps"] = dict(steps)
        for part in private.split_optimizers(optimizer):
            for group in part.optimizer.param_groups:
                values = group_scalars(group)
                if not group["params"]:
                    values.pop("step", None)  # FusedAdam does not count in an empty group
                scalars["groups"].setdefault(_group_id(group), {}).update(values)
            scaler = part.grad_scaler.state_dict() if getattr(part, "grad_scaler", None) else {}
            if scaler:
                scalars["grad_scaler"] = scalar_value(scaler)
    if lr_scheduler is not None:
        scalars["lr_scheduler"] = scalar_value(lr_scheduler.state_dict())
    return scalars


def _group_id(group: Mapping[str, Any]) -> str:
    return json.dumps({k: scalar_value(group[k]) for k in _GROUP_KEYS if k in group})


def _group_values(scalars: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
    known = scalars["groups"]
    identity = _group_id(group)
    if identity not in known:
        raise KeyError(
            f"the source has no parameter group {identity}; it has {sorted(known)}: the optimizer "
            "settings (lr, min_lr, weight decay, decoupled lr) must be the same in both layouts"
        )
    values: Mapping[str, Any] = known[identity]
    return values


def _load_grad_scaler(part: Any, values: Mapping[str, Any] | None) -> None:
    scaler = getattr(part, "grad_scaler", None)
    if scaler is None or values is None:
        return
    state = dict(scaler.state_dict())
    for key, value in values.items():
        old = state.get(key)
        state[key] = torch.full_like(old, value) if isinstance(old, torch.Tensor) else value
    scaler.load_state_dict(state)


# -- what is refused ---------------------------------------------------------------------------

_REFUSED_OPTIMIZER = {
    "use_precision_aware_optimizer": "keeps its state in other types than two fp32 moments",
    "optimizer_cpu_offload": "keeps its state in host memory",
    "reuse_grad_buf_for_mxfp8_param_ag": "keeps fp8 weights, which are not boxes",
    "overlap_param_gather_with_optimizer_step": "leaves weights stale between iterations",
}
_REFUSED_DDP = {
    "use_megatron_fsdp": "shards with Megatron-FSDP",
    "use_custom_fsdp": "shards with Megatron-FSDP",
    "fp8_param_gather": "keeps fp8 weights, which are not boxes",
    "overlap_param_gather": "leaves weights stale between iterations",
}


def _refuse_unsupported(chunks: Sequence[torch.nn.Module], optimizer: Any | None) -> None:
    def refuse(config: Any, names: Mapping[str, str]) -> None:
        for name, why in names.items():
            if getattr(config, name, False):
                raise UnsupportedState(f"{name}=True {why}; set {name}=False")

    for chunk in chunks:
        refuse(getattr(chunk, "ddp_config", None), _REFUSED_DDP)
        if getattr(getattr(unwrap(chunk), "config", None), "fp8_param", False):
            raise UnsupportedState("fp8_param=True keeps fp8 weights; set fp8_param=False")
    if optimizer is None:
        return
    for part in private.split_optimizers(optimizer):
        refuse(part.config, _REFUSED_OPTIMIZER)
        known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
        if not isinstance(part, known):
            raise UnsupportedState(
                f"optimizer {type(part).__name__} is not supported; set optimizer=adam"
            )


def _refuse_extra_state(entry: Any) -> None:
    """TransformerEngine modules report an extra state even when it is empty; content is fp8's."""
    data = entry.data
    if isinstance(data, torch.Tensor):
        empty = data.numel() == 0
    elif hasattr(data, "getbuffer"):
        empty = data.getbuffer().nbytes == 0
    else:
        empty = data is None or len(data) == 0
    if not empty:
        raise UnsupportedState(
            f"{entry.key} carries extra state that is not a box (fp8 scaling?); set fp8=None"
        )


def _refuse_offloaded(shards: Sequence[LocalShard]) -> None:
    for shard in shards:
        if shard.view.numel() and shard.view.untyped_storage().nbytes() == 0:
            raise UnsupportedState(
                f"{shard.name} has no memory on {shard.view.device}: it is offloaded; load it first"
            )
