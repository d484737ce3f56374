"""Seconds of collectives: measured tables inside a node, network bandwidth between nodes."""

from __future__ import annotations

import dataclasses

from .hardware import GPU, Network
from .kernels import nccl_s


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that communicate: `ranks` in all, spread over `nodes` nodes evenly."""

    ranks: int
    nodes: int

    @classmethod
    def of(cls, ranks: int, stride: int, gpus_per_node: int) -> Group:
        """The group of `ranks` ranks, `stride` devices apart, on nodes filled in order."""
        per_node = max(1, min(ranks, gpus_per_node // min(stride, gpus_per_node)))
        return cls(ranks, -(-ranks // per_node))

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)


def collective_s(gpu: GPU, network: Network, op: str, group: Group, nbytes: float) -> float:
    """Seconds of one collective; `nbytes` is the whole tensor (the gathered one).

    Inside a node: the measured table. Between nodes a ring over all ranks moves (n - 1) / n of the
    tensor through each node's network ports, per_node of which the group uses, while NVLink
    carries the same inside: the slower of the two, plus one network hop for each node.
    """
    if group.ranks <= 1 or nbytes <= 0:
        return 0.0
    if group.nodes == 1:
        return nccl_s(gpu, op, group.ranks, nbytes)
    share = (group.ranks - 1) / group.ranks
    rounds = 2.0 if op == "all_reduce" else 1.0
    port = network.inter_node_bytes_s * network.efficiency
    if op == "alltoall":
        # Each rank sends (nodes - 1) / nodes of its part through its own port.
        wire = nbytes * (group.nodes - 1) / group.nodes / port
        return wire + network.inter_node_latency_s * group.nodes
    wire = rounds * nbytes * share / (group.per_node * port)
    inside = nccl_s(gpu, op, max(2, group.per_node), nbytes) if group.per_node > 1 else 0.0
    return max(wire, inside) + rounds * network.inter_node_latency_s * group.nodes


def point_to_point_s(gpu: GPU, network: Network, nbytes: float, *, same_node: bool) -> float:
    """Seconds to send `nbytes` to one other rank."""
    if same_node:
        return 10e-6 + nbytes / (0.75 * gpu.nvlink_bytes_s)
    return network.inter_node_latency_s + nbytes / (network.inter_node_bytes_s * network.efficiency)
