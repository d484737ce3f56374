"""A verl Megatron engine as an elastic unit: TP, PP, DP, and sequence parallelism with TP.

Colocated Megatron units share one parallel state, so they change together, into one layout. The
target is a second engine object built under globals of its own; commit exchanges the contents of
the two objects and loads the new globals.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described.megatron import (
    FreedGradients,
    describe_megatron,
    ensure_optimizer_state,
    free_gradients,
    load_scalars,
)
from nereus_plugins.emu.described.megatron_private import clear_rotary_caches, drop_ddp_hooks
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.gtg.scalars import RNG, derived_seed
from nereus_plugins.spec import Layout
from nereus_verl import memory, offload, rng, verl_private
from nereus_verl.parallel_state import World, Worlds


class MegatronProcess:
    """What the Megatron units of one process share: the parallel states, and the RNG tracker.

    Args:
        engine: any of the process's engines; it tells the layout in force.
        timeout_s: how long the transition's votes wait.
        elsewhere: the layout in force, where this process is not part of it and its engines are
            empty (`verl_private.build_empty`).
    """

    def __init__(self, engine: Any, timeout_s: float, elsewhere: Layout | None = None) -> None:
        self.timeout_s = timeout_s
        # The trainer's step after which the next transition takes place; new generators' seeds
        # follow from it, in a resumed job as in the first.
        self.step = 0
        self.worlds = Worlds(elsewhere or engine_layout(engine))
        self.rng_owner: str | None = None
        self._pending: World | None = None

    def acquire(self, layout: Layout) -> World:
        """The world that a transition builds in: made by its first unit, shared by the others.

        Raises: ValueError when two units ask for different layouts.
        """
        if self._pending is None:
            self._pending = self.worlds.fresh(layout)
        elif self._pending.layout != layout:
            raise ValueError(
                f"Megatron units of one process share one layout: one was asked for {layout}, "
                f"another for {self._pending.layout}"
            )
        self._pending.users += 1
        return self._pending

    def committed(self, world: World) -> None:
        self.worlds.switch(world)
        self._pending = None

    def give_back(self, world: World) -> None:
        """A unit is done with `world`, which is not current; the last one destroys its groups."""
        world.users -= 1
        if world.users <= 0:
            if self._pending is world:
                self._pending = None
            self.worlds.drop(world)


class BuiltMegatron:
    """One layout of a Megatron unit: the engine object that holds it, and its parallel state."""

    def __init__(
        self, name: str, engine: Any, layout: Layout, world: World, process: MegatronProcess
    ) -> None:
        self.name = name
        self.engine = engine
        self.layout = layout
        self.world = world
        self._process = process

    def described(self) -> DescribedUnit:
        """Raises: UnsupportedState for state that is not a box."""
        engine = self.engine
        if engine.module is None:  # this rank is not part of the layout
            return DescribedUnit()
        with self._process.worlds.using(self.world):
            unit = describe_megatron(
                engine.module,
                engine.optimizer,
                dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                lr_scheduler=engine.lr_scheduler,
            )
            if self._process.rng_owner == self.name:
                unit.scalars[RNG] = {_coordinate(): _tracker_states()}
            return unit

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        engine = self.engine
        with self._process.worlds.using(self.world):
            load_scalars(
                scalars,
                engine.module,
                engine.optimizer,
                dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                lr_scheduler=engine.lr_scheduler,
            )
            if RNG in scalars:
                _load_tracker(scalars[RNG], engine.engine_config.seed, self._process.step)


class MegatronUnit:
    """Implements `nereus_plugins.emu.unit.ElasticUnit` over one `MegatronEngine`.

    Args:
        name: "actor", "critic" or "ref".
        engine: verl's engine, initialised.
        process: shared by all Megatron units of this process.
        optimizer_groups: of the unit's optimizer, where the engine here is empty
            (`verl_private.optimizer_groups` of one that is not).
    """

    def __init__(
        self,
        name: str,
        engine: Any,
        process: MegatronProcess,
        optimizer_groups: Sequence[Any] | None = None,
    ) -> None:
        self.name = name
        self._process = process
        known = verl_private.optimizer_groups(engine.optimizer)
        self._optimizer_groups = optimizer_groups or known
        world = process.worlds.current
        world.users += 1
        if process.rng_owner is None:
            process.rng_owner = name
        self._current = BuiltMegatron(name, engine, world.layout, world, process)
        self._freed: FreedGradients | None = None

    @property
    def engine(self) -> Any:
        return self._current.engine

    def layout(self) -> Layout:
        return self._current.layout

    def described(self) -> DescribedUnit:
        if self.engine.module is not None:
            offload.onto_device(self.engine)
        return self._current.described()

    def free_gradients(self) -> None:
        engine = self.engine
        # verl frees the gradients itself with the weights that it offloads.
        if engine.optimizer is not None and not engine.is_param_offload_enabled:
            engine.optimizer_zero_grad()
            self._freed = free_gradients(engine.module, engine.optimizer)

    def build(self, layout: Layout) -> BuiltMegatron:
        old = self.engine
        world = self._process.acquire(layout)
        engine: Any = None
        try:
            with (
                rng.preserved(),
                self._process.worlds.using(world),
                world.groups.collect(self._process.timeout_s),
            ):
                engine = type(old)(
                    model_config=old.model_config,
                    engine_config=_config_for(old.engine_config, layout),
                    optimizer_config=old.optimizer_config,
                    checkpoint_config=old.checkpoint_config,
                )
                with (
                    verl_private.megatron_without_weights(engine),
                    verl_private.known_optimizer_groups(self._optimizer_groups),
                ):
                    engine.initialize()
                offload.onto_device(engine)
                if engine.optimizer is not None:
                    ensure_optimizer_state(engine.optimizer)
        except BaseException:
            _empty(engine)
            self._process.give_back(world)
            memory.collect()
            raise
        memory.OUTSTANDING.built()
        return BuiltMegatron(self.name, engine, layout, world, self._process)

    def switch(self, built: BuiltUnit) -> BuiltMegatron:
        assert isinstance(built, BuiltMegatron)
        ours, theirs = self._current.engine, built.engine
        ours.__dict__, theirs.__dict__ = theirs.__dict__, ours.__dict__
        self._freed = None  # with the layout that goes
        previous, process = self._current, self._process
        self._current = BuiltMegatron(self.name, ours, built.layout, built.world, process)
        process.committed(built.world)
        return BuiltMegatron(self.name, theirs, previous.layout, previous.world, process)

    def release(self, built: BuiltUnit) -> None:
        assert isinstance(built, BuiltMegatron)
        _empty(built.engine)
        self._process.give_back(built.world)
        memory.OUTSTANDING.released()

    def settle(self) -> None:
        if self._freed is not None:
            self._freed.restore()
            self._freed = None
        if self.engine.module is not None:
            offload.settle(self.engine)


def engine_layout(engine: Any) -> Layout:
    """The layout of the parallel state that is loaded, and what `engine` does with it."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    return Layout(
        tp=tp,
        pp=pp,
        dp=dist.get_world_size() // (tp * pp),
        sequence_parallel=bool(engine.tf_config.sequence_parallel) and tp > 1,
        sharding="zero1" if engine.engine_config.use_distributed_optimizer else "none",
    )


def _config_for(config: Any, layout: Layout) -> Any:
    config = copy.deepcopy(config)
    override = dict(config.override_transformer_config)
    # mbridge turns sequence parallelism on with tp > 1 unless it is told otherwise here.
    if config.vanilla_mbridge or "sequence_parallel" in override:
        override["sequence_parallel"] = layout.sequence_parallel
    verl_private.set_config(
        config,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        override_transformer_config=override,
    )
    return config


def _empty(engine: Any) -> None:
    """Let go of everything an engine object holds."""
    if engine is not None:
        for chunk in engine.__dict__.get("module") or ():
            if hasattr(chunk, "grad_accs"):
                drop_ddp_hooks(chunk)
        engine.__dict__.clear()
    clear_rotary_caches()


# -- the tensor-parallel RNG tracker -------------------------------------------------------------


def _coordinate(*, tp: int | None = None) -> str:
    if tp is None:
        tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    return f"{tp},{pp},{parallel_state.get_data_parallel_rank()}"


def _tracker_states() -> dict[str, str]:
    states = get_cuda_rng_tracker().get_states()
    return {
        name: base64.b64encode(state.cpu().numpy().tobytes()).decode()
        for name, state in states.items()
    }


def _load_tracker(states: Mapping[str, Mapping[str, str]], seed: int, step: int) -> None:
    """Take over the states of this rank's coordinate, or seed anew where nobody had it.

    Tensor-parallel ranks must draw alike from the data-parallel generator, so that one is always
    looked up at tp = 0.
    """
    tracker = get_cuda_rng_tracker()
    names = list(tracker.get_states())
    tracker.reset()
    loaded: dict[str, torch.Tensor] = {}
    for name in names:
        place = _coordinate(tp=0 if name == get_data_parallel_rng_tracker_name() else None)
        if name in states.get(place, {}):
            raw = bytearray(base64.b64decode(states[place][name]))
            loaded[name] = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            tracker.add(name, derived_seed(seed, step, f"{place}/{name}"))
    tracker.set_states({**tracker.get_states(), **loaded})
