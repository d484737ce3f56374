"""Every private name of megatron-core that Nereus uses, wrapped once.

Tested with the version in `TESTED`; any other is refused, because a private name may keep its
spelling and change its meaning. All names were read in megatron-core 0.16.1's source.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import megatron.core as megatron_core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

TESTED = ("0.16.1",)


class UntestedVersion(RuntimeError):
    """The installed megatron-core is not one whose private names were checked."""


def check_version() -> None:
    """Raise `UntestedVersion` unless the installed megatron-core is a tested one."""
    if megatron_core.__version__ not in TESTED:
        raise UntestedVersion(
            f"megatron-core {megatron_core.__version__} is not tested with Nereus; install "
            f"megatron-core=={TESTED[-1]}"
        )


class ShardedParam(NamedTuple):
    """A tensor of the model and the boxes it is made of, in order along its own flat memory.

    `pieces` is one box, or several for a fused projection (SwiGLU's gate and up).
    """

    data: torch.Tensor
    pieces: list[ShardedTensor]


@contextlib.contextmanager
def tied_weights_group(dp_cp_group: dist.ProcessGroup) -> Iterator[None]:
    """Let `sharded_state_dict` find a group that it is given and yet asks parallel_state for.

    0.16.1 does so for output weights tied to the embedding of another pipeline stage.
    """
    before = parallel_state._DATA_PARALLEL_GROUP_WITH_CP
    parallel_state._DATA_PARALLEL_GROUP_WITH_CP = dp_cp_group
    try:
        yield
    finally:
        parallel_state._DATA_PARALLEL_GROUP_WITH_CP = before


def sharded_model_state(
    model: Any, dp_cp_group: dist.ProcessGroup
) -> tuple[list[ShardedParam], list[ShardedObject]]:
    """Boxes of one model chunk, as `sharded_state_dict` gives them, and what is not a tensor.

    Args:
        model: a chunk without wrappers (GPTModel).
        dp_cp_group: the chunk's data-parallel group, context parallel included.
    """
    with tied_weights_group(dp_cp_group):
        entries = model.sharded_state_dict(metadata={"dp_cp_group": dp_cp_group})
    params: list[ShardedParam] = []
    objects: list[ShardedObject] = []
    for entry in entries.values():
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build()
            pieces = list(built.values()) if isinstance(built, dict) else list(built)
            params.append(ShardedParam(entry.data, pieces))
        elif isinstance(entry, ShardedTensor):
            params.append(ShardedParam(entry.data, [entry]))
        else:
            objects.append(entry)
    return params, objects


def owned_range(optimizer: Any, param: torch.nn.Parameter) -> tuple[int, int] | None:
    """Elements [start, end) of `param`, flat, whose state a distributed optimizer holds here."""
    if param not in optimizer.model_param_group_index_map:
        return None
    found = optimizer._get_model_param_range_map(param)["param"]
    return found.start, found.end


def drop_ddp_hooks(ddp: Any) -> None:
    """Break the cycle through autograd's C++ nodes that keeps a DDP-wrapped model alive for ever.

    Megatron's DDP hooks each parameter's AccumulateGrad node and keeps the nodes; Python's garbage
    collector does not see the link from node to hook.
    """
    for node in ddp.grad_accs:
        # The handle of any hook refers to the node's whole dict of hooks.
        hooks = node.register_hook(lambda *args: None).hooks_dict_ref()
        if hooks is not None:
            hooks.clear()
    ddp.grad_accs.clear()


def clear_rotary_caches() -> None:
    """Empty the `lru_cache`s on methods of RotaryEmbedding: they keep old models and groups."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    for cls in vars(rotary_pos_embedding).values():
        if isinstance(cls, type):
            for method in vars(cls).values():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()


def ensure_global_memory_buffer() -> None:
    """Attention's scratch memory: the one global needed where parallel_state is not initialised."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


class _Redirect:
    """A module's namespace with some names replaced."""

    def __init__(self, base: types.ModuleType, **replaced: Any) -> None:
        self._base = base
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


@contextlib.contextmanager
def optimizer_gathers_within(group: dist.ProcessGroup) -> Iterator[None]:
    """Confine `get_megatron_optimizer` to a layout's ranks.

    It gathers the parameter groups of all ranks of the *job*; with a layout on some ranks only, or
    two layouts at once, that waits for ever. Only Megatron's own view of torch.distributed changes.

    Args:
        group: all ranks of the layout.
    """
    import megatron.core.optimizer as module

    def world_size(of: dist.ProcessGroup | None = None) -> int:
        return dist.get_world_size(of or group)

    def all_gather_object(out: list[Any], value: Any, group_: Any = None, **kw: Any) -> None:
        dist.all_gather_object(out, value, group=kw.get("group") or group_ or group)

    redirected = _Redirect(dist, get_world_size=world_size, all_gather_object=all_gather_object)
    module.torch = _Redirect(torch, distributed=redirected)
    try:
        yield
    finally:
        module.torch = torch


def gradient_buffers(model_chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The flat gradient buffers of DDP-wrapped chunks."""
    out = []
    for chunk in model_chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)
            if isinstance(buffers, list):
                out += [b.grad_data for b in buffers if b.grad_data is not None]
    return out


def split_optimizers(optimizer: Any) -> Sequence[Any]:
    """The optimizers inside Megatron's ChainedOptimizer, or the one given; stubs left out."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in parts if o.optimizer is not None]


def set_recompute(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    *,
    recompute_granularity: str | None,
    recompute_method: str | None,
    recompute_num_layers: int | None,
) -> None:
    """Have a built model recompute activations in another way from its next forward on.

    Full recompute is read from the configuration with every forward; core attention's, the only
    selective one that can be switched, from the module.

    Args:
        chunks: of the model. config: that it was built from.
    """
    configs = {id(config): config}
    for chunk in chunks:
        part: Any
        for part in chunk.modules():
            own = getattr(part, "config", None)
            if isinstance(own, type(config)):
                configs[id(own)] = own
            if hasattr(part, "checkpoint_core_attention"):
                part.checkpoint_core_attention = recompute_granularity == "selective"
    for one in configs.values():
        one.recompute_granularity = recompute_granularity
        one.recompute_method = recompute_method
        one.recompute_num_layers = recompute_num_layers
