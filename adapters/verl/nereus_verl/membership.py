"""The set of ranks changes: what one worker process does of it.

A process is a rank of one world, torch's default group. While ranks join and leave, three worlds
are alive: the old one; the union of old and new ranks, in which the transition runs; and the new
one, in which the target layouts are built. Nothing of the old world is touched before the commit,
so going back is a matter of making it the default again. A process that joins starts in a world of
its own, with engines that hold nothing (`enter`).

    join -> prepare, commit, release (nereus_verl.worker) -> settle
         `-> withdraw, where anything failed before the commit
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.unit import BuiltUnit, ElasticUnit
from nereus_plugins.gtg.execute import RankTransition
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.torch_private import (
    current_world,
    form_world,
    groups_named,
    in_world,
    name_groups_from,
    set_world,
)
from nereus_verl import rollout_worker, verl_private

if TYPE_CHECKING:
    from nereus_verl.worker import RankState


# Where in the store of a change its ranks vote, and what their votes while they join are called.
VOTES, JOIN = "votes", "nereus.join"


@dataclass
class RanksChange:
    """A change of the set of ranks under way, as one process sees it.

    Attributes:
        rank: in the union; an old rank keeps its number, those that join follow.
        order: for each rank of the new world its rank in the union.
        address, port: of the store of the new world.
        old, union, new: the worlds; `new` is None where this process leaves.
        before: what ran transitions in the old world.
        votes: where the ranks of the union vote, a connection to the store of its own; the driver
            knows it too.
    """

    rank: int
    order: tuple[int, ...]
    address: str
    port: int
    old: dist.ProcessGroup
    before: RankTransition
    votes: dist.Store
    union: dist.ProcessGroup | None = None
    new: dist.ProcessGroup | None = None

    @property
    def target(self) -> int | None:
        """This process's rank in the new world."""
        return self.order.index(self.rank) if self.rank in self.order else None


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
    timeout_s = state.options.timeout_s
    limit = datetime.timedelta(seconds=timeout_s / 2)
    connection = dist.TCPStore(address, port, is_master=False, timeout=limit)
    change = RanksChange(
        rank,
        tuple(order),
        address,
        port,
        current_world(),
        state.transition,
        dist.PrefixStore(VOTES, connection),
    )
    state.change = change
    store = state.store
    if change.target != 0 or store is None:
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
    # Ranks that were never in one world have formed different numbers of groups.
    control = Control(rank, size, timeout_s=timeout_s, store=change.votes, prefix=JOIN)
    votes = control.vote("groups", True, str(groups_named()))
    name_groups_from(max(int(vote.payload) for vote in votes))
    # Ranks wait half as long as the driver's votes, so that they can still say what failed.
    change.union = form_world(dist.PrefixStore("union", store), rank, size, timeout_s=timeout_s / 2)
    if change.target is not None:
        change.new = form_world(
            dist.PrefixStore("world", store), change.target, len(order), timeout_s=timeout_s / 2
        )
    set_world(change.union)
    state.transition = RankTransition(
        {name: _UnitOnTheMove(unit, change) for name, unit in state.units.items()},
        rank=rank,
        world=size,
        control=control,
        options=state.options,
    )
    state.transition.epoch = change.before.epoch


def withdraw(state: RankState) -> None:
    """Go back to the old world, after an abort or where worlds were not formed. Local."""
    change, state.change = state.change, None
    if change is None:
        return
    set_world(change.old)
    state.transition = change.before
    state.store = None
    for world in (change.union, change.new):
        if world is not None:
            dist.destroy_process_group(world)


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
    assert change is not None
    assert change.target is not None
    rollout_worker.drop(state, worker, world=change.old)
    for world in (change.union, change.old):
        if world is not None:
            dist.destroy_process_group(world)
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


class _UnitOnTheMove:
    """A unit while ranks join and leave (`ElasticUnit`): the layout in force lives in the old
    world, the target in the new one; a process that leaves builds nothing."""

    def __init__(self, unit: ElasticUnit, change: RanksChange) -> None:
        self.name = unit.name
        self._unit = unit
        self._change = change

    def layout(self) -> Layout:
        return self._unit.layout()

    def described(self) -> DescribedUnit:
        with in_world(self._change.old):
            return self._unit.described()

    def version(self) -> int:
        return self._unit.version()

    def free_gradients(self) -> None:
        self._unit.free_gradients()

    def build(self, layout: Layout) -> BuiltUnit:
        if self._change.new is None:
            return _Nothing(layout)
        with in_world(self._change.new):
            return _InWorld(self._unit.build(layout), self._change.new)

    def switch(self, built: BuiltUnit) -> BuiltUnit:
        return self._unit.switch(built.built) if isinstance(built, _InWorld) else built

    def release(self, built: BuiltUnit) -> None:
        if not isinstance(built, _Nothing):
            self._unit.release(built.built if isinstance(built, _InWorld) else built)

    def settle(self) -> None:
        self._unit.settle()


class _InWorld:
    """A target that was built in a world which is not the default yet."""

    def __init__(self, built: BuiltUnit, world: dist.ProcessGroup) -> None:
        self.built = built
        self.layout = built.layout
        self._world = world

    def described(self) -> DescribedUnit:
        with in_world(self._world):
            return self.built.described()

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        with in_world(self._world):
            self.built.load_scalars(scalars)


class _Nothing:
    """What a process that leaves holds of the target."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def described(self) -> DescribedUnit:
        return DescribedUnit()

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        raise RuntimeError("a rank that leaves has nothing to load")
