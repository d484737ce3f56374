"""What a job runs where: model-stages, knobs, assignments, global plans.

A plan file is short where it can be. An assignment may be a bare layout, and devices default to
the first `layout.world_size` ones:

    name: start
    assignments:
      actor-train: {tp: 2, pp: 1, dp: 2}
      critic-train:
        layout: {tp: 1, pp: 2, dp: 2}
        knobs: {token_budget_tokens: 16384, recompute: full}
        devices: 0-3
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from .layout import MOST_RANKS, Layout
from .record import (
    FrozenMap,
    Record,
    SpecError,
    require,
    require_bool,
    require_choice,
    require_int,
    require_number,
    shown,
)

A = TypeVar("A", bound="Assignment")

RECOMPUTE = ("none", "selective", "full")


class ModelStage(str, enum.Enum):
    """One model in one stage of the iteration."""

    ACTOR_GENERATE = "actor-generate"
    ACTOR_TRAIN = "actor-train"
    CRITIC_VALUES = "critic-values"
    CRITIC_TRAIN = "critic-train"
    REF_LOGPROB = "ref-logprob"
    REWARD_SCORE = "reward-score"

    def __str__(self) -> str:
        return self.value

    @property
    def model(self) -> str:
        """The model (and unit) of this stage: actor, critic, ref or reward."""
        return self.value.split("-")[0]


@dataclasses.dataclass(frozen=True)
class Knobs(Record):
    """What can change without moving state.

    Attributes:
        micro_batch: sequences in one micro-batch of one data-parallel rank.
        token_budget_tokens: tokens in one micro-batch of one rank, packed; instead of micro_batch.
        recompute: activations computed again in backward: "none", "selective" (attention only),
            "full" (every layer).
        offload_params: weights lie in host memory between stages.
        offload_optimizer: master weights and moments lie in host memory between updates.
        offload_activations: saved activations lie in host memory between forward and backward.
        rollout_memory_fraction: part of a device's memory the rollout engine may take, in (0, 1].
    """

    micro_batch: int | None = None
    token_budget_tokens: int | None = None
    recompute: str = "none"
    offload_params: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False
    rollout_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        require(
            self.micro_batch is None or self.token_budget_tokens is None,
            "micro_batch and token_budget_tokens both size the micro-batch: set one of them",
        )
        for name in ("micro_batch", "token_budget_tokens"):
            if getattr(self, name) is not None:
                require_int("Knobs", name, getattr(self, name))
        require_choice("Knobs", "recompute", self.recompute, RECOMPUTE)
        for name in ("offload_params", "offload_optimizer", "offload_activations"):
            require_bool("Knobs", name, getattr(self, name))
        if self.rollout_memory_fraction is not None:
            require_number(
                "Knobs",
                "rollout_memory_fraction",
                self.rollout_memory_fraction,
                above=0.0,
                maximum=1.0,
            )


def parse_devices(text: str, where: str) -> tuple[int, ...]:
    """Device indices from "0-3,8" as (0, 1, 2, 3, 8)."""
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + MOST_RANKS:
            raise SpecError(
                f"{where}: devices must be a list or a text like '0-3,8', of at most {MOST_RANKS}, "
                f"got {text[:60]!r}"
            )
        devices.extend(range(first, last + 1))
    return tuple(devices)


@dataclasses.dataclass(frozen=True)
class Assignment(Record):
    """A layout and knobs on a set of devices.

    Attributes:
        layout: the parallel layout.
        knobs: the settings that move no state.
        devices: index into the cluster's devices of each rank of the layout; empty means
            0 .. layout.world_size-1.
    """

    layout: Layout
    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            isinstance(self.devices, (tuple, list, range)),
            f"Assignment.devices must be a sequence of device indices, got {shown(self.devices)}",
        )
        devices = tuple(self.devices) or tuple(range(self.layout.world_size))
        object.__setattr__(self, "devices", devices)
        # A planner makes many plans of many devices: one by one only to name the wrong one.
        if set(map(type, devices)) != {int} or min(devices) < 0:
            for device in devices:
                require_int("Assignment", "devices", device, minimum=0)
        require(len(set(devices)) == len(devices), f"devices {list(devices)} name one device twice")
        require(
            len(devices) == self.layout.world_size,
            f"layout {self.layout} takes {self.layout.world_size} devices, {len(devices)} are "
            "assigned",
        )

    @classmethod
    def from_dict(cls: type[A], data: Mapping[str, Any], *, where: str | None = None) -> A:
        where = where or cls.__name__
        if isinstance(data, Mapping):
            full = {f.name for f in dataclasses.fields(cls)}
            if not full & set(data):
                data = {"layout": data}
            if isinstance(data.get("devices"), str):
                data = {**data, "devices": parse_devices(data["devices"], where)}
            elif type(data.get("devices")) is int:
                data = {**data, "devices": (data["devices"],)}
        return super().from_dict(data, where=where)

    def to_dict(self) -> dict[str, Any]:
        out = super().to_dict()
        if self.devices == tuple(range(self.layout.world_size)):
            out.pop("devices", None)
        return out


@dataclasses.dataclass(frozen=True)
class GlobalPlan(Record):
    """An assignment for every model-stage of the job."""

    assignments: Mapping[ModelStage, Assignment]
    name: str = "plan"

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and self.name != "", "GlobalPlan.name must be a text")
        require(
            isinstance(self.assignments, Mapping) and len(self.assignments) > 0,
            "GlobalPlan.assignments must map at least one model-stage to an assignment",
        )
        for stage, assignment in self.assignments.items():
            require(
                isinstance(stage, ModelStage) and isinstance(assignment, Assignment),
                f"GlobalPlan.assignments must map ModelStage to Assignment, got {shown(stage)}",
            )
        object.__setattr__(self, "assignments", FrozenMap(self.assignments))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that some model-stage is assigned to, ascending."""
        return tuple(sorted({d for a in self.assignments.values() for d in a.devices}))
