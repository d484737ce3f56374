"""What a transition was predicted to save, and what it did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_plugins.spec import GlobalPlan

from .admission import confidence_of
from .decision import Decision
from .plans import Plans

# Steps after a transition that warm up, and then those that are measured.
_WARM, _MEASURED = 2, 8
TRIAL_STEPS = _WARM + _MEASURED
# A plan found slower is not tried again for so many steps, twice as many each time, unless GPUs or
# (by this factor) lengths are others.
BARRED_STEPS = 50
ALIKE = 1.5


@dataclasses.dataclass
class Proof:
    """One transition.

    Attributes:
        step: after which it happened. epoch: that was left.
        former, plan: before and after.
        forced: whether nothing had to be gained. trial: whether it was made for what it may tell.
        predicted_s, predicted_spread_s: saving a step, as predicted; of the step of predicted_of_s.
        predicted_stall_s, stall_s: of the transition.
        gpus, mean_tokens: the conditions.
        savings: by measured step, what was saved of what the step would have taken before
            (relative). Empty where the former plan could not have run it.
        seen: steps since.
        slower: whether, once they were measured, the plan was slower than the former one beyond
            the stated confidence; at other lengths than it was entered for, that says nothing.
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
    gpus: int
    mean_tokens: float
    savings: list[float] = dataclasses.field(default_factory=list)
    seen: int = 0
    slower: bool = False
    trial: bool = False

    @classmethod
    def begin(cls, decision: Decision, former: GlobalPlan, step: int, stall_s: float) -> Proof:
        assert decision.plan is not None
        assert decision.numbers is not None
        numbers = decision.numbers
        return cls(
            step, decision.epoch, former, decision.plan, decision.forced, numbers.saving_s,
            numbers.saving_spread_s, numbers.step_s, numbers.transition_s or 0.0, stall_s,
            decision.gpus, decision.mean_response_tokens, trial=decision.trial,
        )  # fmt: skip

    @property
    def open(self) -> bool:
        return self.seen < TRIAL_STEPS

    def observe(self, plans: Plans, mean_tokens: float, step_s: float, confidence: float) -> None:
        """A step after it, which the calibration has learned from. After the last one, whether the
        plan is slower is judged by what was learned of both, in which slow ranks do not count."""
        self.seen += 1
        if self.seen > _WARM:
            before = plans.judge(self.former, mean_tokens).step_s
            if math.isfinite(before) and before > 0:
                self.savings.append(1.0 - step_s / before)
        if not self.open:
            self.close(plans, mean_tokens, confidence)

    def close(self, plans: Plans, mean_tokens: float, confidence: float) -> None:
        """No more steps will be measured."""
        self.seen = max(self.seen, TRIAL_STEPS)
        former, now = plans.judge(self.former, mean_tokens), plans.judge(self.plan, mean_tokens)
        if math.isfinite(former.step_s) and self.alike(mean_tokens):
            saving, spread = plans.saving(self.former, former, self.plan, now)
            self.slower = saving < 0 and confidence_of(-saving, spread, 1.0, 0.0) >= confidence

    def alike(self, mean_tokens: float) -> bool:
        """Whether lengths are about those that the plan was entered for."""
        return abs(math.log(self.mean_tokens / mean_tokens)) < math.log(ALIKE)

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


def barred(proofs: Sequence[Proof], plan: GlobalPlan, step: int, gpus: int, mean: float) -> bool:
    """Whether a plan was found slower in conditions like these, too few steps ago."""
    found = [
        one
        for one in proofs
        if one.slower
        and one.plan.assignments == plan.assignments
        and one.gpus == gpus
        and one.alike(mean)
    ]
    return bool(found) and step < found[-1].step + BARRED_STEPS * 2 ** (len(found) - 1)
