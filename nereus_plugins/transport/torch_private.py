"""The names of torch.distributed that are not public and have no public counterpart."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def groups_named() -> int:
    """How many process groups this process has given a name to.

    torch names a group by this counter of each process. A rank that failed between its peers'
    calls of `new_group` has another count than they; the next group would never be formed.
    """
    count: int = distributed_c10d._world.group_count
    return count


def name_groups_from(count: int) -> None:
    """Continue numbering process groups from a count that all ranks know. Local.

    Args:
        count: no name was given by a larger one on any rank; this rank never goes back.
    """
    world: Any = distributed_c10d._world
    world.group_count = max(world.group_count, count)


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """How long work of the group may take from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def registered_groups() -> list[dist.ProcessGroup]:
    """The process groups alive in this process, the world group among them."""
    return list(distributed_c10d._world.pg_map)


@contextmanager
def forming_within(
    timeout_s: float, not_formed: Callable[[RuntimeError], Exception]
) -> Iterator[None]:
    """Inside, a rank waits `timeout_s` for its peers while a group is formed; the group's own
    timeout holds for its work. The makers, in Megatron and in torch's DeviceMesh, do not let their
    callers set one for forming.

    Args:
        not_formed: makes the exception to raise where peers did not come.
    """
    original = distributed_c10d._new_group_with_tag

    def new_group(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        shorter = datetime.timedelta(seconds=timeout_s)
        try:
            group = original(ranks, shorter, *args, **kwargs)
        except RuntimeError as error:
            raise not_formed(error) from error
        if isinstance(group, dist.ProcessGroup):
            backend = distributed_c10d.Backend(dist.get_backend(group))
            wanted = timeout or distributed_c10d._get_default_timeout(backend)
            set_timeout(group, wanted)
        return group

    distributed_c10d._new_group_with_tag = new_group
    try:
        yield
    finally:
        distributed_c10d._new_group_with_tag = original
