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
from typing import Any

GIB = 1024**3
CPU = "cpu"  # name and architecture of a rank on CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU.

    Attributes:
        name: as in `GPUS`.
        memory_bytes: device memory that a process sees, below the datasheet's: PyTorch's "total
            capacity", as users' out-of-memory messages on public trackers state it (79.10 GiB of
            an "80 GB" H100, 44.39 GiB of a "48 GB" L40S with error correction).
        bf16_flops, fp8_flops: dense tensor-core peaks, per second (fp8: bf16 rate where absent).
        hbm_bytes_s: device-memory bandwidth.
        nvlink_bytes_s: NVLink (or PCIe) bandwidth to the node's other GPUs, one direction.
        host_bytes_s: PCIe or C2C bandwidth to host memory, one direction.
        fp32_flops: fp32 peak on CUDA cores.
        sms: streaming multiprocessors.
        kernels: measured table that stands for it: a100_sxm, h100_sxm or h200_sxm; "" for a device
            without one, whose rates are taken to be reached at every size.
        measured: whether that table was measured on this very GPU.
        architecture: ampere, hopper, ada, volta or blackwell; picks the attention kernel.
        sustained: part of the measured GEMM rate that lasts under the power cap (fitted where
            `sustained_from` names rows, else taken over from the nearest fitted GPU).
        sustained_from: where `sustained` comes from.
        clocks: clock rate against the GPU that the tables were measured on, where a lower power
            cap holds it down; slows everything that runs on the multiprocessors.
        cublas_workspace_bytes: workspace that cuBLAS and TransformerEngine allocate.
        context_bytes: outside torch: CUDA context, loaded kernels and NCCL channels, about 1 GiB
            on recent drivers, seen as the difference between nvidia-smi and
            torch.cuda.memory_reserved.
        framework_bytes: small buffers of training frameworks.
        engine_bytes: what a rollout engine needs beyond weights and cache (assumed): its profiling
            run's activations, graphs.
        unused_bytes: reserved by the caching allocator whatever runs.
        width: bytes of what a pass holds over those that it has in bf16.
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
    clocks: float = 1.0
    cublas_workspace_bytes: int = 4 << 20
    context_bytes: float = 1.2 * GIB
    framework_bytes: float = 64 * 2**20
    engine_bytes: float = 2.5e9
    unused_bytes: float = 0.2e9
    width: float = 1.0
    source: str


def _seen(gib: float) -> int:
    return round(gib * GIB)


def _like(base: GPU, **differs: Any) -> GPU:
    """A sibling of `base`; its kernels were not measured unless `measured` is given."""
    return dataclasses.replace(base, **{"measured": False, **differs})


A100_SUSTAINED = 0.80
HOPPER_SUSTAINED = 0.72
BLACKWELL_SUSTAINED = 0.52
# 500 W instead of 700 W: dynamic power goes with frequency times voltage squared, and near the top
# of the curve voltage follows frequency weakly, so that clocks fall with about the root of the cap.
CAPPED_500W = (500 / 700) ** 0.5
_A = "fitted: benchmarks/cost_accuracy.py, group llm_foundry 7b a100_40gb"
_H = "fitted: benchmarks/cost_accuracy.py, group llm_foundry 7b h100_80gb"
_B = "fitted: benchmarks/cost_accuracy.py, one SimuMax row"

_A100_80 = GPU(
    name="a100_80gb",
    memory_bytes=_seen(79.15),
    bf16_flops=312e12,
    fp8_flops=312e12,
    hbm_bytes_s=2.039e12,
    nvlink_bytes_s=300e9,
    host_bytes_s=25e9,
    fp32_flops=19.5e12,
    sms=108,
    kernels="a100_sxm",
    measured=True,
    architecture="ampere",
    sustained=A100_SUSTAINED,
    sustained_from=_A,
    source="NVIDIA A100 datasheet, SXM4 80 GB",
)
_H100_80 = GPU(
    name="h100_80gb",
    memory_bytes=_seen(79.10),
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    hbm_bytes_s=3.35e12,
    nvlink_bytes_s=450e9,
    host_bytes_s=55e9,
    fp32_flops=67e12,
    sms=132,
    kernels="h100_sxm",
    measured=True,
    architecture="hopper",
    sustained=HOPPER_SUSTAINED,
    sustained_from=_H,
    cublas_workspace_bytes=32 << 20,
    source="NVIDIA H100 datasheet, SXM5",
)
_B200 = GPU(
    name="b200",
    memory_bytes=_seen(178.35),
    bf16_flops=2250e12,
    fp8_flops=4500e12,
    hbm_bytes_s=8.0e12,
    nvlink_bytes_s=900e9,
    host_bytes_s=55e9,
    fp32_flops=80e12,
    sms=148,
    kernels="h100_sxm",
    measured=False,
    architecture="blackwell",
    sustained=BLACKWELL_SUSTAINED,
    sustained_from=_B,
    cublas_workspace_bytes=32 << 20,
    source="NVIDIA DGX B200 datasheet, per GPU",
)

_GPUS = (
    _A100_80,
    _like(
        _A100_80,
        name="a100_40gb",
        memory_bytes=_seen(39.39),
        hbm_bytes_s=1.555e12,
        measured=True,
        source="NVIDIA A100 datasheet, SXM4 40 GB",
    ),
    _like(
        _A100_80,
        name="a800_80gb",
        nvlink_bytes_s=200e9,
        source="as A100 80 GB, NVLink 400 GB/s both directions (NVIDIA A800 datasheet)",
    ),
    _H100_80,
    _like(
        _H100_80,
        name="h100_96gb",
        memory_bytes=_seen(95.00),
        hbm_bytes_s=2.4e12,
        clocks=CAPPED_500W,
        source="torchtitan benchmarks page: H100 96 GB HBM2e at 500 W; rates as H100 SXM5",
    ),
    _like(
        _H100_80,
        name="h200",
        memory_bytes=_seen(139.80),
        hbm_bytes_s=4.8e12,
        kernels="h200_sxm",
        measured=True,
        source="NVIDIA H200 datasheet, SXM",
    ),
    _like(
        _H100_80,
        name="h800",
        nvlink_bytes_s=200e9,
        source="as H100 SXM5, NVLink 400 GB/s both directions",
    ),
    _like(
        _H100_80,
        name="h20",
        memory_bytes=_seen(95.00),
        bf16_flops=148e12,
        fp8_flops=296e12,
        hbm_bytes_s=4.0e12,
        fp32_flops=44e12,
        sms=78,
        sustained=1.0,
        sustained_from="assumed: 400 W suffice for 148 TFLOP/s, no throttling",
        source="NVIDIA H20 specifications as published by resellers: 148 TFLOP/s, 4.0 TB/s, "
        "900 GB/s",
    ),
    _B200,
    _like(
        _B200,
        name="gb200",
        memory_bytes=_seen(184.31),
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        host_bytes_s=225e9,
        source="NVIDIA GB200 NVL72 datasheet, per GPU",
    ),
    GPU(
        name="v100",
        memory_bytes=_seen(31.73),
        bf16_flops=125e12,
        fp8_flops=125e12,
        hbm_bytes_s=0.9e12,
        nvlink_bytes_s=150e9,
        host_bytes_s=12e9,
        fp32_flops=15.7e12,
        sms=80,
        kernels="a100_sxm",
        measured=False,
        architecture="volta",
        sustained=A100_SUSTAINED,
        sustained_from=_A,
        source="NVIDIA V100 datasheet, SXM2 32 GB (fp16)",
    ),
    GPU(
        name="l40s",
        memory_bytes=_seen(44.39),
        bf16_flops=362e12,
        fp8_flops=733e12,
        hbm_bytes_s=0.864e12,
        nvlink_bytes_s=25e9,
        host_bytes_s=25e9,
        fp32_flops=91.6e12,
        sms=142,
        kernels="a100_sxm",
        measured=False,
        architecture="ada",
        sustained=0.75,
        sustained_from="assumed: 350 W card, clocks fall under GEMM load",
        source="NVIDIA L40S datasheet, PCIe gen 4 between GPUs",
    ),
    GPU(
        name="rtx4090",
        memory_bytes=_seen(23.52),
        bf16_flops=165.2e12,
        fp8_flops=330.3e12,
        hbm_bytes_s=1.008e12,
        nvlink_bytes_s=25e9,
        host_bytes_s=25e9,
        fp32_flops=82.6e12,
        sms=128,
        kernels="a100_sxm",
        measured=False,
        architecture="ada",
        sustained=A100_SUSTAINED,
        sustained_from=_A,
        source="NVIDIA Ada GPU architecture paper: fp16 with fp32 accumulate; PCIe gen 4 between "
        "GPUs",
    ),
    # A rank on CPU, nominal: what it really does is what the running job teaches. Its memory is
    # counted to the byte (nereus_cpu.memory), so nothing lies beside what tensors take.
    GPU(
        name=CPU,
        memory_bytes=_seen(4.0),
        bf16_flops=30e9,
        fp8_flops=30e9,
        hbm_bytes_s=8e9,
        nvlink_bytes_s=1e9,
        host_bytes_s=8e9,
        fp32_flops=30e9,
        sms=1,
        kernels="",
        measured=False,
        architecture=CPU,
        sustained=1.0,
        sustained_from="nominal",
        cublas_workspace_bytes=0,
        context_bytes=0.0,
        framework_bytes=0.0,
        engine_bytes=0.0,
        unused_bytes=0.0,
        width=2.0,  # all in fp32
        source="nominal: one core",
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
