"""The names of torch.distributed that are not public and have no public counterpart."""

from __future__ import annotations

import datetime
import sys
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


# -- worlds ------------------------------------------------------------------------------------
#
# torch knows one default group at a time, "the world", but several may be alive: groups are
# registered by themselves, each with its own ranks, and only a pointer says which one is the
# default. What is built while a world is current (meshes, further groups) belongs to it.


def current_world() -> dist.ProcessGroup:
    """The default process group. Raises: ValueError if there is none."""
    return distributed_c10d._get_default_group()


def set_world(world: dist.ProcessGroup) -> None:
    """Make a group that `form_world` made, or the first default group, the default. Local."""
    distributed_c10d._update_default_pg(world)


@contextmanager
def in_world(world: dist.ProcessGroup) -> Iterator[None]:
    """Inside, `world` is the default group."""
    before = current_world()
    set_world(world)
    try:
        yield
    finally:
        set_world(before)


def form_world(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> dist.ProcessGroup:
    """A further default group, with the back end of the current one, which stays current.
    Collective among its ranks, which must number groups alike (`name_groups_from`).

    Args:
        store: reachable by its ranks, with no keys of another world.
        rank, size: of the new world. timeout_s: how long to wait for peers; work of the group has
            torch's own timeout.

    Raises: RuntimeError (torch.distributed's) where peers did not come.
    """
    before, hook = current_world(), sys.excepthook
    backend = dist.get_backend_config(before)
    distributed_c10d._update_default_pg(None)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        world = current_world()
    finally:
        set_world(before)
        sys.excepthook = hook  # each call would wrap another one around it
    usual = distributed_c10d._get_default_timeout(distributed_c10d.Backend(dist.get_backend(world)))
    set_timeout(world, usual)
    return world
