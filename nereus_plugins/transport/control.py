"""Votes between ranks through torch.distributed's key-value store.

The store needs no process group: a vote works when a communicator is broken or a peer is dead,
which is when it matters. Every rank writes its vote, waits until all are there, and reads them in
one request; so all surviving ranks see the same votes or each learns which ranks are missing.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from nereus_plugins.transport.torch_private import clone_default_store


class ControlError(RuntimeError):
    """A vote could not be held."""


class RankLost(ControlError):
    """Ranks did not vote in time: dead, hung, or slower than the timeout.

    Attributes:
        ranks: the missing ranks, ascending.
        phase: the name of the vote.
    """

    def __init__(self, ranks: tuple[int, ...], phase: str, timeout_s: float) -> None:
        super().__init__(
            f"no vote from rank(s) {', '.join(map(str, ranks))} in phase {phase!r} within "
            f"{timeout_s:g} s: dead or hung, or raise timeout_s if the phase takes longer"
        )
        self.ranks = ranks
        self.phase = phase


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


@dataclass(frozen=True)
class Vote:
    """What one rank said in a vote: `ok`, and a `payload` (a reason, a digest, JSON)."""

    rank: int
    ok: bool
    payload: str


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

    def vote(self, name: str, ok: bool, payload: str = "") -> list[Vote]:
        """Say `ok`, wait for all ranks, return all votes by rank. Collective.

        The name may be used again: votes of one name are numbered.

        Raises:
            RankLost: naming the ranks that did not vote within `timeout_s`.
            StoreLost: the store cannot be reached.
        """
        number = self._held[name]
        self._held[name] += 1
        keys = [f"{name}/{number}/{rank}" for rank in range(self.world)]
        done = f"{name}/{number}/done"
        try:
            self._store.set(keys[self.rank], json.dumps([ok, payload]))
            self._wait_for(keys, name)
            values = self._store.multi_get(keys)
            # The last to have read removes the keys, so that the store does not grow.
            if self._store.add(done, 1) == self.world:
                for key in (*keys, done):
                    self._store.delete_key(key)
        except dist.DistNetworkError as error:
            raise StoreLost(
                f"the key-value store cannot be reached in phase {name!r}: the process that "
                f"serves it (usually rank 0) is gone ({error})"
            ) from error
        votes = []
        for rank, value in enumerate(values):
            said, text = json.loads(value)
            votes.append(Vote(rank, bool(said), str(text)))
        return votes

    def agree(self, name: str, digest: str) -> None:
        """Check that all ranks hold the same `digest`. Collective.

        Raises:
            Disagreement: naming the ranks that differ; on all ranks.
            RankLost, StoreLost: as `vote`.
        """
        digests = [vote.payload for vote in self.vote(name, True, digest)]
        usual = Counter(digests).most_common(1)[0][0]
        odd = tuple(rank for rank, other in enumerate(digests) if other != usual)
        if odd:
            raise Disagreement(name, odd, digests)

    def _wait_for(self, keys: list[str], phase: str) -> None:
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self.timeout_s))
            return
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # the time is over
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if missing:
            raise RankLost(tuple(missing), phase, self.timeout_s)
