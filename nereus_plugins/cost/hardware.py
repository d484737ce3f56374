"""What GPUs and links can do: datasheet values, and which measured table stands for each GPU.

Peak rates are dense (no sparsity) and come from the vendors' datasheets, named in `source`.
`kernels` names the measured kernel table (see `kernels.py`) whose *efficiencies*, relative to
datasheet peaks, stand for the GPU: its own where one was measured, else that of the nearest
architecture; `measured` tells which. `sustained` is the one fitted number of this file: the part
of the measured GEMM rate that lasts through a training step under the power cap. Micro-benchmarks
run in bursts between cool-downs and see higher clocks.
"""

from __future__ import annotations

import dataclasses

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        name: as in `GPUS`.
        memory_bytes: device memory that a process sees.
        bf16_flops, fp8_flops: dense tensor-core peaks, per second (fp8: bf16 rate where absent).
        hbm_bytes_s: device-memory bandwidth.
        nvlink_bytes_s: NVLink (or PCIe) bandwidth to the node's other GPUs, one direction.
        host_bytes_s: PCIe or C2C bandwidth to host memory, one direction.
        fp32_flops: fp32 peak on CUDA cores.
        sms: streaming multiprocessors.
        kernels: measured table that stands for it: a100_sxm, h100_sxm or h200_sxm.
        measured: whether that table was measured on this very GPU.
        architecture: ampere, hopper, ada, volta or blackwell; picks the attention kernel.
        sustained: part of the measured GEMM rate that lasts under the power cap (fitted where
            `sustained_from` names rows, else taken over from the nearest fitted GPU).
        sustained_from: where `sustained` comes from.
        clocks: clock rate against the GPU that the tables were measured on, where a lower power
            cap holds it down; slows everything that runs on the multiprocessors.
        cublas_workspace_bytes: workspace that cuBLAS and TransformerEngine allocate.
        source: where the datasheet values come from.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_s: float
    nvlink_bytes_s: float
    host_bytes_s: float
    fp32_flops: float
    sms: int
    kernels: str
    measured: bool
    architecture: str
    sustained: float
    sustained_from: str
    clocks: float
    cublas_workspace_bytes: int
    source: str


A100_SUSTAINED = 0.80
HOPPER_SUSTAINED = 0.72
BLACKWELL_SUSTAINED = 0.52
# 500 W instead of 700 W: dynamic power goes with frequency times voltage squared, and near the top
# of the curve voltage follows frequency weakly, so that clocks fall with about the root of the cap.
CAPPED_500W = (500 / 700) ** 0.5
_A = "fitted: benchmarks/cost_accuracy.py, group llm_foundry 7b a100_40gb"
_H = "fitted: benchmarks/cost_accuracy.py, group llm_foundry 7b h100_80gb"
_B = "fitted: benchmarks/cost_accuracy.py, one SimuMax row"

_GPUS = (
    GPU(
        "a100_40gb",
        40 * GIB,
        312e12,
        312e12,
        1.555e12,
        300e9,
        25e9,
        19.5e12,
        108,
        "a100_sxm",
        True,
        "ampere",
        A100_SUSTAINED,
        _A,
        1.0,
        4 << 20,
        "NVIDIA A100 datasheet, SXM4 40 GB",
    ),
    GPU(
        "a100_80gb",
        80 * GIB,
        312e12,
        312e12,
        2.039e12,
        300e9,
        25e9,
        19.5e12,
        108,
        "a100_sxm",
        True,
        "ampere",
        A100_SUSTAINED,
        _A,
        1.0,
        4 << 20,
        "NVIDIA A100 datasheet, SXM4 80 GB",
    ),
    GPU(
        "a800_80gb",
        80 * GIB,
        312e12,
        312e12,
        2.039e12,
        200e9,
        25e9,
        19.5e12,
        108,
        "a100_sxm",
        False,
        "ampere",
        A100_SUSTAINED,
        _A,
        1.0,
        4 << 20,
        "as A100 80 GB, NVLink 400 GB/s both directions (NVIDIA A800 datasheet)",
    ),
    GPU(
        "h100_80gb",
        80 * GIB,
        989.4e12,
        1978.9e12,
        3.35e12,
        450e9,
        55e9,
        67e12,
        132,
        "h100_sxm",
        True,
        "hopper",
        HOPPER_SUSTAINED,
        _H,
        1.0,
        32 << 20,
        "NVIDIA H100 datasheet, SXM5",
    ),
    GPU(
        "h100_96gb",
        96 * GIB,
        989.4e12,
        1978.9e12,
        2.4e12,
        450e9,
        55e9,
        67e12,
        132,
        "h100_sxm",
        False,
        "hopper",
        HOPPER_SUSTAINED,
        _H,
        CAPPED_500W,
        32 << 20,
        "torchtitan benchmarks page: H100 96 GB HBM2e at 500 W; rates as H100 SXM5",
    ),
    GPU(
        "h200",
        141 * 10**9,
        989.4e12,
        1978.9e12,
        4.8e12,
        450e9,
        55e9,
        67e12,
        132,
        "h200_sxm",
        True,
        "hopper",
        HOPPER_SUSTAINED,
        _H,
        1.0,
        32 << 20,
        "NVIDIA H200 datasheet, SXM",
    ),
    GPU(
        "h800",
        80 * GIB,
        989.4e12,
        1978.9e12,
        3.35e12,
        200e9,
        55e9,
        67e12,
        132,
        "h100_sxm",
        False,
        "hopper",
        HOPPER_SUSTAINED,
        _H,
        1.0,
        32 << 20,
        "as H100 SXM5, NVLink 400 GB/s both directions",
    ),
    GPU(
        "h20",
        96 * GIB,
        148e12,
        296e12,
        4.0e12,
        450e9,
        55e9,
        44e12,
        78,
        "h100_sxm",
        False,
        "hopper",
        1.0,
        "assumed: 400 W suffice for 148 TFLOP/s, no throttling",
        1.0,
        32 << 20,
        "NVIDIA H20 specifications as published by resellers: 148 TFLOP/s, 4.0 TB/s, 900 GB/s",
    ),
    GPU(
        "b200",
        180 * GIB,
        2250e12,
        4500e12,
        8.0e12,
        900e9,
        55e9,
        80e12,
        148,
        "h100_sxm",
        False,
        "blackwell",
        BLACKWELL_SUSTAINED,
        _B,
        1.0,
        32 << 20,
        "NVIDIA DGX B200 datasheet, per GPU",
    ),
    GPU(
        "gb200",
        186 * GIB,
        2500e12,
        5000e12,
        8.0e12,
        900e9,
        225e9,
        80e12,
        148,
        "h100_sxm",
        False,
        "blackwell",
        BLACKWELL_SUSTAINED,
        _B,
        1.0,
        32 << 20,
        "NVIDIA GB200 NVL72 datasheet, per GPU",
    ),
    GPU(
        "v100",
        32 * GIB,
        125e12,
        125e12,
        0.9e12,
        150e9,
        12e9,
        15.7e12,
        80,
        "a100_sxm",
        False,
        "volta",
        A100_SUSTAINED,
        _A,
        1.0,
        4 << 20,
        "NVIDIA V100 datasheet, SXM2 32 GB (fp16)",
    ),
    GPU(
        "l40s",
        48 * GIB,
        362e12,
        733e12,
        0.864e12,
        25e9,
        25e9,
        91.6e12,
        142,
        "a100_sxm",
        False,
        "ada",
        0.75,
        "assumed: 350 W card, clocks fall under GEMM load",
        1.0,
        4 << 20,
        "NVIDIA L40S datasheet, PCIe gen 4 between GPUs",
    ),
    GPU(
        "rtx4090",
        24 * GIB,
        165.2e12,
        330.3e12,
        1.008e12,
        25e9,
        25e9,
        82.6e12,
        128,
        "a100_sxm",
        False,
        "ada",
        A100_SUSTAINED,
        _A,
        1.0,
        4 << 20,
        "NVIDIA Ada GPU architecture paper: fp16 with fp32 accumulate; PCIe gen 4 between GPUs",
    ),
)
GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in _GPUS}
_ALIASES = {
    "a100": "a100_80gb",
    "h100": "h100_80gb",
    "a800": "a800_80gb",
    "rtx_4090": "rtx4090",
    "4090": "rtx4090",
    "h100_sxm": "h100_80gb",
    "h200_sxm": "h200",
    "a100_sxm": "a100_80gb",
}


def find_gpu(name: str) -> GPU:
    """The GPU called `name` (case, spaces, dashes do not matter); `KeyError` names those known."""
    key = name.strip().lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_")
    key = _ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    raise KeyError(f"gpu {name!r} is not known; known: {', '.join(sorted(GPUS))}")


@dataclasses.dataclass(frozen=True)
class Network:
    """How GPUs are wired.

    Attributes:
        gpus_per_node: GPUs that NVLink (or PCIe) joins.
        inter_node_bytes_s: network bandwidth of one GPU to other nodes, one direction.
        inter_node_latency_s: one hop between nodes.
        efficiency: part of the network's bandwidth that NCCL reaches on large messages.
    """

    gpus_per_node: int = 8
    inter_node_bytes_s: float = 50e9
    inter_node_latency_s: float = 8e-6
    efficiency: float = 0.85
