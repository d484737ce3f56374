"""What the controller says at a boundary, with the numbers behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from nereus_plugins.spec import GlobalPlan, Record
from nereus_plugins.spec.record import require, require_choice

KINDS = ("stay", "propose")


@dataclasses.dataclass(frozen=True)
class Numbers(Record):
    """What was expected of a plan against the one in force, at the same lengths.

    Attributes:
        step_s: seconds of a step in the plan in force.
        new_step_s: of one in the other plan.
        saving_s: their difference, and saving_spread_s its standard deviation.
        steps: how many steps the saving is expected to last.
        transition_s: seconds that the job would wait for the transition; by part,
            transition_parts_s. None where it was not estimated, or no order of moves fits in
            memory: the reason says.
        confidence: probability that what is saved in these steps exceeds the transition.
        memory: part of a GPU's memory that the fullest stage takes within the look-ahead.
    """

    step_s: float
    new_step_s: float
    saving_s: float
    saving_spread_s: float
    steps: float
    confidence: float
    memory: float
    transition_s: float | None = None
    transition_parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Alternative(Record):
    """A plan that was considered, and why it was not taken."""

    plan: GlobalPlan
    reason: str
    numbers: Numbers


@dataclasses.dataclass(frozen=True)
class Decision(Record):
    """For the boundary before the step that comes next.

    Attributes:
        kind: "stay", or "propose" (`plan` is then to be executed as epoch `epoch`'s successor).
        reason: why, in words.
        step: how many steps are done.
        epoch: the job's when this was decided; the proposal is stale in any other.
        gpus: how many may be used from now on.
        mean_response_tokens: forecast for the next steps.
        plan: what is proposed.
        digest: of the schedule that its transition is predicted to compile to; "" if none moves.
        forced: whether staying was not possible, so that nothing had to be gained.
        trial: whether the plan is proposed for what running it may tell, not for what it saves.
        numbers: of the plan proposed.
        alternatives: others considered; none where no comparison was due.
    """

    kind: str
    reason: str
    step: int
    epoch: int
    gpus: int
    mean_response_tokens: float
    plan: GlobalPlan | None = None
    digest: str = ""
    forced: bool = False
    trial: bool = False
    numbers: Numbers | None = None
    alternatives: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        require_choice("Decision", "kind", self.kind, KINDS)
        require(
            (self.plan is not None) == (self.kind == "propose"),
            "Decision.plan is what is proposed: a decision to stay has none",
        )

    def predicted(self) -> dict[str, float]:
        """As the record of its transition has it (`TransitionRecord.predicted`); without what is
        infinite, of a plan that cannot run any longer."""
        names = ("transition_s", "step_s", "new_step_s", "saving_s", "steps", "confidence")
        values = {name: getattr(self.numbers, name, None) for name in names}
        return {n: float(v) for n, v in values.items() if v is not None and math.isfinite(v)}
