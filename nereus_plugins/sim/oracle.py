"""The clairvoyant: the sequence of plans that takes least time, with trace, truth and chance known.

Candidates are declared: every plan that a policy of the same engine ran in, and the planner's best
and its alternatives (made with the truth) for the GPUs and lengths that the trace has. Over them a
dynamic programme is exact: a state is a plan in force in a step; a step costs what the simulator
will say, a change its compiled graph, or a restart where that is cheaper or the only way. Steps and
transitions start as bounds from below and are computed where the best path needs them, until the
path has none left that is not exact (or nothing below it could save more than `TOLERANCE`).

Then it runs as any policy does. Beside it stands what no transition costs can take from it: the
sum over the steps of the fastest candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.controller.plans import ANCHOR, NO_HURRY
from nereus_plugins.cost.estimate import Estimate
from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.planner import plan
from nereus_plugins.spec import GlobalPlan, SpecError

from .job import Failure, SimulatedJob
from .planning import Known, capabilities_of
from .policies import Decision
from .truth import STAGES
from .world import World

# Relative: how far above the best of its candidates the path may be.
TOLERANCE = 0.0005
MOST_CANDIDATES = 160
MOST_ROUNDS = 200
# Conditions that are planned for: numbers of GPUs, those of most steps, and lengths of each.
_SIZES, _LENGTHS_APART = 16, 1.6
# Lengths this close have one bound, that of the shortest.
_SAME = 1.1
# Longer responses take longer, but for how they happen to be packed.
_LESS = 0.99
Costs = NDArray[np.float64]


class Oracle:
    """See the module's docstring.

    Attributes:
        about: what was searched and found, for the report.
    """

    name = "oracle"

    def __init__(self, world: World, run_others: Callable[[], None]) -> None:
        """run_others: runs the policies whose plans are candidates, where they have not been run.

        Raises: SpecError: a trace by wall clock.
        """
        if world.trace.indexed_by != "step":
            raise SpecError(
                "oracle: what a step meets on a trace by wall clock depends on the steps before, "
                "so that no table of steps says it: leave the oracle out"
            )
        self.world = world
        self._run_others = run_others
        self.about: dict[str, float] = {}
        self._path: list[GlobalPlan] = []

    def start(self, known: Known) -> GlobalPlan:
        self._run_others()
        search = _Search(self.world, candidates(self.world))
        free_s = search.free_s()
        path = search.best()
        self._path = [search.plans[at] for at in path]
        self.about = {
            "candidates": len(search.plans),
            "free_s": free_s,
            "free_step_s": free_s / len(path),
            "exact_to": search.gap,
        }
        return self._path[0]

    def decide(self, job: SimulatedJob) -> Decision | None:
        now, then = job.describe(), self._path[job.step]
        if now.assignments == then.assignments:
            return None
        return Decision(then, restart=_change(job.world, now, then)[1])

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        raise AssertionError("a transition that was compiled is possible")

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        raise SpecError(f"oracle: {failure.reason}")  # it has seen every step


def candidates(world: World) -> list[GlobalPlan]:
    """Plans that were run in, and the best few for the trace; at most `MOST_CANDIDATES`."""
    found = dict(world.visited)
    setting, trace = world.setting, world.trace
    lengths_at: dict[int, list[float]] = {}
    for step, mean in enumerate(trace.mean_response_tokens):
        lengths_at.setdefault(trace.conditions(step, 0.0).gpus, []).append(mean)
    for gpus in sorted(lengths_at, key=lambda g: -len(lengths_at[g]))[:_SIZES]:
        last = None
        for mean in _apart(lengths_at[gpus]):
            try:
                last = plan(
                    setting.job,
                    setting.cluster,
                    setting.workload(trace.response_tokens(mean)),
                    world.truth,
                    gpus=gpus,
                    capabilities=capabilities_of(setting.job),
                    current=ANCHOR,
                    horizon_steps=NO_HURRY,
                    after=last,
                )
            except SpecError:
                continue
            for one in (last.plan, *(other for other, _ in last.alternatives)):
                found.setdefault(one.assignments, one)
    return list(found.values())[:MOST_CANDIDATES]


def _apart(means: Sequence[float]) -> list[float]:
    """The longest, and shorter ones down to the shortest, apart by `_LENGTHS_APART`."""
    out = [max(means)]
    while out[-1] / _LENGTHS_APART > min(means):
        out.append(out[-1] / _LENGTHS_APART)
    return out


def _change(world: World, now: GlobalPlan, then: GlobalPlan) -> tuple[float, bool]:
    """(seconds, whether by a restart) of the cheaper way from one plan to the other."""
    restart_s = _restart_s(world, now, then)
    try:
        stall_s = world.transitions.cost(now, then).stall_s
    except (InfeasibleTransition, SpecError):
        return restart_s, True
    return min(stall_s, restart_s), restart_s < stall_s


def _restart_s(world: World, now: GlobalPlan, then: GlobalPlan) -> float:
    return world.checkpoint_s(now) + sum(world.start_s(then).values())


class _Search:
    """Costs of steps and changes, as bounds from below or exact, and the best path through them.

    step_s: float64[steps, plans], infinite where a plan cannot run. exact: bool of the same shape.
    change_s, change_exact: [plans, plans], from the row's to the column's.
    """

    def __init__(self, world: World, plans: list[GlobalPlan]) -> None:
        self.world = world
        self.plans = plans
        self.gap = 0.0
        steps, count = world.trace.steps, len(plans)
        self.step_s: Costs = np.full((steps, count), math.inf)
        self.exact = np.zeros((steps, count), bool)
        self._gpus = [world.trace.conditions(step, 0.0).gpus for step in range(steps)]
        for at in range(count):
            self._bound(at)
        self.change_s: Costs = np.zeros((count, count))
        self.change_exact = np.eye(count, dtype=bool)
        save = [world.checkpoint_s(one) for one in plans]
        start = [sum(world.start_s(one).values()) for one in plans]
        for a, now in enumerate(plans):
            for b, then in enumerate(plans):
                if a != b:
                    restart_s = save[a] + start[b]
                    self.change_s[a, b] = min(world.transitions.least_s(now, then), restart_s)

    def _bound(self, at: int) -> None:
        """Bounds of one plan in every step in which its GPUs are there."""
        world, chosen = self.world, self.plans[at]
        trace, needed = world.trace, max(chosen.devices)
        chance = world.chance.seconds
        known: dict[int, Estimate] = {}
        for step, mean in enumerate(trace.mean_response_tokens):
            if needed >= self._gpus[step]:
                self.exact[step, at] = True
                continue
            bucket = math.floor(math.log(mean) / math.log(_SAME) + 1e-9)
            if bucket not in known:
                workload = world.setting.workload(trace.response_tokens(_SAME**bucket))
                known[bucket] = world.true_estimate(chosen, workload)
            sure = known[bucket]
            if any(s.reserved_bytes > 1.02 * s.capacity_bytes for s in sure.stages.values()):
                self.exact[step, at] = True  # what does not fit shorter ones does not fit these
                continue
            self.step_s[step, at] = _LESS * _with_chance(sure, chance[step])

    def _compute_step(self, step: int, at: int) -> None:
        if self.exact[step, at]:
            return
        trace = self.world.trace
        mean = trace.mean_response_tokens[step]
        workload = self.world.setting.workload(trace.response_tokens(mean))
        result = self.world.step_estimate(self.plans[at], workload, step)
        self.step_s[step, at] = result.iteration_s if result.fits else math.inf
        self.exact[step, at] = True

    def free_s(self) -> float:
        """Seconds of all steps, each in its fastest candidate.

        Raises: SpecError: a step that no candidate gets through.
        """
        total = 0.0
        for step in range(len(self.step_s)):
            row = self.step_s[step]
            while not self.exact[step, at := int(row.argmin())]:
                self._compute_step(step, at)
            if math.isinf(row[at]):
                raise SpecError(f"oracle: no candidate gets through step {step + 1}")
            total += float(row[at])
        return total

    def best(self) -> list[int]:
        """The plan of each step. Raises: SpecError: no path reaches the end."""
        least_s, found, found_s = 0.0, [0], math.inf
        for _ in range(MOST_ROUNDS):
            least_s, path = self._shortest()
            if math.isinf(least_s):
                raise SpecError("oracle: no sequence of candidates gets through the trace")
            for step, at in enumerate(path):
                self._compute_step(step, at)
            for a, b in {(a, b) for a, b in pairwise(path) if a != b}:
                if not self.change_exact[a, b]:
                    self.change_s[a, b] = _change(self.world, self.plans[a], self.plans[b])[0]
                    self.change_exact[a, b] = True
            if (path_s := self._path_s(path)) < found_s:
                found_s, found = path_s, path
            if math.isfinite(found_s) and found_s - least_s <= TOLERANCE * found_s:
                break
        if math.isinf(found_s):
            raise SpecError("oracle: no sequence of candidates gets through the trace")
        self.gap = max(0.0, 1.0 - least_s / found_s)
        return found

    def _path_s(self, path: Sequence[int]) -> float:
        steps = float(self.step_s[np.arange(len(path)), path].sum())
        return steps + sum(float(self.change_s[a, b]) for a, b in pairwise(path))

    def _shortest(self) -> tuple[float, list[int]]:
        """(seconds, plan of each step) of the shortest path through the costs as they stand."""
        came = np.zeros(self.step_s.shape, np.int32)
        total = self.step_s[0].copy()
        for step in range(1, len(self.step_s)):
            through = total[:, None] + self.change_s
            came[step] = through.argmin(axis=0)
            total = through[came[step], np.arange(len(total))] + self.step_s[step]
        path = [int(total.argmin())]
        for step in range(len(self.step_s) - 1, 0, -1):
            path.append(int(came[step, path[-1]]))
        return float(total.min()), path[::-1]


def _with_chance(sure: Estimate, factors: NDArray[np.float64]) -> float:
    """Seconds of an iteration at least, each stage stretched by its factor; exact where stages take
    turns."""
    in_turn = sum(stage.seconds for stage in sure.stages.values())
    if abs(in_turn - sure.iteration_s) > 1e-9 * in_turn:
        return sure.iteration_s * float(min(factors[STAGES.index(s)] for s in sure.stages))
    return sum(factors[STAGES.index(s)] * one.seconds for s, one in sure.stages.items())
