"""Measured kernel latencies: GEMM, attention, collectives inside a node.

`data/kernels.npz` holds measurements by ai-dynamo/aiconfigurator (see data/ATTRIBUTION.md) on A100,
H100 and H200 SXM. They are used as *efficiencies*: measured latency over the roofline of the GPU
measured. Another GPU's latency is its own roofline over that efficiency, interpolated in the
logarithms of the shape; outside the grid the nearest edge's efficiency holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np

from .hardware import GPU, find_gpu

# Peaks of the GPUs the tables were measured on.
_MEASURED_ON = {"a100_sxm": "a100_80gb", "h100_sxm": "h100_80gb", "h200_sxm": "h200"}
# Time to launch a kernel: the floor of every latency in the tables.
LAUNCH_S = 2.0e-6
# Of a collective on a device without a table, each rank's: assumed, gloo between processes.
UNMEASURED_LATENCY_S = 1.0e-4


@functools.cache
def _archive() -> dict[str, Any]:
    path = resources.files("nereus_plugins.data").joinpath("kernels.npz")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@dataclasses.dataclass(frozen=True)
class _Grid:
    """log(efficiency) over the logarithms of the axes."""

    axes: tuple[list[float], ...]
    log_efficiency: Any

    def at(self, *point: float) -> float:
        """Multilinear interpolation; outside the grid, its edge."""
        corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for axis, value in zip(self.axes, point, strict=True):
            x = math.log(value)
            if x <= axis[0]:
                steps = [(0, 1.0)]
            elif x >= axis[-1]:
                steps = [(len(axis) - 1, 1.0)]
            else:
                i = bisect_right(axis, x) - 1
                part = (x - axis[i]) / (axis[i + 1] - axis[i])
                steps = [(i, 1.0 - part), (i + 1, part)]
            corners = [((*at, i), w * v) for at, w in corners for i, v in steps]
        return math.exp(sum(w * self.log_efficiency[at] for at, w in corners))


def _axes(system: str, kind: str, names: tuple[str, ...]) -> list[Any]:
    return [_archive()[f"{system}/{kind}/{name}"].astype(float) for name in names]


@functools.cache
def _gemm_grid(system: str) -> _Grid:
    axes = _axes(system, "gemm", ("m", "n", "k"))
    gpu = find_gpu(_MEASURED_ON[system])
    m, n, k = np.meshgrid(*axes, indexing="ij")
    roof = np.maximum(2 * m * n * k / gpu.bf16_flops, 2 * (m * n + n * k + m * k) / gpu.hbm_bytes_s)
    # Launching is not part of the efficiency: it is added back, the same on every GPU.
    seconds = np.maximum(_archive()[f"{system}/gemm/s"] - LAUNCH_S, 0.2e-6)
    return _Grid(tuple(list(np.log(a)) for a in axes), np.log(roof / seconds))


def _efficiency(gpu: GPU, grid: Callable[[str], _Grid], *point: float) -> float:
    """Of the roofline, as the table that stands for the GPU has it."""
    return grid(gpu.kernels).at(*point) if gpu.kernels else 1.0


@functools.lru_cache(maxsize=200_000)
def gemm_s(gpu: GPU, m: int, n: int, k: int, *, fp8: bool = False) -> float:
    """Seconds of one (m, k) x (k, n) product in bf16, as measured in isolation.

    fp8 halves the operands' bytes and takes the fp8 peak at the same efficiency (no fp8 table).
    """
    flops = gpu.fp8_flops if fp8 else gpu.bf16_flops
    operand = 1 if fp8 else 2
    traffic = operand * (m * k + n * k) + 2 * m * n
    roof = max(2 * m * n * k / flops, traffic / gpu.hbm_bytes_s)
    # An SM's tile count, not the shape alone, sets how well a GEMM fills the GPU: GPUs with a
    # higher peak need more rows for the same efficiency.
    shrink = find_gpu(_MEASURED_ON[gpu.kernels]).bf16_flops / flops if gpu.kernels else 1.0
    rows = m * min(1.0, shrink) if shrink < 1.0 else m
    return roof / _efficiency(gpu, _gemm_grid, max(1.0, rows), n, k) + LAUNCH_S


@functools.cache
def _context_grid(system: str) -> _Grid:
    axes = _axes(system, "context", ("batch", "seq", "heads"))
    gpu = find_gpu(_MEASURED_ON[system])
    b, s, h = np.meshgrid(*axes, indexing="ij")
    roof = 2 * b * h * s**2 * 128 / gpu.bf16_flops
    seconds = np.maximum(_archive()[f"{system}/context/s"] - LAUNCH_S, 0.2e-6)
    return _Grid(tuple(list(np.log(a)) for a in axes), np.log(roof / seconds))


# Attention kernels of training stacks against the table's forward pass (FA2 on A100, FA3 on
# Hopper), per architecture. Rates behind them, causal, head_dim 128, long sequences:
# FlashAttention-3 paper (arXiv:2407.08608, fig. 5, 6): FA3 forward about 640, backward about 550;
# FA2 on H100 forward about 370, backward about 310 TFLOP/s.
# FlashAttention-2 paper (arXiv:2307.08691, fig. 4): FA2 on A100 about 190 forward, 165 backward.
# FA1/Triton: the same figures, forward and backward 90 to 130 TFLOP/s.
_FORWARD = {
    ("fa3", "hopper"): 1.0, ("fa2", "hopper"): 0.60, ("fa1", "hopper"): 0.40,
    ("fa2", "ampere"): 1.0, ("fa1", "ampere"): 0.65,
    ("cudnn", "hopper"): 1.0, ("cudnn", "blackwell"): 0.9, ("fa3", "blackwell"): 0.5,
    ("fa2", "blackwell"): 0.3,
}  # fmt: skip
_BACKWARD = {
    ("fa3", "hopper"): 0.85, ("fa2", "hopper"): 0.50, ("fa1", "hopper"): 0.33,
    ("fa2", "ampere"): 0.87, ("fa1", "ampere"): 0.55,
    ("cudnn", "hopper"): 0.85, ("cudnn", "blackwell"): 0.7, ("fa3", "blackwell"): 0.4,
    ("fa2", "blackwell"): 0.25,
}  # fmt: skip


def _kernel(table: dict[tuple[str, str], float], kernel: str, gpu: GPU) -> float:
    if (kernel, gpu.architecture) in table:
        return table[kernel, gpu.architecture]
    fallback = {"hopper": "fa3", "blackwell": "cudnn"}.get(gpu.architecture, "fa2")
    architecture = gpu.architecture if (fallback, gpu.architecture) in table else "ampere"
    return table[fallback, architecture]


def attention_s(
    gpu: GPU,
    *,
    batch: float,
    seq: float,
    heads: float,
    head_dim: int,
    kernel: str,
    backward: bool = False,
    query_part: float = 1.0,
) -> float:
    """Seconds of causal attention over `batch` sequences of `seq` tokens, `heads` query heads.

    FLOPs, causal half: forward 2 * batch * heads * seq^2 * head_dim (QK^T and PV), backward 2.5
    times that (five products for two; FlashAttention paper, arXiv:2205.14135). `query_part`: share
    of the queries computed here (context parallelism).
    """
    flops = 2.0 * batch * heads * seq * seq * head_dim * query_part
    factor = _kernel(_BACKWARD if backward else _FORWARD, kernel, gpu)
    # head_dim 64 fills the tensor cores less: about two thirds (Hopper), 0.85 (Ampere), as the
    # FA2 and FA3 papers' figures show.
    if head_dim < 96:
        factor *= 0.67 if gpu.architecture in ("hopper", "blackwell") else 0.85
    efficiency = _efficiency(
        gpu, _context_grid, max(1.0, batch * query_part), max(1.0, seq), max(1.0, heads)
    )
    return flops * (2.5 if backward else 1.0) / (gpu.bf16_flops * efficiency * factor) + LAUNCH_S


@functools.cache
def _decode_grid(system: str) -> _Grid:
    axes = _axes(system, "decode", ("batch", "context", "kv_heads"))
    gpu = find_gpu(_MEASURED_ON[system])
    b, s, h = np.meshgrid(*axes, indexing="ij")
    roof = b * s * h * 128 * 2 * 2 / gpu.hbm_bytes_s
    seconds = np.maximum(_archive()[f"{system}/decode/s"] - LAUNCH_S, 0.2e-6)
    return _Grid(tuple(list(np.log(a)) for a in axes), np.log(roof / seconds))


def decode_attention_s(
    gpu: GPU, *, batch: float, context: float, kv_heads: float, head_dim: int
) -> float:
    """Seconds of one layer's attention for one new token of each of `batch` sequences.

    Reads keys and values once: batch * context * kv_heads * head_dim * 2 tensors * 2 bytes.
    """
    traffic = batch * context * kv_heads * head_dim * 4.0
    efficiency = _efficiency(
        gpu, _decode_grid, max(1.0, batch), max(1.0, context), max(1.0, kv_heads)
    )
    return traffic / (gpu.hbm_bytes_s * efficiency) + LAUNCH_S


@functools.lru_cache(maxsize=50_000)
def nccl_s(gpu: GPU, op: str, ranks: int, nbytes: float) -> float:
    """Seconds of a collective inside a node; `nbytes` is the whole tensor (all_gather's output).

    Other NVLink rates scale the part beyond the smallest message's latency.
    """
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    if not gpu.kernels:
        return ranks * UNMEASURED_LATENCY_S + (ranks - 1) / ranks * nbytes / gpu.nvlink_bytes_s
    table = max(r for r in (2, 4, 8) if r <= max(2, ranks))
    size = _archive()[f"{gpu.kernels}/nccl/{op}/{table}/bytes"]
    seconds = _archive()[f"{gpu.kernels}/nccl/{op}/{table}/s"]
    floor = float(seconds[0])
    # Beyond the largest measured size the rate between the last two sizes holds.
    rate = float((size[-1] - size[-2]) / (seconds[-1] - seconds[-2]))
    if nbytes >= size[-1]:
        wire = float(seconds[-1]) - floor + (nbytes - float(size[-1])) / rate
    else:
        at = float(np.exp(np.interp(math.log(nbytes), np.log(size), np.log(seconds))))
        wire = max(0.0, at - floor)
    measured_on = find_gpu(_MEASURED_ON[gpu.kernels])
    # Only the part that the wire's rate explains changes with the NVLink generation; protocol and
    # pipeline filling do not.
    carried = min(wire, nbytes / rate)
    wire += carried * (measured_on.nvlink_bytes_s / gpu.nvlink_bytes_s - 1.0)
    # (r - 1) / r of the tensor crosses the wire; the table has it for its own rank count.
    share = ((ranks - 1) / ranks) / ((table - 1) / table)
    return floor + wire * share
