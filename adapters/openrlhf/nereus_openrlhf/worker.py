"""What runs in the processes of OpenRLHF's model actors, called by the trainer's process.

Each function takes the model actor (`openrlhf_private.call_worker`) and returns plain data. One
process is one rank of one model. Every transition forms worlds of its own
(`nereus_plugins.gtg.ranks_change`), also where the ranks stay the same: a layout of DeepSpeed takes
torch's default group for all ranks that train.

    setup | enter -> host_store -> join -> prepare -> commit -> release -> settle
                                       `-> withdraw, where anything failed before the commit
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nereus_openrlhf import deepspeed_unit, openrlhf_private
from nereus_openrlhf.deepspeed_unit import Building, DeepSpeedUnit
from nereus_plugins.cost.hardware import CPU
from nereus_plugins.gtg.execute import (
    RankTransition,
    ReleaseFailed,
    TransitionAborted,
    TransitionOptions,
)
from nereus_plugins.gtg.ranks_change import RanksChange, UnitOnTheMove
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.groups import live_group_count
from nereus_plugins.transport.torch_private import current_world, set_world
from nereus_plugins.transport.torch_transport import GLOO_STAGING_BYTES, NCCL_STAGING_BYTES


@dataclass
class RankState:
    """Nereus's state in this process.

    epoch: in force. change: that is under way, in which `transition` runs. store: served here for
    the world of which this process is rank 0; kept_store: for that of the layout in force.
    """

    unit: DeepSpeedUnit
    options: TransitionOptions
    epoch: int = 0
    change: RanksChange | None = None
    transition: RankTransition | None = None
    store: dist.TCPStore | None = None
    kept_store: dist.TCPStore | None = None


# Of this process. Not on the model actor, whose contents a transition exchanges.
_state: RankState | None = None


def _here() -> RankState:
    assert _state is not None, "nereus was not set up in this process"
    return _state


def setup(
    worker: Any, name: str, checksum: bool, staging_bytes: int | None, timeout_s: float, epoch: int
) -> dict[str, Any]:
    """Make the rank's model a unit. Called once, after OpenRLHF built it.

    Returns: {"layout", "host", "backend": of its world}.
    """
    global _state
    openrlhf_private.check_version()
    layout = deepspeed_unit.start_layout(worker, name)
    unit = DeepSpeedUnit(name, worker, layout, timeout_s)
    _state = RankState(unit, _options(checksum, staging_bytes, timeout_s), epoch)
    return {
        "layout": layout.to_dict(),
        "host": openrlhf_private.node_address(),
        "backend": dist.get_backend_config(),
    }


def _options(checksum: bool, staging_bytes: int | None, timeout_s: float) -> TransitionOptions:
    nccl = "nccl" in dist.get_backend_config()
    return TransitionOptions(
        staging_bytes=staging_bytes or (NCCL_STAGING_BYTES if nccl else GLOO_STAGING_BYTES),
        checksum=checksum,
        timeout_s=timeout_s,
    )


def briefing(worker: Any) -> dict[str, Any]:
    """What a process that joins needs of one that is there."""
    return deepspeed_unit.generator_states()


def enter(
    worker: Any,
    name: str,
    checksum: bool,
    staging_bytes: int | None,
    timeout_s: float,
    epoch: int,
    backend: str,
    layout: Mapping[str, Any],
    generators: Mapping[str, Any],
) -> dict[str, Any]:
    """Make this new process one that can join: in a world of its own, with no model.

    Args:
        backend: of torch's worlds. layout: in force.
        generators: as from `briefing`.

    Returns: {"host"}.
    """
    global _state
    openrlhf_private.check_version()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed_unit.set_generator_states(generators)
    unit = DeepSpeedUnit(name, worker, Layout.from_dict(layout), timeout_s, empty=True)
    _state = RankState(unit, _options(checksum, staging_bytes, timeout_s), epoch)
    return {"host": openrlhf_private.node_address()}


def host_store(worker: Any) -> tuple[str, int]:
    """Serve the store that the worlds of a change meet at; its address and port. Rank 0 does: it
    is in both worlds."""
    state = _here()
    state.store = dist.TCPStore(
        openrlhf_private.node_address(), 0, is_master=True, wait_for_workers=False
    )
    return openrlhf_private.node_address(), state.store.port


def join(worker: Any, rank: int, size: int, order: Sequence[int], address: str, port: int) -> str:
    """Form the worlds of a change. Collective in old and new ranks. A model that sleeps is awake
    from here to `settle` or `withdraw`.

    Args: rank, size: of the union. order, address, port: as in `RanksChange`.

    Returns: why not, or "".
    """
    state = _here()
    timeout_s = state.options.timeout_s
    try:
        state.unit.wake()
        change = RanksChange.begin(rank, tuple(order), address, port, current_world(), timeout_s)
        state.change = change
        control = change.form(size, state.store, timeout_s)
        state.transition = RankTransition(
            {state.unit.name: UnitOnTheMove(state.unit, change)},
            rank=rank,
            world=size,
            control=control,
            options=state.options,
        )
        state.transition.epoch = state.epoch
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def withdraw(worker: Any) -> None:
    """Go back to the old world, after an abort or where worlds were not formed. Local."""
    state = _here()
    change, state.change = state.change, None
    state.transition, state.store = None, None
    if change is not None:
        change.undo()
    state.unit.put_to_sleep()


def votes_of(epoch: int) -> str:
    """The prefix of the votes of an attempt."""
    return f"nereus.{epoch}"


def prepare(
    worker: Any,
    layout: Mapping[str, Any],
    epoch: int,
    node_of: tuple[int, ...],
    args: Any,
    max_steps: int,
) -> dict[str, Any]:
    """Build, move and verify the target layout beside the current one. Collective.

    Args:
        epoch: of the plan, once committed; each attempt has its own. node_of: node of each rank.
        args, max_steps: as in `Building`.

    Returns: {"report", "seconds"}, or {"aborted": {"phase", "rank", "reason", "lost_ranks"}} with
        the old layout as it was.
    """
    begin_s = time.perf_counter()
    state = _here()
    change, transition = state.change, state.transition
    assert change is not None
    assert transition is not None
    if change.target is not None:
        state.unit.building = Building(args, max_steps, change.target, change.address, change.port)
    transition.options = dataclasses.replace(state.options, node_of=node_of)
    transition.control = Control(
        transition.rank,
        transition.world,
        timeout_s=state.options.timeout_s,
        store=change.votes,
        prefix=votes_of(epoch),
    )
    try:
        report = transition.prepare(
            {state.unit.name: Layout.from_dict(layout)}, epoch, attempt=epoch, ranks_change=True
        )
    except TransitionAborted as aborted:
        return {"aborted": _abort_reason(aborted)}
    return {"report": report.to_dict(), "seconds": time.perf_counter() - begin_s}


def abort(worker: Any) -> None:
    """Give up what was prepared; the old layout stays. All ranks together."""
    transition = _here().transition
    assert transition is not None
    transition.abort()


def commit(worker: Any) -> dict[str, Any]:
    """Switch to the prepared layout, and its world.

    Returns: {}, or {"aborted": ...} where a rank failed before any switched.
    """
    state = _here()
    change, transition = state.change, state.transition
    assert change is not None
    assert transition is not None
    try:
        transition.commit()
    except TransitionAborted as aborted:
        return {"aborted": _abort_reason(aborted)}
    state.epoch = transition.epoch
    if change.new is not None:
        set_world(change.new)
    return {}


def release(worker: Any) -> dict[str, Any]:
    """Free the old layout.

    Returns: {"report", "failed": reason or ""}; after a failure the new layout is current and
        right, but memory of the old one is still held.
    """
    transition = _here().transition
    assert transition is not None
    try:
        return {"report": transition.release().to_dict(), "failed": ""}
    except ReleaseFailed as error:
        return {"report": {}, "failed": str(error)}


def settle(worker: Any) -> None:
    """Leave nothing of the old world behind. In ranks of the new one. Local."""
    state = _here()
    change, state.change = state.change, None
    state.transition = None
    state.unit.building = None
    assert change is not None
    change.finish()
    # Of the world that is over, only now: its groups used it.
    if state.store is not None:
        state.kept_store, state.store = state.store, None
    state.unit.put_to_sleep()


def memory(worker: Any) -> dict[str, int]:
    """Bytes: peaks since the last call on the device, and what the process holds of the host."""
    peaks = {"allocated": 0, "reserved": 0}
    if torch.cuda.is_available():
        peaks = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()
    return peaks | {
        "host_rss": psutil.Process().memory_info().rss,
        "process_groups": live_group_count(),
    }


def device(worker: Any) -> dict[str, Any]:
    """This rank's device: "name", "memory_bytes" (0: a CPU, which has none of its own), and
    "host_bytes"."""
    host = {"host_bytes": int(psutil.virtual_memory().total)}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return host | {"name": properties.name, "memory_bytes": int(properties.total_memory)}
    return host | {"name": CPU, "memory_bytes": 0}


def placement(worker: Any) -> Any:
    """The placement group that this process is in, or None."""
    import ray

    return ray.util.get_current_placement_group()


def _abort_reason(aborted: TransitionAborted) -> dict[str, Any]:
    return {
        "phase": aborted.phase,
        "rank": aborted.rank,
        "reason": aborted.reason,
        "lost_ranks": list(aborted.lost_ranks),
    }
