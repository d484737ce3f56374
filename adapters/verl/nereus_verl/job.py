"""The job port of a running verl job: the one caller of its workers, between iterations."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nereus_plugins.control.attempt import Attempt, TransitionFailed, listed
from nereus_plugins.control.driver import Driver, Scheduled, say
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.job import Capabilities, Gpus, Proposal, UnitInfo
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.trace.record import StepRecord, TransitionRecord
from nereus_verl import (
    asked,
    capabilities,
    jobconfig,
    knobs,
    last_words,
    stamp,
    verl_private,
    worker,
)
from nereus_verl.answers import Answers
from nereus_verl.asked import Asked, InForce
from nereus_verl.controller import JobController
from nereus_verl.driver import call_all, submit
from nereus_verl.knobs import UnitKnobs
from nereus_verl.preflight import Preflight
from nereus_verl.preparing import Preparing
from nereus_verl.ranks import SETUP_TIMEOUT_S, Change, ClaimFailed, Rank, Ranks, Setup
from nereus_verl.reconcile import Rollout, RolloutLost
from nereus_verl.rollout import RolloutPlan, check_rollout
from nereus_verl.rollout_backends import backend_of

PACKAGES = ("nereus-plugins", "verl", "torch", "megatron-core", "ray", "transformers")


class RolloutFailed(TransitionFailed):
    """The training state is in its new layout, but the rollout could not follow: the job must end.
    A checkpoint can be saved first."""


@dataclass(frozen=True)
class _Wanted:
    """What a transition changes: the set of ranks, or None; layouts of the units that move, and
    knobs, by unit; the rollout after it."""

    ranks: Change | None
    layouts: Mapping[str, Layout]
    knobs: Mapping[str, UnitKnobs]
    rollout: RolloutPlan


class VerlJob:
    """Implements `nereus_plugins.job.JobPort`.

    Args:
        checked: what was found before the job started.
        ranks: the job's processes.
    """

    def __init__(self, checked: Preflight, ranks: Ranks) -> None:
        self.checked = checked
        self._ranks = ranks
        self._layouts = dict(checked.layouts)
        self._knobs = dict(checked.knobs)
        self._rollout = Rollout(ranks, backend_of(checked.config), checked.rollout)
        self.rollout_is_synced = False  # at this boundary
        self._controller = JobController(checked, ranks, self.gpus)
        inbox = Inbox(
            self._check_submitted,
            adapt=self._controller.adapted,
            more=self._controller.about,
            takes_gpus=self._controller.no_gpus(),
        )
        self._driver = Driver(checked.run_dir, inbox, self._state)
        self._answers = Answers(checked.nereus.timeout_s)
        self._preparing = Preparing(checked, self._driver, ranks, self._answers)
        self._memory: dict[str, int] = {}  # of the ranks, asked before they were busy in a window
        self._garbage = False  # ranks have some to collect, in the next window
        self._collecting: Mapping[Any, int] = {}  # what ranks were asked for in this window

    def start(self) -> None:
        """Make the workers' engines units, and check that they are what the configuration says.

        Raises: WorkersFailed; RuntimeError if verl built another layout than configured.
        """
        answers = call_all(
            self._ranks.workers,
            "setup",
            worker.setup,
            *self._ranks.setup.args(),
            timeout_s=SETUP_TIMEOUT_S,
        )
        self._ranks.set_places(answers)
        for answer in answers:
            built = {name: Layout.from_dict(f) for name, f in answer["layouts"].items()}
            if any(not _same_ranks(built[name], self._layouts[name]) for name in self._layouts):
                raise RuntimeError(
                    f"verl built {listed(built)} on rank {answer['rank']}, its configuration "
                    f"says {listed(self._layouts)}; please report this with the job's settings"
                )
        self._layouts = built
        if self.checked.ranks_change():
            self._rollout.find_servers()
        self._driver.begin(
            source="verl",
            packages=PACKAGES,
            world_size=len(self._ranks),
            plan=self.layouts(),
            config=dataclasses.asdict(self.checked.nereus) | {"schedule": self._schedule()},
        )
        if missing := self._ranks.missing(self.checked.most_ranks()):
            say(f"warning: {missing}")
        say(f"on; start {listed(self._layouts)}; {len(self.checked.targets)} transitions scheduled")
        if self.checked.nereus.control:
            name = str(jobconfig.select(self.checked.config, "trainer.experiment_name", ""))
            self._driver.listen(name)
        if self._controller.wanted:
            self._begin_controller()

    def _begin_controller(self) -> None:
        (device,) = self._answers.call(self._ranks.current[:1], "device", worker.device)
        self._controller.begin(device, self.capabilities(), self.describe(), self.epoch())

    def close(self) -> None:
        """Take no more commands; the rollout is over."""
        self._controller.close()
        self._driver.close()
        try:
            self._rollout.close()
        except Exception as error:  # what ended the job counts, not this
            say(f"the rollout's servers may have left shared memory behind: {error!r}")

    # -- the port -------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return capabilities.capabilities(self.checked.config, verl_private.verl_version())

    def describe(self) -> GlobalPlan:
        config = self.checked.config
        assignments = {}
        for name, layout in self._layouts.items():
            fixed = knobs.fixed_knobs(config, self.checked.units[name])
            for stage in knobs.STAGES[name]:
                live = self._knobs[name].knobs(stage)
                assignments[stage] = Assignment(layout, Knobs(**fixed, **live))
        rollout = self._rollout.plan
        assignments[ModelStage.ACTOR_GENERATE] = Assignment(
            rollout.layout(len(self._ranks)), rollout.knobs()
        )
        return GlobalPlan(assignments, name=f"epoch-{self.epoch()}")

    def epoch(self) -> int:
        return self._driver.epoch

    def gpus(self) -> Gpus:
        """The ranks, and what Ray has free where more may join; or as `nereus gpus` said last; but
        for those whose node Ray drains. One is always kept: a job on none cannot go on."""
        world = self.world_size()
        if not self.checked.ranks_may_change():
            return Gpus(world)
        granted, draining = self._driver.inbox.granted(), self._ranks.draining()
        keep, left_s = world, math.inf
        if draining:
            keep = max(1, world - len(draining))
            left_s = max(min(draining.values()) - time.time(), 0.0)
        if granted is not None and granted.gpus < world:
            keep = min(keep, granted.gpus)
            left_s = min(left_s, max(granted.deadline - time.monotonic(), 0.0))
        if keep < world:
            return Gpus(world, world - keep, left_s)
        most = world + self._ranks.free()
        return Gpus(most if granted is None else min(most, granted.gpus))

    def observe(self) -> StepRecord | None:
        return self._driver.last

    def units(self) -> tuple[UnitInfo, ...]:
        return tuple(
            UnitInfo(
                name=name,
                model=self.checked.models[name],
                stages=frozenset(knobs.STAGES[name]),
                layout=layout,
                trainable=name != "ref",
            )
            for name, layout in self._layouts.items()
        )

    def execute(self, proposal: Proposal) -> TransitionRecord:
        self._driver.require_epoch(proposal)
        return self.transition(asked.proposed(self.checked, self._in_force(), proposal.plan))

    # -- what the trainer calls -----------------------------------------------------------------

    def layouts(self) -> dict[str, Any]:
        """The layouts in force, by unit, as dicts."""
        return {name: layout.to_dict() for name, layout in self._layouts.items()}

    def layout(self, unit: str) -> Layout:
        return self._layouts[unit]

    def unit_knobs(self, unit: str) -> UnitKnobs:
        return self._knobs[unit]

    def rollout(self) -> RolloutPlan:
        return self._rollout.plan

    def world_size(self) -> int:
        return len(self._ranks)

    def data_parallelism_changed(self) -> bool:
        """Whether a unit that trains has another dp than at the job's start."""
        return any(
            layout.dp != self.checked.layouts[name].dp
            for name, layout in self._layouts.items()
            if name != "ref"
        )

    def is_due(self, step: int) -> bool:
        """Whether there may be something to run at the end of `step`."""
        with self._controller.spending():
            waiting = self._driver.inbox.waiting()
        return step in self.checked.targets or waiting

    def at_boundary(self, step: int) -> TransitionRecord | None:
        """Run what is due at the end of `step`: see `Driver.at_boundary`."""
        self.rollout_is_synced = False
        record = self._driver.at_boundary(step, self._scheduled(step), self._run_submitted)
        self._preparing.drop()
        return record

    def begin_window(self, step: int) -> None:
        """The ranks have nothing to do until the boundary after `step`, and others run meanwhile:
        begin to prepare what is due there, and have them do what they left. Does not wait for it.

        Raises: TransitionFailed: a rank that the job needs is gone.
        """
        self._driver.step = step
        layouts = self._due_in_window(step) if self.is_due(step) else {}
        with self._last_words_if_lost("what ranks do in the background could not begin"):
            if self._garbage or layouts:
                self._memory = self.memory()
            if self._garbage:
                self._garbage = False
                self._collecting = submit(self._ranks.workers, worker.collect_garbage)
            if layouts:
                self._preparing.start(step, layouts)

    def end_window(self) -> None:
        """The ranks are needed again: what they left behind is done.

        Raises: TransitionFailed: a rank could not do it.
        """
        collecting, self._collecting = self._collecting, {}
        with self._last_words_if_lost("what a transition left behind could not be cleared away"):
            self._answers.collect(collecting, "collect_garbage")

    def controller_ms(self) -> float | None:
        """What the driver spent on the controller since it was asked last; None: there is none."""
        return self._controller.spent_ms()

    def memory(self) -> dict[str, int]:
        """The largest value over ranks of what `worker.memory` reports; of a rank that is busy in
        a window, what it reported before. With a controller peaks are of one step."""
        known, self._memory = self._memory, {}
        if known:
            return known
        anew = self._controller.wanted
        by_rank = self._answers.call(self._ranks.current, "memory", worker.memory, anew)
        return {key: max(one[key] for one in by_rank) for key in by_rank[0]}

    def write_step(self, record: StepRecord) -> None:
        self._driver.write_step(record)

    def save_stamp(self, folder: Any) -> None:
        """Write the layouts in force where a checkpoint is about to be saved."""
        config, rollout = self.checked.config, self._rollout.plan
        stamp.write(folder, self._layouts, self._knobs, config, self.epoch(), rollout)

    # -- what is due ----------------------------------------------------------------------------

    def _in_force(self) -> InForce:
        return InForce(dict(self._layouts), dict(self._knobs), self._rollout.plan)

    def _scheduled(self, step: int) -> Scheduled | None:
        """What is scheduled after `step`, None if nothing is."""
        if step not in self.checked.targets:
            return None
        checked, now = self.checked, self._in_force()
        return Scheduled(
            asked.would_change(checked, now, step),
            lambda: self.transition(asked.scheduled(checked, now, step)),
        )

    def _run_submitted(self, submitted: Submitted) -> TransitionRecord:
        """Raises: SpecError, TransitionFailed."""
        with self._controller.spending():
            plan = asked.submitted(self.checked, self._in_force(), submitted.plan)
        return self.transition(plan, submitted.predicted)

    def _check_submitted(self, plan: Mapping[str, Any]) -> str:
        """What a plan changes as things are, in words. Raises: SpecError if it cannot be run."""
        now = self._in_force()
        changes = asked.submitted(self.checked, now, plan).changes(now).words()
        if not changes:
            raise SpecError(f"nothing to change: {listed(now.layouts)} is in force")
        return ", ".join(changes)

    def _due_in_window(self, step: int) -> Mapping[str, Layout]:
        """The layouts, by unit, that are to be prepared in the background."""
        now, inbox = self._in_force(), self._driver.inbox
        try:
            if step in self.checked.targets:
                if inbox.paused:
                    return {}
                wanted = self._wanted(asked.scheduled(self.checked, now, step))
            else:
                plan = inbox.pending_plan()
                if plan is None:
                    return {}
                wanted = self._wanted(asked.submitted(self.checked, now, plan))
        except SpecError:
            return {}  # the boundary says so
        # Where ranks join or leave, everything waits: claiming them beside generation was not run.
        return wanted.layouts if wanted.ranks is None else {}

    def _wanted(self, plan: Asked) -> _Wanted:
        """Raises: SpecError: the plan cannot be run by this job."""
        checked, where = self.checked, plan.where
        after = self._knobs | dict(plan.knobs)
        world = capabilities.check_targets(
            checked.config, checked.models, self._layouts, plan.targets, where, plan.leave, after
        )
        check_rollout(
            plan.rollout,
            config=checked.config,
            current=self._rollout.plan,
            world=world,
            where=where,
        )
        change = self._ranks.change_to(world, plan.leave)
        layouts = {
            name: plan.targets.get(name, layout)
            for name, layout in self._layouts.items()
            if change is not None or plan.targets.get(name, layout) != layout
        }
        switched = {name: new for name, new in after.items() if new != self._knobs[name]}
        return _Wanted(change, layouts, switched, plan.rollout)

    def _state(self) -> dict[str, Any]:
        """For those who command the job."""
        self._controller.look_at(self.describe)
        return {
            "world_size": len(self._ranks),
            "nodes": [rank.host for rank in self._ranks.current],
            "plan": self.layouts(),
        }

    # -- the transaction ------------------------------------------------------------------------

    def transition(
        self, plan: Asked, predicted: Mapping[str, float] = MappingProxyType({})
    ) -> TransitionRecord:
        """One transition of the named units, as a transaction; then the rollout follows.

        Args: predicted: what its controller expects of it, for the record.

        Returns: the record, also when it was aborted: then the old layouts are in force.

        Raises:
            SpecError: the plan cannot be run by this job.
            TransitionFailed: the job must end (RolloutFailed: after a checkpoint).
        """
        wanted = self._wanted(plan)
        epoch, exposed = self._preparing.claim(wanted.layouts, wanted.ranks)
        changes = asked.changes(self._in_force(), wanted.layouts, wanted.knobs, wanted.rollout)
        attempt = self._driver.attempt(changes, epoch=epoch, predicted=predicted)
        attempt.exposed(exposed)
        if changes.words():
            say(f"step {attempt.step}: {attempt.listed()} ...")
            try:
                self._run(attempt, wanted)
            except (WorkersFailed, TransitionFailed) as error:
                attempt.ended("failed", str(error))
                words = last_words.of_attempt(attempt, self.checked.config, self.checked.run_dir)
                words += self._driver.failed(attempt)
                if isinstance(error, RolloutFailed):
                    raise RolloutFailed(
                        f"after the transition of step {attempt.step} ({attempt.listed()}) "
                        f"training state is whole, but the job cannot go on: {error}"
                    ) from error
                raise TransitionFailed(words) from error
        return self._driver.finished(attempt)

    def _run(self, attempt: Attempt, wanted: _Wanted) -> None:
        """Raises: WorkersFailed, TransitionFailed."""
        if not wanted.layouts and not wanted.knobs:
            self._change_rollout(attempt, wanted)
            return
        if not wanted.layouts:
            self._change_knobs(attempt, wanted)
        elif wanted.ranks is None:
            self._execute(attempt, wanted, self._ranks.current)
        else:
            self._execute_on_other_ranks(attempt, wanted, wanted.ranks)
        if attempt.outcome == "committed":
            self._follow_with_rollout(attempt, wanted)

    def _execute_on_other_ranks(self, attempt: Attempt, wanted: _Wanted, change: Change) -> None:
        """As `_execute`, with ranks that join before and ranks that leave after it."""
        options = self.checked.nereus
        attempt.ranks = change.to_dict()
        try:
            with attempt.timed("claim"):
                change.claim(self.layouts(), attempt.step, options.claim_timeout_s)
            attempt.ranks = change.to_dict()
            with attempt.timed("join"):
                change.join()
            self._execute(attempt, wanted, change.union)
        except ClaimFailed as error:
            attempt.ended("aborted", str(error))
        if attempt.outcome != "committed":
            with attempt.timed("give_back"):
                change.give_back()
            return
        with attempt.timed("follow"):
            change.follow()

    def _execute(self, attempt: Attempt, wanted: _Wanted, ranks: Sequence[Rank]) -> None:
        """The transaction. Args: ranks: that take part; where their set changes, the union."""
        change = wanted.ranks

        def call(phase: str, function: Any, *args: Any) -> list[Any]:
            return self._answers.call(
                ranks, phase, function, *args, change=change, epoch=attempt.epoch
            )

        with attempt.timed("prepare"):
            answers = self._preparing.answers(attempt, wanted.layouts, ranks, change)
        if attempt.gave_up(answers):
            return
        reports = [answer["report"] for answer in answers]
        attempt.prepared([reports])
        digests = {report["digest"] for report in reports}
        if len(digests) != 1:
            call("abort", worker.abort)
            raise TransitionFailed(f"ranks prepared different schedules: {sorted(digests)}")
        names = [rank.name for rank in (ranks if change is None else change.after)]
        if not self._committed_in_journal(attempt, wanted, names):
            call("abort", worker.abort)
            return
        with attempt.timed("commit"):
            answers = call("commit", worker.commit)
        if attempt.gave_up(answers):
            self._driver.take_back(attempt)
            return
        self._layouts.update(wanted.layouts)
        self._knobs |= wanted.knobs
        self._driver.epoch = attempt.epoch
        for group in self._ranks.groups:
            verl_private.forget_dispatch(group)
        with attempt.timed("release"):
            self._garbage = "hidden_s" in attempt.background
            values = self._unit_values(self._knobs)
            answers = call("release", worker.release, values, self._garbage)
        attempt.released(answers)
        reports = [answer["report"] for answer in answers if answer["report"]]
        for name, unit in attempt.units.items():
            spent = [report["units"].get(name, 0.0) for report in reports]
            unit["seconds"]["release"] = max(spent, default=0.0)

    def _change_knobs(self, attempt: Attempt, wanted: _Wanted) -> None:
        """A transition that moves nothing: committed in the journal, then set on every rank."""
        if not self._committed_in_journal(attempt, wanted, self._ranks.names):
            return
        with attempt.timed("commit"):
            values = self._unit_values(wanted.knobs)
            self._answers.call(self._ranks.current, "commit", worker.set_knobs, values)
        self._knobs |= wanted.knobs
        self._driver.epoch = attempt.epoch

    def _change_rollout(self, attempt: Attempt, wanted: _Wanted) -> None:
        """A transition of the rollout alone. It is committed in the journal first, as any; where
        the rollout before had to come back, that is taken back."""
        if not self._committed_in_journal(attempt, wanted, self._ranks.names):
            return
        fell_back = self._reconcile(attempt, wanted.rollout)
        if not fell_back:
            self._driver.epoch = attempt.epoch
            return
        attempt.ended("aborted", fell_back)
        self._driver.take_back(attempt)

    def _follow_with_rollout(self, attempt: Attempt, wanted: _Wanted) -> None:
        """After the commit: reconcile the rollout, where it or the ranks change."""
        if wanted.ranks is None and wanted.rollout == self._rollout.plan:
            return
        fell_back = self._reconcile(attempt, wanted.rollout)
        attempt.reason = "; ".join(filter(None, (attempt.reason, fell_back)))
        if wanted.ranks is not None:
            self._ranks.give_back_empty()

    def _reconcile(self, attempt: Attempt, rollout: RolloutPlan) -> str:
        """Returns: why the rollout fell back to what it was, "" if it did not.

        Raises: WorkersFailed; RolloutFailed where no rollout is left.
        """
        with attempt.timed("rollout"):
            try:
                report = self._rollout.follow(rollout, attempt.step)
            except RolloutLost as error:
                raise RolloutFailed(str(error)) from error
        attempt.rollout = report.to_dict()
        attempt.seconds |= {f"rollout.{part}": spent for part, spent in report.seconds.items()}
        self.rollout_is_synced = True
        if not report.fell_back:
            return ""
        return f"the rollout stays as it was, {report.before}: {report.fell_back}"

    def _committed_in_journal(
        self, attempt: Attempt, wanted: _Wanted, names: Sequence[str]
    ) -> bool:
        """Write the commit; where it cannot be written, the attempt is aborted.

        The rollout is not in it: derived state, which follows later and may fall back. Records and
        checkpoints say what is in force.
        """
        after: dict[str, Any] = {
            name: layout.to_dict() for name, layout in {**self._layouts, **wanted.layouts}.items()
        }
        unit_knobs = {**self._knobs, **wanted.knobs}
        if unit_knobs != self.checked.knobs:
            after["knobs"] = {name: one.to_dict() for name, one in unit_knobs.items()}
        return self._driver.commit(attempt, after, names)

    def _last_words_if_lost(self, failure: str) -> AbstractContextManager[None]:
        return last_words.if_lost(failure, self._driver.step, self.checked.config)

    def _unit_values(self, unit_knobs: Mapping[str, UnitKnobs]) -> dict[str, Any]:
        checked = self.checked
        return {
            name: knobs.unit_values(checked.config, checked.units[name], one)
            for name, one in unit_knobs.items()
        }

    def _schedule(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for step, targets in self.checked.targets.items():
            out[str(step)] = {name: layout.to_dict() for name, layout in targets.items()}
            if knobs_too := self.checked.knob_targets[step]:
                out[str(step)]["knobs"] = {name: c.to_dict() for name, c in knobs_too.items()}
            out[str(step)]["rollout"] = self.checked.rollout_targets[step].to_dict()
        return out


def setup(checked: Preflight) -> Setup:
    """What the job's processes are told."""
    options = checked.nereus
    return Setup(
        models={name: model.to_dict() for name, model in checked.models.items()},
        checksum=options.checksum,
        staging_bytes=None if options.staging_mib is None else options.staging_mib << 20,
        timeout_s=options.timeout_s,
    )


def _same_ranks(a: Layout, b: Layout) -> bool:
    """Whether state is cut alike; sequence parallelism cuts activations only."""
    return dataclasses.replace(a, sequence_parallel=b.sequence_parallel and a.tp > 1) == b
