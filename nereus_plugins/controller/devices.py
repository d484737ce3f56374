"""The devices of a live job as the cost model takes them, from what torch says of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_plugins.cost.hardware import CPU, GPU, GPUS, find_gpu
from nereus_plugins.spec import ClusterSpec, GPUSpec, LinkSpec

# Of one GPU to other nodes, where nobody says: the figure of `nereus plan`.
NETWORK_BYTES_S = 50e9
NETWORK_LATENCY_S = 8e-6


def cluster(device: Mapping[str, Any], gpus: int, per_node: int) -> ClusterSpec:
    """Nodes of `per_node` such devices that hold `gpus`.

    Args: device: "name" and "memory_bytes".
    """
    known = known_gpu(str(device["name"]), int(device["memory_bytes"]))
    on_cpu = known.name == CPU
    network = known.nvlink_bytes_s if on_cpu else NETWORK_BYTES_S
    return ClusterSpec(
        nodes=-(-gpus // per_node),
        gpus_per_node=per_node,
        gpu=GPUSpec(
            name=known.name,
            memory_bytes=int(device["memory_bytes"]),
            peak_flops=known.bf16_flops,
            memory_bandwidth_bytes_per_s=known.hbm_bytes_s,
        ),
        intra_node=LinkSpec(known.nvlink_bytes_s),
        inter_node=LinkSpec(network, NETWORK_LATENCY_S),
    )


def known_gpu(name: str, memory_bytes: int) -> GPU:
    """The GPU of the cost model that torch calls `name` ("NVIDIA H100 80GB HBM3"); of several with
    that chip, and where none has it, the one whose memory is nearest. What it is off by, the job
    teaches."""
    try:
        return find_gpu(name)
    except KeyError:
        pass
    words = name.lower().replace("-", " ").split()
    compact = "".join(words)
    gpus = [gpu for gpu in GPUS.values() if gpu.name != CPU]
    same = [gpu for gpu in gpus if gpu.name.split("_")[0] in (*words, *_endings(compact))]
    return min(same or gpus, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def _endings(compact: str) -> list[str]:
    """Of "nvidiageforcertx4090": "rtx4090" among them."""
    return [compact[at:] for at in range(len(compact))]
