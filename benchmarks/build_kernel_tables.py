"""Build `nereus_plugins/data/kernels.npz` from the aiconfigurator measurements.

    python benchmarks/build_kernel_tables.py DIRECTORY_WITH_THE_CSV_FILES

Source: ai-dynamo/aiconfigurator @ 095f58a (Apache-2.0), kernels measured under vLLM 0.14.0 and
NCCL. What is changed here: only bf16 ("half") rows are kept, latencies become seconds, repeated
measurements become their median, context attention its median over key-value head counts (they
differ by less than 15 %), and GEMM latencies more than 1.6 times what their neighbours in the
grid say are replaced by that (a handful of cold or disturbed runs).
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm")


def read(path: Path) -> list[dict[str, str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def grid(
    rows: list[dict[str, str]], columns: tuple[str, ...], value: str, scale: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Median of `value` on the grid of distinct `columns`; NaN where nothing was measured."""
    axes = [np.unique([int(r[c]) for r in rows]) for c in columns]
    samples: dict[tuple[int, ...], list[float]] = defaultdict(list)
    index = [{int(v): i for i, v in enumerate(axis)} for axis in axes]
    for row in rows:
        key = tuple(index[d][int(row[c])] for d, c in enumerate(columns))
        samples[key].append(float(row[value]) * scale)
    out = np.full([len(a) for a in axes], np.nan)
    for key, values in samples.items():
        out[key] = np.median(values)
    return axes, out


def repair_gemm(axes: list[np.ndarray], seconds: np.ndarray) -> tuple[np.ndarray, int]:
    """Replace latencies far above what the neighbouring shapes' FLOP rates imply."""
    m, n, k = np.meshgrid(*axes, indexing="ij")
    log_rate = np.log(m * n * k / seconds)
    out, repaired = seconds.copy(), 0
    for i, j, o in np.argwhere(~np.isnan(seconds)):
        if axes[0][i] < 128:
            continue
        near = []
        for d in range(3):
            for step in (-1, 1):
                at = [i, j, o]
                at[d] += step
                if 0 <= at[d] < seconds.shape[d] and not np.isnan(log_rate[tuple(at)]):
                    near.append(log_rate[tuple(at)])
        middle = float(np.median(near))
        if log_rate[i, j, o] < middle - np.log(1.6):
            out[i, j, o] = m[i, j, o] * n[i, j, o] * k[i, j, o] / np.exp(middle)
            repaired += 1
    return out, repaired


def fill(values: np.ndarray, axes: list[np.ndarray], work: np.ndarray) -> np.ndarray:
    """Fill NaN with the rate (work per second) of the nearest measured grid point."""
    rate = work / values
    known = np.argwhere(~np.isnan(rate))
    logs = [np.log(a) for a in axes]
    points = np.stack([logs[d][known[:, d]] for d in range(len(axes))], axis=1)
    out = values.copy()
    for at in np.argwhere(np.isnan(values)):
        here = np.array([logs[d][at[d]] for d in range(len(axes))])
        best = known[np.argmin(((points - here) ** 2).sum(1))]
        out[tuple(at)] = work[tuple(at)] / rate[tuple(best)]
    return out


def main(source: Path, target: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    gemm = read(source / "gemm_bf16_vllm0.14.csv.gz")
    context = read(source / "context_attention_bf16_vllm0.14.csv.gz")
    decode = read(source / "generation_attention_bf16_vllm0.14.csv.gz")
    nccl = read(source / "nccl_latency.csv")
    for system in SYSTEMS:
        axes, seconds = grid(
            [r for r in gemm if r["system"] == system], ("m", "n", "k"), "latency_ms", 1e-3
        )
        seconds, repaired = repair_gemm(axes, seconds)
        m, n, k = np.meshgrid(*axes, indexing="ij")
        seconds = fill(seconds, axes, (m * n * k).astype(float))
        print(f"{system}: gemm {seconds.shape}, {repaired} latencies repaired")
        for name, axis in zip("mnk", axes, strict=True):
            arrays[f"{system}/gemm/{name}"] = axis.astype(np.int32)
        arrays[f"{system}/gemm/s"] = seconds.astype(np.float32)

        axes, seconds = grid(
            [r for r in context if r["system"] == system],
            ("batch_size", "isl", "num_heads"),
            "latency_ms",
            1e-3,
        )
        b, s, h = np.meshgrid(*axes, indexing="ij")
        seconds = fill(seconds, axes, (b * h * s.astype(float) ** 2))
        for name, axis in zip(("batch", "seq", "heads"), axes, strict=True):
            arrays[f"{system}/context/{name}"] = axis.astype(np.int32)
        arrays[f"{system}/context/s"] = seconds.astype(np.float32)

        # Decode reads the cache once whatever the number of query heads: keep 8 to a key-value
        # head (or as many as were measured), and let the axis be key-value heads.
        rows = [
            r
            for r in decode
            if r["system"] == system
            and int(r["num_heads"]) == min(8 * int(r["num_key_value_heads"]), 64)
        ]
        axes, seconds = grid(
            rows, ("batch_size", "step", "num_key_value_heads"), "latency_ms", 1e-3
        )
        b, s, h = np.meshgrid(*axes, indexing="ij")
        seconds = fill(seconds, axes, (b * h * (s + 1.0)))
        for name, axis in zip(("batch", "context", "kv_heads"), axes, strict=True):
            arrays[f"{system}/decode/{name}"] = axis.astype(np.int32)
        arrays[f"{system}/decode/s"] = seconds.astype(np.float32)

        for op in ("all_gather", "reduce_scatter", "all_reduce", "alltoall"):
            for gpus in (2, 4, 8):
                axes, seconds = grid(
                    [
                        r
                        for r in nccl
                        if r["system"] == system
                        and r["op_name"] == op
                        and r["nccl_dtype"] == "half"
                        and int(r["num_gpus"]) == gpus
                    ],
                    ("message_size",),
                    "latency",
                    1e-3,
                )
                arrays[f"{system}/nccl/{op}/{gpus}/bytes"] = axes[0].astype(np.int64) * 2
                arrays[f"{system}/nccl/{op}/{gpus}/s"] = seconds.astype(np.float32)
    np.savez_compressed(target, **arrays)
    print(f"{target}: {target.stat().st_size} bytes, {len(arrays)} arrays")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(__file__).resolve().parents[1] / "nereus_plugins" / "data" / "kernels.npz",
    )
