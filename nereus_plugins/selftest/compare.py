"""The whole state of a unit, put together from its boxes on every rank, and compared bit by bit.

For proofs on small models: every rank gathers everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described.base import merge_scalars
from nereus_plugins.emu.table import ShardTable

State = tuple[dict[str, torch.Tensor], dict[str, Any]]


class BrokenState(RuntimeError):
    """The shards of a unit are not one whole state."""


def whole_state(unit: DescribedUnit, device: torch.device) -> State:
    """(tensors by name, scalars) of a unit, assembled from all ranks of the job.

    Args:
        unit: this rank's part; empty on a rank without the unit.
        device: one the default group can communicate from.

    Raises:
        BrokenState: a tensor is not covered, or two ranks hold different bits of one element.
    """
    rank = dist.get_rank()
    payload = [s.view.detach().contiguous().view(-1).view(torch.uint8) for s in unit.shards]
    data = torch.cat(payload).cpu() if payload else torch.empty(0, dtype=torch.uint8)
    tables = _gather(
        torch.frombuffer(bytearray(unit.table(rank).to_bytes()), dtype=torch.uint8), device
    )
    contents = _gather(data, device)
    scalars = _gather(
        torch.frombuffer(bytearray(json.dumps(unit.scalars).encode()), dtype=torch.uint8), device
    )
    tensors: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for source, raw in enumerate(tables):
        table = ShardTable.from_bytes(raw.numpy().tobytes())
        at = 0
        for row in range(len(table)):
            info, box = table.tensors[table.tensor[row]], table.box(row)
            size = box.numel * info.itemsize
            piece = contents[source][at : at + size].view(*box.shape, info.itemsize)
            at += size
            whole = tensors.setdefault(
                info.name, torch.zeros(*info.shape, info.itemsize, dtype=torch.uint8)
            )
            done = written.setdefault(info.name, torch.zeros(info.shape, dtype=torch.bool))
            place = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            again = done[place]
            if bool(again.any()):
                same = (whole[place] == piece).all(-1)
                if not bool(same[again].all()):
                    raise BrokenState(f"replicas of {info.name} {box} differ")
            whole[place] = piece
            done[place] = True
    for name, done in written.items():
        if not bool(done.all()):
            raise BrokenState(f"{name} is not covered")
    return tensors, merge_scalars([json.loads(s.numpy().tobytes()) for s in scalars])


def differences(a: State, b: State) -> list[str]:
    """What differs between two states, in words; empty if they are equal bit by bit."""
    found = []
    for name in sorted(a[0].keys() | b[0].keys()):
        if name not in a[0] or name not in b[0]:
            found.append(f"{name} is on one side only")
        elif a[0][name].shape != b[0][name].shape:
            found.append(f"{name} has shape {tuple(a[0][name].shape)}, {tuple(b[0][name].shape)}")
        elif not torch.equal(a[0][name], b[0][name]):
            count = int((a[0][name] != b[0][name]).any(-1).sum())
            found.append(f"{count} elements of {name} differ")
    found += _scalar_differences(a[1], b[1], "")
    return found


def _scalar_differences(a: Any, b: Any, where: str) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        out = []
        for key in sorted(a.keys() | b.keys()):
            out += _scalar_differences(a.get(key), b.get(key), f"{where}/{key}")
        return out
    return [] if a == b else [f"scalar {where}: {a!r} and {b!r}"]


def _gather(data: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """uint8[n] of every rank, n differing."""
    world = dist.get_world_size()
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [p[: int(n)].cpu() for p, n in zip(parts, sizes, strict=True)]
