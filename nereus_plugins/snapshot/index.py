"""The index of a snapshot: what it is of, its files and their digests. JSON, checked on reading.

A snapshot is complete when its index is there: it is written last, and holds a digest of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus_plugins.emu.table import TensorInfo
from nereus_plugins.snapshot.blocks import BLOCK_BYTES
from nereus_plugins.snapshot.errors import DamagedSnapshot
from nereus_plugins.spec import Layout

INDEX_NAME = "index.json"
FORMAT = "nereus-snapshot-1"  # the kind of digests is part of it
# Nothing in an index can name a file outside of the snapshot.
UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_FILE_NAME = re.compile(r"shard-\d{5,}-model-\d{5}-of-\d{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileRecord:
    """One data file.

    Attributes:
        unit: whose; also the name of the folder it is in. name: in that folder.
        rank: which copied it, in the job that took the snapshot.
        nbytes: of the whole file. header_bytes: of what comes before the data.
        header_digest: of those. blocks: digests of the data, `BLOCK_BYTES` each.
    """

    unit: str
    name: str
    rank: int
    nbytes: int
    header_bytes: int
    header_digest: str
    blocks: tuple[str, ...]

    @property
    def path(self) -> str:
        """Relative to the snapshot's folder."""
        return f"{self.unit}/{self.name}"


@dataclass(frozen=True)
class UnitRecord:
    """One unit: the layout it was in, its whole tensors, and the state that is not a box."""

    layout: Layout
    tensors: tuple[TensorInfo, ...]
    scalars: Mapping[str, Any]


@dataclass(frozen=True)
class Index:
    """What a snapshot is of.

    Attributes:
        number: ascends with every snapshot of a job.
        step: the trainer's iteration after which it was taken. epoch, plan: the job's then.
        world: number of ranks then. taken: UTC, ISO 8601.
        units: by name. files: of all units.
    """

    number: int
    step: int
    epoch: int
    plan: Mapping[str, Any]
    world: int
    taken: str
    units: Mapping[str, UnitRecord]
    files: tuple[FileRecord, ...]

    def to_json(self) -> str:
        body = {
            "format": FORMAT,
            "block_bytes": BLOCK_BYTES,
            "number": self.number,
            "step": self.step,
            "epoch": self.epoch,
            "plan": self.plan,
            "world": self.world,
            "taken": self.taken,
            "units": {
                name: {
                    "layout": unit.layout.to_dict(),
                    "tensors": [[t.name, list(t.shape), t.dtype] for t in unit.tensors],
                    "scalars": unit.scalars,
                }
                for name, unit in self.units.items()
            },
            "files": [dataclasses.asdict(file) for file in self.files],
        }
        return json.dumps({"digest": _digest(body), **body}, sort_keys=True)

    @property
    def digest(self) -> str:
        """Equal for equal snapshots only."""
        found: str = json.loads(self.to_json())["digest"]
        return found


def read_index(text: str, where: str) -> Index:
    """Raises: DamagedSnapshot, naming `where`."""
    try:
        body = json.loads(text)
        said = body.pop("digest")
        if body["format"] != FORMAT:
            raise DamagedSnapshot(f"{where}: format {body['format']!r}, not {FORMAT}")
        if said != _digest(body):
            raise DamagedSnapshot(f"{where}: its digest is not that of its content")
        if body["block_bytes"] != BLOCK_BYTES:
            raise DamagedSnapshot(f"{where}: blocks of {body['block_bytes']!r} bytes")
        return Index(
            number=_count(body["number"]),
            step=_count(body["step"]),
            epoch=_count(body["epoch"]),
            plan=dict(body["plan"]),
            world=_count(body["world"]),
            taken=str(body["taken"]),
            units={_matching(UNIT_NAME, n): _unit(one) for n, one in body["units"].items()},
            files=tuple(file_record(one) for one in body["files"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedSnapshot(f"{where}: not an index of a snapshot: {error!r}") from None


def _unit(said: Any) -> UnitRecord:
    return UnitRecord(
        layout=Layout.from_dict(said["layout"]),
        tensors=tuple(
            TensorInfo(str(name), tuple(map(_count, shape)), str(dtype))
            for name, shape, dtype in said["tensors"]
        ),
        scalars=dict(said["scalars"]),
    )


def file_record(said: Any) -> FileRecord:
    """From its fields as JSON. Raises: KeyError, TypeError, ValueError."""
    record = FileRecord(
        unit=_matching(UNIT_NAME, said["unit"]),
        name=_matching(_FILE_NAME, said["name"]),
        rank=_count(said["rank"]),
        nbytes=_count(said["nbytes"]),
        header_bytes=_count(said["header_bytes"]),
        header_digest=_matching(_DIGEST, said["header_digest"]),
        blocks=tuple(_matching(_DIGEST, one) for one in said["blocks"]),
    )
    if len(record.blocks) != -(-(record.nbytes - record.header_bytes) // BLOCK_BYTES):
        raise ValueError(f"{record.path} has {len(record.blocks)} blocks")
    return record


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is no such name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
