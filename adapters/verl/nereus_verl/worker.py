"""What runs in verl's worker processes, called by the driver through `verl_private.call_worker`.

Each function takes the colocated worker object of one rank (verl's `WorkerDict`) and returns plain
data. verl's own worker classes stay as they are; the rank's state hangs on the worker object.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
import torch.distributed as dist
from verl.utils.device import get_device_name, get_torch_device

from nereus_plugins.emu.described.base import dtype_name
from nereus_plugins.emu.feasibility import gradient_bytes_by_rank
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.gtg.execute import (
    RankTransition,
    ReleaseFailed,
    TransitionAborted,
    TransitionOptions,
)
from nereus_plugins.gtg.ranks_change import RanksChange
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.groups import GroupSet, live_group_count
from nereus_plugins.transport.torch_transport import GLOO_STAGING_BYTES, NCCL_STAGING_BYTES
from nereus_verl import background, live_knobs, membership, rng, verl_private
from nereus_verl.memory import OUTSTANDING, free_host_bytes
from nereus_verl.progress import MoveProgress

if TYPE_CHECKING:
    from nereus_plugins.snapshot.snapshots import Snapshots
    from nereus_verl.fsdp_unit import FsdpUnit
    from nereus_verl.megatron_unit import MegatronProcess, MegatronUnit

STATE = "_nereus_rank"


@dataclass
class Seat:
    """A place in verl that holds a copy of what one engine's layout implies.

    worker: the role worker. mesh: the name under which it registered its data-parallel rank.
    """

    worker: Any
    mesh: str


@dataclass
class RankState:
    """Nereus's state in one worker process.

    change: of the set of ranks, while one is under way; before: what ran transitions before it.
    store: served here for a world of which
    this process is rank 0. rollout_groups: process groups of the rollout's mesh.
    snapshots: of this world, where the job takes some.
    """

    units: dict[str, FsdpUnit | MegatronUnit]
    megatron: MegatronProcess | None
    engines: dict[str, Any]
    seats: dict[str, list[Seat]]
    models: dict[str, ModelSpec]
    options: TransitionOptions
    transition: RankTransition
    targets: dict[str, Layout] = field(default_factory=dict)
    change: RanksChange | None = None
    before: RankTransition | None = None
    store: dist.TCPStore | None = None
    rollout_groups: GroupSet = field(default_factory=GroupSet)
    snapshots: Snapshots | None = None


def setup(
    worker: Any,
    models: Mapping[str, Mapping[str, Any]],
    checksum: bool,
    staging_bytes: int | None,
    timeout_s: float,
    elsewhere: Mapping[str, Mapping[str, Any]] | None = None,
    optimizer_groups: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Find the rank's engines and make them units. Called once, after verl built its models.

    Args:
        models: by unit, as dicts. checksum, staging_bytes, timeout_s: as in `NereusConfig`.
        elsewhere, optimizer_groups: by unit, the layouts in force and what the optimizers there are
            made of (Megatron), where this process is not a rank yet.

    Returns: {"rank", "layouts": {unit: layout}, "host", "node"}; "node" is Ray's name of it.
    """
    verl_private.check_version()
    if hasattr(worker, STATE):
        raise RuntimeError("nereus was already set up in this worker")
    engines, seats = _find_engines(worker)
    units, megatron = _make_units(engines, timeout_s, elsewhere or {}, optimizer_groups or {})
    rank, world = dist.get_rank(), dist.get_world_size()
    nccl = dist.get_backend() == "nccl"
    options = TransitionOptions(
        staging_bytes=staging_bytes or (NCCL_STAGING_BYTES if nccl else GLOO_STAGING_BYTES),
        checksum=checksum,
        timeout_s=timeout_s,
    )
    state = RankState(
        units=units,
        megatron=megatron,
        engines=engines,
        seats=seats,
        models={name: ModelSpec.from_dict(models[name]) for name in units},
        options=options,
        transition=RankTransition(
            units,
            rank=rank,
            world=world,
            control=Control(rank, world, timeout_s=timeout_s),
            options=options,
        ),
    )
    setattr(worker, STATE, state)
    return {
        "rank": rank,
        "layouts": {name: unit.layout().to_dict() for name, unit in units.items()},
        "host": ray.util.get_node_ip_address(),
        "node": ray.get_runtime_context().get_node_id(),
    }


def _find_engines(worker: Any) -> tuple[dict[str, Any], dict[str, list[Seat]]]:
    engines: dict[str, Any] = {}
    seats: dict[str, list[Seat]] = {}
    for role in verl_private.roles_of(worker).values():
        if hasattr(role, "engine"):  # a TrainingWorker by itself: the critic
            engines["critic"] = role.engine
            seats["critic"] = [Seat(role, "train")]
            continue
        for name in ("actor", "ref"):
            inner = getattr(role, name, None)
            if inner is not None:
                engines[name] = inner.engine
                seats[name] = [Seat(inner, "train"), Seat(role, name)]
    order = [name for name in ("actor", "critic", "ref") if name in engines]
    return {name: engines[name] for name in order}, seats


def _make_units(
    engines: Mapping[str, Any],
    timeout_s: float,
    elsewhere: Mapping[str, Mapping[str, Any]],
    optimizer_groups: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, FsdpUnit | MegatronUnit], MegatronProcess | None]:
    first = next(iter(engines.values()))
    layouts = {name: Layout.from_dict(layout) for name, layout in elsewhere.items()}
    if first.engine_config.strategy == "megatron":
        from nereus_verl.megatron_unit import MegatronProcess, MegatronUnit

        process = MegatronProcess(timeout_s)
        return {
            name: MegatronUnit(name, engine, process, layouts.get(name), optimizer_groups.get(name))
            for name, engine in engines.items()
        }, process
    from nereus_verl.fsdp_unit import FsdpUnit

    return {
        name: FsdpUnit(name, engine, timeout_s, layouts.get(name))
        for name, engine in engines.items()
    }, None


# -- the set of ranks changes: see nereus_verl.membership ---------------------------------------


def briefing(worker: Any) -> dict[str, Any]:
    """What a process that joins needs to know of one that is there."""
    state: RankState = getattr(worker, STATE)
    groups = {}
    if state.megatron is not None:
        groups = {
            name: verl_private.optimizer_groups(engine.optimizer)
            for name, engine in state.engines.items()
        }
    return {
        "loss_functions": verl_private.loss_functions_of(worker),
        "optimizer_groups": groups,
    }


def enter(
    worker: Any,
    models: Mapping[str, Mapping[str, Any]],
    checksum: bool,
    staging_bytes: int | None,
    timeout_s: float,
    layouts: Mapping[str, Mapping[str, Any]],
    briefing: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Make this new process one that can join: with all that verl makes, and no state yet.

    Args:
        models, checksum, staging_bytes, timeout_s: as in `setup`. layouts: in force, by unit.
        briefing: what a rank knows.
        seed: of this process's default generators.

    Returns: as `setup`.
    """
    verl_private.build_empty(worker, briefing["loss_functions"])
    rng.seed(seed)
    groups = briefing["optimizer_groups"]
    return setup(worker, models, checksum, staging_bytes, timeout_s, layouts, groups)


def host_store(worker: Any) -> tuple[str, int]:
    """Serve the store of a change of the set of ranks; its address and port."""
    return membership.host_store(worker, getattr(worker, STATE))


def join(worker: Any, size: int, order: Sequence[int], address: str, port: int, rank: int) -> str:
    """Form the worlds of a change. Collective in old and new ranks. Returns: why not, or ""."""
    try:
        membership.join(getattr(worker, STATE), rank, size, order, address, port)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def withdraw(worker: Any) -> None:
    """Go back to the world as it was; for an old rank, after an abort."""
    membership.withdraw(getattr(worker, STATE))


def settle(worker: Any) -> None:
    """Leave nothing of the old world behind."""
    membership.settle(worker, getattr(worker, STATE))


# -- a transition, step by step; the driver calls each on all ranks ----------------------------


def prepare(
    worker: Any,
    targets: Mapping[str, Mapping[str, Any]],
    epoch: int,
    step: int,
    node_of: tuple[int, ...],
    memory_budget_bytes: int | None,
    window: background.Window | None = None,
) -> dict[str, Any]:
    """Build, move and verify the target layouts beside the current ones. Collective.

    Args:
        targets: unit -> layout as a dict.
        epoch: of the plan, once committed; each attempt has its own.
        step: the trainer's, after which the transition takes place.
        node_of: node of each rank.
        memory_budget_bytes: for old and new state on one rank; None: no limit.
        window: where this is done in the background.

    Returns: {"report": ..., "seconds": ...}, or {"aborted": {"phase", "rank", "reason",
        "lost_ranks"}} with the old layout as it was.
    """
    begin_s = time.perf_counter()
    state: RankState = getattr(worker, STATE)
    layouts = {name: Layout.from_dict(fields) for name, fields in targets.items()}
    if state.megatron is not None:
        state.megatron.step = step
    transition = state.transition
    transition.options = dataclasses.replace(
        state.options,
        node_of=node_of,
        memory_budget_bytes=memory_budget_bytes,
        progress=MoveProgress(step) if transition.rank == 0 else None,
        host_free_bytes=free_host_bytes,
    )
    if window is not None:
        transition.options = dataclasses.replace(
            transition.options, background_share=window.share, hurry=window.watched()
        )
    # Votes of an attempt that broke off in the middle must not be taken for those of the next.
    transition.control = Control(
        transition.rank,
        transition.world,
        timeout_s=state.options.timeout_s,
        store=None if state.change is None else state.change.votes,
        prefix=votes_of(epoch),
    )
    try:
        predicted, build_bytes = None, None
        if memory_budget_bytes is not None:
            predicted = _predict_all(state, layouts)
            if state.megatron is not None:  # it allocates fp32 gradients with a model that trains
                build_bytes = {
                    name: gradient_bytes_by_rank(table)
                    for name, table in predicted.items()
                    if not state.engines[name].engine_config.forward_only
                }
        report = transition.prepare(
            layouts,
            epoch,
            predicted,
            build_bytes,
            attempt=epoch,
            ranks_change=state.change is not None,
        )
    except TransitionAborted as aborted:
        return {"aborted": _abort_reason(aborted)}
    state.targets = {name: layouts[name] for name in report.units}
    return {"report": report.to_dict(), "seconds": time.perf_counter() - begin_s}


def votes_of(epoch: int) -> str:
    """The prefix of the votes of an attempt."""
    return f"nereus.{epoch}"


def _predict_all(state: RankState, layouts: Mapping[str, Layout]) -> dict[str, ShardTable]:
    """Predictions by unit. Raises: TransitionAborted, on all ranks, where one cannot predict."""
    predicted, reason = {}, ""
    try:
        for name, layout in layouts.items():
            table = predict(state.engines[name], state.models[name], layout)
            predicted[name] = table if state.change is None else table.on_ranks(state.change.order)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    votes = state.transition.control.vote("predict", not reason, reason)
    failed = [vote for vote in votes if not vote.ok]
    if failed:
        for name in layouts:
            state.units[name].settle()
        raise TransitionAborted("plan", failed[0].rank, failed[0].payload)
    return predicted


def predict(engine: Any, model: ModelSpec, layout: Layout) -> ShardTable:
    """The shards that `engine`'s model would have in `layout`, on all ranks."""
    megatron = engine.engine_config.strategy == "megatron"
    dtype = verl_private.param_dtype(engine)
    optimizer = None
    if not engine.engine_config.forward_only:
        # FSDP2 updates its parameters themselves; Megatron's masters and moments are fp32.
        kept = "float32" if megatron else dtype_name(dtype)
        optimizer = OptimizerSpec(master_dtype=kept, moments_dtype=kept)
    return predict_unit(
        model,
        layout,
        backend="megatron" if megatron else "fsdp2",
        optimizer=optimizer,
        param_dtype=dtype_name(dtype),
        device=get_device_name(),  # also of what verl keeps in host memory between stages
    )


def look(worker: Any, names: Sequence[str], reserve: float) -> dict[str, Any]:
    """Whether the units `names` can be moved while the rollout is awake. Args: as `free_memory`.

    Returns: {"obstacle": why not or "", "store": (address, port) of the world's store,
        "free_bytes": as `free_memory`}.
    """
    state: RankState = getattr(worker, STATE)
    on_accelerator = torch.cuda.is_available()
    found = [background.obstacle(n, state.engines[n], on_accelerator) for n in names]
    obstacle = "; ".join(filter(None, found))
    return {
        "obstacle": obstacle,
        "store": background.store_address(),
        "free_bytes": None if obstacle else free_memory(worker, names, reserve),
    }


def stale(worker: Any) -> list[str]:
    """Prepared units whose training state has changed since."""
    state: RankState = getattr(worker, STATE)
    return list(state.transition.stale())


def free_memory(worker: Any, names: Sequence[str], reserve: float = 0.0) -> int | None:
    """Device bytes that old and new state of the units `names` may take on this rank: what they
    take now, what is free, and what torch holds without using it.

    None on CPU, where memory is the host's. What verl offloaded of the units is loaded.

    Args: reserve: part of the device's memory that is left free.
    """
    if not torch.cuda.is_available():
        return None
    state: RankState = getattr(worker, STATE)
    held = {
        storage.data_ptr(): storage.nbytes()
        for name in names
        for storage in state.units[name].described().storages()
        if storage.device.type == "cuda"
    }
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    return int(free + unused + sum(held.values()) - reserve * total)


def commit(worker: Any) -> dict[str, Any]:
    """Switch to the prepared layouts, and let everything verl keeps about them follow.

    Returns: {}, or {"aborted": ...} where a rank failed before any switched.
    """
    state: RankState = getattr(worker, STATE)
    try:
        state.transition.commit()
    except TransitionAborted as aborted:
        state.targets = {}
        return {"aborted": _abort_reason(aborted)}
    if not membership.committed(worker, state):
        return {}
    for name in state.targets:
        engine = state.engines[name]
        for seat in state.seats[name]:
            verl_private.set_dispatch(
                seat.worker,
                seat.mesh,
                engine.get_data_parallel_rank(),
                engine.is_mp_src_rank_with_outputs(),
            )
            if hasattr(seat.worker, "engine_config"):
                seat.worker.engine_config = engine.engine_config
    return {}


def set_knobs(worker: Any, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Have the engines work with these knobs from the next call on. Local.

    Args:
        values: by unit (`knobs.unit_values`).
    """
    state: RankState = getattr(worker, STATE)
    for name, of_unit in values.items():
        live_knobs.apply(state.engines[name], of_unit)


def release(
    worker: Any, unit_values: Mapping[str, Mapping[str, Any]], garbage_later: bool = False
) -> dict[str, Any]:
    """Free the old layouts; then set the knobs, as one that ends offloading takes memory.

    Args:
        unit_values: as in `set_knobs`, of all units: a process that joins was made with what verl's
            configuration says.
        garbage_later: what is left besides their memory waits for `collect_garbage`.

    Returns: {"report": ..., "failed": reason or ""}; after a failure the new layout is current and
        right, but memory of the old one is still held.
    """
    state: RankState = getattr(worker, STATE)
    state.targets = {}
    OUTSTANDING.later = garbage_later
    report: dict[str, Any] = {}
    failed = ""
    try:
        report = state.transition.release().to_dict()
    except ReleaseFailed as error:
        failed = str(error)
    finally:
        OUTSTANDING.later = False
    if state.change is None or state.change.target is not None:  # not one that leaves
        set_knobs(worker, unit_values)
    return {"report": report, "failed": failed}


def collect_garbage(worker: Any) -> None:
    """What a release has left."""
    OUTSTANDING.collect_left()


def abort(worker: Any) -> dict[str, Any]:
    """Drop what was prepared; the old layouts train on. Collective.

    Returns: {}, or {"aborted": ...} where ranks were lost meanwhile.
    """
    state: RankState = getattr(worker, STATE)
    state.targets = {}
    lost = state.transition.abort()
    if not lost:
        return {}
    return {"aborted": _abort_reason(TransitionAborted("abort", lost[0], "no answer", lost))}


def _abort_reason(aborted: TransitionAborted) -> dict[str, Any]:
    return {
        "phase": aborted.phase,
        "rank": aborted.rank,
        "reason": aborted.reason,
        "lost_ranks": list(aborted.lost_ranks),
    }


# -- observation -------------------------------------------------------------------------------


def device(worker: Any) -> dict[str, Any]:
    """This rank's device: "name", "memory_bytes" (0: a CPU's, which has no limit of its own)."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {"name": properties.name, "memory_bytes": int(properties.total_memory)}
    total = get_torch_device().mem_get_info()[1]
    return {"name": get_device_name(), "memory_bytes": total if total > 1 else 0}


def host_bytes() -> int:
    """Memory of this host."""
    return int(psutil.virtual_memory().total)


def memory(worker: Any, anew: bool = False) -> dict[str, int]:
    """This rank's memory in bytes and process groups: allocator peaks since the job's start.

    Args: anew: peaks are since the last such call, as of verl's own metrics from then on.
    """
    device = get_torch_device()
    out = {
        "host_rss": psutil.Process().memory_info().rss,
        "allocated": device.max_memory_allocated(),
        "reserved": device.max_memory_reserved(),
        "process_groups": live_group_count(),
    }
    if anew:
        device.reset_peak_memory_stats()
    return out
