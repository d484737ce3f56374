"""The policy `nereus`: the controller of live jobs, on what a live job would tell it; and what is
left of it where every change is a checkpoint and a restart."""

from __future__ import annotations

from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import Controller, starting_plan
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.controller.transition import TransitionEstimate
from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.spec import GlobalPlan, SpecError

from .job import Failure, SimulatedJob, capabilities_of
from .planning import Known
from .policies import Decision
from .world import World


class Nereus:
    """Starts in the planner's best for the first conditions; the controller decides from there.

    It sees records and GPUs. A transition is estimated by the graph that is executed: compiled once
    for both.
    """

    name = "nereus"

    def __init__(
        self,
        world: World,
        config: ControllerConfig | None = None,
        journal: DecisionJournal | None = None,
    ) -> None:
        self.world = world
        self.config = config or ControllerConfig()
        self.journal = journal
        self.controller: Controller
        self._read = 0

    def start(self, known: Known) -> GlobalPlan:
        setting = JobSetting.of(
            known.setting,
            capabilities_of(known.setting.job),
            known.response_tokens,
            known.max_response_tokens,
            self.world.trace.steps,
        )
        plan = starting_plan(setting, known.gpus)
        self._read = 0
        self.controller = Controller(
            setting, self.config, plan, 0, self.journal, clock=lambda: 0.0,
            transitions=self._transition,
        )  # fmt: skip
        return plan

    def decide(self, job: SimulatedJob) -> Decision | None:
        self._catch_up(job)
        found = self.controller.decide(job.leases(), job.step)
        if found.plan is not None:
            return Decision(found.plan, predicted=found.predicted())
        if max(job.describe().devices) >= job.available():
            return Decision(self.controller.recovery_plan(job.available()), restart=True)
        return None

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        pass  # the record of it says so

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        self._catch_up(job)
        lacks_memory = failure.kind != "gpus"
        return self.controller.recovery_plan(job.available(), out_of_memory=lacks_memory)

    def _catch_up(self, job: SimulatedJob) -> None:
        for record in job.records[self._read :]:
            self.controller.observe(record)
        self._read = len(job.records)
        self.controller.adopt(job.describe(), job.epoch())

    def _transition(self, old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate | None:
        try:
            cost = self.world.transitions.cost(old, new)
        except (InfeasibleTransition, SpecError):
            return None
        return TransitionEstimate(cost.seconds, cost.digest)


class RestartElastic(Nereus):
    """The same controller and plans; it knows that a change takes a checkpoint and a restart."""

    name = "restart_elastic"

    def decide(self, job: SimulatedJob) -> Decision | None:
        found = super().decide(job)
        return None if found is None else found._replace(restart=True)

    def _transition(self, old: GlobalPlan, new: GlobalPlan) -> TransitionEstimate | None:
        seconds = {"save": self.world.checkpoint_s(old), **self.world.start_s(new)}
        return TransitionEstimate(seconds, "")
