"""verl's Megatron engines, each at work in the world of its own layout (`parallel_state`).

verl's engine takes the parallel state that it finds for its own, and only the first of a process
makes one: whatever the others are configured for, they run in the first one's layout. Here every
engine is built in the layout that its configuration says, and every call of it runs there.

Installed in the worker processes of a job with Nereus on, before their first engine is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from nereus_verl import verl_private
from nereus_verl.parallel_state import World, Worlds

# Stands among an engine's own attributes, so that it goes with them where a unit switches.
_WORLD = "nereus_world"

_worlds: Worlds | None = None


def install(module: ModuleType) -> None:
    """Called with `verl.workers.engine.megatron.transformer_impl` once verl has imported it."""
    global _worlds
    _worlds = Worlds()
    verl_private.wrap_megatron_engines(module, around_building=_building, around=_at_work)


def worlds() -> Worlds:
    """Those of this process. Raises: RuntimeError where `install` was not called."""
    if _worlds is None:
        raise RuntimeError("this process was not started as a worker of a job with Nereus on")
    return _worlds


def world_of(engine: Any) -> World:
    """The world that `engine` works in."""
    world: World = vars(engine)[_WORLD]
    return world


@contextmanager
def _building(engine: Any, engine_config: Any) -> Iterator[None]:
    found = worlds()
    # A unit says itself which world it builds its target in.
    world = found.inside or found.find(
        engine_config.tensor_model_parallel_size, engine_config.pipeline_model_parallel_size
    )
    vars(engine)[_WORLD] = world
    with found.using(world):
        yield
        found.own_groups()


def _at_work(engine: Any) -> AbstractContextManager[None]:
    return worlds().using(world_of(engine))
