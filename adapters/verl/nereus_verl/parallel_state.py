"""Several Megatron parallel layouts in one process, one of them loaded at a time.

Megatron-core keeps its groups in module globals (`megatron.core.parallel_state` and a few more),
and verl puts actor, critic and reference of one process into the same ones. Here each layout has
globals of its own, a world, which are loaded around every piece of work on an engine of that
layout: see `engine_worlds`. Whatever is loaded, Megatron's own code runs unchanged.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import utils as transformer_utils

from nereus_plugins.transport.groups import GroupSet

Globals = dict[tuple[types.ModuleType, str], Any]


def _names() -> list[tuple[types.ModuleType, str]]:
    names: list[tuple[types.ModuleType, str]] = [
        (parallel_state, name)
        for name, value in vars(parallel_state).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not callable(value)
        and not isinstance(value, types.ModuleType)
    ]
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        names.append((tensor_parallel_random, name))
    if hasattr(transformer_utils, "_sequence_parallel_attr_cache"):
        names.append((transformer_utils, "_sequence_parallel_attr_cache"))
    return names


class World:
    """The globals and groups of one layout.

    Attributes:
        tp, pp: its sizes.
        ranks: torch's default group that it was made in.
        groups: its process groups.
        users: the units whose engines work in it, as built. What of it belongs to one unit (the
            tensor-parallel generators) belongs to the first.
        in_force: whether units train in it.
    """

    def __init__(self, tp: int, pp: int, state: Globals) -> None:
        self.tp = tp
        self.pp = pp
        self.ranks = dist.group.WORLD
        self.groups = GroupSet()
        self.users: list[str] = []
        self.in_force = False
        self._state = state


class Worlds:
    """The worlds of a process. One instance a process, made before Megatron is initialised.

    Engines that are built together in equal layouts share a world. While there is one only, it
    stays loaded, as in a process without this. Where there are several, none is loaded outside
    `using`, so that whatever asks Megatron for its groups there fails, instead of being told those
    of another engine.
    """

    def __init__(self) -> None:
        if parallel_state.is_initialized():
            raise RuntimeError("Megatron's parallel state is in use already")
        self._names = _names()
        self._pristine = self._snapshot()
        self._worlds: list[World] = []
        self._loaded: World | None = None
        self._inside: World | None = None

    @property
    def inside(self) -> World | None:
        """The world of the innermost `using`."""
        return self._inside

    def find(self, tp: int, pp: int) -> World:
        """The world to build an engine of these sizes in, over the ranks of torch's default group:
        that of the engines it is built together with, or a new one: empty, as after importing
        Megatron.

        Never one in force: a rank that fails to build would leave its peers waiting in groups that
        others train with.
        """
        for world in self._worlds:
            same = (world.tp, world.pp) == (tp, pp) and world.ranks is dist.group.WORLD
            if same and not world.in_force:
                return world
        world = World(tp, pp, self._empty())
        self._worlds.append(world)
        return world

    @contextmanager
    def using(self, world: World) -> Iterator[None]:
        """Load `world` for the time inside; what happens to its globals inside stays with it."""
        outer, self._inside = self._inside, world
        try:
            self._load(world)
            yield
        finally:
            self._inside = outer
            self._load(outer or self._alone())

    def own_groups(self) -> None:
        """The world that is loaded owns the groups that its globals name."""
        assert self._loaded is not None
        for group in _groups_of(self._snapshot()):
            self._loaded.groups.add(group)

    def leave(self, world: World, user: str) -> None:
        """A unit is done with `world`; with the last one its groups are destroyed."""
        world.users.remove(user)
        if world.users:
            return
        self._worlds.remove(world)
        world.groups.destroy()
        world._state = {}
        if self._loaded is world:
            self._loaded = None
            self._set(self._empty())
        if self._inside is None:
            self._load(self._alone())

    def _alone(self) -> World | None:
        return self._worlds[0] if len(self._worlds) == 1 else None

    def _load(self, world: World | None) -> None:
        if world is self._loaded:
            return
        if world is not None and world not in self._worlds:
            raise RuntimeError("a parallel state was used after it was dropped")
        if self._loaded is not None:
            self._loaded._state = self._snapshot()
        self._loaded = world
        self._set(self._empty() if world is None else world._state)

    def _empty(self) -> Globals:
        return {
            key: copy.copy(value) if isinstance(value, dict) else value
            for key, value in self._pristine.items()
        }

    def _snapshot(self) -> Globals:
        return {(module, name): getattr(module, name) for module, name in self._names}

    @staticmethod
    def _set(state: Globals) -> None:
        for (module, name), value in state.items():
            setattr(module, name, value)


def _groups_of(state: Globals) -> list[dist.ProcessGroup]:
    """Process groups found in the globals, also inside lists, tuples and dicts."""
    found: list[dist.ProcessGroup] = []

    def walk(value: Any) -> None:
        if isinstance(value, dist.ProcessGroup):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)

    for value in state.values():
        walk(value)
    return found
