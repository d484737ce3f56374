"""Private names of torch that describing an FSDP2 model needs, wrapped once.

Checked with torch 2.13; the tests of FSDP2 units fail if a later torch changes their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor import debug as dtensor_debug
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of this rank's part of a DTensor, uneven and strided shards included."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(shape)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's memory, without the autograd function that `to_local` adds."""
    return tensor._local_tensor


def clear_sharding_cache() -> None:
    """Forget what is cached by mesh, which belongs to the layout that it was computed in.

    Equality of meshes ignores the process's own rank: a process whose rank changed on an equal
    mesh would be given the shapes of its old rank. And who is asked for by an equal mesh keeps the
    first one, with its process groups, their threads and their connections. One of the caches is
    per thread, so call this in the thread that runs the model.
    """
    dtensor_debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the state dict, by qualified name."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
