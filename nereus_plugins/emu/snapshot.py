"""A copy of a unit's state in host memory, and restoring it into any layout of the unit.

A snapshot is itself a described unit: the same boxes, with views of host memory. So it can be the
source of planned moves like a live unit, into the layout it was taken in or any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from nereus_plugins.emu.boxes import intersect
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard


class SnapshotMismatch(ValueError):
    """A snapshot that cannot fill a target; the message names tensor and box."""


def take(unit: DescribedUnit) -> DescribedUnit:
    """Copy a unit's shards and scalars into host memory (pinned if they are on a CUDA device)."""
    shards = []
    for shard in unit.shards:
        pinned = shard.view.is_cuda
        host = torch.empty(shard.view.shape, dtype=shard.view.dtype, pin_memory=pinned)
        host.copy_(shard.view, non_blocking=pinned)
        shards.append(LocalShard(shard.name, shard.box, shard.global_shape, host))
    if any(s.view.is_cuda for s in unit.shards):
        torch.cuda.synchronize()
    return DescribedUnit(shards, copy.deepcopy(unit.scalars))


def restore(snapshots: Mapping[int, DescribedUnit], target: DescribedUnit) -> int:
    """Fill a target's shards from snapshots that this process can reach.

    Across processes plan moves from the snapshots' tables instead and give them to a transport.

    Args:
        snapshots: by the rank they were taken on; together they hold whatever the target needs.
        target: live shards to fill; scalars are the caller's, by its own `load_scalars`.

    Returns:
        Bytes copied.

    Raises:
        SnapshotMismatch: a tensor is missing, has another shape or dtype, or is not covered whole.
    """
    by_name: dict[str, list[LocalShard]] = {}
    for _, snapshot in sorted(snapshots.items()):
        for shard in snapshot.shards:
            by_name.setdefault(shard.name, []).append(shard)
    copied = 0
    with torch.no_grad():
        for shard in target.shards:
            filled = torch.zeros(shard.view.shape, dtype=torch.bool)
            for source in by_name.get(shard.name, []):
                if source.info != shard.info:
                    raise SnapshotMismatch(f"the snapshot has {source.info}, not {shard.info}")
                common = intersect(source.box, shard.box)
                if common is None or bool(filled[common.slices_in(shard.box)].all()):
                    continue
                shard.view[common.slices_in(shard.box)].copy_(
                    source.view[common.slices_in(source.box)]
                )
                filled[common.slices_in(shard.box)] = True
                copied += common.numel * shard.view.element_size()
            if not bool(filled.all()):
                raise SnapshotMismatch(f"the snapshot does not cover {shard.name} {shard.box}")
    return copied
