"""Everything of verl's that has no public name, each wrapped once.

Written against and tested with the versions in `TESTED`; `check_version` refuses others, because a
change in any of these would otherwise show as wrong numbers rather than as an error.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.metadata import version
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

TESTED = ("0.9.1",)
_LOCAL_RANKS = "RAY_LOCAL_WORLD_SIZE"


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


@contextmanager
def workers_know() -> Iterator[None]:
    """Inside, the trainer's worker processes start with `WORKER` in their environment."""
    module: Any = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    start = functools.partial(module.RayWorkerGroup, worker_env={WORKER: "1"})
    with _replaced(module, RayWorkerGroup=start):
        yield


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


def wrap_megatron_engines(
    module: ModuleType,
    *,
    around_building: Callable[[Any, Any], AbstractContextManager[None]],
    around: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """Have everything that verl's Megatron engines do run inside a context of the engine.

    That is their methods, what runs inside their train and eval contexts, and every step of the
    generators that they return: the weight sync draws tensors from one long after the call.

    Args:
        module: verl's, with the engines.
        around_building: of an engine and its configuration, for the constructor. around: of an
            engine, for all else.
    """
    base: Any = module.MegatronEngine
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base)]
    functions = [
        (cls, name, function) for cls in classes for name, function in _functions(cls).items()
    ]
    # Those of all engines, too: one that goes through a batch calls many others.
    inherited = _functions(importlib.import_module("verl.workers.engine.base").BaseEngine)
    own = _functions(base)
    functions += [(base, name, f) for name, f in inherited.items() if name not in own]
    for cls, name, function in functions:
        wrap = _context_inside if name in ("train_mode", "eval_mode") else _inside
        setattr(cls, name, wrap(function, around))
    build = base.__init__

    @functools.wraps(build)
    def init(engine: Any, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        with around_building(engine, engine_config):
            build(engine, model_config, engine_config, *args, **kwargs)

    base.__init__ = init


def _functions(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) and not name.startswith("__")
    }


def _inside(function: Any, around: Callable[[Any], AbstractContextManager[None]]) -> Any:
    @functools.wraps(function)
    def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with around(engine):
            result = function(engine, *args, **kwargs)
        if isinstance(result, Iterator):
            return _each_inside(result, engine, around)
        if isinstance(result, tuple) and result and isinstance(result[0], Iterator):
            return (_each_inside(result[0], engine, around), *result[1:])
        return result

    return method


def _each_inside(
    items: Iterator[Any], engine: Any, around: Callable[[Any], AbstractContextManager[None]]
) -> Iterator[Any]:
    while True:
        with around(engine):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _context_inside(function: Any, around: Callable[[Any], AbstractContextManager[None]]) -> Any:
    @functools.wraps(function)
    @contextmanager
    def method(engine: Any, **kwargs: Any) -> Iterator[None]:
        with around(engine), function(engine, **kwargs):
            yield

    return method


@contextmanager
def known_optimizer_groups(known: Sequence[Any]) -> Iterator[None]:
    """Inside, a Megatron optimizer is built without asking all ranks for their parameter groups.

    Megatron gathers the groups' keys over the job's world group, where a rank that failed to build
    would leave its peers waiting. The result is the same in every layout of a model.

    Args:
        known: as `optimizer_groups` gives them for the model's optimizer in force.
    """

    def gather(out: list[Any], value: Any, group: Any = None) -> None:
        if group is not None:
            raise RuntimeError("Megatron's optimizer gathers over another group than is known of")
        missing = [key for key in value if key not in known]
        if missing:
            raise RuntimeError(
                f"parameter groups {missing} of the target are not among those of the optimizer "
                f"in force, {known}"
            )
        out[:] = [list(known)] * len(out)

    with _replaced(torch.distributed, all_gather_object=gather):
        yield


def optimizer_groups(optimizer: Any) -> list[Any]:
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


class Updates:
    """What happened to one engine's training state.

    Attributes:
        count: of updates begun. before: called before each, for what an update needs.
    """

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[], None] = lambda: None


_UPDATES: WeakKeyDictionary[Any, Updates] = WeakKeyDictionary()
# Methods of verl's engines that change training state, or what it is made from.
_UPDATING = ("train_batch", "optimizer_step", "lr_scheduler_step", "load_checkpoint")


def watch_updates(engine: Any) -> Updates:
    """From now on, the updates of an engine's training state.

    They belong to the object that verl holds, also when its contents are exchanged.
    """
    cls = type(engine)
    if not any("_nereus_watched" in base.__dict__ for base in cls.__mro__):
        for name in _UPDATING:
            setattr(cls, name, _counting(getattr(cls, name)))
        cls._nereus_watched = True
    return _UPDATES.setdefault(engine, Updates())


def _counting(method: Any) -> Any:
    @functools.wraps(method)
    def counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
        updates = _UPDATES.get(engine)
        if updates is not None:
            updates.before()
            updates.count += 1
        return method(engine, *args, **kwargs)

    return counted


def set_config(config: Any, **values: Any) -> None:
    """Set fields of one of verl's frozen engine configurations; unknown fields are refused."""
    for name, value in values.items():
        if not hasattr(config, name):
            raise AttributeError(f"{type(config).__name__} has no field {name!r}")
        object.__setattr__(config, name, value)


def set_settings(config: DictConfig, settings: Mapping[str, Any]) -> None:
    """Set verl's settings, dotted path to value, also those that its configuration lacks."""
    with open_dict(config):
        for path, value in settings.items():
            OmegaConf.update(config, path, value)


def set_offload(engine: Any, param_offload: bool, optimizer_offload: bool) -> None:
    """What an engine keeps in host memory between stages; moves nothing."""
    engine._is_offload_param, engine._is_offload_optimizer = param_offload, optimizer_offload


# -- ranks that join and leave: in a worker process ----------------------------------------------


def all_workers(worker_dict: Any) -> list[Any]:
    """Every verl `Worker` of one process: the colocated one, its roles, and those inside roles."""
    roles = list(roles_of(worker_dict).values())
    inner = [getattr(role, name, None) for role in roles for name in ("actor", "ref")]
    return [worker_dict, *roles, *(one for one in inner if one is not None)]


def set_rank(worker_dict: Any, rank: int, world: int, address: str, port: int) -> None:
    """Give the process another rank: in its environment, and in all that verl keeps of it."""
    for worker in all_workers(worker_dict):
        worker._configure_with_store(
            {
                "_rank": rank,
                "_world_size": world,
                "_local_rank": worker._local_rank,
                "_local_world_size": worker._local_world_size,
                "_master_addr": address,
                "_master_port": str(port),
            }
        )
        if hasattr(getattr(worker, "checkpoint_engine", None), "is_master"):
            worker.checkpoint_engine.is_master = rank == 0
        profiler = getattr(worker, "profiler", None)
        if profiler is not None and profiler.check_enable():
            if profiler.check_this_step():  # one that would go on over the boundary
                profiler.stop(run_command=False)
            worker.profiler = type(profiler)(
                rank=rank,
                config=profiler.config,
                tool_config=profiler.tool_config,
                save_file_prefix=profiler.save_file_prefix,
            )


def node_address(worker_dict: Any) -> str:
    """The address at which other nodes reach this process."""
    address: str = worker_dict.get_available_master_addr_port()[0]
    return address


# Set in the environment of the worker processes of a job with Nereus on.
WORKER = "NEREUS_WORKER"

# Set in the environment of a process that will join: it starts in a world of one rank, in which
# the layout that it is configured for need not fit.
JOINS = "NEREUS_JOINS"


def megatron_in_a_world_of_one(module: ModuleType) -> None:
    """Called with verl's Megatron engine in a process that will join: engines start without
    parallelism, until `build_empty`."""
    from megatron.core import parallel_state

    def init_device_mesh(engine: Any) -> None:
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()

    cls: Any = module.MegatronEngine
    cls.nereus_init_device_mesh, cls._init_device_mesh = cls._init_device_mesh, init_device_mesh


def build_empty(worker_dict: Any, loss_functions: dict[str, Any]) -> None:
    """Make a process's role workers as verl does, but with engines that hold nothing, and without
    the rollout: for a rank that is given its state by a transition.

    Args:
        loss_functions: by role, where verl's driver sets them (`loss_functions_of`).
    """

    def initialize(engine: Any) -> None:
        engine.module = engine.optimizer = engine.lr_scheduler = None
        engine.checkpoint_manager = None

    importlib.import_module("verl.workers.engine")  # as the first role would, without a critic
    with ExitStack() as stack:
        for kind, name in (("fsdp", "FSDPEngine"), ("megatron", "MegatronEngine")):
            module = sys.modules.get(f"verl.workers.engine.{kind}.transformer_impl")
            if module is not None:
                cls = getattr(module, name)
                stack.enter_context(_replaced(cls, initialize=initialize))
        for name, role in roles_of(worker_dict).items():
            if hasattr(role, "engine"):
                role.reset()
                role.set_loss_fn(loss_functions[name])
            else:
                with _as_role(role, role.role.replace("_rollout", "")):
                    role.init_model()
    megatron: Any = sys.modules.get("verl.workers.engine.megatron.transformer_impl")
    if megatron is not None and hasattr(megatron.MegatronEngine, "nereus_init_device_mesh"):
        cls = megatron.MegatronEngine
        cls._init_device_mesh = cls.nereus_init_device_mesh
        del cls.nereus_init_device_mesh


def loss_functions_of(worker_dict: Any) -> dict[str, Any]:
    """By role, the loss functions that verl's driver gave to training workers."""
    roles = roles_of(worker_dict)
    return {name: role.loss_fn for name, role in roles.items() if hasattr(role, "engine")}


def rollout_roles(worker_dict: Any) -> list[Any]:
    """The role workers that hold a rollout."""
    return [role for role in roles_of(worker_dict).values() if getattr(role, "_is_rollout", False)]


def rollout_mesh(role: Any) -> Any:
    """The device mesh of a role worker's rollout, None where it has none."""
    return getattr(role.rollout, "device_mesh", None)


def forget_rollout(role: Any) -> None:
    """Drop a role worker's side of the rollout."""
    role.rollout = None


def set_rollout_config(role: Any, settings: Mapping[str, Any]) -> None:
    """Set what `build_rollout` reads. Args: settings: dotted path in verl's configuration ->
    value, below "actor_rollout_ref"."""
    below = {path.removeprefix("actor_rollout_ref."): value for path, value in settings.items()}
    set_settings(role.config, below)


def build_rollout(role: Any) -> None:
    """Make a role worker's side of the rollout anew, in the current world. Collective."""
    # verl tells a node's ranks apart by this variable, which is 1 where every rank has a placement
    # group of its own.
    local = str(role.config.rollout.get("n_gpus_per_node") or os.environ[_LOCAL_RANKS])
    before, os.environ[_LOCAL_RANKS] = os.environ[_LOCAL_RANKS], local
    try:
        with _as_role(role, "rollout"):
            role.init_model()
    finally:
        os.environ[_LOCAL_RANKS] = before


def limit_weight_sockets(timeout_s: float | None) -> None:
    """How long this process waits for a vLLM server to take a part of the weights. None: for ever,
    as verl has it."""
    import zmq

    context: Any = zmq.Context.instance()  # options of the sockets that are made from now on
    context.rcvtimeo = context.sndtimeo = -1 if timeout_s is None else int(timeout_s * 1000)


@contextmanager
def _as_role(role: Any, name: str) -> Iterator[None]:
    """Inside, `init_model` makes only the parts that belong to `name`."""
    before, role.role = role.role, name
    try:
        yield
    finally:
        role.role = before


def param_dtype(engine: Any) -> torch.dtype:
    """Of an engine's parameters, also of one that holds no model."""
    from verl.utils.torch_dtypes import PrecisionType

    if engine.engine_config.strategy == "megatron":
        dtype: torch.dtype = PrecisionType.to_dtype(engine.engine_config.dtype)
        return dtype
    if engine.module is not None:
        return next(engine.module.parameters()).dtype
    named = engine.engine_config.model_dtype
    usual = torch.bfloat16 if engine.engine_config.forward_only else torch.float32
    return usual if named is None else PrecisionType.to_dtype(named)


def generation_config(engine: Any) -> Any:
    """The generation settings of an FSDP2 engine's model, None if it has none; of an engine that
    holds no model, those beside its pretrained weights."""
    if engine.module is not None:
        return getattr(engine.module, "generation_config", None)
    if engine.model_config.model_type != "language_model":
        return None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(engine.model_config.local_path)
    except OSError:
        return None


# -- ranks that join and leave: in the driver ----------------------------------------------------

POOL = "global_pool"
KILL_S = 60.0


def one_bundle_a_group(trainer: Any) -> None:
    """Have the pool of the training ranks made of one placement group a rank, before it is made:
    Ray gives no part of a placement group back."""
    spec = trainer.resource_pool_manager.resource_pool_spec
    spec[POOL] = [1] * sum(spec[POOL])


def bundles_of(trainer: Any) -> list[tuple[Any, int]]:
    """(placement group, index of the bundle in it) of every rank, as verl placed them."""
    pool = trainer.resource_pool_manager.resource_pool_dict[POOL]
    module: Any = importlib.import_module("verl.single_controller.ray.base")
    groups = module.sort_placement_group_by_node_ip(pool.get_placement_groups())
    size = pool.store[0]
    return [(group, index) for group in groups for index in range(size)]


def ray_resource() -> str:
    """What a rank takes one of, in Ray's words."""
    from verl.plugin.platform import get_platform

    name: str = get_platform().ray_resource_name()
    return name


def request_bundle(trainer: Any, name: str) -> Any:
    """Ask Ray for a placement group of one bundle like those of the training ranks. Does not
    wait."""
    from ray.util.placement_group import placement_group

    pool = trainer.resource_pool_manager.resource_pool_dict[POOL]
    bundle: dict[str, float] = {
        "CPU": pool.max_colocate_count,
        ray_resource(): 1,
    }
    if pool.accelerator_type is not None:
        bundle[pool.accelerator_type] = 1e-4
    return placement_group([bundle], strategy="STRICT_PACK", name=name)


def start_worker(trainer: Any, group: Any, bundle: int, number: int) -> tuple[Any, str]:
    """Start a process like those of the training ranks, in a world of its own.

    Args:
        group, bundle: where. number: never given before in this job; it is in the actor's name.

    Returns: (Ray handle, the actor's name). Does not wait for the process.
    """
    module: Any = importlib.import_module("verl.single_controller.ray.base")
    pool = trainer.resource_pool_manager.resource_pool_dict[POOL]
    starter = copy.copy(trainer.actor_rollout_wg)
    starter._workers, starter._worker_names = [], []
    # The store of a world of one rank is at any free port of its own process.
    starter._master_addr, starter._master_port = "127.0.0.1", "0"
    starter._create_worker(
        rank=0,
        pg_idx=number,
        pg=group,
        local_rank=bundle,
        resource_pool=module.RayResourcePool([1], max_colocate_count=pool.max_colocate_count),
        ray_cls_with_init=starter.ray_cls_with_init,
        worker_env={**starter.customized_worker_env, WORKER: "1", JOINS: "1"},
        detached=False,
    )
    return starter._workers[0], starter._worker_names[0]


def names_of(worker_group: Any) -> list[str]:
    """Names of the group's actors, by rank."""
    return list(worker_group._worker_names)


def end_actor(handle: Any) -> None:
    """Kill a Ray actor and wait until it is gone, so that its name and bundle can be used again."""
    import ray
    from ray.exceptions import RayError

    ray.kill(handle)
    with suppress(RayError):
        ray.get(handle.__ray_ready__.remote(), timeout=KILL_S)


def set_ranks(
    trainer: Any,
    worker_groups: Sequence[Any],
    workers: Sequence[Any],
    names: Sequence[str],
    bundles: Sequence[tuple[Any, int]],
    address: str,
    port: int,
) -> None:
    """Let verl's driver count with other ranks: worker groups, resource pool, GPU counts."""
    for group in worker_groups:
        # The groups spawned of one share these lists.
        group._workers[:] = workers
        group._worker_names[:] = names
        group._world_size = len(workers)
        group._master_addr, group._master_port = address, str(port)
        forget_dispatch(group)
    placement = {id(group): group for group, _ in bundles}
    counts = [sum(group is other for other, _ in bundles) for group in placement.values()]
    manager = trainer.resource_pool_manager
    pool = manager.resource_pool_dict[POOL]
    pool.pgs = list(placement.values())
    pool._store = counts
    manager.resource_pool_spec[POOL] = counts


# -- the rollout: in the driver -------------------------------------------------------------------


def replicas_of(trainer: Any) -> list[Any]:
    """verl's rollout replicas, by their rank."""
    return list(trainer.llm_server_manager.rollout_replicas)


def identities(workers: Sequence[Any]) -> tuple[Any, ...]:
    """What tells worker processes apart: handles of the same one need not be equal."""
    return tuple(worker._actor_id for worker in workers)


def set_rollout_settings(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Have replicas that are launched from now on, and processes that join, follow `settings`
    (dotted path to value)."""
    set_settings(trainer.config, settings)
    manager = trainer.llm_server_manager
    manager.rollout_config = trainer.config.actor_rollout_ref.rollout


def launch_replicas(
    trainer: Any, ranks: Sequence[int], timeout_s: float, end: Callable[[Sequence[Any]], None]
) -> list[Any]:
    """Launch the replicas of these numbers for the worker processes as they are, asleep; requests
    are not routed to them yet. What was launched when one of them fails is ended.

    Args: end: called with replicas before their servers are killed.

    Raises: what the rollout raises; TimeoutError.
    """
    import ray

    manager, group = trainer.llm_server_manager, trainer.actor_rollout_wg
    new = [
        manager.rollout_replica_class(
            replica_rank=rank,
            config=manager.rollout_config,
            model_config=manager.model_config,
            gpus_per_node=manager.rollout_config.n_gpus_per_node,
        )
        for rank in ranks
    ]

    async def launch(replica: Any) -> None:
        await replica.init_hybrid(group)
        await replica.sleep()

    async def launch_all() -> list[BaseException | None]:
        launches = [asyncio.wait_for(launch(replica), timeout_s) for replica in new]
        return await asyncio.gather(*launches, return_exceptions=True)

    before = set(ray.util.list_named_actors())
    failed = [error for error in asyncio.run(launch_all()) if error is not None]
    if failed:
        end(new)
        # A server that failed as it was made still has its name, until it is killed too.
        for replica in new:
            for server in replica.servers:
                end_actor(server)
        # Those of a replica that failed half-way may be known by their names alone.
        for name in set(ray.util.list_named_actors()) - before:
            with suppress(ValueError):  # it has ended by itself
                end_actor(ray.get_actor(name))
        raise failed[0]
    return new


def end_replicas(trainer: Any, replicas: Sequence[Any]) -> None:
    """Route no more requests to these replicas, and end their servers."""
    import ray

    manager = trainer.llm_server_manager
    addresses = [replica.server_address for replica in replicas]
    ray.get(manager.global_load_balancer.remove_servers.remote(addresses))
    for replica in replicas:
        for server in replica.servers:
            end_actor(server)
    _set_replicas(trainer, [one for one in manager.rollout_replicas if one not in replicas])


def route_to(trainer: Any, replicas: Sequence[Any]) -> None:
    """Let replicas that were launched take requests. The agent loops' clients ask the load
    balancer, which every one of them has."""
    import ray

    balancer = trainer.llm_server_manager.global_load_balancer
    if replicas:
        added = {replica.server_address: replica.server_handle for replica in replicas}
        ray.get(balancer.add_servers.remote(added))
    ray.get(balancer.clear_sticky_cache.remote())
    _set_replicas(trainer, [*trainer.llm_server_manager.rollout_replicas, *replicas])


def _set_replicas(trainer: Any, replicas: Sequence[Any]) -> None:
    manager = trainer.llm_server_manager
    after = sorted(replicas, key=lambda replica: int(replica.replica_rank))
    manager.rollout_replicas = after
    manager.server_handles = [replica.server_handle for replica in after]
    manager.server_addresses = [replica.server_address for replica in after]
    trainer.checkpoint_manager.replicas = after


def sync_rollout(trainer: Any, step: int) -> None:
    """Give the trained weights to all replicas and wake them, as verl does at the end of a step."""
    trainer.checkpoint_manager.update_weights(step)
