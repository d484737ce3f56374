"""Votes between ranks through torch.distributed's key-value store.

The store needs no process group: a vote works when a communicator is broken or a peer is dead,
which is when it matters. Every rank writes its vote and waits until all are there. The first to
see all of them, or to run out of patience, writes down which: "all", or the ranks that are lost.
Every rank obeys that one decision, a rank that comes late too; so all leave a vote alike. Who
knows from elsewhere that a rank is dead casts an empty vote for it (`report_lost`), so that the
others need not wait for it.
"""

from __future__ import annotations

import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from nereus_plugins.transport.torch_private import clone_default_store

# How often a wait that may be left looks whether it is over. (A wait in the store itself cannot be
# cut in slices: torch logs warnings about each that ends without the keys.)
_LOOK_EVERY_S = 0.01

_ALL = "all"

# A key that names the vote being held; the vote of a rank that is reported lost.
_CURRENT, _LOST = "current", "null"


class ControlError(RuntimeError):
    """A vote could not be held."""


@dataclass(frozen=True)
class Vote:
    """What one rank said in a vote.

    Attributes:
        ok, payload: what it said; a reason, a digest, JSON.
        order: 0 if ok; else 1 for the rank that was the first to vote against, and so on.
    """

    rank: int
    ok: bool
    payload: str
    order: int = 0


class RankLost(ControlError):
    """Ranks did not vote in time: dead, hung, or slower than the timeout; or were reported lost.

    Attributes:
        ranks: the missing ranks, ascending.
        phase: the name of the vote.
        votes: of the ranks that did vote.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        phase: str,
        timeout_s: float,
        votes: Sequence[Vote] = (),
        reported: bool = False,
    ) -> None:
        why = f" within {timeout_s:g} s: dead or hung, or raise timeout_s if the phase takes longer"
        if reported:
            why = "; reported dead"
        super().__init__(
            f"no vote from rank(s) {', '.join(map(str, ranks))} in phase {phase!r}{why}"
        )
        self.ranks = ranks
        self.phase = phase
        self.votes = tuple(votes)


class PeerFailed(ControlError):
    """A vote was left, as a peer has failed and may never come to it."""


class StoreLost(ControlError):
    """The store itself cannot be reached: the process that serves it is gone."""


class Disagreement(ControlError):
    """Ranks hold different digests of what must be one thing.

    Attributes:
        phase: the name of the vote.
        ranks: the ranks that differ from the most frequent digest (of the lowest rank on a tie).
    """

    def __init__(self, phase: str, ranks: tuple[int, ...], digests: list[str]) -> None:
        held = "; ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        super().__init__(f"rank(s) {', '.join(map(str, ranks))} differ in {phase!r} ({held})")
        self.phase = phase
        self.ranks = ranks


class Control:
    """Votes among the ranks ``0 .. world - 1``; every rank must hold the same votes in order.

    Args:
        rank, world: this rank and the number of ranks.
        timeout_s: how long a vote waits for the slowest rank.
        store: a torch.distributed store; default: a connection of its own to the store of the
            default group (a wait on a shared connection would block other users of it).
        prefix: separates the keys of one user from another's.

    Raises:
        ValueError: no store given and no default process group.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        timeout_s: float,
        store: dist.Store | None = None,
        prefix: str = "nereus",
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        base = clone_default_store() if store is None else store
        self._store = dist.PrefixStore(prefix, base)
        self._held: Counter[str] = Counter()

    def vote(
        self,
        name: str,
        ok: bool,
        payload: str = "",
        *,
        timeout_s: float | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> list[Vote]:
        """Say `ok`, wait for all ranks, return all votes by rank. Collective.

        The name may be used again: votes of one name are numbered.

        Args:
            timeout_s: how long to wait for the slowest rank; default: that of this object.
            leave: looked at while waiting; once it is true, the vote is left.

        Raises:
            RankLost: on all ranks alike, naming those that did not vote in time.
            PeerFailed: the vote was left; by other ranks perhaps not.
            StoreLost: the store cannot be reached.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        prefix = self._next(name)
        self._held[name] += 1
        keys = [f"{prefix}/{rank}" for rank in range(self.world)]
        against, decision, done = (f"{prefix}/{end}" for end in ("against", "decision", "done"))
        try:
            order = 0 if ok else self._store.add(against, 1)
            # In this order, so that nobody is past this vote when a late rank names it: that one
            # may die before the next, and nothing would name the next again.
            self._store.set(_CURRENT, prefix)
            self._store.set(keys[self.rank], json.dumps([ok, payload, order]))
            missing = self._wait_for(keys, decision, limit_s, leave)
            proposal = json.dumps(missing) if missing else _ALL
            decided = self._store.compare_set(decision, "", proposal).decode()
            lost = [] if decided == _ALL else json.loads(decided)
            present = [rank for rank in range(self.world) if rank not in lost]
            said = [json.loads(v) for v in self._store.multi_get([keys[r] for r in present])]
            reported = [rank for rank, vote in zip(present, said, strict=True) if vote is None]
            # The last to have read removes the keys, so that the store does not grow.
            if self._store.add(done, 1) == self.world - len(reported):
                for key in (*keys, against, decision, done):
                    self._store.delete_key(key)
        except dist.DistNetworkError as error:
            raise StoreLost(
                f"the key-value store cannot be reached in phase {name!r}: the process that "
                f"serves it (usually rank 0) is gone ({error})"
            ) from error
        votes = [
            Vote(rank, bool(vote[0]), str(vote[1]), int(vote[2]))
            for rank, vote in zip(present, said, strict=True)
            if vote is not None
        ]
        if lost or reported:
            missed = tuple(sorted([*lost, *reported]))
            raise RankLost(missed, name, limit_s, votes, reported=not lost)
        return votes

    def voted_against(self, name: str) -> bool:
        """Whether a rank has already voted against, in the vote of that name that comes next here.

        Raises: StoreLost.
        """
        try:
            return self._store.check([f"{self._next(name)}/against"])
        except dist.DistNetworkError as error:
            raise StoreLost(f"the key-value store cannot be reached ({error})") from error

    def agree(self, name: str, digest: str, *, leave: Callable[[], bool] | None = None) -> None:
        """Check that all ranks hold the same `digest`. Collective.

        Raises:
            Disagreement: naming the ranks that differ; on all ranks.
            RankLost, PeerFailed, StoreLost: as `vote`.
        """
        digests = [vote.payload for vote in self.vote(name, True, digest, leave=leave)]
        usual = Counter(digests).most_common(1)[0][0]
        odd = tuple(rank for rank, other in enumerate(digests) if other != usual)
        if odd:
            raise Disagreement(name, odd, digests)

    def _next(self, name: str) -> str:
        """The keys of the vote of this name that comes next."""
        return f"{name}/{self._held[name]}"

    def _wait_for(
        self, keys: list[str], decision: str, limit_s: float, leave: Callable[[], bool] | None
    ) -> list[int]:
        """The ranks whose votes are not there at the end of the wait, ascending."""
        if not self._store.check([decision]):
            if leave is None:
                try:
                    self._store.wait(keys, datetime.timedelta(seconds=limit_s))
                    return []
                except dist.DistNetworkError:
                    raise
                except dist.DistStoreError:  # the time is over
                    pass
            else:
                end = time.monotonic() + limit_s
                while not self._store.check(keys) and time.monotonic() < end:
                    if leave():
                        raise PeerFailed("a peer failed in the same step")
                    time.sleep(_LOOK_EVERY_S)
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def report_lost(store: dist.Store, prefix: str, ranks: Iterable[int]) -> None:
    """Vote for `ranks`, which are dead, in the vote that their peers hold now: these raise RankLost
    at once. To be called again until they have; a vote that a rank cast before its death counts.

    Args: store, prefix: those of the peers' `Control`; this process need not be one of its ranks.

    Raises: StoreLost.
    """
    votes = dist.PrefixStore(prefix, store)
    try:
        if not votes.check([_CURRENT]):
            return
        current = votes.get(_CURRENT).decode()
        for rank in ranks:
            votes.compare_set(f"{current}/{rank}", "", _LOST)
    except dist.DistNetworkError as error:
        raise StoreLost(f"the key-value store cannot be reached ({error})") from error
