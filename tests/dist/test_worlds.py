"""Several default groups in one process, one of them current at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nereus_plugins.transport.groups import live_group_count
from nereus_plugins.transport.torch_private import (
    clone_default_store,
    current_world,
    form_world,
    in_world,
    set_world,
)

from .spawn import run_ranks


def _sum(value: int, group: dist.ProcessGroup | None = None) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def _two_worlds(rank: int, world: int) -> Any:
    """Ranks 2 and 1 of three become ranks 0 and 1 of a world of two; rank 0 is not in it."""
    order = (2, 1)
    store = dist.PrefixStore("second", clone_default_store())
    first = current_world()
    if rank not in order:
        seen = [_sum(rank)]
        dist.barrier()
        return [*seen, _sum(rank), live_group_count()]
    second = form_world(store, order.index(rank), 2, timeout_s=20.0)
    assert current_world() is first
    assert dist.get_rank() == rank
    with in_world(second):
        assert (dist.get_rank(), dist.get_world_size()) == (order.index(rank), 2)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        assert mesh.get_local_rank("dp") == order.index(rank)
        assert _sum(10 + rank) == 23
        assert _sum(rank, mesh.get_group("dp")) == 3
        dist.destroy_process_group(mesh.get_group("tp"))
        with pytest.raises(RuntimeError), in_world(first):
            raise RuntimeError
        assert current_world() is second
    seen = [_sum(rank)]  # in the first world, which all three are in
    set_world(second)
    assert _sum(rank) == 3
    set_world(first)
    dist.destroy_process_group(second)
    dist.barrier()
    return [*seen, _sum(rank), live_group_count()]


def test_a_second_world_beside_the_first() -> None:
    assert run_ranks(_two_worlds, 3) == [[3, 3, 1]] * 3


def _nobody_comes(rank: int, world: int) -> Any:
    store = dist.PrefixStore("second", clone_default_store())
    if rank == 0:
        with pytest.raises(RuntimeError):
            form_world(store, 0, 2, timeout_s=1.0)
    dist.barrier()
    return _sum(rank), dist.get_world_size()


def test_a_world_that_is_not_formed_leaves_the_current_one() -> None:
    assert run_ranks(_nobody_comes, 2) == [(1, 2)] * 2
