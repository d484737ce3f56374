"""The controller of one job: learns from its records, says at each boundary in which plan to go on.

It never executes anything and never touches the job: whoever drives the job asks `decide` before a
step, runs what is proposed or does not, and hands every record to `observe`. The same object serves
a live job and a simulated one.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nereus_plugins.cost.calibrate import measured_seconds
from nereus_plugins.job import Lease
from nereus_plugins.planner.search import MARGIN
from nereus_plugins.spec import GlobalPlan, ModelStage, SpecError
from nereus_plugins.trace.record import (
    Record,
    StepRecord,
    TransitionRecord,
    parse_record,
)
from nereus_plugins.trace.steps import observed_of

from .admission import Verdict, admit, confidence_of, quantile, worth_of_trying
from .backoff import BackOff
from .books import Books
from .config import ControllerConfig
from .decision import Alternative, Decision, Numbers
from .forecast import LengthForecast, Lifetime
from .journal import DecisionJournal, DecisionJournalError
from .learned import SETTLED, Learned
from .leases import Level, levels, usable, within
from .plans import ANCHOR, GRID, SEARCH_GRID, Judged, Plans, fits
from .proof import BARRED_STEPS, TRIAL_STEPS, Proof, barred
from .setting import JobSetting
from .transition import Corrected, Estimator, GraphEstimator, TransitionEstimate

# The plan in force is left when it is forecast to fill this part of a GPU; a new one has to fit
# with the planner's margin.
FULL = 0.985
# A plan expected to fill this part that runs out needed more than was expected of it.
_NEARLY_FULL = 0.9
# Plans are compared at the lengths expected so many steps ahead.
_AHEAD = 5
# Standard deviations of forecast lengths that memory has to suffice for.
_DEVIATIONS = 2.5
# A search is made again when stages' factors have moved by this against each other.
_RELEARNED = 0.08
# The state is journaled at least so often; records since then are learned from again on resuming.
_STATE_EVERY = 50
# Plans are compared at least so often.
_COMPARE_EVERY = 5
_CONSIDERED = 4
_MOST_DWELL = 40
_BUDGET_AHEAD = 100
_GRANTED = "beyond the budget, to the plan that would have been best to hold"
# A job takes up one of so many of the last proposals, or none.
_TAKEN_UP = 8
# Steps in a plan, in conditions that stay, before another is tried for what it may tell.
_STEADY = 20
# Of the best plan's gain, what a change of knobs alone must bring to be preferred.
_MOST = 0.7


@dataclasses.dataclass(frozen=True)
class _Option:
    """A plan that could be proposed.

    steps: how many it is expected to last; lent: its GPUs have to be left after these.
    """

    plan: GlobalPlan
    judged: Judged
    memory: float
    saving_s: float
    spread_s: float
    steps: float
    lent: bool = False


class _Weighed(NamedTuple):
    """net_s: what it brings over the horizon with the stated confidence, its transition paid: of
    plans that seem equally fast, the one that is known better."""

    option: _Option
    verdict: Verdict
    numbers: Numbers
    digest: str
    net_s: float


class Controller:
    """See the module's docstring. Not safe for use by several threads at once."""

    def __init__(
        self,
        setting: JobSetting,
        config: ControllerConfig,
        plan: GlobalPlan,
        epoch: int,
        journal: DecisionJournal | None = None,
        *,
        clock: Callable[[], float] = time.time,
        transitions: Estimator | None = None,
    ) -> None:
        """
        Args:
            plan, epoch: in force.
            journal: where observations and decisions are made durable; None keeps none.
            clock: seconds since the epoch, for the journal.
            transitions: what a transition takes before it is corrected by those of the job;
                default by its graph.
        """
        self.setting = setting
        self.config = config
        self.plan = plan
        self.epoch = epoch
        self._journal = journal
        self._clock = clock
        self._transitions = transitions or GraphEstimator(
            setting.setting, sharing_fixed=setting.sharing_fixed
        )
        self.learned = Learned()
        self.plans = Plans(setting, self.learned)
        self.lengths = LengthForecast()
        self.lifetime = Lifetime()
        self.books = Books()
        self.back_off = BackOff()
        self.corrected = Corrected()
        self.proofs: list[Proof] = []
        self._step_s = 0.0
        self._steps = 0
        self._in_force = 0
        self._gpus = 0
        self._preferred: GlobalPlan | None = None
        # GPUs and, on a grid, lengths that it came to be preferred in.
        self._preferred_for = (0, 0)
        self._version = 0
        self._weights: dict[ModelStage, float] = {}
        self._compared: tuple[object, int] = (None, 0)
        # GPUs that plans were last compared for.
        self._judged_for = 0
        self._proposed: list[Decision] = []
        # Transitions that were aborted: plans, after which step, how often.
        self._aborted: dict[object, tuple[GlobalPlan, GlobalPlan, int, int]] = {}
        self._since_state = 0
        self._said: object = None
        self._write(
            "start",
            {"setting": setting.to_dict(), "config": config.to_dict(), **self._in_force_dict()},
        )

    # What a job tells.

    def observe(self, record: Record) -> None:
        """Learn from a finished step or an attempted transition; other records are passed over.

        A committed transition that was proposed here (its record says what was predicted) puts the
        proposed plan in force, unless the rollout fell back; any other change of plan has to be
        told with `adopt`.
        """
        if isinstance(record, (StepRecord, TransitionRecord)):
            self._write("observation", {"record": record.to_dict()})
            self._learn(record)
            self._since_state += 1
            if self._since_state >= _STATE_EVERY:
                self._write_state()

    def adopt(self, plan: GlobalPlan, epoch: int) -> None:
        """The plan and epoch in force, where others changed them; without effect where they are
        known. To be called at a boundary before `decide`."""
        if epoch == self.epoch and plan.assignments == self.plan.assignments:
            return
        self.epoch = epoch
        if plan.assignments != self.plan.assignments:
            self._entered(plan)
        self._write_state()

    def decide(self, leases: Sequence[Lease], steps_done: int) -> Decision:
        """In which plan to go on with the step that comes next. Nothing is executed.

        Args:
            leases: as the job port says.
            steps_done: how many steps of the run are finished.

        Raises: OSError, DecisionJournalError: the decision could not be made durable.
        """
        decision = self._decided(leases, steps_done)
        self._note(decision)
        self._write_decision(decision)
        return decision

    def recovery_plan(self, gpus: int, *, out_of_memory: bool = False) -> GlobalPlan:
        """The plan to start again in after a failure, on at most so many GPUs.

        Raises: SpecError: none fits.
        """
        if out_of_memory:
            self._ran_out()
        mean, high = self._mean(), self._high()
        for memory_of in (high, self._forecast_high()):
            options = [
                (self.plans.judge(one, mean).step_s, one)
                for one in self._candidates((gpus,), mean, memory_of, self.plan)
                if max(one.devices) < gpus and fits(self.plans.memory(one, memory_of))
            ]
            if options:
                return min(options, key=lambda option: option[0])[1]
        raise SpecError(f"no plan fits {gpus} GPUs with responses of {high:.0f} tokens")

    def _ran_out(self) -> None:
        """A step did not fit. Near what was expected, the expectation was too low; far from it,
        lengths were others than any that were seen."""
        mean, high = self._mean(), self._high()
        made = self.plans.estimate(self.plan, mean)
        if made is not None and self.plans.memory(self.plan, high) > _NEARLY_FULL:
            top = made.peak
            beside = sum(top.resting.values())
            own = max(1.0, top.reserved_bytes - beside)
            self.learned.memory.exceeded(own, top.capacity_bytes - beside)
            self._version += 1
        else:
            self.lengths.exceeded(float(self.setting.max_response_tokens))
        self._write_state()

    # Learning.

    def _learn(self, record: StepRecord | TransitionRecord) -> None:
        if isinstance(record, TransitionRecord):
            self._learn_transition(record)
        else:
            self._learn_step(record)

    def _learn_step(self, record: StepRecord) -> None:
        self._steps = record.step
        # verl records a step after the transition at its end.
        before = record.epoch < self.epoch
        self._in_force += not before
        if record.samples <= 0 or not _is_measured(record.alone_s):
            return
        metrics, layouts = observed_of(record)
        mean = metrics.get("response_length/mean", 0.0)
        if not _is_measured(mean):
            return
        self.lengths.observe(mean)
        self.lifetime.steps += 1
        rate = 0.2 if self._step_s else 1.0
        self._step_s += rate * (min(record.alone_s, 3 * (self._step_s or math.inf)) - self._step_s)
        if before or any(
            layouts[stage.model] != one.layout
            for stage, one in self.plan.assignments.items()
            if stage.model in layouts and stage is not ModelStage.ACTOR_GENERATE
        ):
            return  # the step ran in another plan than is known here
        made = self.plans.estimate(self.plan, mean)
        if made is None:
            return
        measured = {
            stage: seconds
            for stage, seconds in measured_seconds(metrics).items()
            if stage in made.stages and _is_measured(seconds)
        }
        allocated = float(record.memory_bytes.get("allocated", 0))
        self.learned.observe(
            self.plan.assignments, made, measured, allocated if _is_measured(allocated) else None
        )
        self.books.step(self.plans, self.plan, mean, record.alone_s, self._gpus)
        for proof in self.proofs:
            if proof.open and proof.plan.assignments == self.plan.assignments:
                proof.observe(self.plans, mean, record.alone_s, self.config.confidence)
                if not proof.open:
                    self._write("proof", {"proof": proof.to_dict()})
        if self._in_force >= SETTLED:
            self._check_version()

    def _learn_transition(self, record: TransitionRecord) -> None:
        proposed = self._proposal_of(record)
        stall_s = record.stall_s
        # Training followed and the rollout did not: what is in force is neither plan, and is told.
        fell_back = bool(record.rollout.get("fell_back"))
        if record.outcome == "committed":
            self.books.stall(stall_s)
            self.learned.calibration.after_transition()
            if proposed is not None and proposed.plan is not None and not fell_back:
                self._close_proofs()
                self._note_gpus(proposed, record.step, stall_s)
                if proposed.reason.startswith(_GRANTED):
                    self.books.granted += 1
                if proposed.numbers is not None:
                    parts = proposed.numbers.transition_parts_s
                    self.corrected.observe(sum(parts.values()) / self.corrected.factor, stall_s)
                    self.proofs.append(Proof.begin(proposed, self.plan, record.step, stall_s))
                self.epoch = record.epoch
                self._entered(proposed.plan)
                self._write_state()
        elif record.outcome == "aborted":
            self.books.stall(stall_s)
        failed = record.outcome == "aborted" or fell_back
        if failed and proposed is not None and proposed.plan is not None:
            key = (self.plan.assignments, proposed.plan.assignments)
            times = self._aborted[key][3] + 1 if key in self._aborted else 1
            self._aborted[key] = (self.plan, proposed.plan, self._steps, times)

    def _proposal_of(self, record: TransitionRecord) -> Decision | None:
        """The decision whose transition this is; None where others asked for it."""
        if not record.predicted:
            return None
        predicted = dict(record.predicted)
        for one in reversed(self._proposed):
            if one.epoch == self.epoch and one.predicted() == predicted:
                return one
        return None

    def _note_gpus(self, proposed: Decision, step: int, stall_s: float) -> None:
        """The plan in force is left for one on more GPUs, or because GPUs are leaving."""
        assert proposed.plan is not None
        held = max(self.plan.devices)
        if held >= proposed.gpus:
            self.back_off.left(step, stall_s)
        elif max(proposed.plan.devices) > held and not proposed.forced:
            assert proposed.numbers is not None
            self.back_off.took(step, proposed.numbers.saving_s, stall_s)

    def _close_proofs(self) -> None:
        """The plan in force is left: what was measured of it must do."""
        for proof in self.proofs:
            if proof.open:
                proof.close(self.plans, self._mean(), self.config.confidence)
                self._write("proof", {"proof": proof.to_dict()})

    def _dwell_steps(self) -> int:
        """Steps in a plan before another may be preferred: as many as it takes to know its seconds
        to the least gain."""
        least = max(0.01, self.config.least_gain)
        needed = math.ceil(0.5 * self.learned.most_noise() ** 2 / least**2)
        return max(1, self.config.dwell_steps, min(needed, _MOST_DWELL))

    def _entered(self, plan: GlobalPlan) -> None:
        self.plan = plan
        self._in_force = 0
        self._proposed = []

    def _check_version(self) -> None:
        """Searches are made again when what was learned could change what they find: stages have
        moved against each other."""
        factors = self.learned.stage_factors()
        if not factors:
            return
        middle = statistics.median(factors.values())
        weights = {stage: factor / middle for stage, factor in factors.items()}
        if not self._weights or any(
            abs(math.log(weight / self._weights.get(stage, weight))) > _RELEARNED
            for stage, weight in weights.items()
        ):
            self._weights = weights
            self._version += 1

    def _note(self, decision: Decision) -> None:
        """What a decision changes of what is known here; also where it is read from the journal."""
        if decision.kind == "propose":
            brief = dataclasses.replace(decision, alternatives=())
            self._proposed = [*self._proposed, brief][-_TAKEN_UP:]
        self._steps, self._gpus = decision.step, decision.gpus
        compared = [(one.plan, one.numbers) for one in decision.alternatives]
        if decision.plan is not None and decision.numbers is not None:
            compared.append((decision.plan, decision.numbers))
        if not compared:
            return
        compared.sort(key=lambda one: one[1].new_step_s)
        for plan, numbers in compared[:2]:
            if numbers.saving_s > 0:
                self.books.know(plan)
        fastest = compared[0][0] if compared[0][1].saving_s > 0 else self.plan
        met = (decision.gpus, round(math.log(decision.mean_response_tokens) / SEARCH_GRID))
        if self._preferred is None or _layouts(fastest) != _layouts(self._preferred):
            # In the same conditions it is what was learned that has changed.
            self.lifetime.changes += self._preferred is not None and met != self._preferred_for
            self._preferred, self._preferred_for = fastest, met

    # Deciding.

    def _mean(self) -> float:
        """Mean length to plan for: some way into the next steps."""
        if not self.lengths.seen:
            return self.setting.response_tokens.mean_tokens()
        return self._cut(self.lengths.at(_AHEAD))

    def _high(self) -> float:
        """Mean length that memory has to suffice for."""
        if not self.lengths.seen:
            return self._cut(1.1 * self.setting.response_tokens.mean_tokens())
        return self._cut(self.lengths.high(self.config.look_ahead_steps, _DEVIATIONS))

    def _forecast_high(self) -> float:
        """The same, but for lengths that may come back."""
        if not self.lengths.seen:
            return self._high()
        return self._cut(self.lengths.at(self.config.look_ahead_steps, _DEVIATIONS))

    def _cut(self, mean_tokens: float) -> float:
        return min(mean_tokens, float(self.setting.max_response_tokens))

    def _leave_s(self) -> float:
        """Seconds before a lease ends from which on its GPUs are left: then there is no time for a
        step, one that is twice as long as usual, and the transition."""
        return 3.0 * self._step_s + 2.0 * self._usual_stall_s()

    def _usual_stall_s(self) -> float:
        return 60.0 if not self.proofs else max(p.stall_s for p in self.proofs[-5:])

    def _decided(self, leases: Sequence[Lease], steps_done: int) -> Decision:
        self._steps = steps_done
        leave_s = self._leave_s()
        there = usable(leases, leave_s)
        mean, high = self._mean(), self._high()
        now = self.plans.judge(self.plan, mean)
        memory = self.plans.memory(self.plan, high)
        left = max(0, self.setting.steps - steps_done)
        steps = min(float(left), self.lifetime.expected_steps())
        held = 1 + max(self.plan.devices)
        found = levels(leases, leave_s, self._step_s or now.step_s, steps, held)
        most = found[-1].gpus if found else 0

        def decision(kind: str, reason: str, **more: Any) -> Decision:
            return Decision(kind, reason, steps_done, self.epoch, there, mean, **more)

        gone = held > there
        full = memory > FULL
        # GPUs are left in any case: a run may take more steps than was known when it began.
        if left == 0 and not (gone or full):
            return decision("stay", "the run is done")
        if math.isinf(now.step_s) and not gone:
            return decision("stay", "the cost model cannot say what the plan in force takes")
        if not (gone or full):
            if not self.lengths.seen:
                return decision("stay", "no step was observed yet")
            dwell = max(self._dwell_steps(), TRIAL_STEPS if self._on_trial(mean) else 0)
            if self._in_force < dwell and most == self._judged_for:
                return decision("stay", f"in this plan for {self._in_force} steps, of {dwell}")
        if not (gone or full) and not self._due(found, mean, steps_done):
            return decision("stay", "nothing has changed since plans were last compared")
        self._judged_for = most
        if gone or full:
            found = within(found, held)  # further ones that have to be left are not moved onto
        if not found:
            return decision("stay", "there are no GPUs to stay on", forced=True)
        options = self._options(found, there, mean, high, now, steps)
        if gone and not options:
            # That they were found slower than what cannot be held now does not count.
            options = self._options(found, there, mean, high, now, steps, slower_too=True)
        if full and not options:
            # None with the planner's margin: then one that is less full than this.
            fullest = min(FULL, memory - 0.01)
            options = self._options(found, there, mean, high, now, steps, fullest)
        if gone or full:
            why = (
                f"{held - there} GPUs are leaving"
                if gone
                else f"memory is forecast to fill to {100 * min(memory, 9.99):.1f} % within "
                f"{self.config.look_ahead_steps} steps"
            )
            return self._forced(decision, why, options, now)
        made = self._unforced(decision, options, now)
        more = made.plan is not None and max(made.plan.devices) >= held
        saves_s = made.numbers.saving_s if more and made.numbers is not None else 0.0
        if not self.back_off.waits(steps_done, saves_s) or not more:
            return made
        made = self._unforced(decision, [o for o in options if max(o.plan.devices) < held], now)
        if made.kind == "stay":
            made = dataclasses.replace(made, reason=f"{self.back_off}; {made.reason}")
        return made

    def _due(self, found: Sequence[Level], mean: float, steps_done: int) -> bool:
        """Whether plans are to be compared again: conditions or what is known of them are others,
        or it is some steps ago."""
        gpus = tuple(level.gpus for level in found)
        about = (gpus, round(math.log(mean) / GRID), self._version, self.plan.assignments)
        about_before, at = self._compared
        if about == about_before and at <= steps_done < at + _COMPARE_EVERY:
            return False
        self._compared = (about, steps_done)
        return True

    def _candidates(
        self, counts: Iterable[int], mean: float, high: float, current: GlobalPlan
    ) -> Iterable[GlobalPlan]:
        """Plans worth judging on so many GPUs; of each count the planner's preferred one first."""
        out: list[GlobalPlan] = []
        for gpus in counts:
            found = self.plans.searched(gpus, mean, current, self._version)
            if not found or not fits(self.plans.memory(found[0], high)):
                found = [*self.plans.searched(gpus, high, current, self._version), *found]
            scaled = self.plans.scaled(current, gpus)
            out += [*found, *([scaled] if scaled else [])]
            for one in (current, *found[:1], *([scaled] if scaled else [])):
                out += self.plans.with_other_knobs(one, high)
        out += self.books.plans()
        return {one.assignments: one for one in out}.values()

    def _options(
        self,
        found: Sequence[Level],
        there: int,
        mean: float,
        high: float,
        now: Judged,
        steps: float,
        fullest: float = 1.0 - MARGIN,
        slower_too: bool = False,
    ) -> list[_Option]:
        """Every candidate that fits on the GPUs at the lengths to come; fastest first.

        Args:
            found: GPUs to plan for. there: that the next step may use.
            steps: that plans are expected to last where their GPUs do.
            fullest: the part of a GPU that a plan may take; default with the planner's margin.
            slower_too: also plans that were found slower than the one that they were entered from.
        """
        out = []
        for one in self._candidates([level.gpus for level in found], mean, high, self.plan):
            level = next((level for level in found if max(one.devices) < level.gpus), None)
            if one.assignments == self.plan.assignments or level is None:
                continue
            if self._aborted_lately(one):
                continue
            if not slower_too and barred(self.proofs, one, self._steps, there, mean):
                continue
            memory = self.plans.memory(one, high)
            if memory > fullest:
                continue
            judged = self.plans.judge(one, mean)
            saving, spread = self.plans.saving(self.plan, now, one, judged)
            lent = level.steps < steps
            lasts = min(steps, level.steps)
            out.append(_Option(one, judged, memory, saving, spread, lasts, lent))
        out.sort(key=lambda option: option.judged.step_s)
        # Of plans that differ in knobs alone, the fastest.
        best: dict[object, _Option] = {}
        for option in out:
            best.setdefault(_layouts(option.plan), option)
        return list(best.values())

    def _aborted_lately(self, plan: GlobalPlan) -> bool:
        """Whether the transition there was aborted too few steps ago; twice as many each time."""
        found = self._aborted.get((self.plan.assignments, plan.assignments))
        return found is not None and self._steps < found[2] + BARRED_STEPS * 2 ** (found[3] - 1)

    def _transition(self, plan: GlobalPlan) -> tuple[TransitionEstimate | None, dict[str, float]]:
        found = self._transitions(self.plan, plan)
        return found, self.corrected.seconds(found) if found is not None else {}

    def _numbers(self, option: _Option, now: Judged) -> tuple[Numbers, str]:
        """(numbers, digest); a transition that is not possible takes for ever."""
        found, parts = self._transition(option.plan)
        cost = sum(parts.values()) if found is not None else math.inf
        sure = confidence_of(
            option.saving_s, option.spread_s, option.steps, cost * (1.0 + self._again(option))
        )
        numbers = Numbers(
            now.step_s, option.judged.step_s, option.saving_s, option.spread_s, option.steps, sure,
            option.memory, cost if found is not None else None, parts,
        )  # fmt: skip
        return numbers, found.digest if found is not None else ""

    def _again(self, option: _Option) -> float:
        """Probability that a plan has to be left again."""
        if option.lent:
            return 1.0
        left = self.setting.steps - self._steps
        return self.lifetime.change_within(left)

    def _same_layouts(self, plan: GlobalPlan) -> bool:
        return _layouts(plan) == _layouts(self.plan)

    def _forced(
        self,
        decision: Callable[..., Decision],
        why: str,
        options: list[_Option],
        now: Judged,
    ) -> Decision:
        """The cheapest safe plan: least transition and steps together, over the horizon.

        The horizon is that of the plans that last longest. One whose GPUs have to be left before is
        followed by the cheapest of these: its transition, and the steps that are left.
        """
        reached = []
        for option in self._considered(options):
            numbers, digest = self._numbers(option, now)
            if numbers.transition_s is not None:
                steps = max(1.0, option.steps)
                spent_s = numbers.transition_s + steps * option.judged.step_s
                reached.append((spent_s, steps, option, numbers, digest))
        if not reached:
            return decision("stay", f"{why}, and no plan that fits can be reached", forced=True)
        horizon = max(steps for _, steps, _, _, _ in reached)
        last_s, after_s = min(
            (spent_s, option.judged.step_s)
            for spent_s, steps, option, _, _ in reached
            if steps == horizon
        )
        judged = [
            (
                spent_s if steps == horizon else spent_s + last_s - steps * after_s,
                option, numbers, digest,
            )
            for spent_s, steps, option, numbers, digest in reached
        ]  # fmt: skip
        judged.sort(key=lambda one: one[0])
        total, option, numbers, digest = judged[0]
        others = tuple(
            Alternative(o.plan, f"takes {t - total:.0f} s more over {horizon:.0f} steps", n)
            for t, o, n, _ in judged[1:]
        )
        return decision(
            "propose", f"{why}: the cheapest plan that fits", plan=option.plan, digest=digest,
            forced=True, numbers=numbers, alternatives=others,
        )  # fmt: skip

    def _considered(self, options: Sequence[_Option]) -> Iterable[_Option]:
        """Of plans that last equally long, those that change knobs alone, and the fastest."""
        for steps in dict.fromkeys(option.steps for option in options):
            alike = [option for option in options if option.steps == steps]
            knobs = [option for option in alike if self._same_layouts(option.plan)][:_CONSIDERED]
            yield from knobs
            yield from [option for option in alike if option not in knobs][:_CONSIDERED]

    def _unforced(
        self,
        decision: Callable[..., Decision],
        options: list[_Option],
        now: Judged,
    ) -> Decision:
        worth = [o for o in options if o.saving_s > 0]
        if not worth:
            return self._trial(decision, options, now) or decision(
                "stay",
                "no plan that fits is expected to be faster",
                alternatives=tuple(_slower(o, now) for o in options[:1]),
            )
        knobs = [o for o in worth if self._same_layouts(o.plan)]
        ranked = worth[:_CONSIDERED]
        former = [o for o in worth if self._disproved(o.plan)]
        ranked += [o for o in (*knobs[:1], *former) if o not in ranked]
        verdicts = [self._judged(option, now) for option in ranked]
        admitted = [one for one in verdicts if one.verdict.admitted]
        if not admitted:
            return self._trial(decision, options, now) or decision(
                "stay",
                verdicts[0].verdict.reason,
                alternatives=tuple(
                    Alternative(one.option.plan, one.verdict.reason, one.numbers)
                    for one in verdicts
                ),
            )
        best = max(admitted, key=lambda one: one.net_s)
        cheap = (one for one in admitted if self._same_layouts(one.option.plan))
        best = next((one for one in cheap if one.net_s >= _MOST * best.net_s), best)
        return decision(
            "propose", best.verdict.reason, plan=best.option.plan, digest=best.digest,
            numbers=best.numbers,
            alternatives=tuple(
                Alternative(
                    one.option.plan,
                    f"brings {best.net_s - one.net_s:.0f} s less"
                    if one.verdict.admitted
                    else one.verdict.reason,
                    one.numbers,
                )
                for one in verdicts
                if one is not best
            ),
        )  # fmt: skip

    def _trial(
        self,
        decision: Callable[..., Decision],
        options: list[_Option],
        now: Judged,
    ) -> Decision | None:
        """A plan whose layouts were never run, for what running it may tell; None where that is not
        worth it. Only where few steps tell: in steady conditions, with little noise."""
        if self._in_force < _STEADY or self._dwell_steps() > max(1, self.config.dwell_steps):
            return None
        known = self.learned.calibration.seconds_filters
        untried = [
            option
            for option in options
            if any((s, option.plan.assignments[s].layout) not in known for s in now.stages)
        ]
        best: tuple[float, _Option, Numbers, str] | None = None
        for option in untried[:_CONSIDERED]:
            other = {s for s in now.stages if not self._same_layout(s, option.plan)}
            noise = self.learned.noise() / math.sqrt(TRIAL_STEPS)
            noise_s = math.hypot(*(noise * now.stages[s].seconds for s in other))

            def worth_s(transition_s: float, one: _Option = option, n: float = noise_s) -> float:
                return worth_of_trying(
                    one.saving_s, one.spread_s, n, one.steps, TRIAL_STEPS, transition_s
                )

            if worth_s(0.0) <= (best[0] if best else 0.0):
                continue
            numbers, digest = self._numbers(option, now)
            if numbers.transition_s is None:
                continue
            most_s = TRIAL_STEPS * max(0.0, 2.0 * option.spread_s - option.saving_s)
            most_s += 2.0 * numbers.transition_s
            found_s = worth_s(numbers.transition_s)
            if found_s > (best[0] if best else 0.0) and (
                self.books.regret_s() + most_s <= self._budget_s(now)
            ):
                best = (found_s, option, numbers, digest)
        if best is None:
            return None
        found_s, option, numbers, digest = best
        return decision(
            "propose",
            f"never tried: expected to save {option.saving_s:.1f} s (+- {option.spread_s:.1f}) of "
            f"{now.step_s:.1f} s a step; to know is worth {found_s:.0f} s over {option.steps:.0f} "
            "steps",
            plan=option.plan, digest=digest, trial=True, numbers=numbers,
        )  # fmt: skip

    def _same_layout(self, stage: ModelStage, plan: GlobalPlan) -> bool:
        return self.plan.assignments[stage].layout == plan.assignments[stage].layout

    def _judged(self, option: _Option, now: Judged) -> _Weighed:
        """An option, weighed. The graph of its transition is compiled only if it would be admitted
        were the transition free."""
        back = self._disproved(option.plan)
        config = dataclasses.replace(self.config, least_gain=0.0) if back else self.config
        again, regret_s = self._again(option), self.books.regret_s()

        def verdict_for(transition_s: float, budget_s: float) -> Verdict:
            return admit(
                config, step_s=now.step_s, saving_s=option.saving_s, spread_s=option.spread_s,
                steps=option.steps, transition_s=transition_s, again=again, regret_s=regret_s,
                budget_s=budget_s,
            )  # fmt: skip

        free = verdict_for(0.0, math.inf)
        if not free.admitted:
            numbers = _numbers_without_transition(option, now, free.confidence)
            return _Weighed(option, free, numbers, "", -math.inf)
        numbers, digest = self._numbers(option, now)
        transition_s = math.inf if numbers.transition_s is None else numbers.transition_s
        budget_s = self._budget_s(now)
        granted = self.books.leads(option.plan, self.plan, transition_s)
        verdict = verdict_for(transition_s, math.inf if back or granted else budget_s)
        if verdict.admitted and back:
            found = "the plan in force was found slower than this one, which was left for it"
            verdict = verdict._replace(reason=f"{found}: {verdict.reason}")
        elif verdict.admitted and regret_s + transition_s > budget_s:
            verdict = verdict._replace(reason=f"{_GRANTED}: {verdict.reason}")
        at_least_s = option.saving_s - quantile(config.confidence) * option.spread_s
        net_s = at_least_s * option.steps - transition_s
        return _Weighed(option, verdict, numbers, digest, net_s)

    def _budget_s(self, now: Judged) -> float:
        """What unforced transitions may have cost by now, some steps ahead of the run's progress so
        that a first one is possible."""
        ahead = min(_BUDGET_AHEAD, max(0, self.setting.steps - self._steps))
        return self.config.budget * (self._steps + ahead) * (self._step_s or now.step_s)

    def _on_trial(self, mean: float) -> bool:
        """Whether the plan in force is being tried: its first steps alone would be noise."""
        if not self.proofs:
            return False
        last = self.proofs[-1]
        return last.open and last.trial and last.alike(mean)

    def _disproved(self, plan: GlobalPlan) -> bool:
        """Whether the plan in force was found slower than this one, which it was entered from."""
        if not self.proofs:
            return False
        last = self.proofs[-1]
        return (
            last.slower
            and last.alike(self._mean())
            and last.plan.assignments == self.plan.assignments
            and last.former.assignments == plan.assignments
        )

    # The journal.

    def _in_force_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "epoch": self.epoch, "time_unix_s": self._clock()}

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(kind, content)

    def _write_decision(self, decision: Decision) -> None:
        """One that only repeats the last is not written again."""
        says = (
            decision.kind, decision.gpus, re.split(r"\d", decision.reason)[0], decision.plan,
            tuple(one.plan.assignments for one in decision.alternatives),
        )  # fmt: skip
        if decision.kind == "stay" and says == self._said:
            return
        self._write("decision", {"decision": decision.to_dict(), "time_unix_s": self._clock()})
        self._said = says

    def _write_state(self) -> None:
        self._since_state = 0
        self._write("state", {"state": self.to_dict()})

    def to_dict(self) -> dict[str, Any]:
        """Everything that was learned, JSON-able."""
        return {
            **self._in_force_dict(),
            "learned": self.learned.to_dict(),
            "lengths": dataclasses.asdict(self.lengths),
            "lifetime": dataclasses.asdict(self.lifetime),
            "books": self.books.to_dict(),
            "back_off": dataclasses.asdict(self.back_off),
            "corrected": dataclasses.asdict(self.corrected),
            "proofs": [proof.to_dict() for proof in self.proofs],
            "proposed": [decision.to_dict() for decision in self._proposed],
            "aborted": [
                [old.to_dict(), new.to_dict(), step, times]
                for old, new, step, times in self._aborted.values()
            ],
            "preferred": self._preferred.to_dict() if self._preferred is not None else None,
            "preferred_for": list(self._preferred_for),
            "step_s": self._step_s,
            "steps": self._steps,
            "in_force": self._in_force,
            "gpus": self._gpus,
            "judged_for": self._judged_for,
        }

    @classmethod
    def resume(
        cls,
        journal: DecisionJournal,
        *,
        clock: Callable[[], float] = time.time,
        transitions: Estimator | None = None,
    ) -> Controller:
        """The controller that wrote this journal, as it was: what it learned, what it tried and
        left, its budget. Records since its last state are learned from again.

        Raises: DecisionJournalError: a journal that is damaged, has no beginning, or is not this
            version's; OSError.
        """
        entries = journal.read()
        starts = [i for i, entry in enumerate(entries) if entry["kind"] == "start"]
        if not starts:
            raise DecisionJournalError(f"{journal.path}: no controller has begun in it")
        try:
            made = cls._replayed(entries[starts[-1] :], clock, transitions)
            said = [e["proof"] for e in entries[starts[-1] :] if e["kind"] == "proof"]
            known = {(one["epoch"], one["step"]) for one in said}
        except (
            LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError,
        ) as error:  # fmt: skip
            raise DecisionJournalError(
                f"{journal.path}: cannot be resumed from: {error!r}"
            ) from None
        made._journal = journal
        for proof in made.proofs:  # it ended between a step and what the step proved
            if not proof.open and (proof.epoch, proof.step) not in known:
                made._write("proof", {"proof": proof.to_dict()})
        return made

    @classmethod
    def _replayed(
        cls,
        entries: Sequence[Mapping[str, Any]],
        clock: Callable[[], float],
        transitions: Estimator | None,
    ) -> Controller:
        """From what one controller wrote, its beginning first."""
        first = entries[0]
        made = cls(
            JobSetting.from_dict(first["setting"]),
            ControllerConfig.from_dict(first["config"]),
            GlobalPlan.from_dict(first["plan"]),
            int(first["epoch"]),
            None,
            clock=clock,
            transitions=transitions,
        )
        at = max((i for i, e in enumerate(entries) if e["kind"] == "state"), default=0)
        if at:
            made._restore(entries[at]["state"])
        for entry in entries[at + 1 :]:
            if entry["kind"] == "observation":
                record = parse_record(entry["record"])
                assert isinstance(record, (StepRecord, TransitionRecord))
                made._learn(record)
            elif entry["kind"] == "decision":
                made._note(Decision.from_dict(entry["decision"]))
        return made

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.plan = GlobalPlan.from_dict(state["plan"])
        self.epoch = int(state["epoch"])
        self.learned = Learned.from_dict(state["learned"])
        self.plans = Plans(self.setting, self.learned)
        self.lengths = LengthForecast(**state["lengths"])
        self.lifetime = Lifetime(**state["lifetime"])
        self.books = Books.from_dict(state["books"])
        self.back_off = BackOff(**state["back_off"])
        self.corrected = Corrected(**state["corrected"])
        self.proofs = [Proof.from_dict(one) for one in state["proofs"]]
        self._proposed = [Decision.from_dict(one) for one in state["proposed"]]
        for old_, new_, step, times in state["aborted"]:
            old, new = GlobalPlan.from_dict(old_), GlobalPlan.from_dict(new_)
            self._aborted[old.assignments, new.assignments] = (old, new, int(step), int(times))
        preferred = state["preferred"]
        self._preferred = GlobalPlan.from_dict(preferred) if preferred is not None else None
        gpus, lengths = state["preferred_for"]
        self._preferred_for = (int(gpus), int(lengths))
        self._step_s = float(state["step_s"])
        self._steps = int(state["steps"])
        self._in_force = int(state["in_force"])
        self._gpus = int(state["gpus"])
        self._judged_for = int(state["judged_for"])


def starting_plan(setting: JobSetting, gpus: int) -> GlobalPlan:
    """The plan to launch a job in on so many GPUs: the planner's best for the first lengths.

    Raises: SpecError: none fits.
    """
    plans = Plans(setting, Learned())
    mean = setting.response_tokens.mean_tokens()
    high = min(1.1 * mean, float(setting.max_response_tokens))
    found = [
        one
        for length in (mean, high)
        for one in plans.searched(gpus, length, ANCHOR, 0)
        if fits(plans.memory(one, high))
    ]
    if not found:
        raise SpecError(f"no plan fits {gpus} GPUs with responses of {high:.0f} tokens")
    return min(found, key=lambda one: plans.judge(one, mean).step_s)


def _is_measured(value: float) -> bool:
    """Whether there is something to learn from a number of a record."""
    return math.isfinite(value) and value > 0


def _layouts(plan: GlobalPlan) -> object:
    """All of a plan but its knobs."""
    return frozenset((stage, a.layout, a.devices) for stage, a in plan.assignments.items())


def _numbers_without_transition(option: _Option, now: Judged, confidence: float) -> Numbers:
    return Numbers(
        now.step_s, option.judged.step_s, option.saving_s, option.spread_s, option.steps,
        confidence, option.memory,
    )  # fmt: skip


def _slower(option: _Option, now: Judged) -> Alternative:
    """The next best, whose transition is not worth estimating."""
    numbers = _numbers_without_transition(option, now, 0.0)
    slower = -100 * option.saving_s / now.step_s
    return Alternative(option.plan, f"slower by {slower:.1f} % of a step", numbers)
