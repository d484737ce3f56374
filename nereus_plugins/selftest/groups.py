"""Process groups of one layout, each formed once, and destroyed with the layout."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from nereus_plugins.spec import Layout
from nereus_plugins.transport.torch_private import set_timeout

# Groups are formed when all ranks are known to be there: one that does not come has failed.
_FORM_TIMEOUT = datetime.timedelta(seconds=10)


class GroupSet:
    """Groups formed for one layout. Forming is collective over all ranks of the job.

    Args:
        timeout_s: after which a rank that waits for peers in using a group gives up.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def form(self, rank_lists: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Form one group per list of global ranks; returns the one this rank is in, if any."""
        me, mine = dist.get_rank(), None
        for ranks in rank_lists:
            key = tuple(sorted(set(ranks)))
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(key), timeout=_FORM_TIMEOUT)
                if me in key:
                    set_timeout(self._groups[key], self._timeout)
            if me in key:
                mine = self._groups[key]
        return mine

    def destroy(self) -> None:
        """Close every group this rank is in; waits for nobody."""
        me = dist.get_rank()
        for ranks, group in self._groups.items():
            if me in ranks:
                dist.destroy_process_group(group)
        self._groups.clear()


def along(layout: Layout, *axes: str) -> list[list[int]]:
    """Ranks of the layout in lists that vary along `axes` and agree on all others.

    Lists and their ranks come in ascending order, the same on every rank.
    """
    lists: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.coord(rank)
        fixed = tuple(v for name, v in place._asdict().items() if name not in axes)
        lists.setdefault(fixed, []).append(rank)
    return list(lists.values())
