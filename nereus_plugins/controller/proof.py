"""What a transition was predicted to save, and what it did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nereus_plugins.spec import GlobalPlan

from .decision import Decision
from .plans import Plans

# Steps after a transition that warm up, and then those that are measured.
_WARM, _MEASURED = 2, 8


@dataclasses.dataclass
class Proof:
    """One transition.

    Attributes:
        step: after which it happened. epoch: that was left.
        former, plan: before and after.
        forced: whether nothing had to be gained.
        predicted_s, predicted_spread_s: saving a step, as predicted; of the step of predicted_of_s.
        predicted_stall_s, stall_s: of the transition.
        savings: by measured step, what was saved of what the step would have taken before
            (relative). Empty where the former plan could not have run it.
        seen: steps since.
    """

    step: int
    epoch: int
    former: GlobalPlan
    plan: GlobalPlan
    forced: bool
    predicted_s: float
    predicted_spread_s: float
    predicted_of_s: float
    predicted_stall_s: float
    stall_s: float
    savings: list[float] = dataclasses.field(default_factory=list)
    seen: int = 0

    @classmethod
    def begin(cls, decision: Decision, former: GlobalPlan, step: int, stall_s: float) -> Proof:
        assert decision.plan is not None
        assert decision.numbers is not None
        numbers = decision.numbers
        return cls(
            step, decision.epoch, former, decision.plan, decision.forced, numbers.saving_s,
            numbers.saving_spread_s, numbers.step_s, numbers.transition_s or 0.0, stall_s,
        )  # fmt: skip

    @property
    def open(self) -> bool:
        return self.seen < _WARM + _MEASURED

    def observe(self, plans: Plans, mean_tokens: float, step_s: float) -> None:
        """A step after it."""
        self.seen += 1
        if self.seen > _WARM:
            before = plans.judge(self.former, mean_tokens).step_s
            if math.isfinite(before) and before > 0:
                self.savings.append(1.0 - step_s / before)

    def measured(self) -> tuple[float, float] | None:
        """(relative saving, standard error) of the measured steps."""
        if len(self.savings) < 3:
            return None
        mean = sum(self.savings) / len(self.savings)
        variance = sum((one - mean) ** 2 for one in self.savings) / (len(self.savings) - 1)
        return mean, math.sqrt(variance / len(self.savings))

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        measured = self.measured()
        return {
            **out,
            "former": self.former.to_dict(),
            "plan": self.plan.to_dict(),
            "measured": list(measured) if measured else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Proof:
        values = {k: v for k, v in data.items() if k != "measured"}
        values["former"] = GlobalPlan.from_dict(values["former"])
        values["plan"] = GlobalPlan.from_dict(values["plan"])
        values["savings"] = list(values["savings"])
        return cls(**values)
