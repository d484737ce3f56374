"""Ray's drains: of a node that is going to go, Ray knows by when, and gives it nothing new to run.

Ray has no public call for them (`ray drain-node` is hidden from its help, and not covered by its
stability guarantees). Imported where Ray is needed only.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping
from typing import Any

TESTED = ("2.60", "2.55")


class UnsupportedRay(RuntimeError):
    """An installed Ray that this was not tested with."""


class DrainRefused(RuntimeError):
    """Ray does not drain the node, or does not know it; the message says which and why."""


def check_version() -> None:
    """Raises: UnsupportedRay naming the versions that work."""
    import ray

    if ".".join(ray.__version__.split(".")[:2]) not in TESTED:
        raise UnsupportedRay(
            f"drains were tested with Ray {', '.join(TESTED)}; found {ray.__version__}"
        )


def draining() -> dict[str, float]:
    """Nodes of the cluster that this process is connected to which are going to go: by id, until
    when they are there, in seconds since the epoch; infinite where nobody said."""
    from ray._private.state import state

    found: Mapping[str, int] = state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else math.inf for node, at_ms in found.items()}


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Resources that nobody has, by node."""
    from ray._private.state import state

    found: dict[str, Mapping[str, float]] = state.available_resources_per_node()
    return found


def free(kind: str) -> int:
    """How many of a resource nobody has, whole ones, on nodes that stay."""
    goes = draining()
    return sum(int(has.get(kind, 0.0)) for node, has in free_by_node().items() if node not in goes)


def drain(address: str, node_ip: str, within_s: float, why: str) -> str:
    """Have Ray drain the living node at `node_ip`, which is going to go after `within_s`.

    Args: address: of the cluster, host:port.

    Returns: the node's id.

    Raises: DrainRefused; OSError, RuntimeError: the cluster cannot be reached.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    control = raylet.GcsClient(address=address)
    nodes = {
        key.hex(): node
        for key, node in control.get_all_node_info().items()
        if node.state == GcsNodeInfo.GcsNodeState.ALIVE
    }
    here = [key for key, node in nodes.items() if node.node_manager_address == node_ip]
    if len(here) != 1:
        others = ", ".join(sorted(node.node_manager_address for node in nodes.values()))
        raise DrainRefused(
            f"{len(here)} nodes of the cluster at {address} are at {node_ip}; its nodes are at "
            f"{others}: give one with --node-ip"
        )
    accepted, reason = control.drain_node(
        here[0],
        DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        why,
        int(1000 * (time.time() + within_s)),
    )
    if not accepted:
        raise DrainRefused(f"Ray does not drain {node_ip}: {reason}")
    return here[0]
