"""Which rank copies which boxes: every element of a unit once, the bytes spread over its holders.

Replicas (data-parallel ranks hold the same weights) are copied by one of them. The rule is applied
by each rank alone to the table of all ranks, with the same result on all. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.table import ShardTable, TensorInfo, itemsizes
from nereus_plugins.emu.tiling import FlatSpace, check_tiling, disjoint, unique_boxes


@dataclass(frozen=True)
class PartBox:
    """One box that a rank copies.

    Attributes:
        info: the tensor. box: in its coordinates.
        local: index of the shard, on the rank that copies, that holds the box.
    """

    info: TensorInfo
    box: Box
    local: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.info.itemsize


def parts(table: ShardTable) -> dict[int, list[PartBox]]:
    """By rank, what it copies, in order of tensors and of places in them; a rank may have nothing.

    The largest boxes are dealt out first, each to the holder with the fewest bytes so far (the
    lowest rank among equals).

    Raises:
        CoverageError: no rank holds an element of a tensor, so that nothing could be restored.
    """
    space = FlatSpace(table.tensors)
    boxes = unique_boxes(space, table.tensor, table.rank, table.local, table.offset, table.shape)
    boxes = disjoint(boxes)
    held = np.zeros(len(table.tensors), dtype=np.int64)
    np.add.at(held, boxes.tensor, boxes.numel)
    if (held != np.diff(space.base)).any():
        check_tiling(table)  # says which
    nbytes = boxes.numel * itemsizes(table.tensors)[boxes.tensor]
    ranks = max(table.ranks, default=-1) + 1
    load = np.zeros(ranks, dtype=np.int64)
    chosen = np.empty(len(boxes), dtype=np.int64)
    for i in np.argsort(-nbytes, kind="stable").tolist():
        holders = boxes.rank[boxes.start[i] : boxes.start[i + 1]]
        place = int(load[holders].argmin())
        chosen[i] = boxes.start[i] + place
        load[holders[place]] += nbytes[i]
    out: dict[int, list[PartBox]] = {rank: [] for rank in range(ranks)}
    for i in range(len(boxes)):
        entry = chosen[i]
        out[int(boxes.rank[entry])].append(
            PartBox(
                table.tensors[int(boxes.tensor[i])],
                boxes.box(table.tensors, i),
                int(boxes.local[entry]),
            )
        )
    return out
