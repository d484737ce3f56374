"""Shard tables gathered from all ranks: once an epoch, as bytes, never as pickled objects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from nereus_plugins.emu.table import ShardTable, concat


def gather_tables(
    table: ShardTable, group: dist.ProcessGroup, wait: Callable[[], None] = lambda: None
) -> ShardTable:
    """All ranks' rows in one table, the same on every rank. Collective.

    Args: wait: as in `gather_bytes`.

    Raises:
        TableError: two ranks disagree about a tensor's shape or dtype, or bytes are not a table.
    """
    parts = gather_bytes(table.to_bytes(), group, wait)
    return concat([ShardTable.from_bytes(data) for data in parts])


def gather_bytes(
    payload: bytes, group: dist.ProcessGroup, wait: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Every rank's `payload`, by rank; lengths may differ. Collective: two all-gathers.

    Args: wait: called before the host reads what was gathered (`TorchTransport.wait_for_device`).
    """
    device = wire_device(group)
    sizes = _all_gather(torch.tensor([len(payload)], dtype=torch.int64, device=device), group)
    wait()
    lengths = [int(size) for size in sizes]
    padded = np.zeros(max(1, *lengths), dtype=np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    received = _all_gather(torch.from_numpy(padded).to(device), group)
    wait()
    return [
        data[:length].cpu().numpy().tobytes()
        for data, length in zip(received, lengths, strict=True)
    ]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor of one shape and dtype, by rank."""
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group)
    return gathered


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's messages must lie: the current CUDA device for NCCL, else the host."""
    if backend_for(dist.get_backend_config(group), "cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def transfer_backend() -> str:
    """The back end for moving the job's state: "nccl" where the job uses that for its CUDA devices,
    else "gloo". The same on all ranks."""
    config = dist.get_backend_config()
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    return "nccl" if usable and backend_for(config, "cuda") == "nccl" else "gloo"


def backend_for(config: str, device: str) -> str | None:
    """The back end that a process group has for a kind of device, None if it has none.

    Args:
        config: one back end for all it can serve ("gloo"), or one for each kind of device
            ("cpu:gloo,cuda:nccl").
    """
    backends = {}
    for part in config.lower().split(","):
        kind, colon, backend = part.partition(":")
        backends[kind if colon else device] = backend if colon else kind
    return backends.get(device)
