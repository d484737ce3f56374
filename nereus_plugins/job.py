"""The job port: what the core sees of a running job, live or simulated.

An adapter (verl, OpenRLHF, the simulator) implements `JobPort`; controller and tools know nothing
else of the framework. Adapters register under the entry-point group `nereus.jobs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from nereus_plugins.spec import GlobalPlan, Layout, ModelSpec, ModelStage, Record
from nereus_plugins.spec.record import require_int, require_number
from nereus_plugins.trace.record import StepRecord, TransitionRecord

ENTRY_POINT_GROUP = "nereus.jobs"


@dataclass(frozen=True)
class Refusal:
    """A feature that an adapter does not carry through a transition, and what to do about it."""

    feature: str
    setting: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.feature} ({self.setting}): {self.reason}. {self.remedy}."


@dataclass(frozen=True)
class StageCapability:
    """Which fields of a model-stage's `Layout` and `Knobs` can change while the job runs."""

    layout_fields: frozenset[str]
    knob_fields: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Capabilities:
    """What can be executed; the planner proposes nothing else.

    stages: model-stages that can change, with what of them can.
    coupled: groups of model-stages that must always share one layout.
    devices_fixed: whether the set of ranks must stay as it is.
    refused: features that keep a job from being adapted at all, whether this job uses them or not.
    colocated: whether every stage works on all ranks, in their order.
    sharing_fixed: whether model-stages that share GPUs go on sharing them, and others never do;
        how many GPUs each such group has may change, those of models before the rollout's. Each
        model then has settings of its own.
    dp_divides: samples that the dp of every training-engine stage must divide; None: any dp.
    least_budget_tokens: what a micro-batch by token budget must hold at least, over all ranks that
        share a sequence.
    """

    framework: str
    framework_version: str
    stages: Mapping[ModelStage, StageCapability]
    coupled: tuple[frozenset[ModelStage], ...]
    devices_fixed: bool
    refused: tuple[Refusal, ...]
    colocated: bool = False
    sharing_fixed: bool = False
    dp_divides: int | None = None
    least_budget_tokens: int = 0


@dataclass(frozen=True)
class UnitInfo:
    """A unit of the job: the model whose state moves as one, and the stages it serves."""

    name: str
    model: ModelSpec
    stages: frozenset[ModelStage]
    layout: Layout
    trainable: bool


@dataclass(frozen=True)
class Lease(Record):
    """GPUs that a job may use by the step that comes next, as whoever lends them says.

    A job has a tuple of leases, which number its devices: those of the first lease come first, and
    those that must be left first are the last. A revocation with notice is a lease that ends.

    Attributes:
        gpus: how many.
        until_s: seconds from now until they must have been left; None: nobody has said.
        notice_s: they may be taken back before that, with so many seconds of notice (a spot
            instance); None: they are firm.
    """

    gpus: int
    until_s: float | None = None
    notice_s: float | None = None

    def __post_init__(self) -> None:
        require_int("Lease", "gpus", self.gpus)
        for name, seconds in (("until_s", self.until_s), ("notice_s", self.notice_s)):
            if seconds is not None:
                require_number("Lease", name, seconds, minimum=0.0)


def leased(leases: Iterable[Lease]) -> int:
    """How many GPUs: devices 0 up to this may be used."""
    return sum(lease.gpus for lease in leases)


@dataclass(frozen=True)
class Proposal:
    """A plan offered for an epoch; stale once the job's epoch has moved on."""

    epoch: int
    plan: GlobalPlan


class StaleProposal(RuntimeError):
    """The proposal was made for another epoch than the job is in; nothing was done."""


class JobPort(Protocol):
    """What an adapter implements. Called from the trainer's driver, between iterations."""

    def capabilities(self) -> Capabilities: ...

    def describe(self) -> GlobalPlan:
        """The plan in force: every model-stage's layout and devices."""
        ...

    def epoch(self) -> int: ...

    def observe(self) -> StepRecord | None:
        """The last finished step, or None before the first."""
        ...

    def units(self) -> tuple[UnitInfo, ...]: ...

    def leases(self) -> tuple[Lease, ...]:
        """The GPUs that it has as things stand; more than the plan in force uses, or fewer."""
        ...

    def execute(self, proposal: Proposal) -> TransitionRecord:
        """Run one transition now, as a transaction; the record says how it ended.

        Raises: StaleProposal; an error that ends the job when state was lost with a dead rank.
        """
        ...


def registered_jobs() -> dict[str, str]:
    """Adapters installed in this environment: name -> where it is loaded from."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
