"""From a graph to a schedule: one global sequence of rounds, of which each rank runs its part.

A round is one or more nodes of the same step that do not wait for each other; a vote of all ranks
ends it. Since every rank runs its part of the same total order, and a node is placed only after
everything it waits for, no schedule can deadlock.

Memory is followed through the sequence: a node is placed only where what it acquires fits beside
what is live on every rank ("intact"). Where nothing fits any more, source storages are parked in
host memory, as few as needed, the unit that is being built first, in storage order ("staged").
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.gtg.graph import ByteArray, Edge, Graph, GraphError, IntArray, Node, Step

_ORDER = {step: index for index, step in enumerate(Step)}


class InfeasibleTransition(RuntimeError):
    """The target does not fit on a device, even with every source storage parked in host memory."""

    def __init__(self, rank: int, step: str, needed_bytes: int, available_bytes: int) -> None:
        self.rank = rank
        self.step = step
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(
            f"rank {rank} needs {needed_bytes} bytes for {step} and has {available_bytes} bytes "
            "with all parkable source storages in host memory: raise memory_budget_bytes, choose a "
            "target layout that shards more (larger tp, pp or dp with a sharded optimizer), or "
            "lower staging_bytes"
        )


@dataclass(frozen=True)
class Round:
    """Nodes (ids) of one step; a vote of all ranks ends the round."""

    step: Step
    nodes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A compiled graph.

    graph: with PARK nodes and the memory edges that the order relies on added.
    mode: "intact" (source and target live side by side) or "staged" (through host memory).
    peak_bytes, peak_host_bytes: int64[world], the most that is live on each device, and parked.
    """

    graph: Graph
    rounds: tuple[Round, ...]
    mode: str
    peak_bytes: ByteArray
    peak_host_bytes: ByteArray

    def projection(self, rank: int) -> list[tuple[int, Node]]:
        """What one rank does, in order: (round index, node)."""
        return [
            (index, node)
            for index, round_ in enumerate(self.rounds)
            for node in (self.graph.nodes[i] for i in round_.nodes)
            if _contains(node.ranks, rank)
        ]

    def parked(self, index: int, unit: int, rank: int) -> list[int]:
        """Keys of the storages of `unit` on `rank` that round `index` parks, in parking order."""
        blocks = self.graph.blocks
        nodes = [self.graph.nodes[i] for i in self.rounds[index].nodes]
        return [
            int(blocks.key[block])
            for node in nodes
            if node.unit == unit
            for block in node.parks
            if blocks.rank[block] == rank
        ]

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over everything that is executed: nodes, rounds, memory. Traffic, which only
        estimates use, is left out, so that the schedule estimated has the digest of the one run."""
        graph = self.graph
        header = {
            "version": 1,
            "world": graph.world,
            "units": graph.units,
            "mode": self.mode,
            "nodes": [[n.id, n.step.value, n.unit, n.subject, n.window.value] for n in graph.nodes],
            "edges": sorted([e.before, e.after, e.reason] for e in graph.edges),
            "rounds": [[r.step.value, list(r.nodes)] for r in self.rounds],
        }
        digest = hashlib.sha256(json.dumps(header, separators=(",", ":")).encode())
        blocks = graph.blocks
        arrays: list[tuple[str, NDArray[np.generic]]] = [
            ("<i4", blocks.rank),
            ("<i8", blocks.nbytes),
            ("<i4", blocks.unit),
            ("<i8", blocks.key),
            ("|u1", blocks.parkable),
            ("<i4", graph.live),
        ]
        for node in graph.nodes:
            columns = (node.ranks, node.acquires, node.releases, node.parks)
            arrays += [("<i4", column) for column in columns]
        if graph.budget_bytes is not None:
            arrays.append(("<i8", graph.budget_bytes))
        for dtype, array in arrays:
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array.astype(dtype)).tobytes())
        return digest.hexdigest()


def compile_graph(graph: Graph) -> Schedule:
    """Order the nodes of `graph` into rounds within its memory budget.

    Raises:
        GraphError: the graph has a cycle, or releases a block that is not live.
        InfeasibleTransition: some rank's budget cannot hold what its nodes must acquire.
    """
    return _Compiler(graph).run()


class _Compiler:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.edges = list(graph.edges)
        self.waits = graph.predecessors()
        self.left = {node.id for node in graph.nodes}
        self.done: set[int] = set()
        self.rounds: list[Round] = []
        self.live = np.zeros(len(graph.blocks), bool)
        self.live[graph.live] = True
        self.parked = np.zeros(len(graph.blocks), bool)
        self.used = graph.blocks.bytes_by_rank(graph.live, graph.world)
        self.host = np.zeros(graph.world, np.int64)
        self.peak = self.used.copy()
        self.peak_host = self.host.copy()
        self.freed: list[tuple[int, ByteArray]] = []  # (node, bytes it freed by rank), in order

    def run(self) -> Schedule:
        self._check_start()
        while self.left:
            ready = self._ready()
            if not ready:
                raise GraphError(f"nodes {sorted(self.left)} wait for each other in a circle")
            seed = next((n for n in ready if self._fits(n.acquires)), None)
            if seed is None:
                self._park_for(ready)
                continue
            self._place(self._round_with(seed, ready))
        graph = dataclasses.replace(
            self.graph, nodes=tuple(self.nodes), edges=tuple(dict.fromkeys(self.edges))
        )
        return Schedule(
            graph=graph,
            rounds=tuple(self.rounds),
            mode="staged" if any(r.step is Step.PARK for r in self.rounds) else "intact",
            peak_bytes=self.peak,
            peak_host_bytes=self.peak_host,
        )

    def _check_start(self) -> None:
        budget = self.graph.budget_bytes
        if budget is not None and (self.used > budget).any():
            rank = int(np.argmax(self.used - budget))
            raise InfeasibleTransition(
                rank, "what it holds already", int(self.used[rank]), int(budget[rank])
            )

    def _ready(self) -> list[Node]:
        """Nodes that wait for nothing, in the order of steps, then units. What concerns targets
        comes after what else can run: all units are built before any is described."""
        ready = [self.nodes[i] for i in self.left if self.waits[i] <= self.done]
        return sorted(ready, key=lambda n: (n.subject == "target", _ORDER[n.step], n.unit, n.id))

    def _fits(self, acquires: IntArray) -> bool:
        return not len(self._short(acquires))

    def _short(self, acquires: IntArray) -> IntArray:
        """Ranks on which acquiring these blocks now would exceed the budget."""
        if self.graph.budget_bytes is None or not len(acquires):
            return np.zeros(0, np.int32)
        more = self.graph.blocks.bytes_by_rank(acquires, self.graph.world)
        over = (more > 0) & (self.used + more > self.graph.budget_bytes)
        return np.flatnonzero(over).astype(np.int32)

    def _round_with(self, seed: Node, ready: list[Node]) -> list[Node]:
        """`seed` and every other ready node of its step that can run beside it."""
        chosen = [seed]
        acquires = seed.acquires
        for node in ready:
            if node.id == seed.id or node.step is not seed.step:
                continue
            if node.collective and any(
                len(np.intersect1d(node.ranks, other.ranks)) for other in chosen
            ):
                continue
            both = np.concatenate([acquires, node.acquires])
            if self._fits(both):
                chosen.append(node)
                acquires = both
        return chosen

    def _place(self, nodes: list[Node]) -> None:
        blocks, world = self.graph.blocks, self.graph.world
        self._add_memory_edges(nodes)
        for node in nodes:
            if self.live[node.acquires].any() or self.parked[node.acquires].any():
                raise GraphError(f"node {node.id} ({node.step.value}) acquires a live block")
            self.live[node.acquires] = True
            self.used += blocks.bytes_by_rank(node.acquires, world)
        self.peak = np.maximum(self.peak, self.used)
        for node in nodes:
            device = node.releases[self.live[node.releases]]
            host = node.releases[self.parked[node.releases]]
            if len(device) + len(host) != len(node.releases):
                raise GraphError(f"node {node.id} ({node.step.value}) releases a block not live")
            self.live[device] = self.parked[host] = False
            self.live[node.parks] = False
            self.parked[node.parks] = True
            freed = blocks.bytes_by_rank(np.concatenate([device, node.parks]), world)
            self.used -= freed
            if freed.any():
                self.freed.append((node.id, freed))
            self.host += blocks.bytes_by_rank(node.parks, world)
            self.host -= blocks.bytes_by_rank(host, world)
        self.peak_host = np.maximum(self.peak_host, self.host)
        self.left -= {node.id for node in nodes}
        self.done |= {node.id for node in nodes}
        self.rounds.append(Round(nodes[0].step, tuple(node.id for node in nodes)))

    def _add_memory_edges(self, nodes: list[Node]) -> None:
        """Say which earlier releases the order relies on: without them, a node would not fit."""
        budget = self.graph.budget_bytes
        if budget is None:
            return
        every = np.concatenate([node.acquires for node in nodes])
        total = self.graph.blocks.bytes_by_rank(every, self.graph.world)
        later = np.zeros_like(self.used)
        for before, freed in reversed(self.freed):
            later += freed
            needs = (total > 0) & (freed > 0) & (self.used + total + later > budget)
            for node in nodes:
                mine = self.graph.blocks.bytes_by_rank(node.acquires, self.graph.world) > 0
                if (needs & mine).any():
                    self.edges.append(Edge(before, node.id, "memory"))

    def _park_for(self, ready: list[Node]) -> None:
        """Park as few source storages as let the first node that can be helped begin."""
        short: tuple[Node, int, int] | None = None
        for node in ready:
            chosen, lacking = self._choose_to_park(node)
            if lacking is None:
                self._park(node, chosen)
                return
            short = short or (node, *lacking)
        assert short is not None
        node, rank, available = short
        needed = int(self.graph.blocks.bytes_by_rank(node.acquires, self.graph.world)[rank])
        name = self.graph.units[node.unit] if node.unit >= 0 else "all units"
        raise InfeasibleTransition(rank, f"{node.step.value} of {name}", needed, available)

    def _choose_to_park(self, node: Node) -> tuple[IntArray, tuple[int, int] | None]:
        """Blocks to park so that `node` fits, and (rank, bytes available) where that fails."""
        blocks, budget = self.graph.blocks, self.graph.budget_bytes
        assert budget is not None
        open_units = [u for u, after in self.graph.park_after.items() if after in self.done]
        allowed = self.live & blocks.parkable & np.isin(blocks.unit, open_units)
        need = blocks.bytes_by_rank(node.acquires, self.graph.world)
        chosen: list[int] = []
        for rank in self._short(node.acquires):
            free = int(budget[rank] - self.used[rank])
            mine = np.flatnonzero(allowed & (blocks.rank == rank))
            order = np.lexsort(
                (mine, blocks.key[mine], blocks.unit[mine], blocks.unit[mine] != node.unit)
            )
            for block in mine[order]:
                if free >= need[rank]:
                    break
                free += int(blocks.nbytes[block])
                chosen.append(int(block))
            if free < need[rank]:
                return np.zeros(0, np.int32), (int(rank), free)
        return np.array(chosen, np.int32), None

    def _park(self, cause: Node, chosen: IntArray) -> None:
        """Insert a round that parks these blocks: one PARK node a unit."""
        blocks = self.graph.blocks
        nodes = []
        for unit in np.unique(blocks.unit[chosen]):
            mine = chosen[blocks.unit[chosen] == unit]
            ranks = np.unique(blocks.rank[mine]).astype(np.int32)
            node = Node(len(self.nodes), Step.PARK, int(unit), ranks, "source", parks=mine)
            self.nodes.append(node)
            self.waits.append(set())
            self.edges.append(Edge(self.graph.park_after[int(unit)], node.id, "data"))
            self.edges.append(Edge(node.id, cause.id, "memory"))
            for other in self.graph.nodes:
                reads = other.step is Step.MOVE and other.unit == unit and other.id in self.left
                if reads or (other.step is Step.RELEASE and np.isin(mine, other.releases).any()):
                    self.edges.append(Edge(node.id, other.id, "data"))
            nodes.append(node)
        self._place(nodes)


def _contains(ranks: IntArray, rank: int) -> bool:
    at = int(np.searchsorted(ranks, rank))
    return at < len(ranks) and int(ranks[at]) == rank
