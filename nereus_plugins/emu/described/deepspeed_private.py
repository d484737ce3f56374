"""Every private name of DeepSpeed that Nereus uses, wrapped once.

Tested with the version in `TESTED`; any other is refused, because a private name may keep its
spelling and change its meaning. All names were read in DeepSpeed 0.19.6's source.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as deepspeed_comm
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import layers as tp_layers
from deepspeed.module_inject import tp_shard
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.tensor_parallel import AUTOTP_MODE, init_utils
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

TESTED = ("0.19.6",)


class UntestedVersion(RuntimeError):
    """The installed DeepSpeed is not one whose private names were checked."""


def check_version() -> None:
    """Raise `UntestedVersion` unless the installed DeepSpeed is a tested one."""
    if deepspeed.__version__ not in TESTED:
        raise UntestedVersion(
            f"DeepSpeed {deepspeed.__version__} is not tested with Nereus; install "
            f"deepspeed=={TESTED[-1]}"
        )


# -- the optimizers ----------------------------------------------------------------------------


class Piece(NamedTuple):
    """Where a part of one parameter lies in a partition.

    Attributes:
        param: the model's parameter.
        start: of the part, in the parameter's own flat elements (of its tensor-parallel shard).
        at: of the part, in the partition's elements.
        numel: elements.
    """

    param: torch.nn.Parameter
    start: int
    at: int
    numel: int


@dataclass(frozen=True)
class Partition:
    """What Adam updates as one tensor on this rank, and what lies in it.

    Attributes:
        params: the parameters that share it; some may have nothing on this rank.
        main: the tensor, with padding.
        pieces: parts of parameters in it.
        group: index of the optimizer's parameter group.
    """

    params: Sequence[torch.nn.Parameter]
    main: torch.Tensor
    pieces: Sequence[Piece]
    group: int


def adam(engine: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside DeepSpeed's wrappers; None for a model that is not trained."""
    wrapper = engine.optimizer
    if wrapper is None or isinstance(wrapper, DeepSpeedZeRoOffload | DummyOptim):
        return None
    inner = getattr(wrapper, "optimizer", wrapper)
    return None if isinstance(inner, DummyOptim) else inner


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is DeepSpeed's own Adam, which counts steps as whole numbers."""
    return type(optimizer) is FusedAdam


def known_wrapper(engine: Any) -> bool:
    """Whether the engine's optimizer is of a kind that `partitions` reads. Subclasses (ZenFlow,
    MiCS, SuperOffload) keep state elsewhere."""
    wrappers = (
        DeepSpeedZeroOptimizer,
        DeepSpeedZeroOptimizer_Stage3,
        BF16_Optimizer,
        FP16_Optimizer,
        FP16_UnfusedOptimizer,
        DeepSpeedZeRoOffload,
        DummyOptim,
        FusedAdam,
        torch.optim.Adam,
        torch.optim.AdamW,
        type(None),
    )
    return type(engine.optimizer) in wrappers


def partitions(engine: Any) -> list[Partition]:
    """The partitions of a trained model's optimizer on this rank."""
    wrapper = engine.optimizer
    if adam(engine) is None:
        return []
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return _stage3(wrapper)
    if isinstance(wrapper, DeepSpeedZeroOptimizer | BF16_Optimizer):
        if isinstance(wrapper, BF16_Optimizer):
            flats, parts = wrapper.bf16_groups_flat, wrapper.bf16_partitioned_groups
            params, mains = wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
        else:
            flats, parts = wrapper.bit16_groups_flat, wrapper.parallel_partitioned_bit16_groups
            params, mains = wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups
        ranks = [deepspeed_comm.get_rank(group=group) for group in wrapper.real_dp_process_group]
        return [
            _flat(i, params[i], flats[i], parts[i][rank], mains[i]) for i, rank in enumerate(ranks)
        ]
    if isinstance(wrapper, FP16_Optimizer):
        whole = zip(
            wrapper.fp16_groups, wrapper.fp16_groups_flat, wrapper.fp32_groups_flat, strict=True
        )
        return [_flat(i, params, flat, flat, main) for i, (params, flat, main) in enumerate(whole)]
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        return [
            Partition([param], main, [Piece(param, 0, 0, param.numel())], i)
            for i, (params, mains) in enumerate(pairs)
            for param, main in zip(params, mains, strict=True)
        ]
    return [
        Partition([param], param, [Piece(param, 0, 0, param.numel())], i)
        for i, group in enumerate(wrapper.param_groups)
        for param in group["params"]
    ]


def _flat(
    group: int,
    params: Sequence[torch.nn.Parameter],
    flat: torch.Tensor,
    part: torch.Tensor,
    main: torch.Tensor,
) -> Partition:
    """ZeRO 0-2: parameters are views of one flat tensor, of which the rank updates one part.

    Read off memory itself: where a parameter lies in the flat tensor (which round_robin_gradients
    reorders; DeepSpeed's own map of fragments does not know) and where the part begins.
    """
    low = int(part.storage_offset()) - int(flat.storage_offset())
    high = low + part.numel()
    pieces = []
    for param in params:
        if param.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is not in its group's flat tensor: its "
                "data was replaced after deepspeed.initialize"
            )
        begin = int(param.storage_offset()) - int(flat.storage_offset())
        start, end = max(begin, low), min(begin + param.numel(), high)
        if start < end:
            pieces.append(Piece(param, start - begin, start - low, end - start))
    return Partition(list(params), main, pieces, group)


def _stage3(wrapper: Any) -> list[Partition]:
    """ZeRO-3: each parameter is cut by itself; a partition is the concatenation of its parts."""
    found = []
    for number, params in enumerate(wrapper.fp16_groups):
        flat = wrapper.fp16_partitioned_groups_flat[number]
        pieces = []
        for param in params:
            start, numel = zero3_range(param)
            if numel:
                at = param.ds_tensor.storage_offset() - flat.storage_offset()
                pieces.append(Piece(param, start, at, numel))
        main = wrapper.fp32_partitioned_groups_flat[number]
        found.append(Partition(params, main, pieces, wrapper.sub_group_to_group_id[number]))
    return found


def link_moments(engine: Any) -> None:
    """Have DeepSpeed's own `safe_get_*` functions find the moments of all parameters.

    After the first step of the first parameter group 0.19.6 links the moments of all, of which
    those of later groups do not exist yet, and never links them again.
    """
    wrapper = engine.optimizer
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


def drop_host_copies(engine: Any) -> None:
    """Forget the host memory that ZeRO-3 keeps beside the moments of an engine that slept; it is
    allocated again when the engine sleeps again."""
    optimizer = adam(engine)
    for state in () if optimizer is None else optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state.pop(f"{key}_offload_buffer", None)


def loss_scaler(engine: Any) -> Any | None:
    """What holds the dynamic loss scale of an fp16 model, or None."""
    if not engine.fp16_enabled() or engine.optimizer is None:
        return None
    # ZeRO 1-3 have a scaler object, ZeRO-0 a configuration that it counts in.
    for name in ("loss_scaler", "loss_scale_config"):
        if (scaler := getattr(engine.optimizer, name, None)) is not None:
            return scaler
    return None


def manual_boundary(engine: Any) -> bool | None:
    """Whether the caller said that this micro-batch ends an accumulation; None where it leaves
    that to the engine's counter."""
    boundary: bool | None = engine._is_gradient_accumulation_boundary
    return boundary


def drop_gradients(engine: Any) -> None:
    """Drop the gradients that parameters hold."""
    for param in engine.module.parameters():
        param.grad = None
    if adam(engine) is not None:
        engine.optimizer.zero_grad()


def gradient_buffers(engine: Any) -> list[torch.Tensor]:
    """Memory that an engine keeps for gradients from one step to the next."""
    wrapper = engine.optimizer
    if isinstance(wrapper, BF16_Optimizer) and wrapper.using_real_optimizer:
        return [b for b in wrapper.fp32_groups_gradients_flat if b.untyped_storage().nbytes()]
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        buckets = [bucket.buffer for bucket in wrapper.ipg_buckets.values()]
        buffers = [wrapper.grad_partitions_flat_buffer, *buckets]
        return [b for b in buffers if b is not None and b.untyped_storage().nbytes()]
    return []


# -- ZeRO-3 parameters -------------------------------------------------------------------------


def is_zero3(param: torch.nn.Parameter) -> bool:
    """Whether a parameter is cut over data-parallel ranks."""
    return hasattr(param, "ds_id")


def zero3_range(param: Any) -> tuple[int, int]:
    """(start, elements) of this rank's part of a ZeRO-3 parameter, padding left out."""
    rank = deepspeed_comm.get_rank(group=param.ds_process_group)
    start = rank * param.ds_tensor.ds_numel
    return start, max(0, min(param.ds_tensor.ds_numel, param.ds_numel - start))


def zero3_shape(param: Any) -> tuple[int, ...]:
    """Shape of a ZeRO-3 parameter before it was cut over data-parallel ranks."""
    return tuple(param.ds_shape)


def drop_gathered(engine: Any) -> None:
    """Forget gathered ZeRO-3 parameters; they are gathered again from the parts when needed.

    Small parameters stay gathered between steps: copies that writing the parts would leave stale.
    """
    if not any(is_zero3(p) for p in engine.module.parameters()):
        return
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.partition_all_parameters()


def gathered(engine: Any) -> list[str]:
    """Names of ZeRO-3 parameters that are gathered now."""
    status = ZeroParamStatus.NOT_AVAILABLE
    named = engine.module.named_parameters()
    return [name for name, p in named if is_zero3(p) and p.ds_status != status]


# -- AutoTP ------------------------------------------------------------------------------------


class TensorParallelCut(NamedTuple):
    """How AutoTP cut one parameter.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is cut.
        sizes: for each sub-parameter (one, or several for a fused projection), the widths of all
            tensor-parallel ranks.
        rank: this rank's place among them.
        unsupported: why the cut cannot be described, or None.
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[tuple[int, ...], ...]
    rank: int
    unsupported: str | None


def tensor_parallel_cut(param: torch.nn.Parameter) -> TensorParallelCut | None:
    """How a parameter is cut over tensor-parallel ranks; None where each has all of it."""
    meta: Mapping[str, Any] | None = getattr(param, DS_AUTOTP_UC_META, None)
    if not meta or meta["replicated"] or meta["partition_dim"] is None:
        return None
    # Not the rank in the group in force, which may be another layout's.
    layer = param.gather_params.__self__  # type: ignore[attr-defined]
    shape, dim = tuple(meta["original_shape"]), meta["partition_dim"]
    unsupported = meta["conversion"]["unsupported_reason"]
    widths = meta["sub_param_shard_widths"]
    if widths is None and meta["partition_sizes"] is not None:
        widths = (meta["partition_sizes"],)
    if widths is None:
        unsupported = unsupported or "it does not say at which widths"
    elif tuple(meta["logical_shape"]) != shape:
        unsupported = unsupported or f"it is cut as a tensor of shape {meta['logical_shape']}"
    elif len(widths) > 1 and dim != 0:
        unsupported = unsupported or f"its sub-parameters are cut along dim {dim}"
    sizes = tuple(tuple(int(n) for n in part) for part in widths or ())
    return TensorParallelCut(shape, dim, sizes, layer.tp_index, unsupported)


# -- globals -----------------------------------------------------------------------------------

# Where DeepSpeed keeps what is global to a process: groups, tensor-parallel settings, a patch.
_GLOBALS: Mapping[Any, tuple[str, ...]] = {
    groups: (
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        "_WORLD_GROUP",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "mpu",
        "expert_tensor_parallel_world_size",
        "_ALL_TO_ALL_GROUP",
        "mesh_device",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
        "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    ),
    tp_shard: ("num_kv_heads", "num_attention_heads", "n_embd", "tp_grain_size"),
    tp_layers: ("DEEPSPEED_AUTOTP_MODE",),
    init_utils: ("_TP_MODEL_INIT_ARGS",),
    # ZeRO-3 replaces torch's linear layer, which rounds otherwise, and never puts it back.
    torch.nn.functional: ("linear",),
    # It numbers modules and parameters of all engines, and ranks compare the numbers; and it counts
    # those that stay gathered.
    DeepSpeedZeRoOffload._register_deepspeed_module: ("__defaults__",),
    Init: ("param_id", "num_persisted_parameters", "num_persisted_elements"),
}


class Globals:
    """DeepSpeed's globals of one layout: its groups are global to a process, and two layouts are
    alive at once while one is built beside the other."""

    def __init__(self, values: Mapping[tuple[Any, str], Any]) -> None:
        self._values = dict(values)

    @classmethod
    def in_force(cls) -> Globals:
        """Those in force now."""
        return cls(
            {(at, name): getattr(at, name) for at, names in _GLOBALS.items() for name in names}
        )

    @classmethod
    def fresh(cls) -> Globals:
        """As in a process that has built no engine yet."""
        return cls({key: copy.deepcopy(value) for key, value in _INITIAL.items()})

    def load(self) -> None:
        """Put them in force."""
        for (at, name), value in self._values.items():
            setattr(at, name, value)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, they are in force, and what is changed inside is theirs; afterwards those from
        before are back."""
        before = Globals.in_force()
        self.load()
        try:
            yield
        finally:
            self._values = Globals.in_force()._values
            before.load()


# The values that DeepSpeed's and torch's own source give them.
_INITIAL: Mapping[tuple[Any, str], Any] = {
    (at, name): {
        "expert_tensor_parallel_world_size": 1,
        "tp_grain_size": 1,
        "DEEPSPEED_AUTOTP_MODE": AUTOTP_MODE.INFERENCE,
        "_EXPERT_PARALLEL_GROUP": {},
        "_EXPERT_PARALLEL_GROUP_RANKS": {},
        "_EXPERT_DATA_PARALLEL_GROUP": {},
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS": {},
        "_ALL_TO_ALL_GROUP": {},
        "linear": torch._C._nn.linear,
        "__defaults__": ([0],),
        "param_id": 0,
        "num_persisted_parameters": 0,
        "num_persisted_elements": 0,
    }.get(name)
    for at, names in _GLOBALS.items()
    for name in names
}


# -- end of an engine --------------------------------------------------------------------------


def destroy(engine: Any) -> None:
    """Undo what an engine registered outside of itself, so that it can be collected."""
    module = engine.module
    engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [m for m in stack if m is not module]
    # A cache on a method keeps every engine that called it; it is under a wrapper.
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
