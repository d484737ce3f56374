"""The one plan that does best on a whole trace, chosen with the trace and the truth known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nereus_plugins.spec import GlobalPlan, SpecError

from .planning import Known, Planning
from .policies import Static
from .world import World

# Lengths this close are costed once, as the longest of them.
_SAME = 1.1
# What a step may hold of memory before chance is added.
_ROOM = 0.985
_SIZES, _LENGTHS = 3, 5
_FINALISTS = 5


class StaticHindsight(Static):
    """`static` with the plan of `hindsight_plan`."""

    def __init__(self, world: World, run_s: Callable[[GlobalPlan], float]) -> None:
        """`run_s`: see `hindsight_plan`."""
        super().__init__("static_hindsight", planning=world.hindsight())
        self._world = world
        self._run_s = run_s

    def start(self, known: Known) -> GlobalPlan:
        self._given = hindsight_plan(self._world, self._world.hindsight(), self._run_s)
        return super().start(known)


def hindsight_plan(
    world: World, planning: Planning, run_s: Callable[[GlobalPlan], float]
) -> GlobalPlan:
    """The plan that, held for the whole trace, takes least time.

    Candidates: the planner's best for the numbers of GPUs and the lengths that the trace has, and
    sized for the longest response, made by `planning` (which knows the truth) and by the planner
    that does not. Each is costed on all conditions (lengths to 10 %) with the
    truth and without chance; where its GPUs are missing, by what `static` falls back to, restarts
    included. On a trace by wall clock the conditions are those that the planner's first plan meets.
    The best of them, and static's own, are then run.

    Args:
        run_s: seconds of the whole trace as `static` with this plan; infinite if it does not end.

    Raises: SpecError: no plan gets through the trace.
    """
    tried = [plan for _, plan in promising(world, planning)[:_FINALISTS]]
    own = world.planning(planning.rules).sized(world.known.gpus)
    if own is not None and own not in tried:
        tried.append(own)
    taken = {plan: run_s(plan) for plan in tried}
    best = min(tried, key=lambda plan: taken[plan], default=None)
    if best is None or math.isinf(taken[best]):
        raise SpecError("static_hindsight: no single plan gets through the trace")
    return best


def promising(world: World, planning: Planning) -> list[tuple[float, GlobalPlan]]:
    """Candidates for the whole trace with their costs in seconds (see `hindsight_plan`), least
    first."""
    trace = world.trace
    counts = _counts(world, planning)
    ordered, means = sorted(counts), sorted(trace.mean_response_tokens)
    sizes = {counts[0], *(ordered[i] for i in _spread(len(ordered), _SIZES))}
    lengths = [trace.response_tokens(means[i]) for i in _spread(len(means), _LENGTHS)]
    lengths.append(planning.sized_lengths())
    planners = (planning, world.planning(planning.rules))
    asked = ((who, size, one) for who in planners for size in sorted(sizes) for one in lengths)
    found = (who.best(size, one) for who, size, one in asked)
    candidates = dict.fromkeys(plan for plan in found if plan is not None)
    costs = _Costs(world, planning, list(_stretches(counts, trace.mean_response_tokens)))
    return sorted(((costs.total_s(plan), plan) for plan in candidates), key=lambda c: c[0])


class _Stretch(NamedTuple):
    """Steps one after the other with equal GPUs and lengths. bucket: of their lengths."""

    gpus: int
    bucket: int
    steps: int


class _Costs:
    def __init__(self, world: World, planning: Planning, stretches: Sequence[_Stretch]) -> None:
        self.world = world
        self.planning = planning
        self.stretches = stretches
        self.known: dict[tuple[object, int], float] = {}

    def total_s(self, plan: GlobalPlan) -> float:
        """Seconds of the trace; infinite where a step does not fit."""
        total, missed, now = 0.0, 0.0, plan
        for stretch in self.stretches:
            steps = stretch.steps
            if max(now.devices) >= stretch.gpus:
                fallback = self.planning.sized(stretch.gpus)
                if fallback is None:
                    return math.inf
                total += self._change_s(now, fallback)
                now = fallback
            if now != plan and max(plan.devices) < stretch.gpus:
                # Back once what was missed exceeds the restart, as `Missed` does.
                gain = self._step_s(now, stretch.bucket) - self._step_s(plan, stretch.bucket)
                back_s = self._change_s(now, plan)
                waits = math.ceil(max(0.0, back_s - missed) / gain) if gain > 0 else steps
                waits = min(steps, waits)
                total += waits * self._step_s(now, stretch.bucket)
                missed += waits * max(0.0, gain)
                steps -= waits
                if steps:
                    total += back_s
                    missed, now = 0.0, plan
            total += steps * self._step_s(now, stretch.bucket)
        return total

    def _change_s(self, now: GlobalPlan, then: GlobalPlan) -> float:
        """Seconds of a restart from one plan in another."""
        return self.world.checkpoint_s(now) + sum(self.world.start_s(then).values())

    def _step_s(self, plan: GlobalPlan, bucket: int) -> float:
        key = (plan.assignments, bucket)
        if key not in self.known:
            trace = self.world.trace
            tokens = min(_SAME**bucket, float(trace.max_response_tokens))
            workload = trace.setting.workload(trace.response_tokens(tokens))
            result = self.world.true_estimate(plan, workload)
            room = all(s.reserved_bytes <= _ROOM * s.capacity_bytes for s in result.stages.values())
            self.known[key] = result.iteration_s if result.fits and room else math.inf
        return self.known[key]


def _counts(world: World, planning: Planning) -> list[int]:
    """GPUs of each step."""
    trace = world.trace
    counts, elapsed_s = [], 0.0
    first = planning.sized(trace.conditions(0, 0.0).gpus)
    for step in range(trace.steps):
        met = trace.conditions(step, elapsed_s)
        counts.append(met.gpus)
        if trace.indexed_by == "wall_clock" and first is not None:
            seconds = planning.seconds(first, met.response_tokens)
            elapsed_s += seconds or 0.0
    return counts


def _spread(count: int, parts: int) -> list[int]:
    return [i * (count - 1) // (parts - 1) for i in range(parts)]


def _stretches(counts: Sequence[int], means: Sequence[float]) -> Iterator[_Stretch]:
    last: _Stretch | None = None
    for gpus, mean in zip(counts, means, strict=True):
        bucket = max(0, math.ceil(math.log(mean) / math.log(_SAME) - 1e-9))
        if last is not None and (last.gpus, last.bucket) == (gpus, bucket):
            last = last._replace(steps=last.steps + 1)
            continue
        if last is not None:
            yield last
        last = _Stretch(gpus, bucket, 1)
    if last is not None:
        yield last
