"""A gloo group beside torch's registered ones, in place of vLLM's NCCL communicator."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=300)


class GlooGroup:
    """Args: address, port: where rank 0 serves the store. rank, world: of the group."""

    def __init__(self, address: str, port: int, rank: int, world: int) -> None:
        # Held: it lives as long as the group.
        self._store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=TIMEOUT)
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, world, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """The content of rank `src`'s tensor into all ranks' tensors."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor.detach().contiguous()], options).wait()


def form(address: str, port: int, rank: int, world: int) -> GlooGroup:
    """Collective among its ranks."""
    return GlooGroup(address, port, rank, world)
