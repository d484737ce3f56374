"""The job port over a simulated cluster.

Time passes only here: a step takes what the cost model says and what the truth hides, a transition
what its compiled graph takes, a failure what it loses: the step's time so far, the start of the
job, the steps since the last checkpoint, which are run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from nereus_plugins import __version__
from nereus_plugins.cost.estimate import Estimate, StageEstimate
from nereus_plugins.gtg.compile import InfeasibleTransition
from nereus_plugins.job import (
    Capabilities,
    Lease,
    Proposal,
    StaleProposal,
    UnitInfo,
)
from nereus_plugins.spec import GlobalPlan, Knobs, ModelStage, SpecError, WorkloadSpec
from nereus_plugins.trace.conditions import Conditions
from nereus_plugins.trace.record import Record, RunRecord, StepRecord, TransitionRecord

from .planning import capabilities_of
from .transitions import TransitionCost
from .world import World

S = ModelStage
# verl's timers, which `nereus calibrate` and the controller read, by stage.
TIMERS = {
    S.ACTOR_GENERATE: "gen",
    S.REWARD_SCORE: "reward_score",
    S.REF_LOGPROB: "ref",
    S.CRITIC_VALUES: "values",
    S.CRITIC_TRAIN: "update_critic",
    S.ACTOR_TRAIN: "update_actor",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A step that the plan in force did not get through; the job has to be started again.

    Attributes:
        step: which, from 0.
        reason: what happened, in words.
        kind: "memory", "engine" (rollout cannot run) or "gpus" (some are gone).
        lost_s: seconds of the step until then.
    """

    step: int
    reason: str
    kind: str
    lost_s: float


class SimulatedJob:
    """A job that runs through a trace; implements `nereus_plugins.job.JobPort`.

    Attributes:
        step: the step that comes next, from 0; goes back when steps since a checkpoint are lost.
        elapsed_s: seconds since the job began.
        records: everything that happened, in the schema of live jobs.
    """

    def __init__(
        self,
        world: World,
        plan: GlobalPlan,
        *,
        name: str = "simulated",
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        """
        Args:
            plan: the plan the job starts in.
            name: the run's, in its records.
            on_record: called with each record as it is made.

        Raises: SpecError: GPUs that are not there at the first step.
        """
        self.world = world
        self.step = 0
        self.elapsed_s = 0.0
        self.records: list[Record] = []
        self._name = name
        self._on_record = on_record
        self._plan = plan
        self._epoch = 0
        self._last: StepRecord | None = None
        self._check(plan)
        self._in(plan)
        self._started()

    # The job port.

    def capabilities(self) -> Capabilities:
        """Everything that a layout and knobs can say; stages coupled as in verl."""
        return capabilities_of(self.world.setting.job)

    def describe(self) -> GlobalPlan:
        return self._plan

    def epoch(self) -> int:
        return self._epoch

    def observe(self) -> StepRecord | None:
        return self._last

    def units(self) -> tuple[UnitInfo, ...]:
        out = []
        for unit in self.world.transitions.units:
            stages = frozenset(s for s in self.world.setting.job.stages() if s.model == unit.name)
            layout = self._plan.assignments[unit.stage].layout
            trainable = unit.optimizer is not None
            out.append(UnitInfo(unit.name, unit.model, stages, layout, trainable))
        return tuple(out)

    def leases(self) -> tuple[Lease, ...]:
        """Notice is given for as many steps as the constants say, of the last step's seconds."""
        trace, there = self.world.trace, self.available()
        step_s = self._last.step_s if self._last is not None else 0.0
        for ahead in range(1, self.world.constants.notice_steps):
            step, later_s = self.step + ahead, ahead * step_s
            if step >= trace.steps:
                break
            left = trace.conditions(step, self.elapsed_s + later_s).gpus
            if left < there:
                return Lease(left), Lease(there - left, until_s=later_s)
        return (Lease(there),)

    def execute(
        self, proposal: Proposal, predicted: Mapping[str, float] = MappingProxyType({})
    ) -> TransitionRecord:
        """One transition by its graph. predicted: as in its record.

        Raises: StaleProposal; SpecError: a plan that the job or cluster cannot have, or GPUs that
            are not there.
        """
        if proposal.epoch != self._epoch:
            raise StaleProposal(
                f"the proposal is for epoch {proposal.epoch}, the job is in {self._epoch}"
            )
        self._check(proposal.plan)
        old = self._plan
        try:
            cost = self.world.transitions.cost(old, proposal.plan)
        except InfeasibleTransition as error:
            return self._write_transition("aborted", str(error), {}, None, old, predicted)
        self.elapsed_s += cost.stall_s
        self._in(proposal.plan)
        self._epoch += 1
        return self._write_transition("committed", "", cost.seconds, cost, old, predicted)

    # What a simulated job has beside it.

    def conditions(self) -> Conditions:
        """Of the step that comes next. A policy may look at the GPUs, which a cluster scheduler
        tells; not at the lengths."""
        return self.world.trace.conditions(self.step, self.elapsed_s)

    def available(self) -> int:
        """GPUs that are there for the step that comes next: devices 0 up to this."""
        return self.conditions().gpus

    def restart(
        self, plan: GlobalPlan, predicted: Mapping[str, float] = MappingProxyType({})
    ) -> TransitionRecord:
        """Save a checkpoint, end, and start again in `plan`. predicted: as in its record.

        Raises: SpecError as `execute`.
        """
        self._check(plan)
        old = self._plan
        seconds = {"save": self.world.checkpoint_s(old), **self.world.start_s(plan)}
        self.elapsed_s += sum(seconds.values())
        self._in(plan)
        self._epoch += 1
        record = self._write_transition("committed", "", seconds, None, old, predicted)
        self._started()
        return record

    def recover(self, plan: GlobalPlan, failure: Failure) -> TransitionRecord:
        """After `failure`: start in `plan` from the last checkpoint, whose step comes next.

        Raises: SpecError as `execute`.
        """
        self._check(plan)
        old = self._plan
        start_s = self.world.start_s(plan)
        self.elapsed_s += sum(start_s.values())
        record = self._write_transition(
            "failed", failure.reason, {"lost_step": failure.lost_s, **start_s}, None, old
        )
        self.step -= self.step % self.world.constants.checkpoint_every_steps
        self._in(plan)
        self._epoch += 1
        self._started()
        return record

    def advance(self) -> StepRecord | Failure:
        """Run the step that comes next; `Failure` where the plan does not get through it."""
        met = self.conditions()
        if max(self._plan.devices) >= met.gpus:
            reason = f"the plan uses {1 + max(self._plan.devices)} GPUs, {met.gpus} are there"
            return Failure(self.step, reason, "gpus", 0.0)
        workload = self.world.setting.workload(met.response_tokens)
        result = self.world.step_estimate(self._plan, workload, self.step)
        stages = sorted(result.stages.values(), key=lambda s: s.starts_s)
        broken = next((stage for stage in stages if not stage.fits), None)
        if broken is not None:
            lost_s = broken.starts_s + 0.5 * broken.seconds
            self.elapsed_s += lost_s
            return Failure(self.step, *_broken(broken), lost_s)
        self.elapsed_s += result.iteration_s
        record = self._step_record(result, workload)
        self._last = record
        self.step += 1
        self._write(record)
        return record

    def _in(self, plan: GlobalPlan) -> None:
        self._plan = plan
        self.world.visited.setdefault(plan.assignments, plan)

    def _check(self, plan: GlobalPlan) -> None:
        there = self.available()
        if max(plan.devices) >= there:
            raise SpecError(
                f"plan {plan.name} uses device {max(plan.devices)}, and {there} GPUs are there"
            )

    def _started(self) -> None:
        self._write(
            RunRecord(
                run_id=self._name,
                time_unix_s=self.elapsed_s,
                source="simulator",
                versions={"nereus": __version__},
                world_size=1 + max(self._plan.devices),
                plan=layouts_of(self._plan),
                config={
                    "trace": self.world.trace.name,
                    "seed": self.world.seed,
                    "note": self.world.trace.note,
                    "device_memory_bytes": self.world.setting.cluster.gpu.memory_bytes,
                    "truth": self.world.truth.spec.to_dict(),
                    "constants": self.world.constants.to_dict(),
                },
            )
        )

    def _write_transition(
        self,
        outcome: str,
        reason: str,
        seconds: Mapping[str, float],
        cost: TransitionCost | None,
        old: GlobalPlan,
        predicted: Mapping[str, float] = MappingProxyType({}),
    ) -> TransitionRecord:
        """`old`: the plan before; the one in force is the one after, or the same."""
        before, after = 1 + max(old.devices), 1 + max(self._plan.devices)
        ranks: dict[str, Any] = {}
        if before != after:
            low, high = sorted((before, after))
            moved = [f"device {device}" for device in range(low, high)]
            joined = moved if after > before else []
            left = moved if after < before else []
            ranks = {"from": before, "to": after, "joined": joined, "left": left}
        knobs = {}
        for stage, now in self._plan.assignments.items():
            was = old.assignments[stage].knobs
            if was != now.knobs:
                changed = [
                    f.name
                    for f in dataclasses.fields(Knobs)
                    if getattr(was, f.name) != getattr(now.knobs, f.name)
                ]
                knobs[stage.value] = {
                    side: {name: getattr(k, name) for name in changed}
                    for side, k in (("from", was), ("to", now.knobs))
                }
        record = TransitionRecord(
            step=self.step,
            epoch=self._epoch,
            time_unix_s=self.elapsed_s,
            outcome=outcome,
            reason=reason,
            units=dict(cost.units) if cost is not None else {},
            seconds=dict(seconds),
            digest=cost.digest if cost is not None else "",
            ranks=ranks,
            knobs=knobs,
            limit_s=cost.limit_s if cost is not None else None,
            predicted=dict(predicted),
        )
        self._write(record)
        return record

    def _step_record(self, result: Estimate, workload: WorkloadSpec) -> StepRecord:
        seconds = {TIMERS[stage]: e.seconds for stage, e in result.stages.items()}
        train = result.stages.get(S.ACTOR_TRAIN)
        if train is not None and (logprob_s := train.part("old_logprob")) > 0:
            seconds["update_actor"] -= logprob_s
            seconds["old_log_prob"] = logprob_s
        seconds["step"] = result.iteration_s
        mean = self.world.trace.mean_response_tokens[self.step]
        samples = workload.sequences_per_step
        prompt = round(workload.prompt_tokens.mean_tokens() * samples)
        response = round(mean * samples)
        quantile = min(1.0 - 1e-9, max(1e-9, float(self.world.chance.longest[self.step])))
        longest = workload.response_tokens.quantile(quantile)
        return StepRecord(
            step=self.step + 1,  # as frameworks count
            epoch=self._epoch,
            time_unix_s=self.elapsed_s,
            step_s=result.iteration_s,
            stages_s=seconds,
            tokens={"prompt": prompt, "response": response, "total": prompt + response},
            samples=samples,
            memory_bytes={
                "allocated": round(max(s.allocated_bytes for s in result.stages.values())),
                "reserved": round(max(s.reserved_bytes for s in result.stages.values())),
            },
            metrics={
                "response_length/mean": mean,
                "response_length/max": max(longest, mean),
                "prompt_length/mean": prompt / samples,
                "nereus/world_size": 1 + max(self._plan.devices),
                "nereus/gpus_there": self.available(),
            },
            plan=layouts_of(self._plan),
        )

    def _write(self, record: Record) -> None:
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)


def _broken(stage: StageEstimate) -> tuple[str, str]:
    """(reason, kind) of a stage that does not fit."""
    gib = 2**30
    if stage.stage is S.ACTOR_GENERATE and stage.reserved_bytes <= stage.capacity_bytes:
        note = next((n for n in stage.notes if "cannot" in n), "it does not fit")
        return note, "engine"
    return (
        f"out of memory in {stage.stage}: {stage.reserved_bytes / gib:.1f} GiB of "
        f"{stage.capacity_bytes / gib:.1f}",
        "memory",
    )


def layouts_of(plan: GlobalPlan) -> dict[str, Any]:
    """By unit, and rollout, the layout as a record has it."""
    out: dict[str, Any] = {}
    for stage, assignment in plan.assignments.items():
        unit = "rollout" if stage is S.ACTOR_GENERATE else stage.model
        out[unit] = assignment.layout.to_dict()
    return out
