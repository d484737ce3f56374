"""Columns of a predicted shard table, gathered block by block without a loop over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus_plugins.emu.boxes import Int64Array
from nereus_plugins.emu.table import (
    Int32Array,
    ShardTable,
    StorageTable,
    TensorInfo,
    itemsizes,
    storage_keys,
    table_dims,
)


class TableBuilder:
    """Collects blocks of shards and storages in any order; `build` sorts them by rank.

    Args:
        tensors: the tensors of the whole unit; blocks refer to them by index.
        device: where the storages lie.
    """

    def __init__(self, tensors: Sequence[TensorInfo], device: str) -> None:
        self.tensors = tuple(tensors)
        self.dims = table_dims(self.tensors)
        self._device = device
        self._itemsizes = itemsizes(self.tensors)
        self._rows: list[tuple[Int64Array, ...]] = []
        self._storages: list[tuple[Int64Array, Int64Array, Int64Array]] = []

    def add_rows(
        self,
        tensor: Int64Array,
        rank: Int64Array,
        storage: Int64Array,
        offset: Int64Array,
        shape: Int64Array,
        *,
        own_storage: bool,
    ) -> None:
        """Add shards, all int64: tensor, rank, storage [n]; offset, shape [n, D].

        Args:
            own_storage: each (rank, storage) named here holds exactly the shards named with it;
                otherwise the caller adds the storage with `add_storages`.
        """
        self._rows.append((tensor, rank, storage, offset, shape))
        if own_storage and len(tensor):
            keys = (rank << 32) | storage
            nbytes = shape.prod(axis=1) * self._itemsizes[tensor]
            if (keys[1:] > keys[:-1]).all():
                unique, sums = keys, nbytes
            else:
                unique, index = np.unique(keys, return_inverse=True)
                sums = np.zeros(len(unique), np.int64)
                np.add.at(sums, index, nbytes)
            self._storages.append((unique >> 32, unique & 0xFFFFFFFF, sums))

    def add_storages(self, rank: Int64Array, key: Int64Array, nbytes: Int64Array) -> None:
        """Add storages that shards added with `own_storage=False` name, all int64 [n]."""
        self._storages.append((rank, key, nbytes))

    def build(self) -> ShardTable:
        """The table; in a rank, shards keep the order in which they were added."""
        empty = np.zeros(0, np.int64)
        boxes = np.zeros((0, self.dims), np.int64)
        start = (empty, empty, empty, boxes, boxes)
        columns = [np.concatenate(c) for c in zip(start, *self._rows, strict=True)]
        order = np.argsort(columns[1], kind="stable")
        tensor, rank, storage, offset, shape = (c[order] for c in columns)
        first = np.searchsorted(rank, rank, side="left")
        places = [np.concatenate(c) for c in zip((empty,) * 3, *self._storages, strict=True)]
        order = np.argsort(storage_keys(_int32(places[0]), _int32(places[1])), kind="stable")
        owner, key, nbytes = (c[order] for c in places)
        return ShardTable(
            tensors=self.tensors,
            tensor=_int32(tensor),
            rank=_int32(rank),
            storage=_int32(storage),
            local=_int32(np.arange(len(rank)) - first),
            offset=offset,
            shape=shape,
            storages=StorageTable(
                rank=_int32(owner),
                key=_int32(key),
                nbytes=nbytes,
                device=np.zeros(len(owner), np.int32),
                devices=(self._device,),
            ),
        )


def _int32(column: Int64Array) -> Int32Array:
    return column.astype(np.int32)
