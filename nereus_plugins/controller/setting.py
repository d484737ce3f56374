"""What the controller is told of a job before it starts; the rest it learns from records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.spec import LengthDistribution, ModelStage, Record
from nereus_plugins.spec.record import require, require_bool, require_int
from nereus_plugins.trace.conditions import Setting

# Before a step was seen: the median of responses as a part of the longest, and the spread of their
# logarithm, as `nereus check` assumes them. What is measured takes their place.
MEDIAN, SIGMA = 0.5, 0.6


def first_lengths(longest: int) -> LengthDistribution:
    """Of responses, before any was seen. Args: longest: where they are cut, in tokens."""
    return LengthDistribution.lognormal(max(1.0, MEDIAN * longest), SIGMA, max_tokens=longest)


@dataclasses.dataclass(frozen=True)
class Changeable(Record):
    """Fields of a stage's layout and knobs that the adapter can change (`StageCapability`)."""

    layout_fields: tuple[str, ...] = ()
    knob_fields: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class JobSetting(Record):
    """A job as its controller knows it. The driver of a live job writes it into the run directory
    (`to_json`), the controller's process reads it (`JobSetting.load`).

    Attributes:
        setting: models and algorithm, every GPU that may ever be there, prompts, batch.
        response_tokens: lengths to expect of the first step; their shape is kept, their scale
            follows what is measured.
        max_response_tokens: where responses are cut.
        steps: of the whole run.
        changes: by model-stage, what the adapter can change. A stage not named never changes.
        coupled: model-stages that must share one layout.
        devices_fixed: whether the set of ranks stays as it is.
        colocated, sharing_fixed, dp_divides, least_budget_tokens: as in `Capabilities`.
    """

    setting: Setting
    response_tokens: LengthDistribution
    max_response_tokens: int
    steps: int
    changes: Mapping[ModelStage, Changeable]
    coupled: tuple[tuple[ModelStage, ...], ...] = ()
    devices_fixed: bool = False
    colocated: bool = False
    sharing_fixed: bool = False
    dp_divides: int | None = None
    least_budget_tokens: int = 0

    def __post_init__(self) -> None:
        require_int("JobSetting", "max_response_tokens", self.max_response_tokens)
        require_int("JobSetting", "steps", self.steps)
        for name in ("devices_fixed", "colocated", "sharing_fixed"):
            require_bool("JobSetting", name, getattr(self, name))
        require(
            isinstance(self.response_tokens, LengthDistribution),
            "JobSetting.response_tokens must be a LengthDistribution",
        )

    @classmethod
    def of(
        cls,
        setting: Setting,
        capabilities: Capabilities,
        response_tokens: LengthDistribution,
        max_response_tokens: int,
        steps: int,
    ) -> JobSetting:
        """With what a job's port says that it can execute."""
        return cls(
            setting,
            response_tokens,
            max_response_tokens,
            steps,
            {
                stage: Changeable(tuple(sorted(can.layout_fields)), tuple(sorted(can.knob_fields)))
                for stage, can in capabilities.stages.items()
            },
            tuple(tuple(sorted(group, key=str)) for group in capabilities.coupled),
            capabilities.devices_fixed,
            capabilities.colocated,
            capabilities.sharing_fixed,
            capabilities.dp_divides,
            capabilities.least_budget_tokens,
        )

    def capabilities(self) -> Capabilities:
        """As the planner takes them."""
        return Capabilities(
            framework="",
            framework_version="",
            stages={
                stage: StageCapability(frozenset(can.layout_fields), frozenset(can.knob_fields))
                for stage, can in self.changes.items()
            },
            coupled=tuple(frozenset(group) for group in self.coupled),
            devices_fixed=self.devices_fixed,
            refused=(),
            colocated=self.colocated,
            sharing_fixed=self.sharing_fixed,
            dp_divides=self.dp_divides,
            least_budget_tokens=self.least_budget_tokens,
        )
