"""Snapshots of a verl job: what one worker process does. The driver calls each function on all
ranks.

What a job needs to go on besides its models' state is a unit without tensors, `TRAINER`: so it is
written, checked and restored as the others are.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.gtg.scalars import RNG, derived_seed
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.restore import restore as restore_units
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots
from nereus_plugins.spec import Layout
from nereus_plugins.transport.groups import GroupSet
from nereus_plugins.transport.torch_private import groups_named, name_groups_from
from nereus_verl import rng
from nereus_verl.resume import DATA, TRAINER
from nereus_verl.worker import STATE, RankState

if TYPE_CHECKING:
    from nereus_verl.fsdp_unit import FsdpUnit
    from nereus_verl.megatron_unit import MegatronUnit


class TrainerUnit:
    """The position in the data, and the default generators of the ranks' processes, by rank.

    Args:
        rank, world: of this process.
        step: restored to; what new ranks' generators are seeded from.
        data: of the data loader, JSON-able, as rank 0 is told.
    """

    name = TRAINER

    def __init__(self, rank: int, world: int, step: int, data: Any = None) -> None:
        self._rank, self._world, self._step = rank, world, step
        self._scalars = {} if rank else {DATA: data}

    def layout(self) -> Layout:
        return Layout(dp=self._world)

    def described(self) -> DescribedUnit:
        return DescribedUnit(scalars=self._scalars | {RNG: {str(self._rank): rng.states()}})

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """A rank that was there goes on with its generators, any other's are seeded."""
        self._scalars = {} if self._rank else {DATA: scalars[DATA]}
        states = scalars[RNG].get(str(self._rank))
        if states is not None:
            rng.load(states)
        else:
            rng.seed(derived_seed(0, self._step, f"rank {self._rank}"))


def named(worker: Any) -> int:
    """How many process groups this process has named: see `groups_named`."""
    return groups_named()


def begin(worker: Any, settings: Mapping[str, Any], group_count: int, timeout_s: float) -> None:
    """Have snapshots taken in the world as it is. Collective.

    Args:
        settings: of `SnapshotOptions`; the folder as a string.
        group_count: the most that `named` says on any rank.
        timeout_s: how long ranks wait for each other, here and in every step of a snapshot.

    Raises: TransportError where peers did not come.
    """
    state: RankState = getattr(worker, STATE)
    options = SnapshotOptions(**{**settings, "folder": Path(settings["folder"])})
    state.snapshots = Snapshots(options, _group(group_count, timeout_s))


def _group(group_count: int, timeout_s: float) -> dist.ProcessGroup:
    name_groups_from(group_count)
    groups = GroupSet()
    try:
        with groups.collect(timeout_s):
            group = dist.new_group(
                list(range(dist.get_world_size())),
                timeout=datetime.timedelta(seconds=timeout_s),
                backend="gloo",
            )
    except BaseException:
        groups.destroy()
        raise
    assert isinstance(group, dist.ProcessGroup)
    return group


def ended(worker: Any, limit_s: float) -> dict[str, Any]:
    """Whether this rank has written what it copied last; not collective.

    Args: limit_s: how long that is waited for.

    Returns: "ended"; "last": what became of the last one that has ended (`Taken`, the path as a
        string), or None; "lost": whether no more can be taken by these (`Snapshots.lost`).
    """
    state: RankState = getattr(worker, STATE)
    assert state.snapshots is not None
    return {"ended": state.snapshots.ended(limit_s), **_said(state.snapshots)}


def take(worker: Any, step: int, epoch: int, plan: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """Copy this rank's part; it is written in the background. Collective, where all have `ended`.

    Args: step: the trainer's. epoch, plan: in force. data: of the data loader, JSON-able.

    Returns: "not_begun": why it could not be, on all ranks alike, or ""; "last", "lost": as
        `ended`.
    """
    state: RankState = getattr(worker, STATE)
    assert state.snapshots is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = _trained(state)
    trainer: Any = TrainerUnit(rank, world, step, data)
    not_begun = ""
    try:
        state.snapshots.take(step, {**trained, TRAINER: trainer}, epoch=epoch, plan=plan)
    except SnapshotError as error:
        not_begun = str(error)
    finally:
        for unit in trained.values():
            unit.settle()
    return {"not_begun": not_begun, **_said(state.snapshots)}


def end(worker: Any, limit_s: float | None) -> dict[str, Any]:
    """Wait for the one under way; no more are taken over this group.

    Args: limit_s: as of `Snapshots.close`. Returns: "last", "lost": as `ended`.
    """
    state: RankState = getattr(worker, STATE)
    snapshots, state.snapshots = state.snapshots, None
    if snapshots is None:
        return {"last": None, "lost": False}
    snapshots.close(limit_s)
    return _said(snapshots)


def _trained(state: RankState) -> dict[str, FsdpUnit | MegatronUnit]:
    """The reference stays what the job's model path says."""
    return {name: unit for name, unit in state.units.items() if name != "ref"}


def _said(snapshots: Snapshots) -> dict[str, Any]:
    last = snapshots.last
    said = None if last is None else asdict(last) | {"path": str(last.path or "")}
    return {"last": said, "lost": snapshots.lost}


def restore(worker: Any, path: str, step: int, group_count: int, timeout_s: float) -> int:
    """Fill the units that train, and the process's generators. Collective.

    Args: path: of the snapshot. step: its. group_count, timeout_s: as `begin`.

    Returns: bytes that this rank read.

    Raises: SnapshotError: as `nereus_plugins.snapshot.restore.restore`.
    """
    state: RankState = getattr(worker, STATE)
    if state.megatron is not None:
        state.megatron.step = step
    trained = _trained(state)
    group = _group(group_count, timeout_s)
    try:
        filled: dict[str, Any] = {name: unit.to_fill() for name, unit in trained.items()}
        filled[TRAINER] = TrainerUnit(dist.get_rank(), dist.get_world_size(), step)
        return restore_units(folder.open_snapshot(Path(path)), filled, group)
    finally:
        dist.destroy_process_group(group)
        for unit in trained.values():
            unit.settle()
