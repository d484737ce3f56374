"""An estimate as text: stages, parts with their formulas, memory by cause."""

from __future__ import annotations

from typing import Any

from nereus_plugins.spec import ClusterSpec, GPUSpec, LinkSpec, SpecError
from nereus_plugins.spec.layout import MOST_RANKS
from nereus_plugins.spec.record import require_int

from .estimate import Estimate, StageEstimate
from .hardware import find_gpu
from .step import Part

GIB = 2**30


def cluster_of(
    gpu: str,
    gpus: int,
    gpus_per_node: int = 8,
    *,
    inter_node_bytes_s: float | None = None,
) -> ClusterSpec:
    """A cluster of GPUs known by name, with the datasheet's figures.

    inter_node_bytes_s: network bandwidth of one GPU, one direction; default 50 GB/s (a 400 Gbit/s
    port each), 25 GB/s for Ampere.

    Raises: SpecError naming the setting at fault.
    """
    try:
        known = find_gpu(gpu)
    except KeyError as error:
        raise SpecError(str(error.args[0])) from None
    require_int("cluster", "gpus", gpus, maximum=MOST_RANKS)
    require_int("cluster", "gpus_per_node", gpus_per_node, maximum=MOST_RANKS)
    per_node = min(gpus_per_node, gpus)
    if gpus % per_node:
        raise SpecError(f"gpus={gpus} is not a multiple of gpus_per_node={per_node}")
    default = 25e9 if known.architecture == "ampere" else 50e9
    return ClusterSpec(
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        gpu=GPUSpec(
            name=known.name,
            memory_bytes=known.memory_bytes,
            peak_flops=known.bf16_flops,
            memory_bandwidth_bytes_per_s=known.hbm_bytes_s,
        ),
        intra_node=LinkSpec(known.nvlink_bytes_s, 5e-6),
        inter_node=LinkSpec(inter_node_bytes_s or default, 8e-6),
    )


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def _bar(value: float, whole: float, width: int = 24) -> str:
    filled = min(width, round(width * value / whole))
    return "#" * filled + "." * (width - filled)


def table(estimate: Estimate) -> str:
    """One line a stage: layout, devices, seconds, memory."""
    lines = [
        f"iteration {estimate.iteration_s:.1f} s; "
        + ("fits" if estimate.fits else "does NOT fit")
        + f": peak {_gib(estimate.peak.reserved_bytes)} of {_gib(estimate.capacity_bytes)} GiB in "
        f"{estimate.peak.stage}",
        "",
        f"{'stage':15} {'layout':28} {'GPUs':>5} {'start s':>8} {'seconds':>8} "
        f"{'alloc':>6} {'reserved GiB':>12}",
    ]
    for stage in estimate.stages.values():
        layout = stage.assignment.layout
        lines.append(
            f"{stage.stage!s:15} {layout!s:28} {layout.world_size:5d} {stage.starts_s:8.1f} "
            f"{stage.seconds:8.1f} {_gib(stage.allocated_bytes):>6} "
            f"{_gib(stage.reserved_bytes):>12} "
            + _bar(stage.reserved_bytes, stage.capacity_bytes)
            + ("" if stage.fits else " too much")
        )
    for stage in estimate.stages.values():
        lines += [f"{stage.stage}: {note}" for note in stage.notes]
    return "\n".join(lines)


def explanation(estimate: Estimate) -> str:
    """Every part of every stage with its formula."""
    return "\n\n".join(_stage(stage) for stage in estimate.stages.values())


def _stage(stage: StageEstimate) -> str:
    lines = [f"{stage.stage}  {stage.assignment.layout}"]
    for part in stage.parts:
        lines.append(f"  {part.value:10.3f} s    {part.name:15} {part.formula}")
    for part in stage.memory:
        lines.append(f"  {_gib(part.value):>10} GiB  {part.name:15} {part.formula}")
    for unit, value in stage.resting.items():
        lines.append(f"  {_gib(value):>10} GiB  {'(' + unit + ')':15} rests on the same GPUs")
    return "\n".join(lines)


def _parts(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    return [{"name": p.name, "value": p.value, "formula": p.formula} for p in parts]


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain data, for JSON."""
    return {
        "iteration_s": estimate.iteration_s,
        "fits": estimate.fits,
        "capacity_bytes": estimate.capacity_bytes,
        "stages": {
            str(name): {
                "layout": str(stage.assignment.layout),
                "devices": list(stage.assignment.devices),
                "starts_s": stage.starts_s,
                "seconds": stage.seconds,
                "parts": _parts(stage.parts),
                "memory": _parts(stage.memory),
                "resting_bytes": dict(stage.resting),
                "allocated_bytes": stage.allocated_bytes,
                "reserved_bytes": stage.reserved_bytes,
                "fits": stage.fits,
                "notes": list(stage.notes),
            }
            for name, stage in estimate.stages.items()
        },
    }
