"""A folder of snapshots: each appears whole or not at all, torn ones are passed over, the last few
are kept.

    <folder>/000007-step340/index.json, <unit>/*.safetensors
    <folder>/.writing-000008-step360/      being written, or left by a job that died

Numbers ascend in the order in which snapshots were completed, also where a job went back to an
earlier step. A name is given by the rename that ends the writing, after all files are on disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from nereus_plugins.snapshot.errors import DamagedSnapshot, SnapshotError, unreadable
from nereus_plugins.snapshot.index import INDEX_NAME, FileRecord, Index, read_index

_NAME = re.compile(r"(\d{6,})-step(\d+)")
_WRITING = ".writing-"
_GOING = ".removing-"
UNFINISHED = "was not finished"  # how `find` says so


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot on disk."""

    path: Path
    index: Index


def find(folder: Path) -> tuple[list[Snapshot], list[str]]:
    """The complete snapshots of a folder, oldest first; and what was passed over, with the reason.

    Sizes of files are compared with the index; their content is checked where it is read.

    Raises: SnapshotError: this process can open no more files.
    """
    found, passed_over = [], []
    for number, path in numbered(folder):
        try:
            found.append((number, open_snapshot(path)))
        except DamagedSnapshot as error:
            passed_over.append(str(error))
    passed_over += [f"{p}: {UNFINISHED}" for p in folder.glob(f"{_WRITING}*")]
    return [snapshot for _, snapshot in sorted(found, key=lambda one: one[0])], passed_over


def latest(folder: Path) -> Snapshot:
    """The newest complete snapshot.

    Raises: SnapshotError: there is none; says what was passed over. Or as `find`.
    """
    found, passed_over = find(folder)
    if not found:
        because = "; passed over: " + "; ".join(passed_over[:4]) if passed_over else ""
        raise SnapshotError(f"{folder}: no complete snapshot{because}")
    return found[-1]


def open_snapshot(path: Path) -> Snapshot:
    """Raises: DamagedSnapshot: the index or a file is missing, or a file has another size.
    SnapshotError: this process can open no more files."""
    snapshot = Snapshot(path, open_index(path))
    for file in snapshot.index.files:
        check_size(path, file)
    return snapshot


def check_size(path: Path, file: FileRecord) -> None:
    """Raises: DamagedSnapshot: the snapshot at `path` lacks a file, or it has another size."""
    try:
        size = (path / file.path).stat().st_size
    except OSError as error:
        raise DamagedSnapshot(f"{path / file.path}: {error.strerror}") from None
    if size != file.nbytes:
        raise DamagedSnapshot(f"{path / file.path}: {size} bytes, not {file.nbytes}")


def open_index(path: Path) -> Index:
    """The index of the snapshot at `path`. Raises: DamagedSnapshot; SnapshotError: this process
    can open no more files."""
    where = path / INDEX_NAME
    try:
        text = where.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(where, error) from None
    except UnicodeDecodeError as error:
        raise DamagedSnapshot(f"{where}: {error}") from None
    return read_index(text, str(where))


# -- writing, by one process of the job ---------------------------------------------------------


def last_number(folder: Path) -> int:
    """The highest number of a snapshot in the folder, complete or not; 0 if there is none."""
    return max((number for number, _ in numbered(folder)), default=0)


def writing_place(folder: Path, number: int, step: int) -> Path:
    """Where a new snapshot is written."""
    return folder / f"{_WRITING}{number:06d}-step{step}"


def begin(folder: Path, number: int, step: int) -> Path:
    """Make the folder in which a new snapshot is written. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Of a job that died: this one is the only writer.
    for leftover in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(leftover)
    for leftover in folder.glob(f"{_GOING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # in nobody's way
    writing = writing_place(folder, number, step)
    writing.mkdir(mode=0o700)
    return writing


def complete(writing: Path, index: Index) -> Path:
    """Write the index and give the snapshot its name. Its files are on disk already.

    Raises: OSError.
    """
    for place in writing.iterdir():
        sync(place)
    handle = os.open(writing / INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(index.to_json().encode())
        file.flush()
        os.fsync(file.fileno())
    sync(writing)
    path = _named(writing)
    writing.rename(path)
    sync(path.parent)
    return path


def _named(writing: Path) -> Path:
    """What `complete` renames it to."""
    return writing.with_name(writing.name.removeprefix(_WRITING))


def abandon(writing: Path, *, completed: bool) -> None:
    """Remove what was written of a snapshot that failed.

    Args: completed: also where it has its name already, as the others could not complete theirs.
    """
    shutil.rmtree(writing, ignore_errors=True)
    if completed:
        with contextlib.suppress(OSError):
            _remove(_named(writing))


def keep_last(folder: Path, count: int) -> None:
    """Remove what is older than the newest `count` complete snapshots.

    Raises: OSError; SnapshotError: as `find`.
    """
    found, _ = find(folder)
    if len(found) >= count:
        remove_before(folder, found[-count].index.number)


def remove_before(folder: Path, number: int) -> None:
    """Remove snapshots, complete or not, of lower numbers. Raises: OSError."""
    for other, path in numbered(folder):
        if other < number:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a snapshot. Raises: OSError."""
    # A name of its own first: what is half removed is no snapshot any more.
    going = path.with_name(f"{_GOING}{path.name}")
    path.rename(going)
    shutil.rmtree(going)


def sync(folder: Path) -> None:
    """Have the names in a folder on disk. Raises: OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """What has the name of a snapshot, complete or not, by number."""
    matches = [(_NAME.fullmatch(p.name), p) for p in inside(folder) if p.is_dir()]
    return sorted((int(m[1]), p) for m, p in matches if m)


def inside(folder: Path) -> list[Path]:
    """What is in a folder, nothing where there is none: another rank may just have removed it."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
