"""A DeepSpeed engine (ZeRO 0 to 3, AutoTP) and its Adam as shards and scalars.

ZeRO-1 and 2 give each data-parallel rank a flat range of all parameters of a group, ZeRO-3 a flat
range of each parameter: both are a few boxes of each. AutoTP cuts a tensor along one dim, so a
flat range is one of the tensor-parallel shard, whose boxes are placed in the whole tensor.

What Adam updates is a tensor of its own ("master/..."), in fp32. With fp32 weights ZeRO-1 to 3 keep
such a copy too, where ZeRO-0 updates the weights themselves: there one memory is described under
both names, so that each layout has all tensors of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nereus_plugins.emu.boxes import Box, flat_range_to_boxes
from nereus_plugins.emu.described import deepspeed_private as private
from nereus_plugins.emu.described.base import (
    DescribedUnit,
    FreedGradients,
    LocalShard,
    Scalars,
    UnsupportedState,
    ensure_adam_state_of,
    group_scalars,
    load_groups,
    scalar_value,
    set_step,
)
from nereus_plugins.emu.described.torch_private import persistent_buffers


def describe_deepspeed(engine: Any) -> DescribedUnit:
    """The live state of a DeepSpeed engine on this rank.

    Gathered ZeRO-3 parameters are given back first, and moments that do not exist yet (no step
    taken) are allocated as the zeros that the optimizer would start from.

    Args:
        engine: what `deepspeed.initialize` returned, for a model that is trained or not.

    Raises:
        UnsupportedState: something is not a box, or its memory is away; names the setting.
        deepspeed_private.UntestedVersion: private names of this DeepSpeed were not checked.
    """
    private.check_version()
    _refuse_unsupported(engine)
    private.drop_gathered(engine)
    private.drop_host_copies(engine)
    ensure_optimizer_state(engine)
    shards: list[LocalShard] = []
    _refuse_tied_cut(engine.module)
    names: dict[int, str] = {}
    for name, param in engine.module.named_parameters():
        names[id(param)] = name
        shards += _weight(name, param)
    for partition in private.partitions(engine):
        shards += _optimizer_shards(engine, partition, names)
    for name, buffer in persistent_buffers(engine.module):
        shards.append(
            LocalShard(
                f"buffer/{name}", Box.whole(buffer.shape), tuple(buffer.shape), buffer.detach()
            )
        )
    _refuse_offloaded(shards)
    return DescribedUnit(shards, _scalars(engine, names))


def load_scalars(scalars: Mapping[str, Any], engine: Any) -> None:
    """Set a unit's scalars: Adam steps, hyperparameters, LR scheduler, loss scale, counters.

    Counters of micro-batches are those of the new number of accumulation steps.

    Args:
        scalars: the union over the source ranks (`base.merge_scalars`).
        engine: as in `describe_deepspeed`.

    Raises:
        KeyError: the source has no value for a parameter or a parameter group of the target.
    """
    _load_counters(engine, scalars.get("engine", {}))
    if engine.lr_scheduler is not None and "lr_scheduler" in scalars:
        engine.lr_scheduler.load_state_dict(dict(scalars["lr_scheduler"]))
    scaler = private.loss_scaler(engine)
    if scaler is not None:
        for key, value in scalars.get("grad_scaler", {}).items():
            if hasattr(scaler, key):
                setattr(scaler, key, value)
    adam = private.adam(engine)
    if adam is None:
        return
    ensure_optimizer_state(engine)
    load_groups(adam, scalars["groups"])
    names = {id(param): name for name, param in engine.module.named_parameters()}
    for partition in private.partitions(engine):
        steps = {scalars["steps"][names[id(p)]] for p in partition.params}
        if len(steps) > 1:
            raise UnsupportedState(
                f"parameters that the target updates as one took {sorted(steps)} steps"
            )
        set_step(adam.state[partition.main], steps.pop())


def ensure_optimizer_state(engine: Any) -> None:
    """Allocate both moments and the step counter of every partition that has none, and have
    DeepSpeed's own functions find them."""
    adam = private.adam(engine)
    if adam is None:
        return
    for partition in private.partitions(engine):
        ensure_adam_state_of(adam, adam.param_groups[partition.group], partition.main)
        if private.is_fused(adam):
            adam.state[partition.main].setdefault("step", 0)  # it does so only with the moments
    private.link_moments(engine)


def free_gradients(engine: Any) -> FreedGradients:
    """Free gradients and the buffers that they are reduced in: dead at an iteration boundary.

    The engine's next forward has the buffers again, zeroed.
    """
    private.drop_gradients(engine)
    freed = FreedGradients(private.gradient_buffers(engine))

    def restore(*_: Any) -> None:
        handle.remove()
        freed.restore()

    handle = engine.module.register_forward_pre_hook(restore, prepend=True)
    return freed


def release(engine: Any) -> None:
    """Undo what an engine registered outside of itself: hooks, entries in global lists.

    Its memory is free once nothing refers to it, the module included. Process groups are their
    maker's: collect them with `transport.groups.GroupSet` around `deepspeed.initialize`.
    """
    private.destroy(engine)


# -- boxes -------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A box of the whole tensor that a rank's tensor-parallel shard holds, as consecutive elements
    from `start` on of its own flat memory."""

    box: Box
    start: int


def _local_shape(param: Any) -> tuple[int, ...]:
    """Of the tensor-parallel shard, before data-parallel ranks cut it."""
    return private.zero3_shape(param) if private.is_zero3(param) else tuple(param.shape)


def _placed(name: str, param: torch.nn.Parameter) -> tuple[tuple[int, ...], list[_Part]]:
    """(shape of the whole tensor, the boxes of it that this rank's tensor-parallel shard is)."""
    local = _local_shape(param)
    cut = private.tensor_parallel_cut(param)
    if cut is None:
        return local, [_Part(Box.whole(local), 0)]
    if cut.unsupported is not None:
        raise UnsupportedState(
            f"AutoTP's cut of {name} is no box: {cut.unsupported}; set "
            "tensor_parallel.autotp_size=1"
        )
    parts: list[_Part] = []
    start = 0
    for base, widths in zip(_starts([sum(w) for w in cut.sizes]), cut.sizes, strict=True):
        offset, shape = [0] * len(cut.shape), list(cut.shape)
        offset[cut.dim] = base + sum(widths[: cut.rank])
        shape[cut.dim] = widths[cut.rank]
        parts.append(_Part(Box(tuple(offset), tuple(shape)), start))
        start += parts[-1].box.numel
    held = list(cut.shape)
    held[cut.dim] = sum(widths[cut.rank] for widths in cut.sizes)
    if tuple(held) != local:
        raise UnsupportedState(f"{name} has shape {local} where AutoTP's cut says {tuple(held)}")
    return cut.shape, parts


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return itertools.accumulate(sizes[:-1], initial=0)


def _flat_shards(
    kind: str, name: str, param: torch.nn.Parameter, start: int, flat: torch.Tensor
) -> list[LocalShard]:
    """Boxes of `flat`, which holds elements of the parameter's shard from `start` on."""
    shape, parts = _placed(name, param)
    end = start + flat.numel()
    shards = []
    for part in parts:
        low, high = max(start, part.start), min(end, part.start + part.box.numel)
        if low >= high:
            continue
        for cut in flat_range_to_boxes(part.box.shape, low - part.start, high - part.start):
            at = part.start + cut.lo - start
            view = flat[at : at + cut.box.numel].view(cut.box.shape)
            shards.append(
                LocalShard(f"{kind}/{name}", cut.box.shifted(part.box.offset), shape, view)
            )
    return shards


def _weight(name: str, param: Any) -> list[LocalShard]:
    if private.is_zero3(param):
        start, numel = private.zero3_range(param)
        return _flat_shards("weight", name, param, start, param.ds_tensor.detach()[:numel])
    if not param.is_contiguous():
        raise UnsupportedState(f"{name} is not contiguous in memory")
    return _flat_shards("weight", name, param, 0, param.detach().view(-1))


def _optimizer_shards(
    engine: Any, partition: private.Partition, names: Mapping[int, str]
) -> list[LocalShard]:
    adam = private.adam(engine)
    assert adam is not None
    state = adam.state[partition.main]
    main = partition.main.detach().view(-1)
    shards = []
    for param, start, at, numel in partition.pieces:
        name = names[id(param)]
        kinds = {
            "master": main,
            **{kind: state[kind].view(-1) for kind in ("exp_avg", "exp_avg_sq")},
        }
        for kind, flat in kinds.items():
            shards += _flat_shards(kind, name, param, start, flat[at : at + numel])
    return shards


# -- scalars -----------------------------------------------------------------------------------

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "gas_boundary_ctr")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scalars(engine: Any, names: Mapping[int, str]) -> Scalars:
    scalars: Scalars = {"engine": _counters(engine)}
    if engine.lr_scheduler is not None:
        scalars["lr_scheduler"] = scalar_value(engine.lr_scheduler.state_dict())
    scaler = private.loss_scaler(engine)
    if scaler is not None:
        scalars["grad_scaler"] = {
            key: scalar_value(getattr(scaler, key)) for key in _LOSS_SCALE if hasattr(scaler, key)
        }
    adam = private.adam(engine)
    if adam is None:
        return scalars
    scalars["groups"] = {str(i): group_scalars(group) for i, group in enumerate(adam.param_groups)}
    scalars["steps"] = {
        names[id(param)]: float(adam.state[partition.main]["step"])
        for partition in private.partitions(engine)
        for param in partition.params
    }
    return scalars


def _counters(engine: Any) -> Scalars:
    """The engine's counters; micro-batches as whole accumulations, of which layouts differ."""
    counters: Scalars = {name: getattr(engine, name) for name in _COUNTERS}
    steps = engine.gradient_accumulation_steps()
    manual = private.manual_boundary(engine)
    if manual is not None:  # the caller says where accumulations end: it counts as it likes
        counters["accumulation_boundary"] = bool(manual)
        counters["micro_steps"] = engine.micro_steps
    elif engine.micro_steps % steps:
        raise UnsupportedState(
            f"the engine is inside of a gradient accumulation ({engine.micro_steps} micro-steps of "
            f"{steps} each); a layout changes between optimizer steps"
        )
    else:
        counters["accumulations"] = engine.micro_steps // steps
    return counters


def _load_counters(engine: Any, counters: Mapping[str, Any]) -> None:
    for name in _COUNTERS:
        if name in counters:
            setattr(engine, name, counters[name])
    if "accumulation_boundary" in counters:
        engine.set_gradient_accumulation_boundary(counters["accumulation_boundary"])
        engine.micro_steps = counters["micro_steps"]
    elif "accumulations" in counters:
        engine.micro_steps = counters["accumulations"] * engine.gradient_accumulation_steps()


# -- what is refused ---------------------------------------------------------------------------


def _refuse_unsupported(engine: Any) -> None:
    settings: list[tuple[bool, str]] = [
        (
            engine.zero_optimization() and engine.zero_use_cpu_optimizer(),
            "offload_optimizer keeps state in host memory; set offload_optimizer.device to none "
            "(OpenRLHF: leave --ds.adam_offload out)",
        ),
        (
            # Below stage 3 DeepSpeed does not look at the setting: weights are on the device.
            engine.zero_optimization_stage() == 3
            and getattr(engine.zero_offload_param(), "device", "none") != "none",
            "offload_param keeps weights in host memory; set offload_param.device to none",
        ),
        (
            engine.zero_optimization_stage() == 3 and engine.zero_hpz_partition_size() > 1,
            "zero_hpz_partition_size keeps a second copy of the weights; set it to 1 (OpenRLHF: "
            "--ds.zpg 1)",
        ),
        (engine.mics_shard_size() > 0, "MiCS is not supported; leave mics_shard_size out"),
        (
            engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights(),
            "quantized weights are not boxes; set zero_quantized_weights=false",
        ),
        (engine.has_moe_layers, "DeepSpeed's MoE layers are not supported; use a dense model"),
        (engine.is_deepcompile_active(), "DeepCompile is not supported; set deepcompile=false"),
        (
            engine.bf16_master_weights_and_gradients()
            or engine.fp16_master_weights_and_gradients(),
            "16-bit masters are not supported; leave *_master_weights_and_grads out",
        ),
    ]
    for refused, why in settings:
        if refused:
            raise UnsupportedState(why)
    adam = private.adam(engine)
    if not private.known_wrapper(engine):
        raise UnsupportedState(
            f"optimizer {type(engine.optimizer).__name__} is not supported; set the optimizer to "
            "AdamW, and leave ZenFlow and SuperOffload out"
        )
    if adam is not None and not (
        private.is_fused(adam) or type(adam) in (torch.optim.Adam, torch.optim.AdamW)
    ):
        raise UnsupportedState(
            f"optimizer {type(adam).__name__} is not supported; set the optimizer to AdamW "
            "(OpenRLHF: --optim adam)"
        )
    if offloaded := getattr(engine.optimizer, "offloaded_states", None):
        what = ", ".join(sorted(str(getattr(s, "value", s)) for s in offloaded))
        raise UnsupportedState(f"{what} are offloaded: call engine.reload_states() first")


def _refuse_tied_cut(module: torch.nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(param), name)
        if other != name and private.tensor_parallel_cut(param) is not None:
            raise UnsupportedState(
                f"AutoTP cuts {name}, which is also {other}; set tie_word_embeddings=false or "
                "tensor_parallel.autotp_size=1"
            )


def _refuse_offloaded(shards: Sequence[LocalShard]) -> None:
    for shard in shards:
        if shard.view.numel() and shard.view.untyped_storage().nbytes() == 0:
            raise UnsupportedState(
                f"{shard.name} has no memory on {shard.view.device}: it is offloaded; load it first"
            )
