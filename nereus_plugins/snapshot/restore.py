"""Restoring units of a job from a snapshot, in whatever layout and number of ranks they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from nereus_plugins.emu.described.base import DescribedUnit
from nereus_plugins.emu.table import TensorInfo
from nereus_plugins.emu.unit import BuiltUnit
from nereus_plugins.gtg.scalars import check_loaded
from nereus_plugins.snapshot.agree import tell
from nereus_plugins.snapshot.errors import OtherModel, SnapshotError
from nereus_plugins.snapshot.folder import Snapshot
from nereus_plugins.snapshot.index import Index
from nereus_plugins.snapshot.read import read_unit


def restore(snapshot: Snapshot, units: Mapping[str, BuiltUnit], group: dist.ProcessGroup) -> int:
    """Fill units from a snapshot on disk; returns the bytes that this rank read. Collective.

    Args:
        snapshot: the same on all ranks (`folder.latest`).
        units: what is to be filled, by the names they were taken under; may be fewer than the
            snapshot has. Their state must be allocated, as `described()` must report all of it.
        group: all ranks of the job, gloo.

    Raises:
        OtherModel, DamagedSnapshot, SnapshotError: on every rank one of them, saying which tensor
            is not of this model or which file is damaged; the units' content is then undefined.
    """
    check_model(snapshot.index, units, group)
    read, error = 0, None
    try:
        for name, unit in units.items():
            read += read_unit(snapshot, name, unit.described())
        load_scalars(snapshot.index, units)
    except Exception as caught:
        error = caught
    agree_done(group, error)
    return read


def check_model(
    index: Index, units: Mapping[str, BuiltUnit], group: dist.ProcessGroup
) -> dict[str, DescribedUnit]:
    """This rank's shards by unit, where all ranks' tensors are those of the snapshot. Collective.

    Raises: OtherModel, SnapshotError: on all ranks alike.
    """
    described, error = {}, ""
    try:
        for name in sorted(units):
            if name not in index.units:
                known = ", ".join(sorted(index.units))
                raise SnapshotError(f"the snapshot is of {known}; it has no unit {name!r}")
        described = {name: unit.described() for name, unit in units.items()}
    except Exception as caught:
        error = str(caught)
    found = {
        name: sorted({(s.name, tuple(s.global_shape), s.info.dtype) for s in unit.shards})
        for name, unit in described.items()
    }
    said = tell(group, [index.digest, found], error)
    if any(digest != said[0][0] for digest, _ in said):
        raise SnapshotError(
            "ranks found different snapshots: the folder is not the same one on all nodes"
        )
    for name in sorted(units):  # all ranks the first one first
        here = {
            TensorInfo(tensor, tuple(shape), dtype)
            for _, one in said
            for tensor, shape, dtype in one[name]
        }
        _compare(name, index.units[name].tensors, here)
    return described


def _compare(unit: str, snapshot: Sequence[TensorInfo], here: set[TensorInfo]) -> None:
    if here == set(snapshot):
        return
    of_snapshot = {t.name: t for t in snapshot}
    for info in sorted(here - set(snapshot), key=lambda t: t.name):
        other = of_snapshot.get(info.name)
        has = f"{other.dtype} {list(other.shape)}" if other else "nothing of that name"
        raise OtherModel(
            f"unit {unit}: {info.name} is {info.dtype} {list(info.shape)} in this job, the "
            f"snapshot has {has}: it is of another model or optimizer"
        )
    lacking = min(set(snapshot) - here, key=lambda t: t.name)
    raise OtherModel(
        f"unit {unit}: this job has no {lacking.name}, which the snapshot has: it is of another "
        "model or optimizer"
    )


def load_scalars(index: Index, units: Mapping[str, BuiltUnit]) -> None:
    """Load the state that is not a box, and check that it is there.

    Raises: ScalarError: a unit did not take over a value.
    """
    for name, unit in units.items():
        unit.load_scalars(index.units[name].scalars)
        check_loaded(index.units[name].scalars, unit.described().scalars)


def agree_done(group: dist.ProcessGroup, error: Exception | None) -> None:
    """Raises: `error` here, and SnapshotError on all other ranks. Collective."""
    try:
        tell(group, None, str(error) if error else "")
    except SnapshotError as of_all:
        if error is None:
            raise
        raise error from of_all
