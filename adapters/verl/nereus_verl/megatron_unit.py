"""A verl Megatron engine as an elastic unit: TP, PP, DP, and sequence parallelism with TP.

Every layout has a parallel state of its own (`parallel_state.World`), which units that change to it
together share. The target is a second engine object, built in the world of its layout; commit
exchanges the contents of the two objects.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described.base import FreedGradients
from nereus_plugins.emu.described.megatron import (
    describe_megatron,
    ensure_optimizer_state,
    free_gradients,
    load_scalars,
)
from nereus_plugins.emu.described.megatron_private import clear_rotary_caches, drop_ddp_hooks
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.gtg.scalars import RNG, derived_seed
from nereus_plugins.spec import Layout
from nereus_verl import engine_worlds, memory, offload, rng, verl_private
from nereus_verl.parallel_state import World


class MegatronProcess:
    """What the Megatron units of one process share: the parallel states.

    Args:
        timeout_s: how long the transition's votes wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # The trainer's step after which the next transition takes place; new generators' seeds
        # follow from it, in a resumed job as in the first.
        self.step = 0
        self.worlds = engine_worlds.worlds()


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
            # Who comes second to a world finds its generators as they are.
            if RNG in scalars and self.world.users[0] == self.name:
                _load_tracker(scalars[RNG], engine.engine_config.seed, self._process.step)


class MegatronUnit:
    """Implements `nereus_plugins.emu.unit.ElasticUnit` over one `MegatronEngine`.

    Args:
        name: "actor", "critic" or "ref".
        engine: verl's engine, initialised.
        process: shared by all Megatron units of this process.
        elsewhere: the layout in force, where this process is not part of it and the engine is empty
            (`verl_private.build_empty`).
        optimizer_groups: of the unit's optimizer, where the engine here is empty
            (`verl_private.optimizer_groups` of one that is not).
    """

    def __init__(
        self,
        name: str,
        engine: Any,
        process: MegatronProcess,
        elsewhere: Layout | None = None,
        optimizer_groups: Sequence[Any] | None = None,
    ) -> None:
        self.name = name
        self._process = process
        known = verl_private.optimizer_groups(engine.optimizer)
        self._optimizer_groups = optimizer_groups or known
        world = engine_worlds.world_of(engine)
        world.users.append(name)
        world.in_force = True
        layout = elsewhere
        if layout is None:
            with process.worlds.using(world):
                layout = engine_layout(engine)
        self._current = BuiltMegatron(name, engine, layout, world, process)
        self._freed: FreedGradients | None = None
        self._updates = verl_private.watch_updates(engine)
        self._updates.before = self._restore_gradients

    @property
    def engine(self) -> Any:
        return self._current.engine

    def layout(self) -> Layout:
        return self._current.layout

    def described(self) -> DescribedUnit:
        if self.engine.module is not None:
            offload.onto_device(self.engine)
        return self._current.described()

    def to_fill(self) -> BuiltMegatron:
        """The current layout, for a snapshot to be restored into; `settle` afterwards."""
        offload.onto_device(self.engine)
        return self._current

    def version(self) -> int:
        return self._updates.count

    def free_gradients(self) -> None:
        engine = self.engine
        # verl frees the gradients itself with the weights that it offloads.
        if engine.optimizer is not None and not engine.is_param_offload_enabled:
            engine.optimizer_zero_grad()
            self._freed = free_gradients(engine.module, engine.optimizer)

    def build(self, layout: Layout) -> BuiltMegatron:
        old = self.engine
        worlds = self._process.worlds
        world = worlds.find(layout.tp, layout.pp)
        world.users.append(self.name)
        engine: Any = None
        try:
            with (
                rng.preserved(),
                worlds.using(world),
                _tracker_preserved() if len(world.users) > 1 else nullcontext(),
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
            worlds.leave(world, self.name)
            memory.collect()
            raise
        memory.OUTSTANDING.built()
        return BuiltMegatron(self.name, engine, layout, world, self._process)

    def switch(self, built: BuiltUnit) -> BuiltMegatron:
        assert isinstance(built, BuiltMegatron)
        ours, theirs = self._current.engine, built.engine
        ours.__dict__, theirs.__dict__ = theirs.__dict__, ours.__dict__
        self._freed = None  # with the layout that goes
        built.world.in_force = True
        previous, process = self._current, self._process
        self._current = BuiltMegatron(self.name, ours, built.layout, built.world, process)
        return BuiltMegatron(self.name, theirs, previous.layout, previous.world, process)

    def release(self, built: BuiltUnit) -> None:
        assert isinstance(built, BuiltMegatron)
        _empty(built.engine)
        self._process.worlds.leave(built.world, self.name)
        memory.OUTSTANDING.released()

    def settle(self) -> None:
        self._restore_gradients()
        if self.engine.module is not None:
            offload.settle(self.engine)

    def _restore_gradients(self) -> None:
        if self._freed is not None:
            self._freed.restore()
            self._freed = None


def engine_layout(engine: Any) -> Layout:
    """The layout of the parallel state that is loaded, and what `engine` does in it."""
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


@contextmanager
def _tracker_preserved() -> Iterator[None]:
    """Restore a world's generators afterwards: building an engine seeds them."""
    states = get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        get_cuda_rng_tracker().set_states(states)


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
