"""Random transition graphs, executed by simulated blocking ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo, concat
from nereus_plugins.gtg.build import UnitChange, build_graph
from nereus_plugins.gtg.compile import InfeasibleTransition, Schedule, compile_graph
from nereus_plugins.gtg.estimate import StepCosts, byte_bound_s, estimate, node_seconds
from nereus_plugins.gtg.graph import Blocks, Edge, Graph, GraphError, Node, Step
from nereus_plugins.spec import ClusterSpec, GPUSpec, Layout, LinkSpec

# ---------------------------------------------------------------- simulated blocking ranks


@dataclass
class Trace:
    """What happened: per node the earliest begin and latest end, per rank its peak memory."""

    makespan: float
    begin: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    peak: np.ndarray = field(default_factory=lambda: np.zeros(0))
    moves_at_once: int = 0


def simulate(
    schedule: Schedule, seconds: dict[int, np.ndarray], *, vote_s: float = 0.0, votes: bool = True
) -> Trace:
    """Run every rank through its own projection; a rank blocks in a collective node until all the
    node's ranks are there, and (with `votes`) after each round until every rank is.

    Fails if all ranks block: a deadlock.
    """
    graph = schedule.graph
    programs: list[list[tuple[str, int]]] = []
    for rank in range(graph.world):
        mine: dict[int, list[int]] = {}
        for index, node in schedule.projection(rank):
            mine.setdefault(index, []).append(node.id)
        program: list[tuple[str, int]] = []
        for index in range(len(schedule.rounds)):
            program += [("node", i) for i in mine.get(index, [])]
            if votes:
                program.append(("vote", index))
        programs.append(program)
    at = [0] * graph.world
    clock = np.zeros(graph.world)
    used = graph.blocks.bytes_by_rank(graph.live, graph.world)
    parked: set[int] = set()
    trace = Trace(0.0, peak=used.copy())
    intervals: list[tuple[float, float, int]] = []

    def run(node: Node, ranks: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        for rank in ranks:
            mine = node.acquires[graph.blocks.rank[node.acquires] == rank]
            used[rank] += graph.blocks.nbytes[mine].sum()
            trace.peak[rank] = max(trace.peak[rank], used[rank])
            for block in node.parks[graph.blocks.rank[node.parks] == rank]:
                used[rank] -= graph.blocks.nbytes[block]
                parked.add(int(block))
            for block in node.releases[graph.blocks.rank[node.releases] == rank]:
                if int(block) in parked:
                    parked.discard(int(block))
                else:
                    used[rank] -= graph.blocks.nbytes[block]
        trace.begin[node.id] = min(trace.begin.get(node.id, np.inf), float(begins.min()))
        trace.end[node.id] = max(trace.end.get(node.id, 0.0), float(ends.max()))

    while any(at[r] < len(programs[r]) for r in range(graph.world)):
        progressed = False
        for rank in range(graph.world):
            if at[rank] >= len(programs[rank]):
                continue
            kind, which = programs[rank][at[rank]]
            if kind == "vote":
                waiting = np.arange(graph.world)
            else:
                node = graph.nodes[which]
                waiting = node.ranks if node.collective else np.array([rank])
            here = [
                at[r] < len(programs[r]) and programs[r][at[r]] == (kind, which) for r in waiting
            ]
            if not all(here):
                continue
            begins = np.full(len(waiting), clock[waiting].max())
            if kind == "vote":
                ends = begins + vote_s
            else:
                place = np.searchsorted(node.ranks, waiting)
                spent = seconds[which].max() if node.collective else seconds[which][place]
                ends = begins + spent
                run(node, waiting, begins, ends)
                if node.step is Step.MOVE:
                    intervals.append((float(begins.max()), float(ends.max()), which))
            clock[waiting] = ends
            for r in waiting:
                at[r] += 1
            progressed = True
        assert progressed, "deadlock: every rank waits for another"
    trace.makespan = float(clock.max())
    for begin, end, which in intervals:
        for other_begin, other_end, other in intervals:
            if which < other and begin < other_end and other_begin < end:
                shared = np.intersect1d(graph.nodes[which].ranks, graph.nodes[other].ranks)
                assert not len(shared), "two moves use one device's links at once"
    return trace


def check_executes(schedule: Schedule, seconds: dict[int, np.ndarray], vote_s: float) -> Trace:
    """Completes, with and without votes; honours every dependency; stays within memory."""
    graph = schedule.graph
    placed = sorted(i for round_ in schedule.rounds for i in round_.nodes)
    assert placed == list(range(len(graph.nodes)))
    simulate(schedule, seconds, votes=False)
    trace = simulate(schedule, seconds, vote_s=vote_s)
    for edge in graph.edges:
        assert trace.end[edge.before] <= trace.begin[edge.after] + 1e-9, edge
    assert (trace.peak <= schedule.peak_bytes).all()
    if graph.budget_bytes is not None:
        assert (schedule.peak_bytes <= graph.budget_bytes).all()
    return trace


# ---------------------------------------------------------------- random units and layouts


def shard_table(
    tensors: list[TensorInfo], cut: int, copies: int, first: int, storages: int
) -> ShardTable:
    """Every tensor cut in `cut` pieces along its first dim, each held by `copies` ranks, on ranks
    first, first + 1, ...; a rank's shards spread over at most `storages` storages."""
    tables = []
    for index in range(cut * copies):
        part = index % cut
        shards, sizes = [], [0] * storages
        for i, info in enumerate(tensors):
            rows = info.shape[0]
            low, high = rows * part // cut, rows * (part + 1) // cut
            if low == high:
                continue
            key = i % storages
            shape = (high - low, *info.shape[1:])
            shards.append((info, Box((low, *[0] * (len(shape) - 1)), shape), key))
            sizes[key] += int(np.prod(shape)) * info.itemsize
        infos = [
            StorageInfo(rank=first + index, key=k, nbytes=n, device="cuda:0")
            for k, n in enumerate(sizes)
            if n
        ]
        tables.append(ShardTable.from_shards(first + index, shards, infos))
    return concat(tables)


@st.composite
def layouts(draw: st.DrawFn, world: int) -> tuple[int, int, int]:
    """(cut, copies, first rank)."""
    cut = draw(st.integers(1, world))
    copies = draw(st.integers(1, world // cut))
    return cut, copies, draw(st.integers(0, world - cut * copies))


@st.composite
def transitions(draw: st.DrawFn) -> tuple[list[UnitChange], int]:
    world = draw(st.integers(1, 8))
    changes = []
    for index in range(draw(st.integers(1, 3))):
        tensors = [
            TensorInfo(
                f"weight/{index}.{i}",
                (draw(st.integers(1, 12)), draw(st.integers(1, 5))),
                draw(st.sampled_from(["float32", "bfloat16"])),
            )
            for i in range(draw(st.integers(1, 4)))
        ]
        source, target = draw(layouts(world)), draw(layouts(world))
        per_rank = st.lists(st.integers(0, 40), min_size=world, max_size=world)
        changes.append(
            UnitChange(
                name=f"unit{index}",
                source_layout=Layout(tp=source[0], dp=source[1]),
                target_layout=Layout(tp=target[0], dp=target[1]),
                source=shard_table(tensors, *source, draw(st.integers(1, 3))),
                target=shard_table(tensors, *target, draw(st.integers(1, 3))),
                gradient_bytes=np.array(draw(per_rank), np.int64),
                build_bytes=np.array(draw(per_rank), np.int64),
            )
        )
    return changes, world


def storage_bytes(table: ShardTable, world: int) -> np.ndarray:
    out = np.zeros(world, np.int64)
    np.add.at(out, table.storages.rank, table.storages.nbytes)
    return out


def cluster_of(world: int, gpus_per_node: int) -> ClusterSpec:
    return ClusterSpec(
        nodes=-(-world // gpus_per_node),
        gpus_per_node=gpus_per_node,
        gpu=GPUSpec(
            name="g", memory_bytes=1 << 30, peak_flops=1.0, memory_bandwidth_bytes_per_s=1.0
        ),
        intra_node=LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=0.25),
        inter_node=LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=0.5),
    )


COSTS = StepCosts(
    constant_s={step: 0.125 * (i + 1) for i, step in enumerate(Step)},
    vote_s=0.0625,
    host_bytes_per_s=50.0,
    local_bytes_per_s=500.0,
    verify_bytes_per_s=200.0,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_transitions_execute(data: st.DataObject) -> None:
    changes, world = data.draw(transitions())
    staging = data.draw(st.integers(0, 30))
    source = sum(storage_bytes(c.source, world) for c in changes)
    target = sum(storage_bytes(c.target, world) for c in changes)
    gradients = sum(c.gradient_bytes for c in changes)
    extra = sum(c.build_bytes for c in changes)
    start, final = source + gradients, target + extra
    together = int((np.maximum(start, source + final + staging)).max())
    least = int(np.maximum(start, final + staging).max())
    budget = data.draw(st.one_of(st.none(), st.integers(max(1, least - 20), together + 20)))
    node_of = np.arange(world, dtype=np.int32) // 2
    moves = {c.name: plan_moves(c.source, c.target, node_of=node_of) for c in changes}
    graph = build_graph(
        changes,
        world=world,
        memory_budget_bytes=budget,
        staging_bytes=staging,
        moves=moves,
        rollout=data.draw(st.booleans()),
    )
    try:
        schedule = compile_graph(graph)
    except InfeasibleTransition as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        # Refused only where even all sources parked leave too little room.
        most = start[error.rank] if "already" in error.step else final[error.rank] + staging
        assert budget is not None
        assert most > budget
        assert f"rank {error.rank} " in str(error)
        assert "memory_budget_bytes" in str(error)
        return
    if budget is None or budget >= together:
        assert schedule.mode == "intact"
    cluster = cluster_of(world, 2)
    seconds = node_seconds(schedule, cluster, COSTS)
    trace = check_executes(schedule, seconds, COSTS.vote_s)
    cost = estimate(schedule, cluster, COSTS)
    assert cost.critical_path_s == pytest.approx(trace.makespan)
    assert sum(cost.seconds_by_step.values()) == pytest.approx(trace.makespan)
    assert byte_bound_s(graph.traffic, world, cluster) <= cost.critical_path_s
    assert cost.bytes_sent.sum() == cost.bytes_received.sum()
    assert (cost.peak_bytes == schedule.peak_bytes).all()
    assert (cost.recovery_s > 0) == (schedule.mode == "staged")
    again = compile_graph(graph)
    assert again.digest == schedule.digest
    parked = [
        (unit, rank, key)
        for index in range(len(schedule.rounds))
        for unit in range(len(changes))
        for rank in range(world)
        for key in schedule.parked(index, unit, rank)
    ]
    assert bool(parked) == (schedule.mode == "staged")
    assert len(set(parked)) == len(parked), "a storage is parked twice"


# ---------------------------------------------------------------- random graphs of any shape


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any steps on any ranks, forward edges, blocks acquired and released anywhere in order."""
    world = draw(st.integers(1, 6))
    count = draw(st.integers(1, 14))
    steps = [step for step in Step if step not in (Step.PARK, Step.FETCH)]
    ranks_of = [
        np.array(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))), np.int32)
        for _ in range(count)
    ]
    edges = set()
    if count > 1:
        for _ in range(draw(st.integers(0, 2 * count))):
            before = draw(st.integers(0, count - 2))
            edges.add(Edge(before, draw(st.integers(before + 1, count - 1)), "data"))
    units = draw(st.integers(1, 3))
    park_after = {u: draw(st.integers(0, count - 1)) for u in range(units)}
    rows: list[tuple[int, int, int, int, bool]] = []
    acquires: list[list[int]] = [[] for _ in range(count)]
    releases: list[list[int]] = [[] for _ in range(count)]
    live = []
    for block in range(draw(st.integers(0, 12))):
        first = draw(st.integers(-1, count - 1))  # -1: live from the start
        rank = draw(st.sampled_from(range(world) if first < 0 else ranks_of[first].tolist()))
        last = draw(st.integers(max(first, 0), count))  # count: never released
        parkable = first < 0 and draw(st.booleans())
        unit = draw(st.integers(0, units - 1)) if parkable else -1
        rows.append((rank, draw(st.integers(1, 20)), unit, block, parkable))
        if first < 0:
            live.append(block)
        else:
            acquires[first].append(block)
        if last < count and rank in ranks_of[last]:
            releases[last].append(block)
            if first >= 0 and first < last:
                edges.add(Edge(first, last, "data"))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    nodes = tuple(
        Node(
            i,
            draw(st.sampled_from(steps)),
            draw(st.integers(-1, units - 1)),
            ranks_of[i],
            acquires=np.array(acquires[i], np.int32),
            releases=np.array(releases[i], np.int32),
        )
        for i in range(count)
    )
    return Graph(
        world=world,
        units=tuple(f"unit{u}" for u in range(units)),
        nodes=nodes,
        edges=tuple(edges),
        blocks=Blocks(
            rank=np.array(columns[0], np.int32),
            nbytes=np.array(columns[1], np.int64),
            unit=np.array(columns[2], np.int32),
            key=np.array(columns[3], np.int64),
            parkable=np.array(columns[4], bool),
        ),
        live=np.array(live, np.int32),
        budget_bytes=draw(
            st.one_of(st.none(), st.integers(10, 120).map(lambda b: np.full(world, b, np.int64)))
        ),
        park_after=park_after,
    )


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_random_graphs_execute(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    try:
        schedule = compile_graph(graph)
    except InfeasibleTransition:
        assert graph.budget_bytes is not None
        return
    seconds = {
        node.id: np.array(
            data.draw(
                st.lists(
                    st.integers(0, 8).map(float),
                    min_size=len(node.ranks),
                    max_size=len(node.ranks),
                )
            )
        )
        for node in schedule.graph.nodes
    }
    check_executes(schedule, seconds, vote_s=0.5)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_a_cycle_is_refused(graph: Graph) -> None:
    if len(graph.nodes) < 2:
        return
    loop = (Edge(0, len(graph.nodes) - 1, "data"), Edge(len(graph.nodes) - 1, 0, "data"))
    broken = dataclasses.replace(graph, edges=graph.edges + loop, budget_bytes=None)
    with pytest.raises(GraphError, match="circle"):
        compile_graph(broken)
