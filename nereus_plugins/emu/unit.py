"""What an adapter implements, per elastic unit, on each rank.

A unit is the distributed state of one replica of a model-stage ("actor", "critic", "ref"). The
transition graph (`nereus_plugins.gtg`) knows units only through these two protocols; it imports no
RL framework. A rank outside a unit's source layout still holds an `ElasticUnit` whose `described()`
has no shards, and a rank outside the target layout builds a `BuiltUnit` whose `described()` has
none: both take part in every collective step below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nereus_plugins.spec import Layout

if TYPE_CHECKING:
    from nereus_plugins.emu.described.base import DescribedUnit


@runtime_checkable
class BuiltUnit(Protocol):
    """One layout of a unit, built: its groups, model and optimizer with state allocated."""

    @property
    def layout(self) -> Layout: ...

    def described(self) -> DescribedUnit:
        """The shards of this layout on this rank as views of live memory, and its scalars."""
        ...

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Load the state that is not a box.

        `scalars` is what the source ranks reported, merged (`emu.described.base.merge_scalars`).
        Under `"rng"` it maps coordinates "tp,pp,dp" to generator states: a rank whose coordinate
        is there loads that state, any other seeds its generators with
        `gtg.scalars.derived_seed(seed, step, coordinate)`.
        """
        ...


@runtime_checkable
class ElasticUnit(Protocol):
    """A unit on this rank. Exactly one `BuiltUnit` is current at any time."""

    @property
    def name(self) -> str: ...

    def layout(self) -> Layout:
        """The current layout; the same on all ranks."""
        ...

    def described(self) -> DescribedUnit:
        """The current state of this rank: zero-copy shards, and scalars."""
        ...

    def version(self) -> int:
        """Changes whenever the current training state does: by an optimizer or scheduler step, or
        as a checkpoint is loaded. A transition prepared from one version is not committed at
        another. Ranks need not agree."""
        ...

    def free_gradients(self) -> None:
        """Free gradient memory. Gradients are dead at the boundary, so no later number changes."""
        ...

    def build(self, layout: Layout) -> BuiltUnit:
        """Collective over all ranks of the job, called in the same order on each.

        Forms the groups and allocates model and optimizer state of `layout`. The current layout
        stays intact and current; its storages may be parked in host memory meanwhile, so this must
        not read them. If it raises, it has already released what it made on this rank, and groups
        it forms carry a timeout, so that peers waiting for this rank raise too.
        """
        ...

    def switch(self, built: BuiltUnit) -> BuiltUnit:
        """Commit: make `built` current and return the previous one. Local, cannot fail."""
        ...

    def release(self, built: BuiltUnit) -> None:
        """Free memory, groups and hooks of a `BuiltUnit` that is not current.

        Called for the old layout after commit and for the target after an abort, in the same order
        on every rank. It must not wait for peers: after an abort a peer may be gone. It must not
        touch the current layout, whose storages may still be parked in host memory.
        """
        ...

    def settle(self) -> None:
        """Put the current layout's state where the framework keeps it between stages.

        Called on every rank at the end of a release and of an abort, after parked storages have
        been fetched; also after an abort in which nothing was built. Frameworks that offload a
        model between stages offload it here; others do nothing. It must not wait for peers: after
        an abort a peer may be gone.
        """
        return
