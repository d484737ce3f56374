"""The data files of a snapshot: safetensors, with the boxes' offsets as torch's distributed
checkpoint records them.

`torch.distributed.checkpoint.HuggingFaceStorageReader` reads a folder of such files, and so does
any reader of safetensors, box by box; nothing in them is ever unpickled. Format:
https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps); torch adds
"DCP_SHARDING_INFO" to the header's metadata: {name: {"saved_offsets": [...]}}.

torch's own writer keeps one box of a tensor in a file and drops the others without a word, and a
flat range is up to 2n - 1 boxes of a tensor. So these are written here: the k-th box of each tensor
goes into the rank's k-th file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_plugins.emu.boxes import Box, BoxError
from nereus_plugins.emu.table import TableError, TensorInfo
from nereus_plugins.snapshot.errors import DamagedSnapshot
from nereus_plugins.snapshot.parts import PartBox

# safetensors' names of the types that shard tables have.
_NAMES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Entry:
    """One box in a file: its bytes, row-major, are ``begin:end`` of the data that follow the
    header."""

    info: TensorInfo
    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """What stands where in one file.

    Attributes:
        header: everything before the data.
        entries: in order, without gaps.
    """

    header: bytes
    entries: tuple[Entry, ...]

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


def split(boxes: Sequence[PartBox]) -> list[list[PartBox]]:
    """The boxes of one rank by file: no file holds two boxes of one tensor."""
    files: list[list[PartBox]] = []
    seen: dict[str, int] = {}
    for box in boxes:
        number = seen.get(box.info.name, 0)
        seen[box.info.name] = number + 1
        if number == len(files):
            files.append([])
        files[number].append(box)
    # Wide types first, so that each box begins at a multiple of its element size.
    return [sorted(file, key=lambda b: (-b.info.itemsize, b.info.name)) for file in files]


def file_name(rank: int, number: int, count: int) -> str:
    """The name of a rank's file `number` of `count`, as torch names such files."""
    return f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{count:05d}.safetensors"


def lay_out(boxes: Sequence[PartBox]) -> FileLayout:
    """Where the boxes of one file go, and its header."""
    entries, at = [], 0
    for one in boxes:
        entries.append(Entry(one.info, one.box, at, at + one.nbytes))
        at += one.nbytes
    offsets = {e.info.name: {"saved_offsets": list(e.box.offset)} for e in entries}
    header: dict[str, Any] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps(offsets),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    for e in entries:
        header[e.info.name] = {
            "dtype": _NAMES[e.info.dtype],
            "shape": list(e.box.shape),
            "data_offsets": [e.begin, e.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return FileLayout(_LENGTH.pack(len(text)) + text, tuple(entries))


def header_bytes(start: bytes, file_bytes: int, where: str) -> int:
    """Length of everything before the data, from a file's first 8 bytes.

    Raises: DamagedSnapshot: they are none, or say more than the file has.
    """
    if len(start) < _LENGTH.size:
        raise DamagedSnapshot(f"{where}: cut off after {len(start)} bytes")
    (length,) = _LENGTH.unpack(start[: _LENGTH.size])
    if length > min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise DamagedSnapshot(f"{where}: its header says {length} bytes, the file has {file_bytes}")
    return _LENGTH.size + int(length)


def parse(header: bytes, shapes: Mapping[str, Sequence[int]], where: str) -> FileLayout:
    """What `lay_out` made, from a file's header.

    Args: shapes: of the whole tensors, by name, which the files do not hold.

    Raises: DamagedSnapshot.
    """
    try:
        named = json.loads(header[_LENGTH.size :])
        offsets = json.loads(named.pop("__metadata__")["DCP_SHARDING_INFO"])
        entries = [
            _entry(name, one, offsets[name]["saved_offsets"], shapes[name])
            for name, one in named.items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedSnapshot(f"{where}: its header is damaged: {error!r}") from None
    entries.sort(key=lambda e: e.begin)
    at = 0
    for e in entries:
        whole = Box.whole(e.info.shape)
        if e.begin != at or not whole.contains(e.box):
            raise DamagedSnapshot(f"{where}: {e.info.name} {e.box} is not where it can be")
        at = e.end
    return FileLayout(header, tuple(entries))


def _entry(name: str, said: Any, offset: Any, shape: Sequence[int]) -> Entry:
    """Raises: KeyError, TypeError, ValueError (BoxError and TableError are such)."""
    box = Box(tuple(map(_count, offset)), tuple(map(_count, said["shape"])))
    info = TensorInfo(name, tuple(shape), _TYPES[said["dtype"]])
    begin, end = map(_count, said["data_offsets"])
    if box.ndim != len(shape):
        raise BoxError(f"{name}: {box} has {box.ndim} dims, not {len(shape)}")
    if end - begin != math.prod(box.shape) * info.itemsize:
        raise TableError(f"{name}: {end - begin} bytes are not {box} of {info.dtype}")
    return Entry(info, box, begin, end)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
