"""What is the same for every policy on a trace: conditions, truth, chance, constants, links."""

from __future__ import annotations

from nereus_plugins.cost.estimate import Estimate, estimate
from nereus_plugins.spec import GlobalPlan, WorkloadSpec
from nereus_plugins.trace.conditions import Trace

from .constants import Constants
from .transitions import Transitions
from .truth import Chance, StepTruth, Truth, TruthSpec


class World:
    """A trace and a seed. Compiled transitions are kept, so that policies share them.

    Raises: SpecError: a backend whose transitions cannot be simulated.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        seed: int | None = None,
        truth: TruthSpec | None = None,
        constants: Constants | None = None,
    ) -> None:
        """`seed`: of truth and chance; default the trace's."""
        self.trace = trace
        self.setting = trace.setting
        self.seed = trace.seed if seed is None else seed
        self.constants = constants or Constants()
        self.truth = Truth(truth or TruthSpec(), self.seed)
        sequences = self.setting.prompts_per_step * self.setting.samples_per_prompt
        self.chance = Chance(self.truth.spec, self.seed, trace.steps, sequences)
        self.transitions = Transitions(self.setting.job, self.setting.cluster, self.constants)

    def true_estimate(
        self, plan: GlobalPlan, workload: WorkloadSpec, step: int | None = None
    ) -> Estimate:
        """What an iteration really takes; with the chance of `step` where one is given."""
        truth = self.truth if step is None else StepTruth(self.truth, self.chance, step)
        return estimate(self.setting.job, plan, self.setting.cluster, workload, truth)

    def checkpoint_s(self, plan: GlobalPlan) -> float:
        """Seconds to write, or to read, the trained state."""
        state = self.transitions.state_bytes_on_node(plan)
        return state / self.constants.storage_node_bytes_per_s

    def start_s(self, plan: GlobalPlan) -> dict[str, float]:
        """Seconds by phase of starting the job in `plan` from a checkpoint."""
        ranks = 1 + max(plan.devices)
        return {
            "relaunch": self.constants.relaunch_s,
            "groups": self.constants.groups_s + self.constants.groups_rank_s * ranks,
            "load": self.checkpoint_s(plan),
        }
