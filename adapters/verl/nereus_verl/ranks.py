"""The job's ranks as the driver sees them: their processes, where these run, and how they change.

Ray cannot give back a part of a placement group, and a process that ends leaves its bundle to the
job. So every rank has a seat, a bundle of some placement group; ranks that join take seats that are
free, then new placement groups of one seat each; a group without ranks is given back.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch.distributed as dist

from nereus_plugins.control import ray_private
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.gtg.ranks_change import JOIN, VOTES
from nereus_plugins.gtg.scalars import derived_seed
from nereus_plugins.transport.control import ControlError, report_lost
from nereus_verl import verl_private, worker
from nereus_verl.driver import call_all

SETUP_TIMEOUT_S = 600.0
# A phase has many steps, each of which may use up the ranks' own time limit before it fails.
DRIVER_PATIENCE = 4.0
REPORT_WITHIN_S = 5.0
# Numbers of verl's own first processes are far below; none is ever given twice.
FIRST_NUMBER = 1000


class ClaimFailed(RuntimeError):
    """The ranks that a plan asks for could not be had; what was claimed can be given back."""


@dataclass(frozen=True)
class Setup:
    """What every process is told about the job: arguments of `nereus_verl.worker.setup`."""

    models: Mapping[str, Mapping[str, Any]]
    checksum: bool
    staging_bytes: int | None
    timeout_s: float

    def args(self) -> tuple[Any, ...]:
        return (self.models, self.checksum, self.staging_bytes, self.timeout_s)


@dataclass(frozen=True)
class Rank:
    """One rank's process.

    worker: Ray handle. name: of its actor. group, bundle: its seat. host: its node's address.
    node: Ray's name of its node.
    """

    worker: Any
    name: str
    group: Any
    bundle: int
    host: str = ""
    node: str = ""

    def at(self, answer: Mapping[str, Any]) -> Rank:
        """Where its process says it is (`worker.setup`)."""
        return replace(self, host=answer["host"], node=answer["node"])


class Ranks:
    """The ranks of a job.

    Args:
        trainer: verl's, whose worker groups exist.
        groups: its worker groups, which share their processes.
        setup: for processes that join.
    """

    def __init__(self, trainer: Any, groups: Sequence[Any], setup: Setup) -> None:
        self.trainer = trainer
        self.groups = list({id(group): group for group in groups}.values())
        self.setup = setup
        workers = verl_private.workers_of(self.groups[0])
        names = verl_private.names_of(self.groups[0])
        seats = verl_private.bundles_of(trainer)
        self.current = [
            Rank(handle, name, *seat)
            for handle, name, seat in zip(workers, names, seats, strict=True)
        ]
        self._seats = seats
        self._number = FIRST_NUMBER

    def __len__(self) -> int:
        return len(self.current)

    @property
    def workers(self) -> list[Any]:
        return [rank.worker for rank in self.current]

    @property
    def names(self) -> list[str]:
        return [rank.name for rank in self.current]

    def set_places(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Args: by rank, what its process says of itself."""
        pairs = zip(self.current, answers, strict=True)
        self.current = [rank.at(answer) for rank, answer in pairs]

    def change_to(self, world: int, leave: Sequence[int] = ()) -> Change | None:
        """The way to `world` ranks, None if nobody joins or leaves. Args: as `staying`; where
        nobody is named, those whose node goes leave first."""
        if world < len(self):
            leave = leave or tuple(self.draining())[: len(self) - world]
        stay = staying(len(self), world, leave)
        return None if len(stay) == len(self) == world else Change(self, stay, world)

    def missing(self, world: int) -> str:
        """What Ray's cluster lacks for `world` ranks as it is now, "" if nothing: it may grow."""
        kind = verl_private.ray_resource()
        there = ray.cluster_resources().get(kind, 0.0)
        if there >= world:
            return ""
        return (
            f"nereus.schedule asks for up to {world} ranks, Ray's cluster has {there:g} {kind}; "
            "a plan with more is aborted unless nodes are added before its step"
        )

    def in_cluster(self) -> int:
        """How many ranks Ray's cluster has room for as it is now, these ones included."""
        return int(ray.cluster_resources().get(verl_private.ray_resource(), 0.0))

    def free(self) -> int:
        """How many could join now: on free seats, and on what Ray has free."""
        return len(self.free_seats()) + ray_private.free(verl_private.ray_resource())

    def draining(self) -> dict[int, float]:
        """Ranks whose node Ray drains, those that must go first first, then the last: until when it
        is there, in seconds since the epoch; infinite where nobody said."""
        goes = ray_private.draining()
        ranks = reversed(list(enumerate(self.current)))
        found = {rank: goes[one.node] for rank, one in ranks if one.node in goes}
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def free_seats(self) -> list[tuple[Any, int]]:
        taken = {(id(rank.group), rank.bundle) for rank in self.current}
        return [seat for seat in self._seats if (id(seat[0]), seat[1]) not in taken]

    def add_seats(self, seats: Sequence[tuple[Any, int]]) -> None:
        self._seats = [*self._seats, *seats]

    def give_back_empty(self) -> None:
        """Return the placement groups in which no rank has a seat."""
        used = {id(rank.group) for rank in self.current}
        for group in {id(g): g for g, _ in self._seats if id(g) not in used}.values():
            ray.util.remove_placement_group(group)
        self._seats = [seat for seat in self._seats if id(seat[0]) in used]

    def next_number(self) -> int:
        self._number += 1
        return self._number


def staying(count: int, world: int, leave: Sequence[int]) -> tuple[int, ...]:
    """Which of `count` ranks stay where there will be `world`, in their new order.

    Args: leave: ranks that must leave; if there are too many without them, the last leave too.
    """
    return tuple(rank for rank in range(count) if rank not in leave)[:world]


class Change:
    """One change of the set of ranks: claim -> join -> (a transition over the union) -> follow, or
    give_back where it did not happen.

    Args:
        stay: old ranks that stay, in their new order. world: how many ranks there will be.
    """

    def __init__(self, ranks: Ranks, stay: tuple[int, ...], world: int) -> None:
        self._ranks = ranks
        self._old = list(ranks.current)
        self._stay = stay
        self._world = world
        self._joined: list[Rank] = []
        self._address, self._port = "", 0
        self._votes: dist.Store | None = None

    @property
    def union(self) -> list[Rank]:
        """The old ranks, then those that join."""
        return [*self._old, *self._joined]

    @property
    def order(self) -> tuple[int, ...]:
        """For each new rank its place in the union."""
        first = len(self._old)
        return (*self._stay, *range(first, first + len(self._joined)))

    @property
    def after(self) -> list[Rank]:
        """The new ranks."""
        union = self.union
        return [union[place] for place in self.order]

    def can_lose(self, rank: int) -> bool:
        """Whether the job goes on in its old layout without this rank of the union."""
        return rank >= len(self._old)

    def leaves(self, rank: int) -> bool:
        """Whether the job goes on in its new layout without this rank of the union."""
        return rank < len(self._old) and rank not in self._stay

    def report_lost(self, ranks: Sequence[int], votes: str) -> None:
        """Tell the other ranks of the union, which may be waiting for their votes, that `ranks` are
        dead. To be called until they have answered.

        Args: votes: the prefix of the votes that are held.
        """
        if not ranks:
            return
        try:
            if self._votes is None:
                limit = datetime.timedelta(seconds=REPORT_WITHIN_S)
                store = dist.TCPStore(self._address, self._port, is_master=False, timeout=limit)
                self._votes = dist.PrefixStore(VOTES, store)
            report_lost(self._votes, votes, ranks)
        except (dist.DistError, ControlError):
            return  # the store is gone with a rank that the job needs: it ends

    def claim(self, layouts: Mapping[str, Mapping[str, Any]], step: int, timeout_s: float) -> None:
        """Have processes for the ranks that join, ready to.

        Args:
            layouts: in force, by unit. step: the trainer's. timeout_s: how long to wait for Ray.

        Raises: ClaimFailed.
        """
        count = self._world - len(self._stay)
        if count == 0:
            return
        seats = [*self._ranks.free_seats()[:count]]
        seats += self._new_seats(count - len(seats), timeout_s)
        names: list[tuple[Any, str]] = [
            verl_private.start_worker(self._ranks.trainer, *seat, self._ranks.next_number())
            for seat in seats
        ]
        self._joined = [Rank(*started, *seat) for started, seat in zip(names, seats, strict=True)]
        workers = [rank.worker for rank in self._joined]
        try:
            (briefing,) = call_all(
                [self._old[0].worker], "claim", worker.briefing, timeout_s=SETUP_TIMEOUT_S
            )
            first = len(self._old)
            answers = call_all(
                workers,
                "claim",
                worker.enter,
                *self._ranks.setup.args(),
                layouts,
                briefing,
                timeout_s=SETUP_TIMEOUT_S,
                each=[(derived_seed(0, step, f"rank {first + i}"),) for i in range(count)],
            )
        except WorkersFailed as error:
            raise ClaimFailed(f"a process for a new rank did not start: {error}") from error
        pairs = zip(self._joined, answers, strict=True)
        self._joined = [rank.at(answer) for rank, answer in pairs]

    def _new_seats(self, count: int, timeout_s: float) -> list[tuple[Any, int]]:
        groups = [
            verl_private.request_bundle(self._ranks.trainer, f"nereus_{self._ranks.next_number()}")
            for _ in range(count)
        ]
        self._ranks.add_seats([(group, 0) for group in groups])
        deadline = time.monotonic() + timeout_s
        for had, group in enumerate(groups):
            if not group.wait(max(deadline - time.monotonic(), 0.1)):
                raise ClaimFailed(
                    f"Ray had bundles for {had} of {count} further ranks within {timeout_s:g} s "
                    f"(each takes {_listed(group.bundle_specs[0])}; free in the cluster: "
                    f"{_listed(ray.available_resources())}); add nodes, or raise "
                    "nereus.claim_timeout_s if they are only slow to come"
                )
        return [(group, 0) for group in groups]

    def join(self) -> None:
        """Form the worlds of the change.

        Raises:
            ClaimFailed: ranks did not find each other; `give_back` goes back.
            WorkersFailed: an old rank is gone.
        """
        limit_s = self._ranks.setup.timeout_s * DRIVER_PATIENCE
        host = self.after[0].worker
        ((self._address, self._port),) = call_all(
            [host], "join", worker.host_store, timeout_s=limit_s
        )
        workers = [rank.worker for rank in self.union]
        lost: list[int] = []

        def without(rank: int, failure: str) -> str:
            if not self.can_lose(rank):
                raise WorkersFailed(failure)
            lost.append(rank)
            return failure

        answers = call_all(
            workers,
            "join",
            worker.join,
            len(workers),
            self.order,
            self._address,
            self._port,
            timeout_s=limit_s,
            each=[(rank,) for rank in range(len(workers))],
            without=without,
            meanwhile=lambda: self.report_lost(lost, JOIN),
        )
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if failed:
            raise ClaimFailed(f"old and new ranks did not find each other: {failed[0]}")

    def give_back(self) -> None:
        """Be as before: old ranks in their world, what was claimed returned to Ray.

        Raises: WorkersFailed: an old rank is gone.
        """
        limit_s = self._ranks.setup.timeout_s
        call_all([r.worker for r in self._old], "withdraw", worker.withdraw, timeout_s=limit_s)
        for rank in self._joined:
            verl_private.end_actor(rank.worker)
        self._ranks.give_back_empty()

    def follow(self) -> None:
        """After the commit: end the ranks that left, and have verl count with the new ones. Its
        rollout has no ranks then; once it has followed, seats without a rank can be given back.

        Raises: WorkersFailed.
        """
        ranks, after = self._ranks, self.after
        limit_s = ranks.setup.timeout_s * DRIVER_PATIENCE
        call_all([rank.worker for rank in after], "settle", worker.settle, timeout_s=limit_s)
        for place, rank in enumerate(self._old):
            if place not in self._stay:
                verl_private.end_actor(rank.worker)
        ranks.current = after
        verl_private.set_ranks(
            ranks.trainer,
            ranks.groups,
            ranks.workers,
            ranks.names,
            [(rank.group, rank.bundle) for rank in after],
            self._address,
            self._port,
        )

    def to_dict(self) -> dict[str, Any]:
        """For the record: how many ranks, by name which joined and left, all new ranks' nodes."""
        return {
            "from": len(self._old),
            "to": self._world,
            "joined": [rank.name for rank in self._joined],
            "left": [r.name for place, r in enumerate(self._old) if place not in self._stay],
            "nodes": [rank.host for rank in self.after],
        }


def _listed(resources: Mapping[str, float]) -> str:
    kinds = [(kind, resources[kind]) for kind in ("CPU", "GPU", "NPU") if kind in resources]
    return ", ".join(f"{amount:g} {kind}" for kind, amount in kinds) or "nothing"
