"""A verl FSDP2 engine as an elastic unit: full shard, HSDP, Ulysses sequence parallelism.

The target is a second engine object of the same class, built beside the first. Commit exchanges the
contents of the two objects, so every reference verl holds to its engine stays right.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described.fsdp2 import describe_fsdp2, ensure_optimizer_state, load_scalars
from nereus_plugins.emu.described.torch_private import clear_sharding_cache
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.spec import Layout
from nereus_plugins.transport.groups import GroupSet
from nereus_verl import memory, offload, rng, verl_private


class BuiltFsdp:
    """One layout of an FSDP2 unit: the engine object that holds it, and its process groups."""

    def __init__(self, engine: Any, layout: Layout, groups: GroupSet) -> None:
        self.engine = engine
        self.layout = layout
        self.groups = groups

    def described(self) -> DescribedUnit:
        """Raises: UnsupportedState for state that is not a box."""
        engine = self.engine
        if engine.module is None:  # this rank is not part of the layout
            return DescribedUnit()
        return describe_fsdp2(
            engine.module,
            engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            grad_scaler=engine.scaler,
        )

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        engine = self.engine
        load_scalars(
            scalars,
            engine.module,
            engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            grad_scaler=engine.scaler,
        )


class FsdpUnit:
    """Implements `nereus_plugins.emu.unit.ElasticUnit` over one `FSDPEngine`.

    Args:
        name: "actor", "critic" or "ref".
        engine: verl's engine, initialised; or with nothing in it (`verl_private.empty_engines`).
        timeout_s: how long the transition's votes wait.
        elsewhere: the unit's layout, where this rank is not part of it and the engine is empty.
    """

    def __init__(
        self, name: str, engine: Any, timeout_s: float, elsewhere: Layout | None = None
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._updates = verl_private.watch_updates(engine)
        groups = GroupSet()
        for mesh in (engine.device_mesh, engine.ulysses_device_mesh):
            for group in mesh.get_all_groups() if mesh is not None else []:
                groups.add(group)
        self._current = BuiltFsdp(engine, elsewhere or engine_layout(engine), groups)

    @property
    def engine(self) -> Any:
        return self._current.engine

    def layout(self) -> Layout:
        return self._current.layout

    def described(self) -> DescribedUnit:
        if self.engine.module is not None:
            offload.onto_device(self.engine)
        return self._current.described()

    def to_fill(self) -> BuiltFsdp:
        """The current layout, for a snapshot to be restored into; `settle` afterwards."""
        offload.onto_device(self.engine)
        return self._current

    def version(self) -> int:
        return self._updates.count

    def free_gradients(self) -> None:
        if self.engine.optimizer is not None:
            self.engine.optimizer.zero_grad(set_to_none=True)

    def build(self, layout: Layout) -> BuiltFsdp:
        old = self.engine
        config = copy.deepcopy(old.engine_config)
        full = layout.sharding == "fsdp"
        verl_private.set_config(
            config,
            fsdp_size=-1 if full else layout.shard_size,
            ulysses_sequence_parallel_size=layout.ulysses,
        )
        groups = GroupSet()
        engine: Any = None
        # DTensor caches results by mesh, and a mesh of other groups counts as equal: without this,
        # state made here would refer to another unit's groups, and die with them.
        clear_sharding_cache()
        try:
            cls = type(old)
            with (
                rng.preserved(),
                groups.collect(self._timeout_s),
                verl_private.fsdp_without_weights(cls),
            ):
                engine = cls(
                    model_config=old.model_config,
                    engine_config=config,
                    optimizer_config=old.optimizer_config,
                    checkpoint_config=old.checkpoint_config,
                )
                # Compiled for shapes, not for a layout: sharing it saves compiling again.
                engine.compute_entropy_from_logits = old.compute_entropy_from_logits
                engine.initialize()
                generation = verl_private.generation_config(old)
                if generation is not None:
                    engine.module.generation_config = generation
                offload.onto_device(engine)
                if engine.optimizer is not None:
                    ensure_optimizer_state(engine.optimizer)
        except BaseException:
            _empty(engine)
            groups.destroy()
            clear_sharding_cache()
            memory.collect()
            raise
        memory.OUTSTANDING.built()
        return BuiltFsdp(engine, layout, groups)

    def switch(self, built: BuiltUnit) -> BuiltFsdp:
        assert isinstance(built, BuiltFsdp)
        ours, theirs = self._current.engine, built.engine
        ours.__dict__, theirs.__dict__ = theirs.__dict__, ours.__dict__
        previous = BuiltFsdp(theirs, self._current.layout, self._current.groups)
        self._current = BuiltFsdp(ours, built.layout, built.groups)
        return previous

    def release(self, built: BuiltUnit) -> None:
        assert isinstance(built, BuiltFsdp)
        _empty(built.engine)
        built.groups.destroy()
        clear_sharding_cache()  # it may answer for other units with the groups just destroyed
        memory.OUTSTANDING.released()

    def settle(self) -> None:
        if self.engine.module is not None:
            offload.settle(self.engine)


def engine_layout(engine: Any) -> Layout:
    """The layout an FSDP2 engine was built with."""
    world = dist.get_world_size()
    ulysses = engine.ulysses_sequence_parallel_size
    mesh = engine.device_mesh
    if mesh.ndim == 1:
        return Layout(dp=world // ulysses, ulysses=ulysses, sharding="fsdp")
    return Layout(
        dp=world // ulysses, ulysses=ulysses, sharding="hsdp", shard_size=mesh.size(mesh.ndim - 1)
    )


def _empty(engine: Any) -> None:
    """Let go of everything an engine object holds."""
    if engine is not None:
        engine.__dict__.clear()
