"""The shard table: which rank holds which box of which tensor, in columns.

One table describes a unit on any number of ranks. It is columns (NumPy arrays), not objects, since
planning for a thousand ranks means hundreds of thousands of shards. Predicted tables (from the
spec) and described ones (from a built model) have the same form.

On the wire a table is a JSON header and raw little-endian arrays, checked on reading: bytes from a
peer can be wrong but never execute, and never make the reader allocate more than it was sent.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.emu.boxes import Box, Int64Array

Int32Array = NDArray[np.int32]
_Int = TypeVar("_Int", np.int32, np.int64)

KINDS = ("weight", "master", "exp_avg", "exp_avg_sq", "buffer", "average")

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

MAX_DIMS = 8
# Flat addresses over all tensors of a table are int64; the margin keeps sums of two in range.
MAX_ELEMENTS = 1 << 61

_MAGIC = b"NereusT1"
_HEADER_BYTES = struct.Struct("<Q")


class TableError(ValueError):
    """A shard table that is inconsistent in itself, with another one, or as received."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A named global tensor.

    Attributes:
        name: "<kind>/<tensor>", kind one of `KINDS`.
        shape: the global shape, in elements.
        dtype: a key of `DTYPE_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        kind, _, tensor = self.name.partition("/")
        if kind not in KINDS or not tensor:
            raise TableError(
                f"tensor name {self.name!r} is not '<kind>/<tensor>' with kind one of "
                + ", ".join(KINDS)
            )
        if self.dtype not in DTYPE_BYTES:
            raise TableError(f"{self.name}: unknown dtype {self.dtype!r}")
        if len(self.shape) > MAX_DIMS or any(n < 0 for n in self.shape):
            raise TableError(f"{self.name}: shape {self.shape} is negative or over {MAX_DIMS} dims")
        if self.numel > MAX_ELEMENTS:
            raise TableError(f"{self.name}: shape {self.shape} has more than 2**61 elements")

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """One allocation on one rank, into which shards are views.

    Attributes:
        rank: the rank that owns it.
        key: its number, local to the rank.
        nbytes: its size.
        device: "cpu", "cuda:0", ...
    """

    rank: int
    key: int
    nbytes: int
    device: str


@dataclass(frozen=True, eq=False)
class StorageTable:
    """Storages in columns (FSDP2 has one per parameter and moment: too many for objects).

    Attributes:
        rank, key: int32[m], owner and number local to it; the pair is unique.
        nbytes: int64[m], size.
        device: int32[m], index into `devices`.
        devices: device names.

    Raises:
        TableError: naming the column and the row that break these rules.
    """

    rank: Int32Array
    key: Int32Array
    nbytes: Int64Array
    device: Int32Array
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        m = len(self.rank)
        for name in ("rank", "key", "nbytes", "device"):
            column = getattr(self, name)
            _check_column(name, column, np.int64 if name == "nbytes" else np.int32, (m,))
            limit = len(self.devices) if name == "device" else None
            if bad := _first(column, limit):
                raise TableError(f"storage row {bad[0]} has {name} {bad[1]}")
        known = self.sorted_keys
        if (known[1:] == known[:-1]).any():
            raise TableError("two storages have the same rank and key")

    @classmethod
    def from_infos(cls, infos: Iterable[StorageInfo]) -> StorageTable:
        infos = list(infos)
        devices = sorted({s.device for s in infos})
        place = {device: i for i, device in enumerate(devices)}
        return cls(
            rank=np.array([s.rank for s in infos], dtype=np.int32),
            key=np.array([s.key for s in infos], dtype=np.int32),
            nbytes=np.array([s.nbytes for s in infos], dtype=np.int64),
            device=np.array([place[s.device] for s in infos], dtype=np.int32),
            devices=tuple(devices),
        )

    @cached_property
    def sorted_keys(self) -> Int64Array:
        """int64[m], ascending: rank and key in one number, as `storage_keys` makes it."""
        return np.sort(storage_keys(self.rank, self.key))

    def __len__(self) -> int:
        return len(self.rank)

    def infos(self) -> list[StorageInfo]:
        """The rows as objects."""
        columns = (self.rank, self.key, self.nbytes, self.device)
        rows = zip(*(c.tolist() for c in columns), strict=True)
        return [StorageInfo(r, k, size, self.devices[place]) for r, k, size, place in rows]

    def of_rank(self, rank: int) -> StorageTable:
        """The storages of one rank."""
        keep = self.rank == rank
        return StorageTable(
            self.rank[keep], self.key[keep], self.nbytes[keep], self.device[keep], self.devices
        )

    def arrays(self) -> tuple[NDArray[np.int32] | NDArray[np.int64], ...]:
        """The columns, in wire order."""
        return (self.rank, self.key, self.nbytes, self.device)


@dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of a unit: row i says that `rank[i]` holds a box of `tensors[tensor[i]]`.

    D is the largest number of dims of any tensor (at least 1); a tensor with fewer has offset 0
    and shape 1 in the missing, last dims.

    Attributes:
        tensors: the global tensors; names are unique.
        tensor: int32[n], index into `tensors`.
        rank: int32[n], the owner.
        storage: int32[n], key (local to the rank) of the storage the shard is a view of.
        local: int32[n], index of the shard in its rank's own list; unique in a rank.
        offset, shape: int64[n, D], the box; a zero-sized shard has a zero in its shape.
        storages: the storages of all ranks.

    Raises:
        TableError: naming the column and the row that break these rules.
    """

    tensors: tuple[TensorInfo, ...]
    tensor: Int32Array
    rank: Int32Array
    storage: Int32Array
    local: Int32Array
    offset: Int64Array
    shape: Int64Array
    storages: StorageTable

    def __post_init__(self) -> None:
        n, dims = len(self.tensor), table_dims(self.tensors)
        for name in ("tensor", "rank", "storage", "local"):
            _check_column(name, getattr(self, name), np.int32, (n,))
        for name in ("offset", "shape"):
            _check_column(name, getattr(self, name), np.int64, (n, dims))
        if len({t.name for t in self.tensors}) != len(self.tensors):
            raise TableError("two tensors have the same name")
        if sum(t.numel for t in self.tensors) > MAX_ELEMENTS:
            raise TableError("the tensors together have more than 2**61 elements")
        if bad := _first(self.tensor, len(self.tensors)):
            raise TableError(f"row {bad[0]} names tensor {bad[1]} of {len(self.tensors)}")
        for name in ("rank", "storage", "local"):
            if bad := _first(getattr(self, name), None):
                raise TableError(f"row {bad[0]} has {name} {bad[1]}")
        self._check_boxes()
        self._check_unique_local()
        self._check_storages()

    def _check_boxes(self) -> None:
        limit = padded_shapes(self.tensors)[self.tensor]
        # In this order no sum can overflow, whatever the columns hold.
        inside = (self.offset >= 0) & (self.offset <= limit)
        inside &= (self.shape >= 0) & (self.shape <= limit - np.where(inside, self.offset, 0))
        dims = np.array([len(t.shape) for t in self.tensors], dtype=np.int64)[self.tensor]
        missing = np.arange(self.shape.shape[1])[None, :] >= dims[:, None]
        inside &= ~missing | ((self.offset == 0) & (self.shape == 1))
        if inside.all():
            return
        i = int(np.flatnonzero(~inside.all(axis=1))[0])
        info = self.tensors[self.tensor[i]]
        raise TableError(
            f"row {i} (rank {self.rank[i]}): offset {self.offset[i].tolist()} and shape "
            f"{self.shape[i].tolist()} is not a box of {info.name} {info.shape}"
        )

    def _check_unique_local(self) -> None:
        key = np.sort(storage_keys(self.rank, self.local))
        if (twice := key[1:][key[1:] == key[:-1]]).size:
            rank, local = int(twice[0]) >> 32, int(twice[0]) & 0xFFFFFFFF
            raise TableError(f"rank {rank} has two shards with local index {local}")

    def _check_storages(self) -> None:
        if not len(self):
            return
        # Shards come grouped by storage, so that only the changes need to be looked up.
        used = storage_keys(self.rank, self.storage)
        change = np.flatnonzero(np.concatenate(([True], used[1:] != used[:-1])))
        known = self.storages.sorted_keys
        place = np.searchsorted(known, used[change])
        found = np.zeros(len(change), dtype=bool)
        inside = place < len(known)
        found[inside] = known[place[inside]] == used[change][inside]
        if not found.all():
            i = int(change[np.flatnonzero(~found)[0]])
            raise TableError(f"row {i}: rank {self.rank[i]} has no storage {self.storage[i]}")

    @classmethod
    def from_shards(
        cls,
        rank: int,
        shards: Iterable[tuple[TensorInfo, Box, int]],
        storages: Iterable[StorageInfo],
    ) -> ShardTable:
        """The table of one rank from its list of `(tensor, box, storage key)`; `local` is the
        index in that list.

        Raises:
            TableError: as the class; also if two shards disagree about one tensor.
        """
        shards = list(shards)
        index: dict[str, int] = {}
        tensors: list[TensorInfo] = []
        for info, box, _ in shards:
            _register(info, index, tensors)
            if box.ndim != len(info.shape):
                raise TableError(f"{info.name} {info.shape}: box {box} has {box.ndim} dims")
        dims, n = table_dims(tensors), len(shards)
        offset, shape = np.zeros((n, dims), dtype=np.int64), np.ones((n, dims), dtype=np.int64)
        for i, (_, box, _) in enumerate(shards):
            offset[i, : box.ndim], shape[i, : box.ndim] = box.offset, box.shape
        return cls(
            tensors=tuple(tensors),
            tensor=np.array([index[info.name] for info, _, _ in shards], dtype=np.int32),
            rank=np.full(n, rank, dtype=np.int32),
            storage=np.array([key for _, _, key in shards], dtype=np.int32),
            local=np.arange(n, dtype=np.int32),
            offset=offset,
            shape=shape,
            storages=StorageTable.from_infos(storages),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that own a shard or a storage, ascending."""
        return tuple(np.union1d(self.rank, self.storages.rank).tolist())

    def numel_per_row(self) -> Int64Array:
        """int64[n]: elements of each shard."""
        return self.shape.prod(axis=1)

    def nbytes_per_row(self) -> Int64Array:
        """int64[n]: bytes of each shard."""
        return self.numel_per_row() * itemsizes(self.tensors)[self.tensor]

    def box(self, row: int) -> Box:
        """The box of one row, in the tensor's own number of dims."""
        return row_box(self.tensors, self.tensor, self.offset, self.shape, row)

    def of_rank(self, rank: int) -> ShardTable:
        """The rows and storages of one rank; `tensors` stays whole, so that indices keep."""
        keep = self.rank == rank
        return ShardTable(
            tensors=self.tensors,
            tensor=self.tensor[keep],
            rank=self.rank[keep],
            storage=self.storage[keep],
            local=self.local[keep],
            offset=self.offset[keep],
            shape=self.shape[keep],
            storages=self.storages.of_rank(rank),
        )

    def on_ranks(self, ranks: Sequence[int]) -> ShardTable:
        """The same shards, those of rank i on rank `ranks[i]`, which differ.

        Raises: IndexError for a rank that is not in the list.
        """
        place = np.asarray(ranks, dtype=np.int32)
        storages = replace(self.storages, rank=place[self.storages.rank])
        return replace(self, rank=place[self.rank], storages=storages)

    def equals(self, other: ShardTable) -> bool:
        """Same tensors, storages and rows in the same order."""
        mine = (*self._arrays(), *self.storages.arrays())
        theirs = (*other._arrays(), *other.storages.arrays())
        return (
            self.tensors == other.tensors
            and self.storages.devices == other.storages.devices
            and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        )

    def _arrays(self) -> tuple[NDArray[np.int32] | NDArray[np.int64], ...]:
        return (self.tensor, self.rank, self.storage, self.local, self.offset, self.shape)

    def to_bytes(self) -> bytes:
        """The wire form: magic, header length, JSON header, the columns, then the storages'."""
        header = {
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
            "rows": len(self),
            "storages": len(self.storages),
            "devices": list(self.storages.devices),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        arrays = (*self._arrays(), *self.storages.arrays())
        columns = [a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays]
        return b"".join([_MAGIC, _HEADER_BYTES.pack(len(text)), text, *columns])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ShardTable:
        """Read `to_bytes`; checked like any table.

        Raises:
            TableError: the bytes are not a valid table.
        """
        view = memoryview(data).cast("B")
        start = len(_MAGIC) + _HEADER_BYTES.size
        if len(view) < start or view[: len(_MAGIC)] != _MAGIC:
            raise TableError("these bytes are not a shard table of this version")
        (header_bytes,) = _HEADER_BYTES.unpack(view[len(_MAGIC) : start])
        if header_bytes > len(view) - start:
            raise TableError("shard table: the header is longer than what was received")
        tensors, n, m, devices = _read_header(bytes(view[start : start + header_bytes]))
        dims = table_dims(tensors)
        body = view[start + header_bytes :]
        if len(body) != n * (4 * 4 + 2 * 8 * dims) + m * (3 * 4 + 8):
            raise TableError(
                f"shard table: {len(body)} bytes of columns do not fit {n} rows and {m} storages"
            )
        position = 0

        def take(kind: type[_Int], *shape: int) -> NDArray[_Int]:
            nonlocal position
            wire = np.dtype(kind).newbyteorder("<")
            array = np.frombuffer(body, dtype=wire, count=math.prod(shape), offset=position)
            position += array.nbytes
            return array.reshape(shape).astype(kind)

        tensor, rank, storage, local = (take(np.int32, n) for _ in range(4))
        offset, shape = take(np.int64, n, dims), take(np.int64, n, dims)
        storages = StorageTable(
            rank=take(np.int32, m),
            key=take(np.int32, m),
            nbytes=take(np.int64, m),
            device=take(np.int32, m),
            devices=tuple(devices),
        )
        return cls(tensors, tensor, rank, storage, local, offset, shape, storages)


def concat(tables: Sequence[ShardTable]) -> ShardTable:
    """One table of all rows, in order; tensors are merged by name, in order of appearance.

    Raises:
        TableError: two tables disagree about a tensor's shape or dtype (named), or about a rank.
    """
    index: dict[str, int] = {}
    tensors: list[TensorInfo] = []
    maps: dict[tuple[TensorInfo, ...], Int32Array] = {}  # ranks mostly share few tensor lists
    for table in tables:
        if table.tensors not in maps:
            maps[table.tensors] = np.array(
                [_register(info, index, tensors) for info in table.tensors], dtype=np.int32
            )
    dims = table_dims(tensors)
    total = sum(len(t) for t in tables)
    offset, shape = np.zeros((total, dims), dtype=np.int64), np.ones((total, dims), dtype=np.int64)
    start = 0
    for table in tables:
        end, have = start + len(table), table.offset.shape[1]
        offset[start:end, :have], shape[start:end, :have] = table.offset, table.shape
        start = end

    def joined(columns: list[Int32Array]) -> Int32Array:
        return np.concatenate([np.zeros(0, dtype=np.int32), *columns])

    return ShardTable(
        tensors=tuple(tensors),
        tensor=joined([maps[t.tensors][t.tensor] for t in tables]),
        rank=joined([t.rank for t in tables]),
        storage=joined([t.storage for t in tables]),
        local=joined([t.local for t in tables]),
        offset=offset,
        shape=shape,
        storages=_concat_storages([t.storages for t in tables]),
    )


def _concat_storages(tables: Sequence[StorageTable]) -> StorageTable:
    devices = sorted({device for t in tables for device in t.devices})
    place = {device: i for i, device in enumerate(devices)}
    none = np.zeros(0, dtype=np.int32)
    moved = [
        np.array([place[d] for d in t.devices], dtype=np.int32)[t.device] if len(t) else none
        for t in tables
    ]
    return StorageTable(
        rank=np.concatenate([none, *(t.rank for t in tables)]),
        key=np.concatenate([none, *(t.key for t in tables)]),
        nbytes=np.concatenate([none.astype(np.int64), *(t.nbytes for t in tables)]),
        device=np.concatenate([none, *moved]),
        devices=tuple(devices),
    )


def storage_keys(rank: Int32Array, local: Int32Array) -> Int64Array:
    """int64[n]: a rank and a number local to it as one number, ordered by rank."""
    return (rank.astype(np.int64) << 32) | local


def table_dims(tensors: Sequence[TensorInfo]) -> int:
    """D of a table with these tensors: the largest number of dims, at least 1."""
    return max((len(t.shape) for t in tensors), default=1) or 1


def padded_shapes(tensors: Sequence[TensorInfo]) -> Int64Array:
    """int64[t, D]: the global shapes, missing last dims as 1."""
    shapes = np.ones((len(tensors), table_dims(tensors)), dtype=np.int64)
    for i, info in enumerate(tensors):
        shapes[i, : len(info.shape)] = info.shape
    return shapes


def itemsizes(tensors: Sequence[TensorInfo]) -> Int64Array:
    """int64[t]: bytes of one element of each tensor."""
    return np.array([t.itemsize for t in tensors], dtype=np.int64)


def row_box(
    tensors: Sequence[TensorInfo],
    tensor: NDArray[np.integer],
    offset: Int64Array,
    shape: Int64Array,
    row: int,
) -> Box:
    """The box of one row of padded columns, in the tensor's own number of dims."""
    ndim = len(tensors[int(tensor[row])].shape)
    return Box(tuple(offset[row, :ndim].tolist()), tuple(shape[row, :ndim].tolist()))


def _register(info: TensorInfo, index: dict[str, int], tensors: list[TensorInfo]) -> int:
    """Index of `info` in `tensors`, appended if new."""
    known = index.setdefault(info.name, len(tensors))
    if known == len(tensors):
        tensors.append(info)
    elif tensors[known] != info:
        other = tensors[known]
        raise TableError(
            f"tensor {info.name} is {info.dtype} {info.shape} in one place and "
            f"{other.dtype} {other.shape} in another"
        )
    return known


def _check_column(name: str, array: object, dtype: type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        what = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array)
        raise TableError(f"column {name} is {what}, not {np.dtype(dtype)}{shape}")


def _first(column: NDArray[_Int], limit: int | None) -> tuple[int, int] | None:
    """(row, value) of the first entry that is negative or not under `limit`."""
    wrong = column < 0 if limit is None else (column < 0) | (column >= limit)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    return row, int(column[row])


def _read_header(text: bytes) -> tuple[tuple[TensorInfo, ...], int, int, list[str]]:
    """Tensors, number of rows, number of storages, devices."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"shard table: the header is not JSON: {error}") from None
    try:
        rows, storages, devices = header["rows"], header["storages"], header["devices"]
        listed = [(name, tuple(shape), dtype) for name, shape, dtype in header["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"shard table: the header lacks a field: {error!r}") from None
    if not all(type(x) is int and x >= 0 for x in (rows, storages)):
        raise TableError("shard table: the header's numbers of rows and storages are not counts")
    if not (isinstance(devices, list) and all(isinstance(d, str) for d in devices)):
        raise TableError("shard table: the header's devices are not names")
    for name, shape, dtype in listed:
        if not (isinstance(name, str) and isinstance(dtype, str)):
            raise TableError("shard table: a tensor's name or dtype is not text")
        if not all(type(n) is int and abs(n) <= MAX_ELEMENTS for n in shape):
            raise TableError(f"shard table: {name}: the shape is not whole numbers in range")
    return tuple(TensorInfo(*entry) for entry in listed), rows, storages, devices
