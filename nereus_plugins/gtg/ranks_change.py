"""A transition in which ranks join and leave: the worlds that are alive meanwhile.

A process is a rank of one world, torch's default group. Three are alive during the change: the old
one; the union of old and new ranks, in which the transition runs; and the new one, in which the
target layouts are built. Nothing of the old world is touched before the commit, so going back is a
matter of making it the default again. A process that joins starts in a world of its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.unit import BuiltUnit, ElasticUnit
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.torch_private import (
    form_world,
    groups_named,
    in_world,
    name_groups_from,
    set_world,
)

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
        votes: where the ranks of the union vote, a connection to the store of its own; the driver
            knows it too.
    """

    rank: int
    order: tuple[int, ...]
    address: str
    port: int
    old: dist.ProcessGroup
    votes: dist.Store
    union: dist.ProcessGroup | None = None
    new: dist.ProcessGroup | None = None

    @property
    def target(self) -> int | None:
        """This process's rank in the new world."""
        return self.order.index(self.rank) if self.rank in self.order else None

    @classmethod
    def begin(
        cls,
        rank: int,
        order: tuple[int, ...],
        address: str,
        port: int,
        old: dist.ProcessGroup,
        timeout_s: float,
    ) -> RanksChange:
        """Args: as the attributes. timeout_s: how long the votes of the transition wait.

        Raises: RuntimeError where the store cannot be reached.
        """
        votes = dist.PrefixStore(VOTES, _connect(address, port, timeout_s))
        return cls(rank, order, address, port, old, votes)

    def form(self, size: int, served: dist.TCPStore | None, timeout_s: float) -> Control:
        """Form the union, which becomes the default, and the new world. Collective.

        Args:
            size: of the union.
            served: the store of the new world, in the process that serves it.
            timeout_s: as in `begin`.

        Returns: votes of the union.

        Raises: RuntimeError where peers did not come; `undo` goes back.
        """
        store = served if self.target == 0 else None
        if store is None:
            store = _connect(self.address, self.port, timeout_s)
        # Ranks that were never in one world have formed different numbers of groups.
        control = Control(self.rank, size, timeout_s=timeout_s, store=self.votes, prefix=JOIN)
        votes = control.vote("groups", True, str(groups_named()))
        name_groups_from(max(int(vote.payload) for vote in votes))
        # Ranks wait half as long as votes do, so that they can still say what failed.
        limit_s = timeout_s / 2
        union = dist.PrefixStore("union", store)
        self.union = form_world(union, self.rank, size, timeout_s=limit_s)
        if self.target is not None:
            world = dist.PrefixStore("world", store)
            self.new = form_world(world, self.target, len(self.order), timeout_s=limit_s)
        set_world(self.union)
        return control

    def undo(self) -> None:
        """Make the old world the default again, and drop what was formed. Local."""
        set_world(self.old)
        _destroy(self.union, self.new)

    def finish(self) -> None:
        """Drop the worlds that are over, once the new one is the default. Local."""
        _destroy(self.union, self.old)


def _connect(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    limit = datetime.timedelta(seconds=timeout_s / 2)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)


def _destroy(*worlds: dist.ProcessGroup | None) -> None:
    for world in worlds:
        if world is not None:
            dist.destroy_process_group(world)


class UnitOnTheMove:
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
