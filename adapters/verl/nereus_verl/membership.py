"""The set of ranks changes: what one worker process of verl does of it.

The worlds that are alive meanwhile are `nereus_plugins.gtg.ranks_change`'s. A process that joins
starts in a world of its own, with engines that hold nothing (`enter`).

    join -> prepare, commit, release (nereus_verl.worker) -> settle
         `-> withdraw, where anything failed before the commit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nereus_plugins.gtg.execute import RankTransition
from nereus_plugins.gtg.ranks_change import RanksChange, UnitOnTheMove
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.torch_private import current_world, set_world
from nereus_verl import rollout_worker, verl_private

if TYPE_CHECKING:
    from nereus_verl.worker import RankState


def host_store(worker: Any, state: RankState) -> tuple[str, int]:
    """Serve the store that the worlds of a change meet at; its address and port.

    It lives as long as the world it is for, so rank 0 of the new world is asked for it.
    """
    address = verl_private.node_address(worker)
    state.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return address, state.store.port


def join(
    state: RankState,
    rank: int,
    size: int,
    order: Sequence[int],
    address: str,
    port: int,
) -> None:
    """Form the union and the new world, and have transitions run in them. Collective.

    Args:
        rank, size: of the union. order, address, port: as in `RanksChange`.

    Raises: RuntimeError where peers did not come; `withdraw` goes back.
    """
    timeout_s, before = state.options.timeout_s, state.transition
    change = RanksChange.begin(rank, tuple(order), address, port, current_world(), timeout_s)
    state.change, state.before = change, before
    control = change.form(size, state.store, timeout_s)
    state.transition = RankTransition(
        {name: UnitOnTheMove(unit, change) for name, unit in state.units.items()},
        rank=rank,
        world=size,
        control=control,
        options=state.options,
    )
    state.transition.epoch = before.epoch


def withdraw(state: RankState) -> None:
    """Go back to the old world, after an abort or where worlds were not formed. Local."""
    change, state.change = state.change, None
    if change is None:
        return
    assert state.before is not None
    state.transition, state.before = state.before, None
    state.store = None
    change.undo()


def committed(worker: Any, state: RankState) -> bool:
    """The new layouts are current: the new world becomes the default, here and for verl. Local.

    Returns: whether this process is a rank of the new world.
    """
    change = state.change
    if change is None:
        return True
    if change.new is None or change.target is None:
        return False
    set_world(change.new)
    verl_private.set_rank(worker, change.target, len(change.order), change.address, change.port)
    return True


def settle(worker: Any, state: RankState) -> None:
    """Drop the worlds that are over, and with them the rollout's side in this process. Local."""
    change, state.change = state.change, None
    state.before = None
    assert change is not None
    assert change.target is not None
    rollout_worker.drop(state, worker, world=change.old)
    change.finish()
    rank, world_size, timeout_s = change.target, len(change.order), state.options.timeout_s
    epoch = state.transition.epoch
    state.transition = RankTransition(
        state.units,
        rank=rank,
        world=world_size,
        control=Control(rank, world_size, timeout_s=timeout_s),
        options=state.options,
    )
    state.transition.epoch = epoch
