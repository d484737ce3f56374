"""Process groups that a layout owns: formed within a bounded time, and destroyed with the layout.

Groups leak unless each is destroyed by name, and frameworks make them where their callers cannot
see: `GroupSet.collect` owns all that come into being.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nereus_plugins.transport.base import TransportError
from nereus_plugins.transport.torch_private import forming_within, registered_groups


class GroupSet:
    """The process groups that one layout owns in this process, once each."""

    def __init__(self, groups: Iterable[dist.ProcessGroup] = ()) -> None:
        self._groups: list[dist.ProcessGroup] = []
        for group in groups:
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
        before = set(registered_groups())
        try:
            with forming_within(timeout_s / 2, _not_formed):
                yield
        finally:
            for group in registered_groups():
                if group not in before:
                    self.add(group)

    def destroy(self) -> None:
        """Destroy the groups. Waits for no peer; a group that is already gone is passed over."""
        for group in self._groups:
            if group in registered_groups():
                dist.destroy_process_group(group)
        self._groups.clear()


def live_group_count() -> int:
    """Process groups that this process has formed and not destroyed, the world group included."""
    return len(registered_groups())


def _not_formed(error: RuntimeError) -> TransportError:
    return TransportError(f"a process group was not formed: {error}")
