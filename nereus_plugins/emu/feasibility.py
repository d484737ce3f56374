"""Does it fit: bytes of units on each rank's device, before any graph is built.

Counts storages, not shards: memory is acquired and released by storage, padding included. A cheap
screen for candidate layouts; the transition graph finds the exact peak over time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nereus_plugins.emu.table import DTYPE_BYTES, ShardTable


class DoesNotFit(RuntimeError):
    """State that exceeds a device's budget; the message names the rank and the remedy."""


@dataclass(frozen=True)
class Fit:
    """Whether state fits its devices.

    Attributes:
        what: what was counted, for messages.
        worst_rank: the rank with the least left (or the most missing); None with no state at all.
        worst_bytes: what is needed there.
        worst_budget_bytes: what may be used there.
        remedy: the settings to change if it does not fit.
    """

    what: str
    worst_rank: int | None
    worst_bytes: int
    worst_budget_bytes: int
    remedy: str

    @property
    def fits(self) -> bool:
        return self.worst_bytes <= self.worst_budget_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes over budget on the worst rank; 0 if it fits."""
        return max(0, self.worst_bytes - self.worst_budget_bytes)

    def __str__(self) -> str:
        if self.worst_rank is None:
            return f"{self.what}: nothing to hold"
        text = (
            f"{self.what} needs {_size(self.worst_bytes)} on rank {self.worst_rank}, whose budget "
            f"is {_size(self.worst_budget_bytes)}"
        )
        if self.fits:
            return f"{text}: it fits"
        return f"{text}: {_size(self.missing_bytes)} too much; {self.remedy}"

    def require(self) -> None:
        """Raise `DoesNotFit` with the message unless it fits."""
        if not self.fits:
            raise DoesNotFit(str(self))


@dataclass(frozen=True)
class TransitionFit:
    """Whether a transition fits, and how.

    Attributes:
        target: the target layout alone; must fit in any case.
        both: source and target alive at once.
    """

    target: Fit
    both: Fit

    @property
    def mode(self) -> str | None:
        """ "intact" if source and target fit at once, "staged" if only the target, else None."""
        if self.both.fits:
            return "intact"
        return "staged" if self.target.fits else None

    def require(self) -> str:
        """The mode; `DoesNotFit` if there is none."""
        self.target.require()
        return "intact" if self.both.fits else "staged"


def bytes_by_rank(table: ShardTable, *, host: bool = False) -> dict[int, int]:
    """Bytes of the storages that each rank has on its accelerator, or with `host` in host memory.

    A unit that runs on CPU has "cpu" for its device and nothing parked: give `host=True`.
    """
    is_host = np.array([device.startswith("cpu") for device in table.storages.devices], bool)
    keep = is_host[table.storages.device] == host
    return _sum(table.storages.rank[keep], table.storages.nbytes[keep])


def gradient_bytes_by_rank(table: ShardTable, dtype: str = "float32") -> dict[int, int]:
    """Bytes of gradients of `dtype` for the weights each rank holds (Megatron allocates them when
    a model is built; they are freed before a transition)."""
    is_weight = np.array([t.kind == "weight" for t in table.tensors], bool)
    keep = is_weight[table.tensor]
    return _sum(table.rank[keep], table.numel_per_row()[keep] * DTYPE_BYTES[dtype])


def check_fit(
    tables: Sequence[ShardTable],
    budget_bytes: int | Mapping[int, int],
    *,
    what: str = "the state",
    remedy: str = "raise tp, pp or dp, or set sharding to share out more state",
    extra_bytes: Mapping[int, int] | None = None,
    host: bool = False,
) -> Fit:
    """Whether the storages of all `tables` fit at once.

    Args:
        tables: units alive at the same time.
        budget_bytes: for every rank, or by rank.
        what, remedy: for the message.
        extra_bytes: more that each rank needs (gradients, activations, a rollout engine).
        host: count host memory instead of the accelerator's.

    Raises:
        KeyError: `budget_bytes` by rank lacks a rank that holds state.
    """
    need: dict[int, int] = dict(extra_bytes or {})
    for table in tables:
        for rank, nbytes in bytes_by_rank(table, host=host).items():
            need[rank] = need.get(rank, 0) + nbytes

    def budget(rank: int) -> int:
        return budget_bytes if isinstance(budget_bytes, int) else budget_bytes[rank]

    worst = max(sorted(need), key=lambda rank: need[rank] - budget(rank), default=None)
    if worst is None:
        return Fit(what, None, 0, 0, remedy)
    return Fit(what, worst, need[worst], budget(worst), remedy)


def check_transition(
    source: ShardTable,
    target: ShardTable,
    budget_bytes: int | Mapping[int, int],
    *,
    unit: str = "the unit",
    extra_bytes: Mapping[int, int] | None = None,
    host: bool = False,
) -> TransitionFit:
    """Whether a unit can change layout with the old one intact, staged through host, or not at all.

    Args: as `check_fit`; `extra_bytes` is what the ranks hold besides, in both cases.
    """
    return TransitionFit(
        target=check_fit(
            [target],
            budget_bytes,
            what=f"{unit} in its target layout",
            remedy="choose a target with more tp, pp or dp, or lower rollout_memory_fraction",
            extra_bytes=extra_bytes,
            host=host,
        ),
        both=check_fit(
            [source, target],
            budget_bytes,
            what=f"{unit} in both layouts at once",
            remedy="allow staging through host memory, or lower rollout_memory_fraction",
            extra_bytes=extra_bytes,
            host=host,
        ),
    )


def _sum(rank: np.ndarray, nbytes: np.ndarray) -> dict[int, int]:
    ranks, index = np.unique(rank, return_inverse=True)
    sums = np.zeros(len(ranks), np.int64)
    np.add.at(sums, index, nbytes)
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"
