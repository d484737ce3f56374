"""A model of OpenRLHF, in its Ray actor's process, as an elastic unit.

The target is a second object of the model actor's class, which OpenRLHF's own code builds in the
world that is the default then. Commit exchanges the contents of the two objects, so that the actor
that Ray calls is the new one.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.config import STAGES
from nereus_plugins.emu.described import DescribedUnit, UnsupportedState
from nereus_plugins.emu.described.deepspeed import (
    describe_deepspeed,
    ensure_optimizer_state,
    free_gradients,
    load_scalars,
    release,
)
from nereus_plugins.emu.described.deepspeed_private import Globals
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.spec import Layout
from nereus_plugins.transport.groups import GroupSet
from nereus_plugins.transport.torch_private import current_world, set_timeout

# Of the tensors of the moving average that an actor keeps of its weights, and of its scalars.
AVERAGE = "average"


@dataclass
class Building:
    """What the driver says for building the target.

    args: OpenRLHF's. max_steps: of the learning rate's schedule. rank: of this process in the new
    world; address, port: of its store.
    """

    args: Any
    max_steps: int
    rank: int
    address: str
    port: int


class BuiltModel:
    """One layout of a model: the actor object that holds it, its groups, and DeepSpeed's globals
    (None where they are those in force in this process)."""

    def __init__(
        self, holder: Any, unit: str, layout: Layout, groups: GroupSet, own: Globals | None
    ) -> None:
        self.holder = holder
        self.layout = layout
        self.groups = groups
        self.globals = own
        self._unit = unit

    @property
    def engines(self) -> list[Any]:
        """All of DeepSpeed's; none where it was not built so far."""
        try:
            found = [self.engine, openrlhf_private.average_of(self.holder)]
        except AttributeError:
            return []
        return [engine for engine in found if engine is not None]

    @property
    def engine(self) -> Any:
        """DeepSpeed's; None where this rank is not part of the layout."""
        return openrlhf_private.engine_of(self.holder, self._unit) if self.holder else None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        if self.globals is None:
            yield
        else:
            with self.globals.loaded():
                yield

    def described(self) -> DescribedUnit:
        """Raises: UnsupportedState for state that is not a box."""
        if self.engine is None:
            return DescribedUnit()
        with self.in_force():
            described = describe_deepspeed(self.engine)
            if (average := openrlhf_private.average_of(self.holder)) is not None:
                described.shards += [
                    dataclasses.replace(shard, name=f"{AVERAGE}/{shard.name}")
                    for shard in describe_deepspeed(average).shards
                ]
                described.scalars[AVERAGE] = {"accumulations": _accumulations(self.holder)}
        return described

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        with self.in_force():
            load_scalars(scalars, self.engine)
        if AVERAGE in scalars:
            _, each = openrlhf_private.averaged(self.holder)
            openrlhf_private.set_averaged(self.holder, scalars[AVERAGE]["accumulations"] * each)


def _accumulations(holder: Any) -> int:
    """After how many accumulations OpenRLHF averaged. Raises: UnsupportedState inside of one."""
    asked, each = openrlhf_private.averaged(holder)
    if asked % each:
        raise UnsupportedState(
            f"the moving average is inside of a gradient accumulation ({asked} micro-steps of "
            f"{each} each); a layout changes between optimizer steps"
        )
    return asked // each


class DeepSpeedUnit:
    """Implements `nereus_plugins.emu.unit.ElasticUnit`.

    Args:
        name: "actor", "critic", "ref" or "reward".
        worker: OpenRLHF's model actor.
        layout: in force; the worker is empty where this process is not part of it.
        timeout_s: how long the transition's votes wait.
        empty: whether this process is one that joins.
    """

    def __init__(
        self, name: str, worker: Any, layout: Layout, timeout_s: float, *, empty: bool = False
    ) -> None:
        self.name = name
        self.building: Building | None = None
        self._worker = worker
        self._timeout_s = timeout_s
        groups = GroupSet([] if empty else _groups_here())
        self._current = BuiltModel(None if empty else worker, name, layout, groups, None)

    def layout(self) -> Layout:
        return self._current.layout

    def described(self) -> DescribedUnit:
        return self._current.described()

    def version(self) -> int:
        engine = self._current.engine
        if engine is None:
            return 0
        # Of two counters, each of which every update changes; a load sets them back.
        return int(engine.global_steps << 32) + int(engine.micro_steps)

    def free_gradients(self) -> None:
        # Of a model that sleeps DeepSpeed itself takes the buffers away and brings them back.
        if self._current.engine is not None and self._sleeper() is None:
            free_gradients(self._current.engine)

    def wake(self) -> None:
        """Have the state of a model that sleeps on the device. Local."""
        if (engine := self._sleeper()) is not None:
            openrlhf_private.wake(engine)

    def put_to_sleep(self) -> None:
        """The inverse of `wake`, where OpenRLHF has the model sleep. Local."""
        if (engine := self._sleeper()) is not None:
            openrlhf_private.put_to_sleep(engine)

    def _sleeper(self) -> Any:
        """DeepSpeed's engine where OpenRLHF has the model sleep, else None."""
        engine = self._current.engine
        return engine if engine is not None and openrlhf_private.sleeps(self._worker) else None

    def build(self, layout: Layout) -> BuiltModel:
        building = self.building
        assert building is not None
        twin = openrlhf_private.empty_twin(self._worker)
        built = BuiltModel(twin, self.name, layout, GroupSet(), Globals.fresh())
        environment = openrlhf_private.environment(
            building.rank, layout.world_size, building.address, building.port
        )
        try:
            with (
                generators_preserved(),
                environment,
                _waiting(self._timeout_s / 2),
                built.groups.collect(self._timeout_s),
                built.in_force(),
            ):
                openrlhf_private.build_model(
                    twin,
                    building.args,
                    self.name,
                    STAGES[layout.sharding],
                    layout.tp,
                    layout.world_size,
                    building.max_steps,
                )
                ensure_optimizer_state(built.engine)
        except BaseException:
            self.release(built)
            raise
        return built

    def switch(self, built: BuiltUnit) -> BuiltModel:
        assert isinstance(built, BuiltModel)
        building = self.building
        assert building is not None
        old = self._current
        before = Globals.in_force()
        assert built.globals is not None
        built.globals.load()
        openrlhf_private.adopt(
            self._worker, built.holder, self.name, building.rank, built.layout.world_size
        )
        self._current = BuiltModel(self._worker, self.name, built.layout, built.groups, None)
        # What was built and what was in force have changed places.
        holder = built.holder if old.holder is not None else None
        return BuiltModel(holder, self.name, old.layout, old.groups, before)

    def release(self, built: BuiltUnit) -> None:
        assert isinstance(built, BuiltModel)
        with built.in_force():
            for engine in built.engines:
                release(engine)
                del engine
        if built.holder is not None:
            built.holder.__dict__.clear()
        built.holder = None
        built.globals = Globals.fresh()
        gc.collect()
        built.groups.destroy()

    def settle(self) -> None:
        """Nothing to do: the worker puts a model that sleeps to sleep once worlds are settled."""


@contextmanager
def _waiting(timeout_s: float) -> Iterator[None]:
    """Inside, a rank waits so long for its peers in the default world, so that it can still vote:
    DeepSpeed works in that one while it builds, and a peer may have failed before."""
    world = current_world()
    set_timeout(world, datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        set_timeout(world, default_pg_timeout)


def start_layout(worker: Any, unit: str) -> Layout:
    """The layout that OpenRLHF built this model in."""
    strategy = openrlhf_private.strategy_of(worker)
    stage = openrlhf_private.stage_of(worker)
    if unit in ("ref", "reward") and stage != 3:
        stage = 0
    sharding = next(name for name, number in STAGES.items() if number == stage)
    tp = strategy.ds_tensor_parallel_size
    return Layout(dp=strategy.world_size // tp, tp=tp, sharding=sharding)


def _groups_here() -> list[dist.ProcessGroup]:
    from nereus_plugins.transport.torch_private import registered_groups

    return registered_groups()


# -- generators --------------------------------------------------------------------------------
#
# OpenRLHF seeds all ranks alike, and all draw alike. A process keeps its generators as long as it
# is a rank; one that joins goes on from where rank 0's are.


def generator_states() -> dict[str, Any]:
    """The states of this process's default generators."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "device": device,
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """The inverse of `generator_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])


@contextmanager
def generators_preserved() -> Iterator[None]:
    """Restore the default generators afterwards; building a model seeds and draws from them."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)
