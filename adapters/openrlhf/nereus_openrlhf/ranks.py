"""The ranks of each model as the trainer's process sees them: their actors, and how they change.

OpenRLHF has a group of Ray actors for each model. Rank i of every model that shares GPUs sits on
seat i, a bundle of some placement group. Ranks that leave are the last; those that join take seats
that are free, then new placement groups of one bundle each.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch.distributed as dist

from nereus_openrlhf import openrlhf_private, worker
from nereus_plugins.control.workers import WorkersFailed, collect
from nereus_plugins.gtg.ranks_change import JOIN, VOTES
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import ControlError, report_lost

SETUP_TIMEOUT_S = 600.0
# A phase has many steps, each of which may use up the ranks' own time limit before it fails.
DRIVER_PATIENCE = 4.0
REPORT_WITHIN_S = 5.0


class ClaimFailed(RuntimeError):
    """The ranks that a plan asks for could not be had; what was claimed can be given back."""


class Seats:
    """Where ranks sit: GPUs of the models that share them.

    Args:
        seats: the first ranks' bundles of placement groups; (None, 0) is a GPU without one.
        kept: how many of them are not given back.
    """

    def __init__(self, seats: Sequence[tuple[Any, int]], kept: int | None = None) -> None:
        self._seats = list(seats)
        self._kept = len(seats) if kept is None else kept

    @classmethod
    def of(cls, placed: Sequence[Any]) -> Seats:
        """Args: placed: the placement group of each of the first ranks, None where it has none."""
        if len({str(group.id) for group in placed if group is not None}) == len(placed):
            return cls([(group, 0) for group in placed], kept=0)  # one each: Ray takes any back
        return cls([(group, bundle) for bundle, group in enumerate(placed)])

    def __len__(self) -> int:
        return len(self._seats)

    def provide(self, count: int, timeout_s: float) -> list[tuple[Any, int]]:
        """The first `count` seats, made where there are not as many.

        Raises: ClaimFailed where Ray does not have them within `timeout_s`.
        """
        added = [
            ray.util.placement_group([{"GPU": 1, "CPU": 1}])
            for _ in range(count - len(self._seats))
        ]
        self._seats += [(group, 0) for group in added]
        deadline = time.monotonic() + timeout_s
        for had, group in enumerate(added):
            if not group.wait(max(deadline - time.monotonic(), 0.1)):
                free = ray.available_resources()
                raise ClaimFailed(
                    f"Ray had GPUs for {had} of {len(added)} further ranks within {timeout_s:g} s "
                    f"(free in the cluster: {free.get('GPU', 0.0):g} GPU, "
                    f"{free.get('CPU', 0.0):g} CPU); add nodes, or raise nereus.claim_timeout_s if "
                    "they are only slow to come"
                )
        return self._seats[:count]

    def give_back(self, used: int) -> None:
        """Return to Ray what is beyond the first `used` seats. Where OpenRLHF reserved several in
        one placement group those stay: Ray takes groups back as a whole."""
        while len(self._seats) > max(used, self._kept):
            group, _ = self._seats.pop()
            ray.util.remove_placement_group(group)


class UnitRanks:
    """The ranks of one model.

    Args: group: OpenRLHF's. share: of a GPU that a rank takes.
    """

    def __init__(self, name: str, group: Any, seats: Seats, share: float) -> None:
        self.name = name
        self.group = group
        self.seats = seats
        self.share = share
        self.handles = list(group._actor_handlers)
        self.hosts: list[str] = []
        self.backend = ""

    def __len__(self) -> int:
        return len(self.handles)


class Change:
    """One model's change of layout: claim -> join -> (a transition over the union) -> follow, or
    give_back where it did not happen.

    Args: before, after: layouts.
    """

    def __init__(self, ranks: UnitRanks, before: Layout, after: Layout) -> None:
        self.ranks = ranks
        self.name = ranks.name
        self.before = before
        self.after = after
        self.joined: list[Any] = []
        self._hosts: list[str] = []
        self._lost: list[int] = []
        self._address, self._port = "", 0
        self._votes: dist.Store | None = None

    @property
    def stay(self) -> int:
        """How many ranks stay; they are the first."""
        return min(len(self.ranks), self.after.world_size)

    @property
    def union(self) -> list[Any]:
        """The old ranks, then those that join."""
        return [*self.ranks.handles, *self.joined]

    @property
    def order(self) -> tuple[int, ...]:
        """For each new rank its place in the union."""
        first = len(self.ranks)
        return (*range(self.stay), *range(first, first + len(self.joined)))

    @property
    def hosts(self) -> list[str]:
        """Of each rank of the union."""
        return [*self.ranks.hosts, *self._hosts]

    @property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank of the union."""
        return tuple(sorted(set(self.hosts)).index(host) for host in self.hosts)

    @property
    def joined_names(self) -> list[str]:
        first = len(self.ranks)
        return [f"{self.name}-{first + i}" for i in range(len(self.joined))]

    @property
    def left_names(self) -> list[str]:
        return [f"{self.name}-{i}" for i in range(self.stay, len(self.ranks))]

    def can_lose(self, rank: int) -> bool:
        """Whether the job goes on in its old layout without this rank of the union."""
        return rank >= len(self.ranks)

    def leaves(self, rank: int) -> bool:
        """Whether the job goes on in its new layout without this rank of the union."""
        return self.stay <= rank < len(self.ranks)

    def lost(self, rank: int) -> None:
        """A rank of the union is dead."""
        self._lost.append(rank)

    def report_lost(self, votes: str) -> None:
        """Tell the other ranks, which may be waiting for their votes, of those that are dead. To be
        called until they have answered. Args: votes: the prefix of the votes that are held."""
        if not self._lost:
            return
        try:
            if self._votes is None:
                limit = datetime.timedelta(seconds=REPORT_WITHIN_S)
                store = dist.TCPStore(self._address, self._port, is_master=False, timeout=limit)
                self._votes = dist.PrefixStore(VOTES, store)
            report_lost(self._votes, votes, self._lost)
        except (dist.DistError, ControlError):
            return  # the store is gone with a rank that the job needs: it ends

    def start(self, timeout_s: float) -> None:
        """Have actors for the ranks that join. Does not wait for them. Raises: ClaimFailed."""
        ranks, target = self.ranks, self.after.world_size
        if target <= len(ranks):
            return
        seats = ranks.seats.provide(target, timeout_s)[len(ranks) :]
        self.joined = [
            openrlhf_private.start_actor(ranks.group, ranks.share, *seat) for seat in seats
        ]

    def entered(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """What `worker.enter` answered in those that join."""
        self._hosts = [answer["host"] for answer in answers]

    def meet_at(self, address: str, port: int) -> None:
        """Where the store of this change is."""
        self._address, self._port = address, port

    def join_arguments(self) -> list[tuple[Any, ...]]:
        """Of `worker.join`, by rank of the union."""
        size = len(self.union)
        return [(rank, size, self.order, self._address, self._port) for rank in range(size)]

    def give_back(self) -> None:
        """Return to Ray what was claimed."""
        for handle in self.joined:
            ray.kill(handle)
        self.ranks.seats.give_back(len(self.ranks))

    def follow(self, args: Any, unused: Callable[[Seats], int]) -> None:
        """After the commit: end the ranks that left, have OpenRLHF count with the new ones.

        Args: args: the trainer's. unused: how many of some seats are used.
        """
        ranks, union, order, hosts = self.ranks, self.union, self.order, self.hosts
        for handle in ranks.handles[self.stay :]:
            ray.kill(handle)
        ranks.handles = [union[place] for place in order]
        ranks.hosts = [hosts[place] for place in order]
        ranks.group.set_handles(ranks.handles)
        openrlhf_private.set_size(ranks.group, args, self.name, len(ranks), self.after.tp)
        ranks.seats.give_back(unused(ranks.seats))


def call(
    changes: Sequence[Change],
    phase: str,
    function: Callable[..., Any],
    arguments: Callable[[Change], Sequence[tuple[Any, ...]]],
    *,
    timeout_s: float,
    votes: str = "",
    handles: Callable[[Change], Sequence[Any]] = lambda change: change.union,
) -> list[list[Any]]:
    """Run `function(worker, *arguments)` in the processes of all changes; answers by change, rank.

    Args:
        phase: what is being done, for messages.
        arguments: by rank of `handles`.
        timeout_s: for all of them together.
        votes: the prefix of the votes that ranks hold meanwhile: a rank that was to join and died
            is reported there, and counts as one that gave up; without, any death is an error.

    Raises: WorkersFailed: a rank that the job needs is gone, or did not answer.
    """
    places: list[tuple[Change, int]] = []
    submitted: dict[Any, int] = {}
    for change in changes:
        pairs = zip(handles(change), arguments(change), strict=True)
        for rank, (handle, given) in enumerate(pairs):
            submitted[openrlhf_private.call_worker(handle, function, *given)] = len(places)
            places.append((change, rank))

    def without(place: int, failure: str) -> Any:
        change, rank = places[place]
        failure = f"{change.name}: {failure}"
        change.lost(rank)
        # The new layout is whole without the ranks that leave.
        if phase == "commit" and change.leaves(rank):
            return {}
        if phase == "release" and change.leaves(rank):
            return {"report": {}, "failed": failure}
        if not votes or not change.can_lose(rank) or phase == "release":
            raise WorkersFailed(failure)
        return {"aborted": {"phase": phase, "rank": rank, "reason": failure, "lost_ranks": []}}

    def hopeless(answer: Any) -> str:
        aborted = answer.get("aborted") if isinstance(answer, dict) else None
        if not aborted:
            return ""
        lost = [rank for rank in aborted["lost_ranks"] if not _any_can_lose(changes, rank)]
        if not lost:
            return ""
        ranks = ", ".join(map(str, lost))
        return f"rank(s) {ranks} are dead or hung; {aborted['phase']}: {aborted['reason']}"

    def meanwhile() -> None:
        for change in changes:
            change.report_lost(votes)

    answers = collect(
        submitted,
        phase,
        timeout_s=timeout_s,
        hopeless=hopeless,
        without=without,
        meanwhile=meanwhile,
    )
    return [
        [answers[i] for i, (owner, _) in enumerate(places) if owner is change] for change in changes
    ]


def _any_can_lose(changes: Sequence[Change], rank: int) -> bool:
    return any(change.can_lose(rank) for change in changes)


def join(changes: Sequence[Change], timeout_s: float) -> None:
    """Form the worlds of the changes.

    Raises: ClaimFailed: ranks did not find each other. WorkersFailed: an old rank is gone.
    """
    limit_s = timeout_s * DRIVER_PATIENCE
    stores = call(
        changes,
        "join",
        worker.host_store,
        lambda change: [()],
        timeout_s=limit_s,
        handles=lambda change: change.union[:1],
    )
    for change, (store,) in zip(changes, stores, strict=True):
        change.meet_at(*store)
    answers = call(
        changes, "join", worker.join, Change.join_arguments, timeout_s=limit_s, votes=JOIN
    )
    for change, of_change in zip(changes, answers, strict=True):
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(of_change) if answer]
        if failed:
            raise ClaimFailed(
                f"old and new ranks of {change.name} did not find each other: {failed[0]}"
            )
