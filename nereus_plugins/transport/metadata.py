"""Shard tables gathered from all ranks: once an epoch, as bytes, never as pickled objects."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from nereus_plugins.emu.table import ShardTable, concat


def gather_tables(table: ShardTable, group: dist.ProcessGroup) -> ShardTable:
    """All ranks' rows in one table, the same on every rank. Collective.

    Raises:
        TableError: two ranks disagree about a tensor's shape or dtype, or bytes are not a table.
    """
    return concat([ShardTable.from_bytes(data) for data in gather_bytes(table.to_bytes(), group)])


def gather_bytes(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's `payload`, by rank; lengths may differ. Collective: two all-gathers."""
    device = wire_device(group)
    world = dist.get_world_size(group)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    mine = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine, group)
    lengths = sizes.tolist()
    longest = max(1, *lengths)
    padded = np.zeros(longest, dtype=np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    gathered = torch.empty(world * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, torch.from_numpy(padded).to(device), group)
    received = gathered.cpu().numpy()
    return [
        received[rank * longest : rank * longest + length].tobytes()
        for rank, length in enumerate(lengths)
    ]


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's messages must lie: the current CUDA device for NCCL, else the host."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
