"""Several Megatron parallel layouts in one process, one of them loaded at a time.

Megatron-core keeps its groups in module globals (`megatron.core.parallel_state` and a few more),
and verl puts actor, critic and reference of one process into the same ones. While a transition is
prepared, the target layout has globals of its own; they are loaded around every piece of work on
the target, and for good at commit. Whatever is loaded, Megatron's own code runs unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import utils as transformer_utils

from nereus_plugins.spec import Layout
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
    """The globals and groups of one layout. Groups are shared by all units of the process."""

    def __init__(self, layout: Layout, state: Globals) -> None:
        self.layout = layout
        self.groups = GroupSet()
        self.users = 0
        self._state = state


class Worlds:
    """The world that is loaded, and those beside it. One instance a process.

    Created while a layout is in force; that layout's globals become the current world.
    """

    def __init__(self, layout: Layout) -> None:
        self._names = _names()
        self.current = World(layout, {})
        self.current.groups = GroupSet(_groups_of(self._snapshot()))

    def fresh(self, layout: Layout) -> World:
        """An empty world: no groups yet, as after importing Megatron."""
        return World(layout, {key: _pristine(key[1], value) for key, value in self._snap_items()})

    @contextmanager
    def using(self, world: World) -> Iterator[None]:
        """Load `world` for the time inside; what happens to its globals inside stays with it."""
        if world is self.current:
            yield
            return
        mine = self._snapshot()
        self._load(world._state)
        try:
            yield
        finally:
            world._state = self._snapshot()
            self._load(mine)

    def switch(self, world: World) -> None:
        """Make `world` the current one; a second call (from another unit) changes nothing."""
        if world is self.current:
            return
        self.current._state = self._snapshot()
        self._load(world._state)
        world._state = {}
        self.current = world

    def drop(self, world: World) -> None:
        """Destroy the groups of a world that is not current and forget its globals."""
        if world is self.current:
            raise RuntimeError("the current parallel state cannot be dropped")
        world.groups.destroy()
        world._state = {}

    def _snap_items(self) -> list[tuple[tuple[types.ModuleType, str], Any]]:
        return [((m, n), getattr(m, n)) for m, n in self._names]

    def _snapshot(self) -> Globals:
        return dict(self._snap_items())

    @staticmethod
    def _load(state: Globals) -> None:
        for (module, name), value in state.items():
            setattr(module, name, value)


def _pristine(name: str, value: Any) -> Any:
    """The value a global has before `initialize_model_parallel`, from the kind it has after."""
    if isinstance(value, dict):
        return {}
    if isinstance(value, bool) or name.endswith("_INITIALIZED"):
        return False
    return None


def _groups_of(state: Globals) -> list[torch.distributed.ProcessGroup]:
    """Process groups found in the globals, also inside lists, tuples and dicts."""
    found: list[torch.distributed.ProcessGroup] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.distributed.ProcessGroup):
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
