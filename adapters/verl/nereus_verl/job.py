"""The job port of a running verl job: the one caller of its workers, between iterations."""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

from nereus_plugins.control import by_ray, messages
from nereus_plugins.control.beside import Beside, Launch
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.live import gpus_to
from nereus_plugins.control.server import Server
from nereus_plugins.control.workers import WorkersFailed, collect
from nereus_plugins.gtg.journal import EpochError, Journal, JournalError
from nereus_plugins.gtg.report import Timed, merge_unit_reports
from nereus_plugins.job import Capabilities, Gpus, Proposal, StaleProposal, UnitInfo
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
    now_s,
)
from nereus_verl import capabilities, jobconfig, knobs, setting, stamp, verl_private, worker
from nereus_verl.background import AWAKE_RESERVE, Started, Window
from nereus_verl.config import check_plan, global_plan_layouts
from nereus_verl.driver import call_all, submit
from nereus_verl.knobs import UnitKnobs
from nereus_verl.planned import executable
from nereus_verl.preflight import Preflight, plan_targets
from nereus_verl.ranks import (
    DRIVER_PATIENCE,
    SETUP_TIMEOUT_S,
    Change,
    ClaimFailed,
    Rank,
    Ranks,
    Setup,
)
from nereus_verl.reconcile import Rollout, RolloutLost, RolloutReport
from nereus_verl.rollout import RolloutPlan, check_rollout, global_plan_rollout, plan_rollout
from nereus_verl.rollout_backends import backend_of

JOURNAL_FILE = "journal.jsonl"
SUBMITTED = "plan"  # what messages call a submitted plan
PACKAGES = ("nereus-plugins", "verl", "torch", "megatron-core", "ray", "transformers")


class TransitionFailed(RuntimeError):
    """State was lost with a dead or broken rank: the job must end; says what to restart from."""


class RolloutFailed(TransitionFailed):
    """The training state is in its new layout, but the rollout could not follow: the job must end.
    A checkpoint can be saved first."""


class _Asked(NamedTuple):
    """The arguments of `VerlJob.transition`."""

    targets: Mapping[str, Layout]
    where: str
    leave: Sequence[int]
    unit_knobs: Mapping[str, UnitKnobs]
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
        self._records = RecordWriter(checked.run_dir)
        self._journal = Journal(checked.run_dir / JOURNAL_FILE)
        # Epochs go on from an earlier run of the same job; each attempt takes one.
        self._attempts = max((record.epoch for record in self._journal.read()), default=0)
        self._epoch = self._attempts
        self._step = 0
        self._last: StepRecord | None = None
        self._inbox = Inbox(
            self._check_submitted,
            adapt=self._adapted,
            more=self._about_controller,
            takes_gpus=self._no_gpus(),
        )
        self._server: Server | None = None
        self._beside: Beside | None = None
        self._predicted: Mapping[str, float] = {}  # of the transition that runs
        self._global_plan: dict[str, Any] = {}  # in force, for the controller
        self._controller_s = 0.0  # that the driver spent on it since the last step was recorded
        self._sign: Any = None
        self._started: Started | None = None
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
                    f"verl built {_listed(built)} on rank {answer['rank']}, its configuration "
                    f"says {_listed(self._layouts)}; please report this with the job's settings"
                )
        self._layouts = built
        if self.checked.ranks_change():
            self._rollout.find_servers()
        run_id = uuid.uuid4().hex
        self._records.write(
            RunRecord(
                run_id=run_id,
                time_unix_s=now_s(),
                source="verl",
                versions=_versions(),
                world_size=len(self._ranks),
                plan=self.layouts(),
                config=dataclasses.asdict(self.checked.nereus) | {"schedule": self._schedule()},
            )
        )
        if missing := self._ranks.missing(self.checked.most_ranks()):
            say(f"warning: {missing}")
        say(
            f"on; start {_listed(self._layouts)}; {len(self.checked.targets)} transitions scheduled"
        )
        if self.checked.nereus.control:
            self._listen(run_id)
        if self.checked.nereus.controller is not None:
            self._begin_controller()

    def close(self) -> None:
        """Take no more commands; the rollout is over."""
        self._sign = None
        if self._beside is not None:
            self._beside.close()
        if self._server is not None:
            self._server.close()
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
        return GlobalPlan(assignments, name=f"epoch-{self._epoch}")

    def epoch(self) -> int:
        return self._epoch

    def gpus(self) -> Gpus:
        """The ranks, and what Ray has free where more may join; or as `nereus gpus` said last; but
        for those whose node Ray drains. One is always kept: a job on none cannot go on."""
        world = self.world_size()
        if not self.checked.ranks_may_change():
            return Gpus(world)
        granted, draining = self._inbox.granted(), self._ranks.draining()
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
        return self._last

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
        if proposal.epoch != self._epoch:
            raise StaleProposal(
                f"proposed for epoch {proposal.epoch}, the job is in epoch {self._epoch}"
            )
        where = f"plan {proposal.plan.name!r}"
        targets = global_plan_layouts(proposal.plan, self._layouts, where)
        unit_knobs = knobs.global_plan_knobs(
            proposal.plan,
            config=self.checked.config,
            units=self.checked.units,
            current=self._knobs,
            where=where,
        )
        rollout = global_plan_rollout(
            proposal.plan,
            config=self.checked.config,
            current=self._rollout.plan,
            world=_world(self._layouts | targets),
            where=where,
        )
        return self.transition(targets, where, unit_knobs=unit_knobs, rollout=rollout)

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
        begin_s = time.perf_counter()
        waiting = self._inbox.waiting()
        self._controller_s += time.perf_counter() - begin_s
        return step in self.checked.targets or waiting

    def at_boundary(self, step: int) -> TransitionRecord | None:
        """Run what is due at the end of `step`, one transition at most; None if nothing is.

        What is scheduled goes first; a submitted plan then waits for the next boundary, and is
        refused if the epoch has changed.
        """
        self._step = step
        self.rollout_is_synced = False
        scheduled = step in self.checked.targets
        record = self._run_scheduled(step) if scheduled else self._run_submitted(step)
        self._drop_started()
        self._inbox.doing("")
        return record

    def begin_window(self, step: int) -> None:
        """The ranks have nothing to do until the boundary after `step`, and others run meanwhile:
        begin to prepare what is due there, and have them do what they left. Does not wait for it.

        Raises: TransitionFailed: a rank that the job needs is gone.
        """
        self._step = step
        changes = self._plan_window(step) if self.is_due(step) else {}
        with self._last_words_of("what ranks do in the background could not begin"):
            if self._garbage or changes:
                self._memory = self.memory()
            if self._garbage:
                self._garbage = False
                self._collecting = submit(self._ranks.workers, worker.collect_garbage)
            if changes:
                self._start_preparing(step, changes)

    def end_window(self) -> None:
        """The ranks are needed again: what they left behind is done.

        Raises: TransitionFailed: a rank could not do it.
        """
        collecting, self._collecting = self._collecting, {}
        with self._last_words_of("what a transition left behind could not be cleared away"):
            collect(collecting, "collect_garbage", **self._watching("collect_garbage"))

    def _plan_window(self, step: int) -> dict[str, Layout]:
        """The layouts, by unit, that are to be prepared in the background."""
        try:
            due = self._due(step)
            if due is None:
                return {}
            after = {**self._knobs, **due.unit_knobs}
            change, changes = self._changes(due.targets, due.where, due.leave, after, due.rollout)
        except SpecError:
            return {}  # the boundary says so
        # Where ranks join or leave, everything waits: claiming them beside generation was not run.
        return changes if change is None else {}

    def _start_preparing(self, step: int, changes: dict[str, Layout]) -> None:
        current = self._ranks.current
        looks = self._call(current, "look", worker.look, list(changes), AWAKE_RESERVE)
        obstacle = next((look["obstacle"] for look in looks if look["obstacle"]), "")
        epoch, (address, port) = self._next_attempt(), looks[0]["store"]
        share = self.checked.nereus.background_share
        window = Window(share, address, port, f"nereus.window.{epoch}")
        submitted: Mapping[Any, int] = {}
        if not obstacle:
            budget = self._budget(lambda: [look["free_bytes"] for look in looks])
            arguments = self._prepare_arguments(changes, epoch, step, current)
            workers = self._ranks.workers
            submitted = submit(workers, worker.prepare, *arguments, budget, window)
        self._started = Started(epoch, changes, window, submitted, obstacle)
        self._inbox.doing("prepare, in the background", step)

    def _due(self, step: int) -> _Asked | None:
        """What is due, None if nothing is. Raises: SpecError."""
        if step in self.checked.targets:
            return None if self._inbox.paused else self._scheduled(step)
        plan = self._inbox.pending_plan()
        return None if plan is None else self._targets(plan)

    def _scheduled(self, step: int) -> _Asked:
        """What is scheduled after `step`. What its plan leaves out of knobs and rollout stays as it
        is in force: submitted plans may have changed it since the schedule was checked, or a
        rollout may not have followed. Raises: SpecError."""
        checked, where = self.checked, f"nereus.schedule.{step}"
        targets, plan = checked.targets[step], checked.nereus.schedule[step]
        unit_knobs = knobs.plan_knobs(
            plan, config=checked.config, units=checked.units, current=self._knobs, where=where
        )
        rollout = plan_rollout(
            plan,
            config=checked.config,
            current=self._rollout.plan,
            world=_world(self._layouts | dict(targets)),
            where=where,
        )
        return _Asked(targets, where, checked.leave[step], unit_knobs, rollout)

    def _drop_started(self) -> None:
        """Give up what was prepared, if anything still is: it is not what was due.

        Raises: TransitionFailed: a rank that the job needs is gone.
        """
        started, self._started = self._started, None
        if started is None or started.obstacle:
            return
        started.window.end()
        with self._last_words_of("what was prepared in the background could not be given up"):
            answers = collect(started.submitted, "prepare", **self._watching("prepare"))
            if not any("aborted" in answer for answer in answers):
                self._call(self._ranks.current, "abort", worker.abort)

    def _prepared_meanwhile(self, run: _Run) -> list[dict[str, Any]] | None:
        """The ranks' answers to the preparation that was started, once they are there; None if
        what `run` changes is to be prepared now."""
        started, self._started = self._started, None
        if started is None:
            return None
        why = started.obstacle
        if not why:
            begin_s = time.perf_counter()
            answers = collect(started.submitted, "prepare", **self._watching("prepare"))
            waited_s = time.perf_counter() - begin_s
            why = _given_up(answers)
            if not why:
                stale = self._call(self._ranks.current, "prepare", worker.stale)
                names = sorted({name for of_rank in stale for name in of_rank})
                if not names:
                    run.hidden(max(answer["seconds"] for answer in answers), waited_s)
                    return answers
                self._call(self._ranks.current, "abort", worker.abort)
                why = f"{', '.join(names)} was trained or loaded meanwhile"
        run.exposed(why)
        run.epoch = self._next_attempt()  # ranks have voted under the other number
        return None

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def _run_scheduled(self, step: int) -> TransitionRecord:
        """The schedule was checked before the job started; where an earlier transition was aborted
        or skipped since, a plan may not fit what is in force, and is aborted too.
        """
        targets, unit_knobs = self.checked.targets[step], self.checked.knob_targets[step]
        changes = {name: (self._layouts[name], layout) for name, layout in targets.items()}
        switched = {name: (self._knobs[name], new) for name, new in unit_knobs.items()}
        rollout = self.checked.rollout_targets[step]
        if self._inbox.paused:
            run = _Run(self._epoch, step, changes, switched, self._rollout.plan, rollout)
            run.outcome = "skipped"
            run.reason = "the job was paused; `nereus transition` can submit the plan"
            return self._finished(run)
        try:
            return self.transition(*self._scheduled(step))
        except SpecError as error:
            run = _Run(self._next_attempt(), step, changes, switched, self._rollout.plan, rollout)
            run.outcome, run.reason = "aborted", str(error)
            return self._finished(run)

    def _run_submitted(self, step: int) -> TransitionRecord | None:
        begin_s = time.perf_counter()
        submitted = self._inbox.pull(step)
        if submitted is None:
            return None
        try:
            asked = self._targets(submitted.plan)
            self._controller_s += time.perf_counter() - begin_s
            record = self._predicted_by(submitted, asked)
        except SpecError as error:
            self._inbox.answer(messages.REFUSED, str(error), by_plan=True)
            return None
        except TransitionFailed as error:
            self._inbox.answer(messages.FAILED, str(error))
            raise
        self._inbox.answer(record.outcome, record.reason)
        return record

    def _predicted_by(self, submitted: Submitted, asked: _Asked) -> TransitionRecord:
        """The transition, in whose record is what its controller expected."""
        self._predicted = submitted.predicted
        try:
            return self.transition(*asked)
        finally:
            self._predicted = {}

    def _check_submitted(self, plan: Mapping[str, Any]) -> str:
        """What a plan changes as things are, in words. Raises: SpecError if it cannot be run."""
        layouts, now = dict(self._layouts), dict(self._knobs)
        asked = self._targets(plan)
        changes = [f"{n} {layouts[n]} -> {t}" for n, t in asked.targets.items() if t != layouts[n]]
        changes += [
            f"{n} {change}"
            for n, new in asked.unit_knobs.items()
            for change in now[n].changes_to(new)
        ]
        changes += [f"ranks {', '.join(map(str, asked.leave))} leave"] if asked.leave else []
        before = self._rollout.plan
        changes += [f"rollout {before} -> {asked.rollout}"] if asked.rollout != before else []
        if not changes:
            raise SpecError(f"nothing to change: {_listed(layouts)} is in force")
        return ", ".join(changes)

    def _targets(self, plan: Mapping[str, Any]) -> _Asked:
        """What a submitted plan asks for. Raises: SpecError if it cannot be run."""
        checked = self.checked
        plan = check_plan(plan, SUBMITTED)
        layouts = dict(self._layouts)
        targets, leave, unit_knobs = plan_targets(
            checked.config, checked.models, plan, layouts, dict(self._knobs), SUBMITTED
        )
        rollout = plan_rollout(
            plan,
            config=checked.config,
            current=self._rollout.plan,
            world=_world(layouts | targets),
            where=SUBMITTED,
        )
        return _Asked(targets, SUBMITTED, leave, unit_knobs, rollout)

    def _listen(self, run_id: str) -> None:
        self._inform()
        try:
            self._server = Server(self.checked.run_dir, self._inbox, run_id, self._epoch)
        except OSError as error:
            say(f"takes no commands while it runs (nereus.control): {error}")
        else:
            name = str(jobconfig.select(self.checked.config, "trainer.experiment_name", ""))
            self._sign = by_ray.publish(self.checked.run_dir, run_id, name)
            say(f"takes commands: nereus status {self.checked.run_dir}")

    # -- the controller --------------------------------------------------------------------------

    def _begin_controller(self) -> None:
        """Start its process; where that cannot be, the job runs without it."""
        checked = self.checked
        assert checked.nereus.controller is not None
        (device,) = self._call(self._ranks.current[:1], "device", worker.device)
        if not device["memory_bytes"]:  # of a CPU without a budget: the host's, shared
            device["memory_bytes"] = worker.host_bytes() // len(self._ranks)
        try:
            launch = Launch(
                setting.job_setting(
                    checked,
                    self.capabilities(),
                    device,
                    max(self._ranks.in_cluster(), checked.most_ranks()),
                    int(self._ranks.trainer.total_training_steps),
                ),
                checked.nereus.controller,
                self.describe(),
                self._epoch,
            )
            launch.write(checked.run_dir)
        except (OSError, SpecError) as error:
            say(f"no controller: {error}")
            return
        self._beside = Beside(checked.run_dir, say)
        self._beside.start()
        say(f"controller in mode {launch.config.mode}: nereus decisions {checked.run_dir}")

    def _adapted(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """A controller's plan as this job can run it."""
        found = GlobalPlan.from_dict(plan, where=SUBMITTED)
        return executable(found, self.checked.config).to_dict()

    def _about_controller(self) -> dict[str, Any]:
        """For the status, asked in a thread of the server."""
        controller, beside = self.checked.nereus.controller, self._beside
        if controller is None or beside is None:
            return {}
        state = {"mode": controller.mode, "running": beside.running, "restarts": beside.restarts}
        return {
            "controller": state,
            "gpus": gpus_to(self.gpus()),
            "global_plan": self._global_plan,
        }

    def _no_gpus(self) -> str:
        """Why nobody can say which GPUs the job may use, "" if they can."""
        if self.checked.nereus.controller is None:
            return "this job has no controller (nereus.controller.mode=off)"
        if not self.checked.ranks_may_change():
            return "the set of ranks of this job cannot change"
        return ""

    def controller_ms(self) -> float | None:
        """What the driver spent on the controller since it was asked last; None: there is none."""
        if self._beside is None:
            return None
        spent_s, self._controller_s = self._controller_s, 0.0
        return 1000.0 * spent_s

    def _inform(self) -> None:
        """Tell those who command the job how it is now."""
        if self.checked.nereus.controller is not None:
            begin_s = time.perf_counter()
            plan = self.describe()
            if plan.name != self._global_plan.get("name"):  # of another epoch
                self._global_plan = plan.to_dict()
            self._controller_s += time.perf_counter() - begin_s
        self._inbox.inform(
            epoch=self._epoch,
            step=self._step,
            world_size=len(self._ranks),
            nodes=[rank.host for rank in self._ranks.current],
            plan=self.layouts(),
        )
        if self._server is not None:
            try:
                self._server.moved_to(self._epoch)
            except OSError as error:
                say(f"step {self._step}: {messages.ENDPOINT_FILE} could not be written: {error}")

    def transition(
        self,
        targets: Mapping[str, Layout],
        where: str,
        leave: Sequence[int] = (),
        unit_knobs: Mapping[str, UnitKnobs] | None = None,
        rollout: RolloutPlan | None = None,
    ) -> TransitionRecord:
        """One transition of the named units, as a transaction; then the rollout follows.

        Args:
            targets: by unit; others stay. where: what asked for it, for messages.
            leave: ranks that must leave; others join for them, or follow them out, as the layouts
                take more or fewer ranks than stay.
            unit_knobs: by unit; others stay.
            rollout: None: stays, but for the number of replicas.

        Returns: the record, also when it was aborted: then the old layouts are in force.

        Raises:
            SpecError: the plan cannot be run by this job.
            TransitionFailed: the job must end (RolloutFailed: after a checkpoint).
        """
        after = self._knobs | dict(unit_knobs or {})
        rollout = rollout or self._rollout.plan
        change, changes = self._changes(targets, where, leave, after, rollout)
        started, exposed = self._started, ""
        if started is not None:
            if change is None and changes == started.changes:
                started.window.end()
            else:
                self._drop_started()
                started, exposed = None, "another plan was prepared"
        run = _Run(
            self._next_attempt() if started is None else started.epoch,
            self._step,
            {n: (self._layouts[n], t) for n, t in changes.items()},
            {n: (self._knobs[n], new) for n, new in after.items() if new != self._knobs[n]},
            self._rollout.plan,
            rollout,
            self._inbox.doing,
            self._predicted,
        )
        run.exposed(exposed)
        if changes or run.knobs or run.rollout_changes():
            say(f"step {self._step}: {run.listed()} ...")
            try:
                if not changes and not run.knobs:
                    self._change_rollout(run)
                elif not changes:
                    self._change_knobs(run)
                elif change is None:
                    self._execute(run, changes, self._ranks.current)
                else:
                    self._execute_on_other_ranks(run, changes, change)
                if run.outcome == "committed" and (changes or run.knobs):
                    self._follow_with_rollout(run, change)
            except (WorkersFailed, TransitionFailed) as error:
                run.outcome, run.reason = "failed", str(error)
                last_words = self._last_words(run)
                try:
                    self._records.write(run.record())
                    if run.journaled and self._epoch != run.epoch:
                        self._journal.abort(epoch=run.epoch, reason=run.reason)
                except (OSError, JournalError, EpochError) as unwritten:
                    last_words += f" (which lack this: {unwritten})"
                if isinstance(error, RolloutFailed):
                    raise RolloutFailed(
                        f"after the transition of step {self._step} ({run.listed()}) training "
                        f"state is whole, but the job cannot go on: {error}"
                    ) from error
                raise TransitionFailed(last_words) from error
        return self._finished(run)

    def _changes(
        self,
        targets: Mapping[str, Layout],
        where: str,
        leave: Sequence[int],
        after: Mapping[str, UnitKnobs],
        rollout: RolloutPlan,
    ) -> tuple[Change | None, dict[str, Layout]]:
        """The change of the set of ranks, and the layouts of the units that move.

        Raises: SpecError: the plan cannot be run by this job.
        """
        checked = self.checked
        world = capabilities.check_targets(
            checked.config, checked.models, self._layouts, targets, where, leave, after
        )
        check_rollout(
            rollout,
            config=checked.config,
            current=self._rollout.plan,
            world=world,
            where=where,
        )
        change = self._ranks.change_to(world, leave)
        return change, {
            name: targets.get(name, layout)
            for name, layout in self._layouts.items()
            if change is not None or targets.get(name, layout) != layout
        }

    def _finished(self, run: _Run) -> TransitionRecord:
        self._inbox.doing("")
        record = run.record()
        say(f"step {self._step}: {run.summary()}")
        self._record(record)
        self._inform()
        return record

    def _record(self, record: TransitionRecord | StepRecord) -> None:
        """Write a record of a job that goes on; where it cannot be written, say so."""
        try:
            self._records.write(record)
        except OSError as error:
            say(f"step {record.step}: not in the records, which could not be written: {error}")

    def _execute_on_other_ranks(
        self, run: _Run, changes: Mapping[str, Layout], change: Change
    ) -> None:
        """As `_execute`, with ranks that join before and ranks that leave after it."""
        options = self.checked.nereus
        run.ranks = change.to_dict()
        try:
            with run.timed("claim"):
                change.claim(self.layouts(), run.step, options.claim_timeout_s)
            run.ranks = change.to_dict()
            with run.timed("join"):
                change.join()
            self._execute(run, changes, change.union, change)
        except ClaimFailed as error:
            run.outcome, run.reason = "aborted", str(error)
        if run.outcome != "committed":
            with run.timed("give_back"):
                change.give_back()
            return
        with run.timed("follow"):
            change.follow()

    def _follow_with_rollout(self, run: _Run, change: Change | None) -> None:
        """After the commit: reconcile the rollout, where it or the ranks change."""
        if change is None and not run.rollout_changes():
            return
        run.reason = "; ".join(filter(None, (run.reason, self._reconcile(run))))
        if change is not None:
            self._ranks.give_back_empty()

    def _change_rollout(self, run: _Run) -> None:
        """A transition of the rollout alone. It is committed in the journal first, as any; where
        the rollout before had to come back, that is taken back."""
        if not self._committed_in_journal(run, {}, self._ranks.names):
            return
        fell_back = self._reconcile(run)
        if not fell_back:
            self._epoch = run.epoch
            return
        run.outcome, run.reason = "aborted", fell_back
        try:
            self._journal.abort(epoch=run.epoch, reason=run.reason)
        except (OSError, JournalError, EpochError) as error:
            run.reason += f"; the journal still says that it was committed: {error}"

    def _reconcile(self, run: _Run) -> str:
        """Returns: why the rollout fell back to what it was, "" if it did not.

        Raises: WorkersFailed; RolloutFailed where no rollout is left.
        """
        with run.timed("rollout"):
            try:
                report = self._rollout.follow(run.rollout[1], run.step)
            except RolloutLost as error:
                raise RolloutFailed(str(error)) from error
        run.reconciled(report)
        self.rollout_is_synced = True
        if not report.fell_back:
            return ""
        return f"the rollout stays as it was, {report.before}: {report.fell_back}"

    def _change_knobs(self, run: _Run) -> None:
        """A transition that moves nothing: committed in the journal, then set on every rank."""
        if not self._committed_in_journal(run, {}, self._ranks.names):
            return
        with run.timed("commit"):
            values = self._unit_values(run.new_knobs())
            self._call(self._ranks.current, "commit", worker.set_knobs, values)
        self._knobs |= run.new_knobs()
        self._epoch = run.epoch

    def _committed_in_journal(
        self, run: _Run, changes: Mapping[str, Layout], names: Sequence[str]
    ) -> bool:
        """Write the commit; where it cannot be written, `run` is aborted.

        The rollout is not in it: derived state, which follows later and may fall back. Records and
        checkpoints say what is in force.
        """
        after: dict[str, Any] = {
            name: layout.to_dict() for name, layout in {**self._layouts, **changes}.items()
        }
        unit_knobs = self._knobs | run.new_knobs()
        if unit_knobs != self.checked.knobs:
            after["knobs"] = {name: one.to_dict() for name, one in unit_knobs.items()}
        try:
            with run.timed("journal"):
                self._journal.commit(
                    epoch=run.epoch, plan=after, digest=run.digest, step=self._step, ranks=names
                )
        except (OSError, JournalError, EpochError) as error:
            run.outcome, run.reason = "aborted", f"the journal was not written: {error}"
            return False
        run.journaled = True
        return True

    def _execute(
        self,
        run: _Run,
        changes: Mapping[str, Layout],
        ranks: Sequence[Rank],
        change: Change | None = None,
    ) -> None:
        """The transaction.

        Args:
            ranks: that take part. change: of the set of ranks, over whose union this runs.
        """

        def call(phase: str, function: Any, *args: Any) -> list[Any]:
            return self._call(ranks, phase, function, *args, change=change, epoch=run.epoch)

        with run.timed("prepare"):
            answers = self._prepared_meanwhile(run)
            if answers is None:
                names = list(changes)
                budget = self._budget(lambda: call("free_memory", worker.free_memory, names))
                arguments = self._prepare_arguments(changes, run.epoch, run.step, ranks)
                answers = call("prepare", worker.prepare, *arguments, budget)
        if run.aborted(answers):
            return
        reports = [answer["report"] for answer in answers]
        run.prepared(reports)
        digests = {report["digest"] for report in reports}
        if len(digests) != 1:
            call("abort", worker.abort)
            raise TransitionFailed(f"ranks prepared different schedules: {sorted(digests)}")
        names = [rank.name for rank in (ranks if change is None else change.after)]
        if not self._committed_in_journal(run, changes, names):
            call("abort", worker.abort)
            return
        with run.timed("commit"):
            answers = call("commit", worker.commit)
        if run.aborted(answers):
            try:
                self._journal.abort(epoch=run.epoch, reason=run.reason)
            except (OSError, JournalError, EpochError) as error:
                run.reason += f"; the journal still says that it was committed: {error}"
            return
        self._layouts.update(changes)
        self._knobs |= run.new_knobs()
        self._epoch = run.epoch
        for group in self._ranks.groups:
            verl_private.forget_dispatch(group)
        with run.timed("release"):
            self._garbage = "hidden_s" in run.background
            values = self._unit_values(self._knobs)
            answers = call("release", worker.release, values, self._garbage)
        run.released(answers)

    def _prepare_arguments(
        self, changes: Mapping[str, Layout], epoch: int, step: int, ranks: Sequence[Rank]
    ) -> tuple[Any, ...]:
        """Of `worker.prepare`, up to the memory budget."""
        wanted = {name: layout.to_dict() for name, layout in changes.items()}
        hosts = [rank.host for rank in ranks]
        node_of = tuple(sorted(set(hosts)).index(host) for host in hosts)
        return wanted, epoch, step, node_of

    def _call(
        self,
        ranks: Sequence[Rank],
        phase: str,
        function: Any,
        *args: Any,
        change: Change | None = None,
        epoch: int = 0,
    ) -> list[Any]:
        workers = [rank.worker for rank in ranks]
        return call_all(workers, phase, function, *args, **self._watching(phase, change, epoch))

    def _watching(self, phase: str, change: Change | None = None, epoch: int = 0) -> dict[str, Any]:
        """How long answers are waited for, and what is made of bad ones: arguments of `collect`."""
        lost: list[int] = []

        def hopeless(answer: Any) -> str:
            return _lost_ranks(answer, change)

        def without(rank: int, failure: str) -> Any:
            if change is None:
                raise WorkersFailed(failure)
            lost.append(rank)
            # The new layout is whole without the ranks that leave. Where the others have not
            # switched to it they say so, and the job ends.
            if change.leaves(rank) and phase == "commit":
                return {}
            if change.leaves(rank) and phase == "release":
                return {"report": {}, "failed": failure}
            # Before the commit the old layout is whole without the ranks that were to join. The
            # others abort once they know.
            before_commit = phase in ("free_memory", "prepare", "commit", "abort")
            if not change.can_lose(rank) or not before_commit:
                raise WorkersFailed(failure)
            return {"aborted": {"phase": phase, "rank": rank, "reason": failure, "lost_ranks": []}}

        def meanwhile() -> None:
            if change is not None:
                change.report_lost(lost, worker.votes_of(epoch))

        return {
            "timeout_s": self.checked.nereus.timeout_s * DRIVER_PATIENCE,
            "hopeless": hopeless,
            "without": without,
            "meanwhile": meanwhile,
        }

    def _budget(self, free_bytes: Callable[[], list[int | None]]) -> int | None:
        """Device bytes for old and new state of units on one rank; the same for all.

        Args: free_bytes: asked where the settings do not say; None: no limit.
        """
        fixed = self.checked.nereus.memory_budget_gib
        if fixed is not None:
            return int(fixed * (1 << 30))
        known = [value for value in free_bytes() if isinstance(value, int)]
        return min(known) if known else None

    def _last_words(self, run: _Run) -> str:
        return (
            f"the transition after step {self._step} ({run.listed()}) failed and state was lost "
            f"with it: {run.reason}. The job ends here: {self._restart()}. Records: "
            f"{self.checked.run_dir / RECORDS_FILE}"
        )

    @contextmanager
    def _last_words_of(self, failure: str) -> Iterator[None]:
        """Raises: TransitionFailed, with what to restart from, where ranks are lost meanwhile."""
        try:
            yield
        except WorkersFailed as error:
            raise TransitionFailed(
                f"after step {self._step} {failure}: {error}. The job ends here: {self._restart()}"
            ) from error

    def _restart(self) -> str:
        """What the job can be started again from, in words."""
        checkpoint = stamp.latest_checkpoint(self.checked.config)
        return (
            f"the newest checkpoint is {checkpoint}; its {stamp.FILE} names the settings to "
            "restart with"
            if checkpoint is not None
            else "there is no checkpoint yet; start again (trainer.save_freq saves some)"
        )

    # -- observing ------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """The largest value over ranks of what `worker.memory` reports; of a rank that is busy in
        a window, what it reported before. With a controller peaks are of one step."""
        known, self._memory = self._memory, {}
        anew = self.checked.nereus.controller is not None
        return known or _largest(self._call(self._ranks.current, "memory", worker.memory, anew))

    def write_step(self, record: StepRecord) -> None:
        self._last = record
        self._step = record.step
        self._record(record)
        self._inform()

    def _unit_values(self, unit_knobs: Mapping[str, UnitKnobs]) -> dict[str, Any]:
        checked = self.checked
        return {
            name: knobs.unit_values(checked.config, checked.units[name], one)
            for name, one in unit_knobs.items()
        }

    def save_stamp(self, folder: Any) -> None:
        """Write the layouts in force where a checkpoint is about to be saved."""
        config, rollout = self.checked.config, self._rollout.plan
        stamp.write(folder, self._layouts, self._knobs, config, self._epoch, rollout)

    def _schedule(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for step, targets in self.checked.targets.items():
            out[str(step)] = {name: layout.to_dict() for name, layout in targets.items()}
            if knobs_too := self.checked.knob_targets[step]:
                out[str(step)]["knobs"] = {name: c.to_dict() for name, c in knobs_too.items()}
            out[str(step)]["rollout"] = self.checked.rollout_targets[step].to_dict()
        return out


def _world(layouts: Mapping[str, Layout]) -> int:
    """The ranks of a plan whose units all take the job's."""
    return next(iter(layouts.values())).world_size


def _lost_ranks(answer: Any, change: Change | None) -> str:
    """Why the job cannot go on after a rank's answer, "" if it can."""
    aborted = answer.get("aborted") if isinstance(answer, dict) else None
    ranks = [] if not aborted else aborted["lost_ranks"]
    needed = [rank for rank in ranks if change is None or not change.can_lose(rank)]
    if not aborted or not needed:
        return ""
    lost = ", ".join(map(str, needed))
    return f"rank(s) {lost} are dead or hung; {aborted['phase']}: {aborted['reason']}"


def _given_up(answers: Sequence[Mapping[str, Any]]) -> str:
    """Why the ranks gave up, "" if they did not. Raises: TransitionFailed if only some did."""
    given_up = [answer["aborted"] for answer in answers if "aborted" in answer]
    if not given_up:
        return ""
    first = given_up[0]
    why = f"rank {first['rank']} in {first['phase']}: {first['reason']}"
    if len(given_up) != len(answers):
        raise TransitionFailed(f"only some ranks gave up: {why}")
    return why


class _Run:
    """One transition as the driver sees it, on its way to a record.

    Args: doing: told each phase as it begins, and the step. predicted: as in its record.
    """

    def __init__(
        self,
        epoch: int,
        step: int,
        changes: Mapping[str, tuple[Layout, Layout]],
        knobs: Mapping[str, tuple[UnitKnobs, UnitKnobs]],
        rollout_before: RolloutPlan,
        rollout_target: RolloutPlan,
        doing: Callable[[str, int], None] = lambda phase, step: None,
        predicted: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._doing = doing
        self.predicted = predicted
        self.epoch = epoch
        self.step = step
        self.changes = changes
        self.knobs = knobs
        self.rollout = (rollout_before, rollout_target)
        self.rollout_report: dict[str, Any] = {}
        self.outcome = "committed"
        self.reason = ""
        self.digest = ""
        self.journaled = False
        self.mode = "unchanged"
        self.ranks: dict[str, Any] = {}
        self.units: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.background: dict[str, Any] = {}

    def timed(self, phase: str) -> Timed:
        self._doing(phase, self.step)
        return Timed(self.seconds, phase)

    def aborted(self, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the ranks gave up, and with them the transition. Raises: as `_given_up`."""
        why = _given_up(answers)
        if why:
            self.outcome, self.reason = "aborted", why
        return bool(why)

    def prepared(self, reports: Sequence[Mapping[str, Any]]) -> None:
        self.mode = reports[0]["mode"]
        self.digest = reports[0]["digest"]
        for name in reports[0]["units"]:
            self.units[name] = merge_unit_reports([report["units"][name] for report in reports])
            self.units[name]["mode"] = self.mode
        for phase in reports[0]["seconds"]:
            self.seconds[f"prepare.{phase}"] = max(r["seconds"].get(phase, 0.0) for r in reports)

    def released(self, answers: Sequence[Mapping[str, Any]]) -> None:
        failed = [answer["failed"] for answer in answers if answer["failed"]]
        if failed:
            self.reason = failed[0]
        reports = [answer["report"] for answer in answers if answer["report"]]
        for name, unit in self.units.items():
            spent = [report["units"].get(name, 0.0) for report in reports]
            unit["seconds"]["release"] = max(spent, default=0.0)

    def rollout_changes(self) -> bool:
        """Whether its layout or knob does; their number changes with the ranks too."""
        return self.rollout[0] != self.rollout[1]

    def reconciled(self, report: RolloutReport) -> None:
        self.rollout_report = report.to_dict()
        self.seconds |= {f"rollout.{part}": spent for part, spent in report.seconds.items()}

    def hidden(self, prepare_s: float, waited_s: float) -> None:
        """It was prepared in the background, in so long, and waited for at the end."""
        self.background = {"prepare_s": prepare_s, "hidden_s": max(prepare_s - waited_s, 0.0)}

    def exposed(self, why: str) -> None:
        """It could not be prepared in the background, if there is a reason `why`."""
        if why:
            self.background = {"exposed": why}

    def new_knobs(self) -> dict[str, UnitKnobs]:
        return {name: new for name, (_, new) in self.knobs.items()}

    def record(self) -> TransitionRecord:
        units = self.units or {
            name: {"from": str(old), "to": str(new)} for name, (old, new) in self.changes.items()
        }
        return TransitionRecord(
            step=self.step,
            epoch=self.epoch,
            time_unix_s=now_s(),
            outcome=self.outcome,
            reason=self.reason,
            units=units,
            seconds=self.seconds,
            digest=self.digest,
            ranks=self.ranks,
            rollout=self.rollout_report,
            knobs={
                name: {"from": old.to_dict(), "to": new.to_dict()}
                for name, (old, new) in self.knobs.items()
            },
            background=self.background,
            predicted=dict(self.predicted),
        )

    def listed(self) -> str:
        parts = [f"{name} {old} -> {new}" for name, (old, new) in self.changes.items()]
        parts += [
            f"{name} {change}"
            for name, (old, new) in self.knobs.items()
            for change in old.changes_to(new)
        ]
        if self.rollout_changes():
            parts.append(f"rollout {self.rollout[0]} -> {self.rollout[1]}")
        return ", ".join(parts) or "nothing to change"

    def summary(self) -> str:
        if self.outcome == "skipped":
            return f"scheduled transition skipped: {self.reason}"
        if self.outcome == "aborted":
            return f"transition aborted, the old layout trains on: {self.reason}"
        wire = sum(unit.get("bytes_wire", 0) for unit in self.units.values())
        stalled = sum(value for phase, value in self.seconds.items() if "." not in phase)
        note = f"; {self.reason}" if self.reason else ""
        if "hidden_s" in self.background:
            note = f" ({self.background['hidden_s']:.2f} s more in the background){note}"
        elif self.background:
            note = f" (not in the background: {self.background['exposed']}){note}"
        return (
            f"epoch {self.epoch} committed: {self.listed()}; {wire / 1e6:.1f} MB between ranks, "
            f"{stalled:.2f} s{note}"
        )


def setup(checked: Preflight) -> Setup:
    """What the job's processes are told."""
    options = checked.nereus
    return Setup(
        models={name: model.to_dict() for name, model in checked.models.items()},
        checksum=options.checksum,
        staging_bytes=None if options.staging_mib is None else options.staging_mib << 20,
        timeout_s=options.timeout_s,
    )


def say(text: str) -> None:
    """One line on the job's console."""
    print(f"nereus: {text}", file=sys.stdout, flush=True)


def _largest(memory: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: max(one[key] for one in memory) for key in memory[0]}


def _listed(layouts: Mapping[str, Layout]) -> str:
    return ", ".join(f"{name} {layout}" for name, layout in layouts.items())


def _same_ranks(a: Layout, b: Layout) -> bool:
    """Whether state is cut alike; sequence parallelism cuts activations only."""
    return dataclasses.replace(a, sequence_parallel=b.sequence_parallel and a.tp > 1) == b


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out
