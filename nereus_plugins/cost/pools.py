"""GPUs of several kinds: pools of equal nodes, devices numbered pool after pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from nereus_plugins.spec import ClusterSpec, Record, SpecError


class Pool(NamedTuple):
    """One cluster of a job's GPUs, and its first device."""

    first: int
    cluster: ClusterSpec

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.cluster.world_size)


@dataclasses.dataclass(frozen=True)
class Pools(Record):
    """Clusters that one job runs on; a model-stage lies inside one of them.

    A stage across GPUs of two kinds would run at the slower one's pace with the smaller one's
    memory: such plans are not considered.
    """

    clusters: tuple[ClusterSpec, ...]

    def __post_init__(self) -> None:
        if not self.clusters:
            raise SpecError("Pools.clusters names no cluster")
        object.__setattr__(self, "clusters", tuple(self.clusters))

    @property
    def world_size(self) -> int:
        return sum(cluster.world_size for cluster in self.clusters)

    def listed(self) -> tuple[Pool, ...]:
        out, first = [], 0
        for cluster in self.clusters:
            out.append(Pool(first, cluster))
            first += cluster.world_size
        return tuple(out)


def pools_of(cluster: ClusterSpec | Pools) -> tuple[Pool, ...]:
    return cluster.listed() if isinstance(cluster, Pools) else (Pool(0, cluster),)


def pool_of(pools: Sequence[Pool], devices: Sequence[int], what: str) -> Pool:
    """The pool that holds `devices`.

    Raises: SpecError naming `what` where they are in none, or in two.
    """
    low, high = min(devices), max(devices)
    for pool in pools:
        if low in pool.devices:
            if high in pool.devices:
                return pool
            if high < pools[-1].devices.stop:
                raise SpecError(f"{what}: devices {low} and {high} are GPUs of two kinds")
            break
    last = pools[-1].devices.stop
    raise SpecError(f"device {high} is not in a cluster of {last} devices")
