"""Process groups of one layout, each formed once, and destroyed with the layout."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from nereus_plugins.spec import Layout
from nereus_plugins.transport.groups import GroupSet

# Groups are formed when all ranks are known to be there: one that does not come within half of
# this has failed.
_FORM_TIMEOUT_S = 60.0


class LayoutGroups(GroupSet):
    """Groups formed for one layout. Forming is collective over all ranks of the job.

    Args:
        timeout_s: after which a rank that waits for peers in using a group gives up.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def form(self, rank_lists: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Form one group per list of global ranks; returns the one this rank is in, if any."""
        me, mine = dist.get_rank(), None
        for ranks in rank_lists:
            key = tuple(sorted(set(ranks)))
            if key not in self._by_ranks:
                with self.collect(_FORM_TIMEOUT_S):
                    self._by_ranks[key] = dist.new_group(list(key), timeout=self._timeout)
            if me in key:
                mine = self._by_ranks[key]
        return mine

    def destroy(self) -> None:
        self._by_ranks.clear()
        super().destroy()


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
