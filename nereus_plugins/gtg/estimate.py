"""What a schedule will cost: critical path, peak memory, bytes. No clock is read here.

Every round ends with a vote of all ranks, so the critical path is the longest node of each round
(of those that run on one rank, their sum), one vote a round. Exchanges are taken to keep the
busiest link of any device busy from begin to end: the figure is a bound that the transport nears,
not a promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.gtg.compile import Schedule
from nereus_plugins.gtg.graph import ByteArray, Graph, Node, Step, Traffic
from nereus_plugins.spec import ClusterSpec

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class StepCosts:
    """Constants that a running job calibrates.

    constant_s: by step, seconds that do not depend on bytes. vote_s: one vote of all ranks.
    host_bytes_per_s: between device and host memory, one device, one direction.
    local_bytes_per_s: copies within a device. verify_bytes_per_s: reading for checksums.
    """

    constant_s: Mapping[Step, float] = field(default_factory=dict)
    vote_s: float = 0.0
    host_bytes_per_s: float = float("inf")
    local_bytes_per_s: float = float("inf")
    verify_bytes_per_s: float = float("inf")


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a schedule costs.

    critical_path_s: from the first node to the last. prepare_s: up to the commit, all that an abort
    can waste. recovery_s: bringing parked storages back after an abort. seconds_by_step: shares of
    the critical path. seconds_by_unit: by unit and step, its slowest rank's. peak_bytes,
    peak_host_bytes, bytes_sent, bytes_received, bytes_local: int64[world].
    """

    critical_path_s: float
    prepare_s: float
    recovery_s: float
    seconds_by_step: Mapping[str, float]
    seconds_by_unit: Mapping[str, Mapping[str, float]]
    peak_bytes: ByteArray
    peak_host_bytes: ByteArray
    bytes_sent: ByteArray
    bytes_received: ByteArray
    bytes_local: ByteArray


def estimate(schedule: Schedule, cluster: ClusterSpec, costs: StepCosts) -> Estimate:
    """Cost of `schedule` on `cluster`; its graph must have been built with `moves`."""
    graph = schedule.graph
    node_of = np.arange(graph.world) // cluster.gpus_per_node
    seconds = node_seconds(schedule, cluster, costs)
    by_step: dict[str, float] = {}
    total = prepare = 0.0
    for round_ in schedule.rounds:
        spent = round_seconds([graph.nodes[i] for i in round_.nodes], seconds, graph.world)
        spent += costs.vote_s
        by_step[round_.step.value] = by_step.get(round_.step.value, 0.0) + spent
        if round_.step is Step.COMMIT:
            prepare = total
        total += spent
    sent, received, local = (np.zeros(graph.world, np.int64) for _ in range(3))
    for traffic in graph.traffic.values():
        loads = link_loads(traffic, node_of, graph.world)
        sent += loads.sent_intra + loads.sent_inter
        received += loads.received_intra + loads.received_inter
        local += loads.local
    host = float(schedule.peak_host_bytes.max(initial=0)) / costs.host_bytes_per_s
    fetch = costs.constant_s.get(Step.FETCH, 0.0) if schedule.mode == "staged" else 0.0
    return Estimate(
        critical_path_s=total,
        prepare_s=prepare,
        recovery_s=host + fetch,
        seconds_by_step=by_step,
        seconds_by_unit=_by_unit(graph, seconds),
        peak_bytes=schedule.peak_bytes,
        peak_host_bytes=schedule.peak_host_bytes,
        bytes_sent=sent,
        bytes_received=received,
        bytes_local=local,
    )


def _by_unit(graph: Graph, seconds: Mapping[int, Seconds]) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {name: {} for name in graph.units}
    for node in graph.nodes:
        if node.unit >= 0:
            mine, step = out[graph.units[node.unit]], node.step.value
            mine[step] = mine.get(step, 0.0) + float(seconds[node.id].max())
    return out


def round_seconds(nodes: list[Node], seconds: Mapping[int, Seconds], world: int) -> float:
    """How long a round takes: its nodes on one rank run one after the other."""
    busy = np.zeros(world)
    for node in nodes:
        if node.collective:
            busy[node.ranks] = busy[node.ranks].max() + seconds[node.id].max()
        else:
            busy[node.ranks] += seconds[node.id]
    return float(busy.max())


def node_seconds(schedule: Schedule, cluster: ClusterSpec, costs: StepCosts) -> dict[int, Seconds]:
    """By node id, float64[len(node.ranks)]: how long the node takes on each of its ranks."""
    graph = schedule.graph
    node_of = np.arange(graph.world) // cluster.gpus_per_node
    loads = [link_loads(traffic, node_of, graph.world) for traffic in graph.traffic.values()]
    checked = sum((one.read for one in loads), np.zeros(graph.world, np.int64))
    out: dict[int, Seconds] = {}
    for node in graph.nodes:
        spent = np.full(len(node.ranks), costs.constant_s.get(node.step, 0.0))
        if node.step is Step.PARK:
            nbytes = graph.blocks.bytes_by_rank(node.parks, graph.world)[node.ranks]
            spent += nbytes / costs.host_bytes_per_s
        elif node.step is Step.MOVE and node.id in graph.traffic:
            spent += exchange_s(graph.traffic[node.id], node_of, graph.world, cluster, costs)
        elif node.step is Step.VERIFY:
            spent += checked[node.ranks] / costs.verify_bytes_per_s
        out[node.id] = spent
    return out


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """int64[world] each: bytes by rank and kind of link, and copied locally."""

    sent_intra: ByteArray
    sent_inter: ByteArray
    received_intra: ByteArray
    received_inter: ByteArray
    local: ByteArray

    @property
    def read(self) -> ByteArray:
        """Bytes that both ends of every move together read."""
        wire = self.sent_intra + self.sent_inter + self.received_intra + self.received_inter
        return wire + 2 * self.local


def link_loads(traffic: Traffic, node_of: NDArray[np.integer], world: int) -> LinkLoads:
    """Bytes that every device's links carry for `traffic`."""

    def add(index: NDArray[np.int32], mask: NDArray[np.bool_]) -> ByteArray:
        out = np.zeros(world, np.int64)
        np.add.at(out, index[mask], traffic.nbytes[mask])
        return out

    local = traffic.src == traffic.dst
    same_node = node_of[traffic.src] == node_of[traffic.dst]
    intra, inter = same_node & ~local, ~same_node
    return LinkLoads(
        sent_intra=add(traffic.src, intra),
        sent_inter=add(traffic.src, inter),
        received_intra=add(traffic.dst, intra),
        received_inter=add(traffic.dst, inter),
        local=add(traffic.src, local),
    )


def exchange_s(
    traffic: Traffic,
    node_of: NDArray[np.integer],
    world: int,
    cluster: ClusterSpec,
    costs: StepCosts,
) -> float:
    """Seconds of one exchange: its busiest link, one latency, local copies beside it."""
    loads = link_loads(traffic, node_of, world)
    copies = float(loads.local.max(initial=0)) / costs.local_bytes_per_s
    wire = 0.0
    for link, sent, received in (
        (cluster.intra_node, loads.sent_intra, loads.received_intra),
        (cluster.inter_node, loads.sent_inter, loads.received_inter),
    ):
        most = max(int(sent.max(initial=0)), int(received.max(initial=0)))
        if most:
            wire = max(wire, link.latency_s + most / link.bandwidth_bytes_per_s)
    return max(wire, copies)


def byte_bound_s(traffic: Mapping[int, Traffic], world: int, cluster: ClusterSpec) -> float:
    """The least any transition with this traffic can take: the most bytes that any rank must send
    or receive over its link's bandwidth, all units together. Cheap enough to rank candidates."""
    node_of = np.arange(world) // cluster.gpus_per_node
    intra = np.zeros((2, world), np.int64)
    inter = np.zeros((2, world), np.int64)
    for one in traffic.values():
        loads = link_loads(one, node_of, world)
        intra += np.stack([loads.sent_intra, loads.received_intra])
        inter += np.stack([loads.sent_inter, loads.received_inter])
    return max(
        float(intra.max(initial=0)) / cluster.intra_node.bandwidth_bytes_per_s,
        float(inter.max(initial=0)) / cluster.inter_node.bandwidth_bytes_per_s,
    )
