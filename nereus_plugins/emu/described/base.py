"""What a built model reports about its own state on one rank: shards as views of live memory.

A described unit is the executable half of a unit: the framework's own objects say which box of
which named global tensor each piece of local memory holds. Nothing here re-implements how a
framework cuts its buffers, and nothing is copied: every `LocalShard.view` aliases live memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo

Scalars = dict[str, Any]


class UnsupportedState(RuntimeError):
    """State that is not a box of a named tensor; the message names the setting to change."""


class ScalarMismatch(RuntimeError):
    """Ranks of one unit disagree about state that must be the same on all of them."""


@dataclass(frozen=True)
class LocalShard:
    """One box of a named global tensor, and the live memory that holds it on this rank.

    Args:
        name: "<kind>/<tensor>", kind being weight, master, exp_avg, exp_avg_sq, buffer or average
            (a tensor of a moving average of the model).
        box: place in the global tensor.
        global_shape: shape of the whole tensor.
        view: zero-copy view of live memory; `view.shape == box.shape`.

    Raises:
        ValueError: the view's shape is not the box's, or the box leaves the tensor.
    """

    name: str
    box: Box
    global_shape: tuple[int, ...]
    view: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != tuple(self.box.shape):
            raise ValueError(
                f"{self.name}: view of shape {tuple(self.view.shape)} for a box of shape "
                f"{tuple(self.box.shape)}"
            )
        ends = [o + s for o, s in zip(self.box.offset, self.box.shape, strict=True)]
        if any(e > g for e, g in zip(ends, self.global_shape, strict=True)):
            raise ValueError(f"{self.name}: {self.box} leaves the tensor {self.global_shape}")

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, tuple(self.global_shape), dtype_name(self.view.dtype))

    @property
    def nbytes(self) -> int:
        return self.view.numel() * self.view.element_size()


@dataclass
class DescribedUnit:
    """A unit's state on this rank.

    Attributes:
        shards: boxes with their memory; the index of a shard is `local` in the shard table.
        scalars: JSON-able state that is not a box; its layout is described below in this file.
    """

    shards: list[LocalShard] = field(default_factory=list)
    scalars: Scalars = field(default_factory=dict)

    @property
    def views(self) -> list[torch.Tensor]:
        """Live views by local shard index, as a transport takes them."""
        return [s.view for s in self.shards]

    def storages(self) -> list[torch.UntypedStorage]:
        """Every allocation that holds a shard, once, in order of first use."""
        return list(unique_storages(self.shards).values())

    def table(self, rank: int) -> ShardTable:
        """Metadata of this rank's shards; row i is `shards[i]`.

        Args:
            rank: global rank that owns the shards.

        Raises:
            TableError: two shards disagree about the shape or dtype of one tensor.
        """
        storages = unique_storages(self.shards)
        keys = {pointer: key for key, pointer in enumerate(storages)}
        return ShardTable.from_shards(
            rank,
            [(s.info, s.box, keys[_pointer(s.view)]) for s in self.shards],
            [
                StorageInfo(rank=rank, key=keys[p], nbytes=s.nbytes(), device=str(s.device))
                for p, s in storages.items()
            ],
        )


def dtype_name(dtype: torch.dtype) -> str:
    """The name shard tables use: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _pointer(view: torch.Tensor) -> int:
    # The storage object's own identity, not its data pointer: a parked storage has no memory.
    return view.untyped_storage()._cdata


def unique_storages(shards: Iterable[LocalShard]) -> dict[int, torch.UntypedStorage]:
    """Every allocation that holds one of `shards`, once, by its identity in this process."""
    out: dict[int, torch.UntypedStorage] = {}
    for shard in shards:
        out.setdefault(_pointer(shard.view), shard.view.untyped_storage())
    return out


class FreedGradients:
    """Gradient memory that was given up, and how to have it again."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = [(b, b.untyped_storage().nbytes()) for b in buffers]
        for buffer, _ in self._buffers:
            buffer.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes given up."""
        return sum(n for _, n in self._buffers)

    def restore(self) -> None:
        """Allocate the buffers again, zeroed; views into them are valid again."""
        for buffer, nbytes in self._buffers:
            buffer.untyped_storage().resize_(nbytes)
            buffer.zero_()


# -- scalars -----------------------------------------------------------------------------------
#
# scalars = {
#   "groups":       {group id: {hyperparameter: value}},        one per optimizer parameter group
#   "steps":        {parameter: step},                          Adam's own counter, where it has one
#   "lr_scheduler": {...} | absent,
#   "grad_scaler":  {...} | absent,
#   "engine":       {counter: value} | absent,                  DeepSpeed's own counters
#   "average":      {counter: value} | absent,                  of a moving average of the model
# }
#
# A rank reports only what it holds (a pipeline stage may lack parameters that others have); the
# scalars of a unit are the union over its ranks.


def merge_scalars(parts: Sequence[Mapping[str, Any]]) -> Scalars:
    """The union of what the ranks of one unit report; dicts are merged key by key.

    Args:
        parts: each source rank's `DescribedUnit.scalars`; a rank without the unit gives an empty
            one or none.

    Returns:
        One dict to give to `load_scalars` on every target rank.

    Raises:
        ScalarMismatch: two ranks report different values for one entry.
    """
    merged: Scalars = {}
    for part in parts:
        _merge_into(merged, part, "")
    return merged


def _merge_into(into: Scalars, part: Mapping[str, Any], where: str) -> None:
    for key, value in part.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            known = into.setdefault(key, {})
            if not isinstance(known, dict):
                raise ScalarMismatch(f"ranks of one unit disagree about the kind of {name}")
            _merge_into(known, value, f"{name}/")
        elif key not in into:
            into[key] = value
        elif not _same(into[key], value):
            raise ScalarMismatch(
                f"ranks of one unit disagree about {name}: {into[key]!r} and {value!r}"
            )


def _same(a: Any, b: Any) -> bool:
    # As JSON: NaN equals NaN, and a tuple the list it becomes on its way.
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def scalar_value(value: Any) -> Any:
    """A hyperparameter as JSON: tensors become numbers, tuples lists.

    Raises:
        UnsupportedState: not a number, string, None, or a list or dict of those.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UnsupportedState(
                f"an optimizer hyperparameter is a tensor of shape {tuple(value.shape)}; "
                "only scalars are carried"
            )
        return value.item()
    if isinstance(value, list | tuple):
        return [scalar_value(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): scalar_value(v) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedState(f"optimizer state of type {type(value).__name__} cannot be carried")


def group_scalars(group: Mapping[str, Any]) -> Scalars:
    """Hyperparameters of one torch optimizer parameter group, without its parameters."""
    return {k: scalar_value(v) for k, v in group.items() if k not in ("params", "param_names")}


def load_group_scalars(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the hyperparameters of a parameter group in place, keeping each value's type.

    A tensor (capturable optimizers keep `lr` or `step` so) is filled, not replaced: a captured
    graph or a scheduler may hold it.
    """
    for key, value in values.items():
        old = group.get(key)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        elif isinstance(old, tuple):
            group[key] = tuple(value)
        else:
            group[key] = value


def load_groups(optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the hyperparameters of all parameter groups, which have their places for names.

    To be called after the LR scheduler is loaded: the source's own lr is kept bit for bit.

    Raises: KeyError: the source has no values for a group of the target.
    """
    for i, group in enumerate(optimizer.param_groups):
        if str(i) not in groups:
            raise KeyError(
                f"the source has {len(groups)} parameter groups, the target "
                f"{len(optimizer.param_groups)}: the optimizer must be built alike in both layouts"
            )
        load_group_scalars(group, groups[str(i)])


def set_step(state: dict[str, Any], value: float) -> None:
    """Set one parameter's own step counter.

    A fresh tensor, never the old one filled: after some loads Megatron-core lets all parameters
    share one counter, which then counts once per parameter.
    """
    old = state.get("step")
    if isinstance(old, torch.Tensor):
        state["step"] = torch.full_like(old, value)
    else:
        state["step"] = type(old)(value) if old is not None else value


def ensure_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate Adam's state as its own first step would, without taking a step.

    Zero moments and a zero step are what torch and FusedAdam start from, so this changes no later
    number; a step with zero gradients would, by weight decay.

    Raises:
        UnsupportedState: not an Adam, or one with more state than two moments.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            ensure_adam_state_of(optimizer, group, p)


def ensure_adam_state_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.Tensor
) -> None:
    """`ensure_adam_state` for one parameter of a group, which may not name it at the moment."""
    kind = type(optimizer).__name__
    if "Adam" not in kind:
        raise UnsupportedState(
            f"optimizer {kind} is not supported; set the optimizer to adam (or adamw)"
        )
    torch_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one since torch 2.7
    torch_adam = torch_adam or isinstance(optimizer, torch.optim.AdamW)
    if group.get("amsgrad"):
        raise UnsupportedState("amsgrad keeps a third moment; set amsgrad=False")
    state = optimizer.state[p]
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = torch.zeros_like(p.data, memory_format=torch.preserve_format)
    if torch_adam and "step" not in state:
        on_device = group.get("capturable") or group.get("fused")
        device = p.device if on_device else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    extra = set(state) - {"exp_avg", "exp_avg_sq", "step"}
    if extra:
        raise UnsupportedState(
            f"optimizer {kind} keeps {sorted(extra)} per parameter; only exp_avg, "
            "exp_avg_sq and step can be moved (set use_precision_aware_optimizer=False)"
        )
