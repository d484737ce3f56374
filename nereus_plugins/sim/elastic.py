"""Policies that change while the job runs, and lack one thing each that Nereus has.

threshold     the planner's best for the GPUs and lengths of now, by transitions, when a rule says
              so; their cost is not asked
verl_dynamic  verl_tuned; engines join on GPUs that training does not use, and leave
"""

from __future__ import annotations

import dataclasses
import statistics

from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    LengthDistribution,
    ModelStage,
    SpecError,
)

from .frameworks import RunS, tuned_choice
from .job import Failure, SimulatedJob
from .planning import Known, Planning
from .policies import LESS_MEMORY, Decision, Elsewhere, Missed, Static
from .world import World

S = ModelStage
# Plans are made for lengths this much above those of now, so that they hold for a while.
AHEAD = 1.15


class Replanning:
    """The planner's best for the GPUs and lengths of now, with room for longer ones."""

    def __init__(self, name: str, planning: Planning) -> None:
        self.name = name
        self.planning = planning
        self.memory = 1.0
        self.mean_tokens = 0.0

    def begin(self, known: Known) -> GlobalPlan:
        """Raises: SpecError: nothing fits."""
        self.memory = 1.0
        self.mean_tokens = known.response_tokens.mean_tokens()
        return self.best(known.gpus)

    def observe(self, job: SimulatedJob) -> None:
        last = job.observe()
        if last is not None:
            self.mean_tokens = last.metrics["response_length/mean"]

    def lengths(self, ahead: float = AHEAD) -> LengthDistribution:
        most = float(self.planning.known.max_response_tokens)
        return self.planning.lengths_of(min(most, ahead * self.mean_tokens))

    def find(self, gpus: int) -> GlobalPlan | None:
        """Where nothing fits longer responses, or memory lowered by failures: what fits those of
        now, or by the planner alone. None: nothing does."""
        for memory in dict.fromkeys((self.memory, 1.0)):
            for ahead in (AHEAD, 1.0):
                found = self.planning.best(gpus, self.lengths(ahead), memory)
                if found is not None:
                    return found
        return None

    def best(self, gpus: int) -> GlobalPlan:
        """Raises: SpecError: nothing fits."""
        found = self.find(gpus)
        if found is None:
            raise SpecError(f"{self.name}: no plan fits {gpus} GPUs with the lengths of now")
        return found

    def must_leave(self, job: SimulatedJob) -> bool:
        """Whether GPUs of the plan in force are gone, or its memory is about to be."""
        now = job.describe()
        if max(now.devices) >= job.available():
            return True
        return self.planning.seconds(now, self.lengths(), self.memory) is None

    def after(self, failure: Failure, job: SimulatedJob) -> GlobalPlan:
        """The plan to start again in."""
        if failure.kind != "gpus":
            self.memory *= LESS_MEMORY
        return self.best(job.available())


class Threshold:
    """Re-plans, and makes a transition to what it finds, when one of these holds:

    - GPUs of the plan in force are gone, or its memory would not hold responses 15 % longer;
    - the number of GPUs has been another than it was planned for, for `STEADY` steps;
    - for `STEADY` steps, generation's share of the step has been off by `SHARE` or more from what
      it was in the first steps of the plan, or responses `LONGER` times longer or shorter.

    The last waits `COOLDOWN` steps after a change. What a transition costs or brings is not
    asked: that is what such rules do not know.
    """

    name = "threshold"
    SHARE = 0.05
    LONGER = 1.25
    STEADY = 2
    COOLDOWN = 10

    def __init__(self, planning: Planning) -> None:
        self.plans = Replanning(self.name, planning)
        self._begin(0, 0)

    def _begin(self, step: int, gpus: int) -> None:
        """A plan has been taken."""
        self.since, self.planned_for = step, gpus
        self.shares: list[float] = []
        self.means: list[float] = []
        self.off = self.other = 0

    def start(self, known: Known) -> GlobalPlan:
        self._begin(0, known.gpus)
        self._impossible: set[tuple[object, object]] = set()
        return self.plans.begin(known)

    def decide(self, job: SimulatedJob) -> Decision | None:
        self.plans.observe(job)
        there, now = job.available(), job.describe()
        self._count(job)
        forced = self.plans.must_leave(job)
        cool = job.step - self.since >= self.COOLDOWN
        off = self.off >= self.STEADY and cool
        if not (forced or off or self.other >= self.STEADY):
            return None
        target = self.plans.find(there)
        self._begin(job.step, there)
        if target is None or target.assignments == now.assignments:
            return None
        if (now.assignments, target.assignments) in self._impossible:
            return Decision(target, restart=True) if forced else None
        return Decision(target)

    def _count(self, job: SimulatedJob) -> None:
        last = job.observe()
        if last is None:
            return
        self.other = self.other + 1 if job.available() != self.planned_for else 0
        share = last.stages_s.get("gen", 0.0) / last.step_s
        if len(self.shares) < self.STEADY:
            self.shares.append(share)
            self.means.append(self.plans.mean_tokens)
            return
        moved = self.plans.mean_tokens / statistics.fmean(self.means)
        longer = max(moved, 1.0 / moved) >= self.LONGER
        off = abs(share - statistics.fmean(self.shares)) >= self.SHARE
        self.off = self.off + 1 if off or longer else 0

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        self._impossible.add((job.describe().assignments, decision.plan.assignments))

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        self._begin(job.step, job.available())
        return self.plans.after(failure, job)


class VerlDynamic:
    """verl_tuned, restarted as that; engines join on the GPUs that training does not use (once what
    was missed exceeds their start), and leave with them. verl's own dynamic scheduling
    (`experimental/fully_async_policy/dynamic_schedule`) wakes and puts to sleep such replicas too,
    between training and generation of an asynchronous job."""

    name = "verl_dynamic"

    def __init__(self, fixed: Static) -> None:
        self.fixed = fixed
        self.base: GlobalPlan  # launched, engines that joined not counted
        self.joins = Missed()

    def start(self, known: Known) -> GlobalPlan:
        self.base = self.fixed.start(known)
        self.joins = Missed()
        return self._widened(known.gpus)

    def decide(self, job: SimulatedJob) -> Decision | None:
        there, now, fixed = job.available(), job.describe(), self.fixed
        if max(self.base.devices) >= there:
            self.base = fixed.sized(there)
            return Decision(self._widened(there), restart=True)
        wide = self._widened(there)
        if self.base != fixed.own and max(fixed.own.devices) < there:
            world = job.world
            cost_s = world.checkpoint_s(now) + sum(world.start_s(fixed.own).values())
            if fixed.missed.pays(job, fixed.own, fixed.planning, cost_s):
                self.base = fixed.own
                return Decision(self._widened(there), restart=True)
        if wide.assignments == now.assignments:
            return None
        if max(now.devices) >= there:
            return Decision(wide)
        cost_s = job.world.transitions.cost(now, wide).stall_s
        return Decision(wide) if self.joins.pays(job, wide, fixed.planning, cost_s) else None

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        pass  # engines move no trained state

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        self.base = self.fixed.recover(job, failure)
        return self._widened(job.available())

    def _widened(self, gpus: int) -> GlobalPlan:
        """The plan with engines on all GPUs, where that is expected to be faster and fits."""
        engines = self.base.assignments[S.ACTOR_GENERATE]
        each = engines.layout.world_size // engines.layout.dp
        count = gpus // each
        if count <= engines.layout.dp:
            return self.base
        layout = dataclasses.replace(engines.layout, dp=count)
        more = Assignment(layout, engines.knobs, tuple(range(count * each)))
        wide = GlobalPlan(
            {**self.base.assignments, S.ACTOR_GENERATE: more}, name=f"{self.base.name} + engines"
        )
        planning = self.fixed.planning
        lengths = planning.sized_lengths(mean_tokens=self.fixed.mean_tokens)
        memory = self.fixed.memory
        wide_s = planning.seconds(wide, lengths, memory)
        base_s = planning.seconds(self.base, lengths, memory)
        return wide if wide_s is not None and (base_s is None or wide_s < base_s) else self.base


def verl_dynamic(world: World, run_s: RunS) -> Elsewhere:
    """`VerlDynamic` on the plan of verl_tuned."""
    chosen = tuned_choice(world, "verl", run_s)
    return Elsewhere(chosen.world, VerlDynamic(chosen.policy("verl_dynamic")))
