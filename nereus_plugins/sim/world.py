"""What is the same for every policy on a trace: conditions, truth, chance, constants, links."""

from __future__ import annotations

import dataclasses
from typing import Any

from nereus_plugins.cost.estimate import Estimate, estimate
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.memory import OUTSIDE_TORCH_BYTES
from nereus_plugins.spec import GlobalPlan, WorkloadSpec
from nereus_plugins.trace.conditions import Trace

from .constants import Constants
from .planning import Known, Planning, Rules
from .transitions import Transitions
from .truth import Chance, StepTruth, Truth, TruthSpec


class World:
    """A trace and a seed. Compiled transitions and plans are kept, so that policies share them."""

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
        self._known: dict[tuple[object, WorkloadSpec], Estimate] = {}
        self._planning: dict[object, Planning] = {}
        self._of_job: dict[JobSpec, World] = {}
        # Every plan that a job has run in, by its assignments.
        self.visited: dict[object, GlobalPlan] = {}
        # What policies have worked out in this world and share, by what it is.
        self.memo: dict[object, Any] = {}
        self.transitions = Transitions(self.setting.job, self.setting.cluster, self.constants)

    @property
    def known(self) -> Known:
        """What whoever starts the job knows."""
        trace = self.trace
        first = trace.conditions(0, 0.0)
        return Known(trace.setting, first.gpus, first.response_tokens, trace.max_response_tokens)

    def planning(self, rules: Rules = Rules()) -> Planning:  # noqa: B008
        """The planner under these rules."""
        if rules not in self._planning:
            self._planning[rules] = Planning(self.known, rules)
        return self._planning[rules]

    def hindsight(self) -> Planning:
        """The planner that knows what is hidden."""
        if "hindsight" not in self._planning:
            self._planning["hindsight"] = Planning(self.known, truth=self.truth)
        return self._planning["hindsight"]

    def of_job(self, job: JobSpec) -> World:
        """The same conditions, truth and chance for a job that another framework runs."""
        if job == self.setting.job:
            return self
        if job not in self._of_job:
            setting = dataclasses.replace(self.setting, job=job)
            self._of_job[job] = World(
                dataclasses.replace(self.trace, setting=setting),
                seed=self.seed,
                truth=self.truth.spec,
                constants=self.constants,
            )
        return self._of_job[job]

    def true_estimate(self, plan: GlobalPlan, workload: WorkloadSpec) -> Estimate:
        """What an iteration really takes, chance left out."""
        key = (plan.assignments, workload)
        if key not in self._known:
            self._known[key] = estimate(
                self.setting.job, plan, self.setting.cluster, workload, self.truth
            )
        return self._known[key]

    def step_estimate(self, plan: GlobalPlan, workload: WorkloadSpec, step: int) -> Estimate:
        """What an iteration really takes, with the chance of `step`."""
        sure = self.true_estimate(plan, workload)
        in_turn = sum(stage.seconds for stage in sure.stages.values())
        if abs(in_turn - sure.iteration_s) > 1e-9 * in_turn:
            truth = StepTruth(self.truth, self.chance, step)
            return estimate(self.setting.job, plan, self.setting.cluster, workload, truth)
        # Stages that take turns: chance only stretches each.
        stages, now_s = dict(sure.stages), 0.0
        for stage, one in sorted(sure.stages.items(), key=lambda item: item[1].starts_s):
            slower, larger = self.chance.factors(step, stage)
            beside = sum(one.resting.values())
            apart = beside + OUTSIDE_TORCH_BYTES
            held = (one.reserved_bytes - apart) * larger + apart
            stages[stage] = dataclasses.replace(
                one,
                parts=tuple(dataclasses.replace(p, value=p.value * slower) for p in one.parts),
                allocated_bytes=(one.allocated_bytes - beside) * larger + beside,
                reserved_bytes=held,
                starts_s=now_s,
                fits=held <= one.capacity_bytes and not any("cannot" in n for n in one.notes),
            )
            now_s += slower * one.seconds
        return Estimate(stages, now_s)

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
