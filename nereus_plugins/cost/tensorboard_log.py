"""Scalars of TensorBoard event files, read without TensorBoard.

An event file is a sequence of records: 8 bytes of length, 4 of its checksum, the data, 4 of its
checksum. The data is a protobuf `Event` (tensorflow/core/util/event.proto): step = field 2, summary
= field 5; in `Summary` value = field 1; in a value tag = field 1, simple_value = field 2 (float),
tensor = field 8, whose float_val is field 5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def read_scalars(path: Path) -> Iterator[dict[str, float]]:
    """Each step's scalars by tag, "step" among them, in the order of steps.

    path: an event file, or a directory that holds some. A file cut short ends at the cut.

    Raises: OSError if a file cannot be read.
    """
    files = sorted(p for p in path.rglob("*tfevents*")) if path.is_dir() else [path]
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        data = file.read_bytes()
        at = 0
        while at + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = data[at + 12 : at + 12 + length]
            if len(event) < length:
                break
            at += 12 + length + 4
            step, values = _event(event)
            if values:
                steps.setdefault(step, {}).update(values)
    for step in sorted(steps):
        yield {"step": float(step), **steps[step]}


def _event(data: bytes) -> tuple[int, dict[str, float]]:
    step, values = 0, {}
    for field, value in _fields(data):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for number, one in _fields(value):
                if number == 1 and isinstance(one, bytes):
                    values.update(_scalar(one))
    return step, values


def _scalar(data: bytes) -> dict[str, float]:
    tag, number = "", None
    for field, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode("utf-8", "replace")
        elif field == 2 and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == 8:
            for inner, content in _fields(value):
                if inner == 5 and isinstance(content, bytes) and len(content) == 4:
                    number = struct.unpack("<f", content)[0]
    return {} if number is None or not tag else {tag: float(number)}


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: an int for varints, bytes for all else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            return  # groups are not used
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if shift > 63:  # no number of a protobuf is longer
            return 0, len(data)
        shift += 7
        if not byte & 0x80:
            break
    return value, at
