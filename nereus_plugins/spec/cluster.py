"""The machines: GPUs, links, nodes. Figures are the user's own; none are built in."""

from __future__ import annotations

import dataclasses

from .layout import MOST_RANKS
from .record import Record, SpecError, require_int, require_number


@dataclasses.dataclass(frozen=True)
class GPUSpec(Record):
    """One device.

    Attributes:
        name: for messages and reports.
        memory_bytes: device memory; a file may say "80GiB".
        peak_flops: dense bf16 floating-point operations in one second.
        memory_bandwidth_bytes_per_s: device memory bandwidth.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    memory_bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        require_int("GPUSpec", "memory_bytes", self.memory_bytes)
        for name in ("peak_flops", "memory_bandwidth_bytes_per_s"):
            require_number("GPUSpec", name, getattr(self, name), above=0)


@dataclasses.dataclass(frozen=True)
class LinkSpec(Record):
    """What one device can send (and at the same time receive) over a kind of link.

    Attributes:
        bandwidth_bytes_per_s: in one direction, for one device.
        latency_s: time of an empty message.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_number("LinkSpec", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above=0)
        require_number("LinkSpec", "latency_s", self.latency_s, minimum=0)


@dataclasses.dataclass(frozen=True)
class ClusterSpec(Record):
    """Equal nodes of equal devices; device d is on node d // gpus_per_node.

    Attributes:
        nodes: machines.
        gpus_per_node: devices on each.
        gpu: the device.
        intra_node: links between devices of one node.
        inter_node: links between devices of different nodes.
    """

    nodes: int
    gpus_per_node: int
    gpu: GPUSpec
    intra_node: LinkSpec
    inter_node: LinkSpec

    def __post_init__(self) -> None:
        require_int("ClusterSpec", "nodes", self.nodes)
        require_int("ClusterSpec", "gpus_per_node", self.gpus_per_node)
        if self.world_size > MOST_RANKS:
            raise SpecError(
                f"ClusterSpec: nodes * gpus_per_node = {self.world_size} GPUs; {MOST_RANKS} is most"
            )
        for name, kind in (("gpu", GPUSpec), ("intra_node", LinkSpec), ("inter_node", LinkSpec)):
            if not isinstance(getattr(self, name), kind):
                raise SpecError(f"ClusterSpec.{name} must be a {kind.__name__}")

    @property
    def world_size(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.gpus_per_node

    def node_of(self, device: int) -> int:
        """The node of a device (equal to the rank when ranks fill the cluster in order)."""
        if not 0 <= device < self.world_size:
            raise SpecError(f"device {device} is not in a cluster of {self.world_size} devices")
        return device // self.gpus_per_node
