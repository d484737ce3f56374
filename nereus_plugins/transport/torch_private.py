"""The names of torch.distributed that are not public and have no public counterpart."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def clone_default_store() -> dist.Store:
    """A connection of its own to the store behind the default process group.

    Raises ValueError if there is no default group. (`clone` is missing from torch's type stubs,
    `_get_default_store` from its documentation.)
    """
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def align_group_names(attempt: int) -> None:
    """Continue numbering process groups from a value that all ranks know. Local.

    torch names a group by a counter in each process. A rank that failed between its peers' calls
    of `new_group` has another count than they; the next group would never be formed.

    Args:
        attempt: which attempt to change layouts this is in the job, the same on all ranks; no job
            forms a million groups between two.
    """
    world: Any = distributed_c10d._world
    world.group_count = max(world.group_count, attempt * 1_000_000)


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """How long work of the group may take from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)
