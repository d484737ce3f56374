"""A copy of a unit's state on one rank, and putting it back: box by box, the plainest way, by which
what Nereus does is checked."""

from __future__ import annotations

import copy

import torch

from nereus_plugins.emu.boxes import intersect
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard


def take(unit: DescribedUnit) -> DescribedUnit:
    """A rank's shards and scalars, copied."""
    shards = [LocalShard(s.name, s.box, s.global_shape, s.view.clone()) for s in unit.shards]
    return DescribedUnit(shards, copy.deepcopy(unit.scalars))


def put_back(saved: DescribedUnit, target: DescribedUnit) -> None:
    """Fill a rank's shards from its own copy, which may be cut otherwise.

    Scalars are the caller's. Raises: AssertionError: the copy does not cover a shard.
    """
    with torch.no_grad():
        for shard in target.shards:
            filled = torch.zeros(shard.view.shape, dtype=torch.bool)
            for source in saved.shards:
                if source.info != shard.info:
                    continue
                if (common := intersect(source.box, shard.box)) is not None:
                    place = common.slices_in(shard.box)
                    shard.view[place].copy_(source.view[common.slices_in(source.box)])
                    filled[place] = True
            assert bool(filled.all()), f"the copy does not cover {shard.name} {shard.box}"
