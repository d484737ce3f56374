"""What the run has cost against plans that could have been held: the regret that the budget bounds.

For each plan in the books, `lead_s` is what the job took since the plan was entered in them, all
transitions and their stalls included, minus what it would have taken in that plan alone. A step's
own seconds are measured; what they would have been elsewhere is that, times the ratio of expected
seconds at the step's lengths, so that a slow rank or a stall counts for both. A plan that could not
have been held (its GPUs were gone) leaves the books.

An unforced transition is admitted only while the largest lead, plus what it costs, stays within the
budget; beyond it, only one to the plan with the largest lead, once that would have saved the
transition, the next time twice its cost, and so on. So the run never takes longer than its best
fixed plan by more than the budget, what conditions that flip cost a fixed plan in one turn, a few
transitions, and the error of the expected ratios.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nereus_plugins.spec import GlobalPlan

from .plans import Plans

MOST_PLANS = 8


@dataclasses.dataclass
class Books:
    """
    Attributes:
        leads_s: (plan, lead in seconds) by the plan's assignments.
        granted: transitions beyond the budget.
    """

    leads_s: dict[object, tuple[GlobalPlan, float]] = dataclasses.field(default_factory=dict)
    granted: int = 0

    def plans(self) -> list[GlobalPlan]:
        return [plan for plan, _ in self.leads_s.values()]

    def know(self, plan: GlobalPlan) -> None:
        """Enter a plan; of too many the one that would have cost most leaves."""
        if plan.assignments not in self.leads_s:
            if len(self.leads_s) >= MOST_PLANS:
                del self.leads_s[min(self.leads_s, key=lambda key: self.leads_s[key][1])]
            self.leads_s[plan.assignments] = (plan, 0.0)

    def step(
        self, plans: Plans, current: GlobalPlan, mean_tokens: float, step_s: float, gpus: int
    ) -> None:
        """A step of these lengths took `step_s` in `current`, with so many GPUs there."""
        self.know(current)
        now = plans.judge(current, mean_tokens)
        for key, (plan, lead) in list(self.leads_s.items()):
            if gpus and max(plan.devices) >= gpus:
                del self.leads_s[key]
            elif key != current.assignments:
                other = plans.judge(plan, mean_tokens)
                if math.isfinite(other.step_s) and other.memory <= 1.0:
                    lead += step_s * (1.0 - other.step_s / now.step_s)
                    self.leads_s[key] = (plan, lead)
                else:
                    del self.leads_s[key]

    def stall(self, seconds: float) -> None:
        """The job waited so long for a transition."""
        for key, (plan, lead) in self.leads_s.items():
            self.leads_s[key] = (plan, lead + seconds)

    def lead_s(self, plan: GlobalPlan) -> float:
        return self.leads_s[plan.assignments][1] if plan.assignments in self.leads_s else 0.0

    def regret_s(self) -> float:
        """The largest lead: what the run cost beyond the best plan that could have been held."""
        return max([0.0, *(lead for _, lead in self.leads_s.values())])

    def leads(self, plan: GlobalPlan, current: GlobalPlan, transition_s: float) -> bool:
        """Whether `plan` is that best one, and not having been in it instead of in `current` has
        cost more than going there: twice as much for each time that this was granted before."""
        lead = self.lead_s(plan)
        missed = lead - self.lead_s(current)
        return 0 < lead == self.regret_s() and missed >= transition_s * 2.0**self.granted

    def to_dict(self) -> dict[str, Any]:
        leads = [[plan.to_dict(), lead] for plan, lead in self.leads_s.values()]
        return {"leads": leads, "granted": self.granted}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Books:
        made = cls(granted=int(data["granted"]))
        for plan_, lead in data["leads"]:
            plan = GlobalPlan.from_dict(plan_)
            made.leads_s[plan.assignments] = (plan, float(lead))
        return made
