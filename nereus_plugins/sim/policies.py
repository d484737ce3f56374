"""Who decides what plan a simulated job runs in. Each is as strong as its definition allows.

static            the planner's best for the first conditions, sized so that the longest allowed
                  response fits. Where its GPUs are taken, it is restarted on what is left, and
                  again once they are back: nothing else changes it
dp_scaling        static's TP and PP; DP follows the GPUs, by transitions
static_hindsight  as static, but the one plan that does best on the whole trace (hindsight.py)

Going back to more GPUs waits until what was missed since they came exceeds what the change costs,
so that GPUs which come and go do not cost more than they bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.planner.candidates import (
    fewest_ranks,
    knob_choices,
    with_knobs,
    with_most_replicas,
)
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    LengthDistribution,
    ModelStage,
    SpecError,
)

from .job import Failure, SimulatedJob
from .planning import Known, Planning
from .world import World

S = ModelStage


class Decision(NamedTuple):
    """A plan for the step that comes next. restart: through a checkpoint, not by a transition.
    predicted: what is expected of it (`TransitionRecord.predicted`)."""

    plan: GlobalPlan
    restart: bool = False
    predicted: Mapping[str, float] = MappingProxyType({})


class Policy(Protocol):
    """Asked at every boundary. It may know of the trace what a job can: the GPUs that are there,
    and what it has observed."""

    @property
    def name(self) -> str: ...

    def start(self, known: Known) -> GlobalPlan:
        """The plan the job starts in. Raises: SpecError: none fits."""
        ...

    def decide(self, job: SimulatedJob) -> Decision | None:
        """What to do before the step that comes next; None: nothing."""
        ...

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        """No order of moves of this transition fits in memory; the policy is asked once more."""
        ...

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        """The plan to start again in after a failure. Raises: SpecError: none fits."""
        ...


class Elsewhere(NamedTuple):
    """A policy that runs in another world than it is compared in: the job as another framework has
    it, under the same conditions, truth and chance."""

    world: World
    policy: Policy


class Missed:
    """Seconds that a job has lost by not running in the plan it could run in."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pays(
        self, job: SimulatedJob, target: GlobalPlan, planning: Planning, cost_s: float
    ) -> bool:
        """Count the last step in; whether it has become more than `cost_s`, and then begin anew."""
        last = job.observe()
        if last is not None:
            lengths = planning.lengths_of(last.metrics["response_length/mean"])
            here_s = planning.iteration_s(job.describe(), lengths)
            there_s = planning.iteration_s(target, lengths)
            self.seconds += max(0.0, last.step_s * (1.0 - there_s / here_s))
        if self.seconds <= cost_s:
            return False
        self.seconds = 0.0
        return True


# After each failure for want of memory, plans are made for this much less of it, and for lengths
# whose mean is so many times that of the last step.
LESS_MEMORY, LONGER = 0.94, 1.1


class Static:
    """See the module's docstring."""

    def __init__(
        self,
        name: str = "static",
        own: GlobalPlan | None = None,
        planning: Planning | None = None,
    ) -> None:
        """planning: where its plans come from; default the planner's."""
        self.name = name
        self.memory = 1.0
        self.mean_tokens: float | None = None  # to plan for; the first lengths'
        self.missed = Missed()
        self._given = own
        self._planning = planning
        self.planning: Planning
        self.own: GlobalPlan

    def start(self, known: Known) -> GlobalPlan:
        self.planning = self._planning or Planning(known)
        self.memory, self.mean_tokens = 1.0, None
        self.missed = Missed()
        self.own = self._given or self.sized(known.gpus)
        if max(self.own.devices) >= known.gpus:
            return self.sized(known.gpus)
        return self.own

    def decide(self, job: SimulatedJob) -> Decision | None:
        there, now = job.available(), job.describe()
        if max(self.own.devices) < there:
            if now == self.own:
                return None
            world = job.world
            cost_s = world.checkpoint_s(now) + sum(world.start_s(self.own).values())
            pays = self.missed.pays(job, self.own, self.planning, cost_s)
            return Decision(self.own, restart=True) if pays else None
        if max(now.devices) < there:
            return None
        return Decision(self.sized(there), restart=True)

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        pass  # it makes no transitions

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        self.learn(job, failure)
        found = self.sized(job.available())
        if failure.kind != "gpus" and job.describe() == self.own:
            self.own = found
        return found

    def learn(self, job: SimulatedJob, failure: Failure) -> None:
        """What whoever starts the job again has seen in its log."""
        if failure.kind == "gpus":
            return
        self.memory *= LESS_MEMORY
        last = job.observe()
        if last is not None:
            met = LONGER * last.metrics["response_length/mean"]
            self.mean_tokens = max(met, self.mean_tokens or 0.0)

    def sized(self, gpus: int) -> GlobalPlan:
        """The best plan for the first lengths on at most so many GPUs."""
        found = self.planning.sized(gpus, self.memory, self.mean_tokens)
        if found is None:
            raise SpecError(f"{self.name}: no plan fits {gpus} GPUs with the longest response")
        return found


class DPScaling:
    """See the module's docstring."""

    name = "dp_scaling"

    def __init__(self, planning: Planning | None = None) -> None:
        self.fixed = Static("dp_scaling", planning=planning)
        self._scaled: dict[tuple[int, float, float | None], GlobalPlan | None] = {}
        # Pairs of plans between which no transition was possible.
        self._impossible: set[tuple[object, object]] = set()

    def start(self, known: Known) -> GlobalPlan:
        self._scaled.clear()
        self._impossible.clear()
        return self.fixed.start(known)

    def decide(self, job: SimulatedJob) -> Decision | None:
        there, now = job.available(), job.describe()
        taken = max(now.devices) >= there
        target = self._for(there)
        if target is None:  # not even one replica of this TP and PP
            return self.fixed.decide(job) if taken else None
        if target.assignments == now.assignments:
            return None
        pair = (now.assignments, target.assignments)
        if pair in self._impossible:
            return Decision(target, restart=True) if taken else None
        if not taken:
            try:
                cost_s = job.world.transitions.cost(now, target).stall_s
            except InfeasibleTransition:
                self._impossible.add(pair)
                return None
            if not self.fixed.missed.pays(job, target, self.fixed.planning, cost_s):
                return None
        return Decision(target)

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        self._impossible.add((job.describe().assignments, decision.plan.assignments))

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        self.fixed.learn(job, failure)
        target = self._for(job.available())
        return target if target is not None else self.fixed.sized(job.available())

    def _for(self, gpus: int) -> GlobalPlan | None:
        key = (gpus, self.fixed.memory, self.fixed.mean_tokens)
        if key not in self._scaled:
            self._scaled[key] = scaled(self.fixed.own, gpus, self.fixed.planning, *key[1:])
        return self._scaled[key]


def scaled(
    own: GlobalPlan,
    gpus: int,
    planning: Planning,
    memory: float = 1.0,
    mean_tokens: float | None = None,
) -> GlobalPlan | None:
    """The plan with its DP for so many GPUs; its other dimensions stay.

    Parts of the cluster keep their shares. Knobs stay where the longest response fits with them,
    else they are the fastest with which it does. None where not even one replica, or no knobs, fit.
    mean_tokens: as of `Planning.sized_lengths`.
    """
    parts: dict[tuple[int, ...], list[ModelStage]] = {}
    for stage, assignment in own.assignments.items():
        parts.setdefault(assignment.devices, []).append(stage)
    total = 1 + max(own.devices)
    start = 0
    assignments: dict[ModelStage, Assignment] = {}
    for place in sorted(parts, key=min):
        room = gpus - start if len(parts) == 1 else len(place) * gpus // total
        used = 0
        for stage in parts[place]:
            before = own.assignments[stage]
            trained = stage is not S.ACTOR_GENERATE
            model = planning.known.setting.job.model_of(stage) if trained else None
            layout = with_most_replicas(before.layout, room, model)
            if layout is None:
                return None
            devices = tuple(range(start, start + layout.world_size))
            assignments[stage] = Assignment(layout, before.knobs, devices)
            used = max(used, layout.world_size)
        start += max(used, room) if len(parts) > 1 else used
    plan = GlobalPlan(assignments, name=f"dp for {gpus}")
    lengths = planning.sized_lengths(mean_tokens=mean_tokens)
    return _with_knobs_that_fit(plan, planning, memory, lengths)


def _with_knobs_that_fit(
    plan: GlobalPlan, planning: Planning, memory: float, lengths: LengthDistribution
) -> GlobalPlan | None:
    """The plan where it fits; else with the fastest other knobs of the trained units."""
    if planning.seconds(plan, lengths, memory) is not None:
        return plan
    workload = planning.known.setting.workload(lengths)
    found: list[tuple[float, GlobalPlan]] = []
    for trained in knob_choices(workload, trains=True, ranks=fewest_ranks(plan)):
        for away in (False, True):
            other = with_knobs(plan, trained, away)
            seconds = planning.seconds(other, lengths, memory)
            if seconds is not None:
                found.append((seconds, other))
    return min(found, key=lambda f: f[0])[1] if found else None
