"""Builds the transition graph of a set of units from their shard tables.

Every transition has the same shape. What the source holds is described first; then, for each unit:

    build -> describe -> (plan -> agree: all units together) -> move

and for all together: verify -> commit -> release of the old -> drop groups, then, on request, what
the trainer's driver does with rollout. Memory decides where parking comes in (`gtg.compile`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.emu.moves import MoveTable
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.gtg.graph import (
    Blocks,
    ByteArray,
    Edge,
    Graph,
    GraphError,
    IntArray,
    Node,
    Step,
    Traffic,
)
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Layout,
    ModelSpec,
    ModelStage,
    OptimizerSpec,
)


@dataclass(frozen=True, eq=False)
class UnitChange:
    """One unit's part of a transition. Ranks in the tables are ranks of the job.

    target: predicted, or described once it is built; None where neither is known, which is enough
        without a memory budget.
    gradient_bytes: int64[world], freed first. build_bytes: int64[world], what building the target
        allocates besides its shards (gradient buffers), for as long as the target lives.
    """

    name: str
    source_layout: Layout
    target_layout: Layout
    source: ShardTable
    target: ShardTable | None
    gradient_bytes: ByteArray | None = None
    build_bytes: ByteArray | None = None


@dataclass(frozen=True)
class PlannedUnit:
    """What must be known of a unit to predict its shards in any plan.

    stage: the model-stage whose assignment places the unit's state.
    """

    name: str
    stage: ModelStage
    model: ModelSpec
    backend: str
    optimizer: OptimizerSpec | None = None
    param_dtype: str = "bfloat16"

    def table(self, assignment: Assignment) -> ShardTable:
        """The predicted shards on the assignment's devices."""
        return predict_unit(
            self.model,
            assignment.layout,
            backend=self.backend,
            optimizer=self.optimizer,
            param_dtype=self.param_dtype,
            ranks=assignment.devices,
        )


def changes_between(
    old: GlobalPlan,
    new: GlobalPlan,
    units: Sequence[PlannedUnit],
    table: Callable[[PlannedUnit, Assignment], ShardTable] = PlannedUnit.table,
) -> list[UnitChange]:
    """The units that move from one plan to the other, predicted from the spec on both sides.

    Args: table: predicts a unit's shards; who asks often may keep them.

    Raises: KeyError: a plan does not assign a unit's stage. SpecError: a layout that its model does
    not fit.
    """
    changes = []
    for unit in units:
        source, target = old.assignments[unit.stage], new.assignments[unit.stage]
        if (source.layout, source.devices) != (target.layout, target.devices):
            changes.append(
                UnitChange(
                    name=unit.name,
                    source_layout=source.layout,
                    target_layout=target.layout,
                    source=table(unit, source),
                    target=table(unit, target),
                )
            )
    return changes


def build_graph(
    changes: Sequence[UnitChange],
    *,
    world: int,
    memory_budget_bytes: int | ByteArray | None = None,
    staging_bytes: int = 0,
    moves: Mapping[str, MoveTable] | None = None,
    rollout: bool = False,
) -> Graph:
    """The graph that moves `changes` together.

    Args:
        world: ranks of the job; all take part in collective steps.
        memory_budget_bytes: what the units may take on a device, or int64[world]; None: no limit.
        staging_bytes: staging buffers of one rank during a move, sending and receiving together.
        moves: by unit, the moves of all ranks; only estimates need them.
        rollout: add the driver's steps that bring rollout in line after the commit.

    Raises:
        GraphError: a memory budget without target tables; a rank outside the world.
    """
    return _Builder(changes, world, memory_budget_bytes, staging_bytes, moves or {}, rollout).run()


class _Builder:
    def __init__(
        self,
        changes: Sequence[UnitChange],
        world: int,
        budget: int | ByteArray | None,
        staging_bytes: int,
        moves: Mapping[str, MoveTable],
        rollout: bool,
    ) -> None:
        if not changes:
            raise GraphError("a transition needs at least one unit to change")
        self.changes = changes
        self.world = world
        self.everyone = np.arange(world, dtype=np.int32)
        self.budget = None if budget is None else np.broadcast_to(np.int64(budget), (world,)).copy()
        self.staging_bytes = staging_bytes
        self.moves = moves
        self.rollout = rollout
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.blocks: list[Blocks] = []
        self.live: list[int] = []
        self.park_after: dict[int, int] = {}
        self.traffic: dict[int, Traffic] = {}

    def run(self) -> Graph:
        sources = [self._source_blocks(i, change) for i, change in enumerate(self.changes)]
        described = self._describe_sources()
        form = self._node(Step.FORM_GROUPS, -1, self.everyone)
        plan = self._node(Step.PLAN, -1, self.everyone, "source", after=[*described, form])
        agree = self._node(Step.AGREE, -1, self.everyone, "source", after=[plan])
        targets = []
        for i, change in enumerate(self.changes):
            acquires = self._target_blocks(i, change)
            build = self._node(Step.BUILD, i, self.everyone, after=[agree], acquires=acquires)
            targets.append(self._node(Step.DESCRIBE, i, self.everyone, "target", after=[build]))
            self.park_after[i] = agree
        plan = self._node(Step.PLAN, -1, self.everyone, "target", after=targets)
        agree = self._node(Step.AGREE, -1, self.everyone, "target", after=[plan])
        moved = self._moves(agree)
        verify = self._node(Step.VERIFY, -1, self.everyone, after=moved)
        commit = self._node(Step.COMMIT, -1, self.everyone, after=[verify])
        released = [
            self._node(Step.RELEASE, i, self.everyone, "source", after=[commit], releases=blocks)
            for i, blocks in enumerate(sources)
        ]
        drop = self._node(Step.DROP_GROUPS, -1, self.everyone, after=released)
        if self.rollout:
            reconcile = self._node(Step.RECONCILE_ROLLOUT, -1, self.everyone, after=[drop])
            self._node(Step.SYNC_WEIGHTS, -1, self.everyone, after=[reconcile])
        return self._graph()

    def _describe_sources(self) -> list[int]:
        described = []
        for i, change in enumerate(self.changes):
            gradients = self._rank_blocks(change.gradient_bytes)
            self.live += gradients
            free = self._node(Step.FREE_GRADIENTS, i, self.everyone, "source", releases=gradients)
            described.append(self._node(Step.DESCRIBE, i, self.everyone, "source", after=[free]))
        return described

    def _moves(self, agree: int) -> list[int]:
        moved: list[int] = []
        for i, change in enumerate(self.changes):
            ranks = self._moving_ranks(change)
            staging = np.zeros(self.world, np.int64)
            staging[ranks] = self.staging_bytes
            blocks = self._rank_blocks(staging)
            move = self._node(
                Step.MOVE,
                i,
                ranks.astype(np.int32),
                after=[agree],
                acquires=blocks,
                releases=blocks,
            )
            # Every device has one link of each kind: two moves that share a device take turns.
            for earlier in moved:
                if len(np.intersect1d(self.nodes[earlier].ranks, ranks)):
                    self.edges.append(Edge(earlier, move, "link"))
            moved.append(move)
            if change.name in self.moves:
                self.traffic[move] = _traffic(self.moves[change.name])
        return moved

    def _node(
        self,
        step: Step,
        unit: int,
        ranks: IntArray,
        subject: str = "",
        *,
        after: Sequence[int] = (),
        acquires: Sequence[int] = (),
        releases: Sequence[int] = (),
    ) -> int:
        node = Node(
            len(self.nodes),
            step,
            unit,
            ranks,
            subject,
            acquires=np.array(acquires, np.int32),
            releases=np.array(releases, np.int32),
        )
        self.nodes.append(node)
        self.edges += [Edge(before, node.id, "data") for before in after]
        return node.id

    def _source_blocks(self, unit: int, change: UnitChange) -> list[int]:
        blocks = self._storage_blocks(unit, change.source, parkable=True)
        self.live += blocks
        return blocks

    def _target_blocks(self, unit: int, change: UnitChange) -> list[int]:
        if change.target is None:
            if self.budget is not None:
                raise GraphError(
                    f"a memory budget needs to know what the target of {change.name} takes: give a "
                    "predicted table for it, or unset memory_budget_bytes"
                )
            return []
        blocks = self._storage_blocks(unit, change.target, parkable=False)
        return blocks + self._rank_blocks(change.build_bytes)

    def _storage_blocks(self, unit: int, table: ShardTable, *, parkable: bool) -> list[int]:
        # Storages in host memory (offloaded state) take no device memory, unless host is all there
        # is: a CPU job's device is the host.
        storages = table.storages
        on_host = np.array([device == "cpu" for device in storages.devices], bool)[storages.device]
        rows = np.flatnonzero(~on_host | on_host.all())
        rows = rows[np.lexsort((storages.key[rows], storages.rank[rows]))]
        columns = (storages.rank[rows], storages.nbytes[rows], storages.key[rows])
        return self._add_blocks(*columns, unit=unit, parkable=parkable)

    def _rank_blocks(self, nbytes: ByteArray | None) -> list[int]:
        """One block a rank that has bytes here."""
        if nbytes is None:
            return []
        ranks = np.flatnonzero(nbytes)
        return self._add_blocks(ranks, nbytes[ranks], np.full(len(ranks), -1), unit=-1)

    def _add_blocks(
        self,
        rank: NDArray[np.integer],
        nbytes: NDArray[np.integer],
        key: NDArray[np.integer],
        *,
        unit: int,
        parkable: bool = False,
    ) -> list[int]:
        start = sum(len(blocks) for blocks in self.blocks)
        n = len(rank)
        self.blocks.append(
            Blocks(
                rank=rank.astype(np.int32),
                nbytes=nbytes.astype(np.int64),
                unit=np.full(n, unit, np.int32),
                key=key.astype(np.int64),
                parkable=np.full(n, parkable, bool),
            )
        )
        return list(range(start, start + n))

    def _moving_ranks(self, change: UnitChange) -> IntArray:
        if change.target is None:
            return self.everyone
        return np.union1d(change.source.rank, change.target.rank).astype(np.int32)

    def _graph(self) -> Graph:
        blocks = Blocks.concatenate(self.blocks)
        if len(blocks) and blocks.rank.max() >= self.world:
            raise GraphError(
                f"a shard table has rank {blocks.rank.max()} in a world of {self.world}"
            )
        return Graph(
            world=self.world,
            units=tuple(change.name for change in self.changes),
            nodes=tuple(self.nodes),
            edges=tuple(self.edges),
            blocks=blocks,
            live=np.array(self.live, np.int32),
            budget_bytes=self.budget,
            park_after=self.park_after,
            traffic=self.traffic,
        )


def _traffic(moves: MoveTable) -> Traffic:
    src, dst, nbytes = moves.pair_bytes()
    return Traffic(src=src.astype(np.int32), dst=dst.astype(np.int32), nbytes=nbytes)
