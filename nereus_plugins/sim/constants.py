"""What a transition or a restart costs beside the bytes it moves: every constant with its source.

measured: by this project, on CPU and gloo. published: in the source named. assumed: neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from nereus_plugins.controller.transition import ENGINE_START_S
from nereus_plugins.gtg.estimate import StepCosts
from nereus_plugins.gtg.planned import (
    BUILD_S,
    DESCRIBE_S,
    GROUPS_RANK_S,
    GROUPS_S,
    VOTE_S,
    step_costs,
)
from nereus_plugins.spec import ClusterSpec, Record
from nereus_plugins.spec.record import require_int, require_number

KINDS = ("measured", "published", "assumed")


class Basis(NamedTuple):
    """kind: one of `KINDS`."""

    kind: str
    source: str


@dataclasses.dataclass(frozen=True)
class Constants(Record):
    """Seconds and rates of the simulated cluster. `BASIS` says where each comes from.

    Attributes:
        groups_s, groups_rank_s: creating a transition's process groups: fixed, and for each rank.
        build_s: building the target's modules without initialising weights.
        describe_s: describing shards, gathering the tables, planning the moves.
        vote_s: one vote of all ranks.
        engine_start_s: starting rollout engines that are new or change.
        relaunch_s: starting the whole job again: scheduler, processes, frameworks, engines.
        storage_node_bytes_per_s: checkpoint storage, read or write, for one node.
        checkpoint_every_steps: a failure goes back to the last of these.
        notice_steps: how many steps ahead a job is told of GPUs that it will lose; with 1, at the
            boundary before the step that has fewer.
    """

    groups_s: float = GROUPS_S
    groups_rank_s: float = GROUPS_RANK_S
    build_s: float = BUILD_S
    describe_s: float = DESCRIBE_S
    vote_s: float = VOTE_S
    engine_start_s: float = ENGINE_START_S
    relaunch_s: float = 180.0
    storage_node_bytes_per_s: float = 2e9
    checkpoint_every_steps: int = 20
    notice_steps: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("checkpoint_every_steps", "notice_steps"):
                require_int("Constants", field.name, value)
            elif field.name == "storage_node_bytes_per_s":
                require_number("Constants", field.name, value, minimum=1)
            else:
                require_number("Constants", field.name, value, minimum=0, maximum=1e9)

    def step_costs(self, cluster: ClusterSpec, ranks: int) -> StepCosts:
        """The graph's constants for a transition of so many ranks."""
        return step_costs(
            cluster,
            ranks,
            groups_s=self.groups_s,
            groups_rank_s=self.groups_rank_s,
            build_s=self.build_s,
            describe_s=self.describe_s,
            vote_s=self.vote_s,
        )


BASIS: Mapping[str, Basis] = {
    "groups_s": Basis("measured", "lean groups of 4 ranks on gloo: 8 to 26 ms"),
    "groups_rank_s": Basis(
        "published",
        "MegaScale (arXiv:2402.15627, 3.5): groups of a job of 2,048 GPUs in under 5 s",
    ),
    "build_s": Basis("assumed", "modules of a rank, on the meta device and then allocated"),
    "describe_s": Basis(
        "measured", "tables gathered in 0.01 to 0.22 s, moves planned in 0.03 to 0.1 s, 4 ranks"
    ),
    "vote_s": Basis("assumed", "an all-reduce of a few bytes over the slowest rank"),
    "engine_start_s": Basis(
        "assumed", "in the job: 5 to 16 s measured on CPU, and graph capture on a GPU"
    ),
    "relaunch_s": Basis(
        "assumed", "verl's start measured on CPU, 4 ranks: 40 to 60 s; more ranks, larger models"
    ),
    "storage_node_bytes_per_s": Basis(
        "assumed", "parallel file system, one 25 Gbit/s share a node"
    ),
    "checkpoint_every_steps": Basis("assumed", "written beside training, no stall"),
    "notice_steps": Basis(
        "published",
        "spot instances: 30 s (Google Cloud, Azure) to 2 min (AWS), less than most steps",
    ),
}
