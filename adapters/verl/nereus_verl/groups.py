"""Process groups made during a transition: found, named alike on all ranks, and destroyed.

Groups leak unless each is destroyed by name, and torch names a group by a counter in each process:
a build that failed on one rank leaves the counters of the ranks apart, and the next `new_group`
would wait for a peer that uses another name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nereus_plugins.transport.base import TransportError

# No iteration of any job makes as many groups as this between two transition attempts.
NAMES_PER_ATTEMPT = 1_000_000


def align_names(attempt: int, *, aborted: bool = False) -> None:
    """Continue numbering groups from a value that all ranks know.

    Args:
        attempt: number of this transition attempt in the job, from 1, the same on all ranks.
        aborted: it is over, and ranks may have made groups of different numbers.
    """
    world: Any = c10d._world  # torch's registry of process groups; no public access to the counter
    known = attempt * NAMES_PER_ATTEMPT + (NAMES_PER_ATTEMPT // 2 if aborted else 0)
    world.group_count = max(world.group_count, known)


class GroupSet:
    """The process groups that one layout owns in this process, once each."""

    def __init__(self, groups: list[dist.ProcessGroup] | None = None) -> None:
        self._groups: list[dist.ProcessGroup] = []
        for group in groups or []:
            self.add(group)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Any) -> None:
        """Add a group of which this rank is a member; the world group is never owned."""
        if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
            return
        if group not in self._groups:
            self._groups.append(group)

    @contextmanager
    def collect(self, timeout_s: float) -> Iterator[None]:
        """Own every group that is made inside, also when what is inside raises.

        Args:
            timeout_s: how long votes of the transition wait. A rank waits half as long for its
                peers while a group is formed, so that it can still vote on that. For the work that
                the group is made for, the timeout that its maker asked for holds.

        Raises: TransportError where peers did not come.
        """
        before = set(_registered())
        try:
            with _formed_within(timeout_s / 2):
                yield
        finally:
            for group in _registered():
                if group not in before:
                    self.add(group)

    def destroy(self) -> None:
        """Destroy the groups. Waits for no peer; a group that is already gone is passed over."""
        for group in self._groups:
            if group in _registered():
                dist.destroy_process_group(group)
        self._groups.clear()


@contextmanager
def _formed_within(timeout_s: float) -> Iterator[None]:
    # The makers, in Megatron and in torch's DeviceMesh, do not let their callers set a timeout.
    original = c10d._new_group_with_tag

    def new_group(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        shorter = datetime.timedelta(seconds=timeout_s)
        try:
            group = original(ranks, shorter, *args, **kwargs)
        except RuntimeError as error:
            raise TransportError(f"a process group was not formed: {error}") from error
        if isinstance(group, dist.ProcessGroup):
            backend = dist.get_backend(group)
            wanted = timeout or c10d._get_default_timeout(c10d.Backend(backend))
            c10d._set_pg_timeout(wanted, group)
        return group

    c10d._new_group_with_tag = new_group
    try:
        yield
    finally:
        c10d._new_group_with_tag = original


def _registered() -> list[dist.ProcessGroup]:
    return list(c10d._world.pg_map)


def registered_count() -> int:
    """Process groups alive in this process, the world group among them."""
    return len(_registered())
