"""The transition graph: steps of units on ranks, what they wait for, what memory they hold.

A node is one step of one unit (or of all units together) on a set of ranks. An edge says that one
node must end before another begins, and why: its data, the memory it frees, or the link it uses.
Memory is counted in blocks: one block is one allocation on one rank (a storage, a staging buffer,
gradients), acquired when a node begins and released when a node ends.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
ByteArray = NDArray[np.int64]


class GraphError(ValueError):
    """A graph that cannot be: an edge to a node that is not there, a cycle, memory used twice."""


class Step(str, enum.Enum):
    """What a node does. Values are the names of phases used in reports and fault injection."""

    FREE_GRADIENTS = "free_gradients"
    FORM_GROUPS = "form_groups"
    DESCRIBE = "describe"
    PLAN = "plan"
    AGREE = "agree"
    PARK = "park"
    BUILD = "build"
    MOVE = "move"
    VERIFY = "verify"
    COMMIT = "commit"
    RELEASE = "release"
    DROP_GROUPS = "drop_groups"
    RECONCILE_ROLLOUT = "reconcile_rollout"
    SYNC_WEIGHTS = "sync_weights"
    FETCH = "fetch"


class Window(str, enum.Enum):
    """When a node may run. Background windows, beside other units' stages, are not built yet."""

    BOUNDARY = "boundary"


# A collective step begins on all its ranks together; a local one on each rank when that is ready.
COLLECTIVE = frozenset(
    {Step.FORM_GROUPS, Step.PLAN, Step.AGREE, Step.BUILD, Step.MOVE, Step.VERIFY, Step.SYNC_WEIGHTS}
)
# Steps that the trainer's driver runs, not the ranks of the units.
DRIVER_STEPS = frozenset({Step.RECONCILE_ROLLOUT, Step.SYNC_WEIGHTS})


@dataclass(frozen=True, eq=False)
class Blocks:
    """Allocations, in columns: one row a block.

    rank: int32[b]. nbytes: int64[b]. unit: int32[b], index of the unit whose storage it is, or -1.
    key: int64[b], the storage's key on its rank, or -1. parkable: bool[b], may go to host memory.
    """

    rank: IntArray
    nbytes: ByteArray
    unit: IntArray
    key: ByteArray
    parkable: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def concatenate(cls, parts: Sequence[Blocks]) -> Blocks:
        """All rows of `parts`, in order."""
        return cls(
            rank=np.concatenate([np.zeros(0, np.int32), *(p.rank for p in parts)]),
            nbytes=np.concatenate([np.zeros(0, np.int64), *(p.nbytes for p in parts)]),
            unit=np.concatenate([np.zeros(0, np.int32), *(p.unit for p in parts)]),
            key=np.concatenate([np.zeros(0, np.int64), *(p.key for p in parts)]),
            parkable=np.concatenate([np.zeros(0, bool), *(p.parkable for p in parts)]),
        )

    def bytes_by_rank(self, blocks: NDArray[np.integer], world: int) -> ByteArray:
        """int64[world]: bytes that these blocks (indices) take on each rank."""
        out = np.zeros(world, np.int64)
        np.add.at(out, self.rank[blocks], self.nbytes[blocks])
        return out


@dataclass(frozen=True, eq=False)
class Node:
    """One step.

    unit: index into `Graph.units`, or -1 for a step of all units together.
    subject: "source" or "target" where a step exists for both, else "".
    ranks: int32[k], ascending, not empty.
    acquires, releases: int32[], block indices; acquired at begin, released at end.
    parks: int32[], block indices; at the end their device memory is free and a host copy holds
        them, until they are released.
    """

    id: int
    step: Step
    unit: int
    ranks: IntArray
    subject: str = ""
    acquires: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    releases: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    parks: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    window: Window = Window.BOUNDARY

    @property
    def collective(self) -> bool:
        return self.step in COLLECTIVE


@dataclass(frozen=True)
class Edge:
    """`before` must end before `after` begins; reason is "data", "memory" or "link"."""

    before: int
    after: int
    reason: str


@dataclass(frozen=True, eq=False)
class Traffic:
    """What a move node carries, in columns: one row a pair of ranks (src may equal dst: a local
    copy). nbytes: int64[p]."""

    src: IntArray
    dst: IntArray
    nbytes: ByteArray


@dataclass(frozen=True, eq=False)
class Graph:
    """Steps, edges and memory of one transition.

    live: int32[], blocks that exist when the transition begins.
    budget_bytes: int64[world], what all blocks of a rank may take together; None: no limit.
    park_after: by unit index, the node after which that unit's parkable blocks may be parked.
    traffic: by node id, what a move carries; only estimates need it.
    """

    world: int
    units: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    blocks: Blocks
    live: IntArray
    budget_bytes: ByteArray | None
    park_after: Mapping[int, int] = field(default_factory=dict)
    traffic: Mapping[int, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if [node.id for node in self.nodes] != list(range(len(self.nodes))):
            raise GraphError("node ids must be 0, 1, 2, ... in order")
        for edge in self.edges:
            if not (0 <= edge.before < len(self.nodes) and 0 <= edge.after < len(self.nodes)):
                raise GraphError(f"{edge} names a node that is not in the graph")
        self._check_blocks("acquire", self.live, [node.acquires for node in self.nodes])
        self._check_blocks("release", self.live[:0], [node.releases for node in self.nodes])
        self._check_blocks("park", self.live[:0], [node.parks for node in self.nodes])
        for node in self.nodes:
            if not len(node.ranks) or node.ranks[0] < 0 or node.ranks[-1] >= self.world:
                raise GraphError(f"node {node.id} ({node.step.value}) has ranks outside the world")
            touched = np.concatenate([node.acquires, node.releases, node.parks])
            if not np.isin(self.blocks.rank[touched], node.ranks).all():
                raise GraphError(
                    f"node {node.id} ({node.step.value}) has memory on ranks it does not run on"
                )

    def _check_blocks(self, what: str, start: IntArray, used: Iterable[IntArray]) -> None:
        every = np.concatenate([start, *used])
        if len(every) and (every.min() < 0 or every.max() >= len(self.blocks)):
            raise GraphError(f"nodes {what} a block that is not in the graph")
        if len(np.unique(every)) != len(every):
            raise GraphError(f"two nodes {what} the same block")

    def predecessors(self) -> list[set[int]]:
        """By node id, the nodes that must end before it."""
        out: list[set[int]] = [set() for _ in self.nodes]
        for edge in self.edges:
            out[edge.after].add(edge.before)
        return out
