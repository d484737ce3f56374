"""A rank's part of a unit, copied to host memory as its files will hold it.

The memory is allocated once for a layout and used again for every snapshot, so a rank's host memory
for snapshots is the size of its part. Pinned where the state is on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.snapshot.parts import PartBox
from nereus_plugins.snapshot.shard_file import FileLayout, file_name, lay_out, split


@dataclass(frozen=True)
class HostFile:
    """The content of one file.

    Attributes:
        name: of the file. layout: its header and what stands where.
        data: uint8[data_bytes] in host memory.
        sources: for each entry of the layout, the index of the live shard that holds the box.
    """

    name: str
    layout: FileLayout
    data: torch.Tensor
    sources: tuple[int, ...]

    def shards(self) -> list[LocalShard]:
        """The entries as views of `data`."""
        return entry_views(self.layout, self.data)


class HostCopy:
    """Memory for one rank's part of one unit.

    Args:
        rank: this rank. boxes: its part (`parts.parts`).
        pinned: allocate page-locked memory, for a unit on a CUDA device.
    """

    def __init__(self, rank: int, boxes: Sequence[PartBox], *, pinned: bool) -> None:
        self.files: list[HostFile] = []
        by_file = split(boxes)
        for number, some in enumerate(by_file):
            layout = lay_out(some)
            self.files.append(
                HostFile(
                    file_name(rank, number, len(by_file)),
                    layout,
                    torch.empty(layout.data_bytes, dtype=torch.uint8, pin_memory=pinned),
                    tuple(box.local for box in some),
                )
            )

    def fill(self, unit: DescribedUnit) -> None:
        """Copy the part; returns when it is in host memory, so that training may go on.

        Args: unit: as this rank's rows of the table from which the part was made.
        """
        devices = set()
        with torch.no_grad():
            for file in self.files:
                for entry, source in zip(file.shards(), file.sources, strict=True):
                    live = unit.shards[source]
                    view = live.view[entry.box.slices_in(live.box)]
                    entry.view.copy_(view, non_blocking=view.is_cuda)
                    devices.add(view.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def entry_views(layout: FileLayout, data: torch.Tensor) -> list[LocalShard]:
    """The boxes of a file as views of its data, uint8[data_bytes]."""
    out = []
    for e in layout.entries:
        dtype = getattr(torch, e.info.dtype)
        view = data[e.begin : e.end].view(dtype).view(e.box.shape)
        out.append(LocalShard(e.info.name, e.box, e.info.shape, view))
    return out
