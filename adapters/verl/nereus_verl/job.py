"""The job port of a running verl job: the one caller of its workers, between iterations."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from nereus_plugins.control.attempt import listed
from nereus_plugins.control.driver import Driver, Scheduled, say
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.job_controller import JobController
from nereus_plugins.control.lent import leases_of
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.job import Capabilities, Lease, Proposal, UnitInfo
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.trace import installed
from nereus_plugins.trace.record import StepRecord, TransitionRecord
from nereus_verl import (
    asked,
    capabilities,
    jobconfig,
    knobs,
    last_words,
    resume,
    setting,
    stamp,
    verl_private,
    worker,
)
from nereus_verl.answers import Answers
from nereus_verl.asked import Asked
from nereus_verl.driver import call_all, submit
from nereus_verl.knobs import UnitKnobs
from nereus_verl.planned import executable
from nereus_verl.preflight import Preflight
from nereus_verl.preparing import Preparing
from nereus_verl.ranks import SETUP_TIMEOUT_S, Ranks, Setup
from nereus_verl.resume import Resume
from nereus_verl.rollout import RolloutPlan
from nereus_verl.snapshots import JobSnapshots
from nereus_verl.transitions import Transitions

PACKAGES = ("nereus-plugins", *installed.SOFTWARE["verl"], "megatron-core")


class VerlJob:
    """Implements `nereus_plugins.job.JobPort`.

    Args:
        checked: what was found before the job started.
        ranks: the job's processes.

    Attributes:
        snapshots: of its state.
    """

    def __init__(self, checked: Preflight, ranks: Ranks) -> None:
        self.checked = checked
        self._ranks = ranks
        self._controller = JobController(
            checked.nereus.controller,
            checked.run_dir,
            self.leases,
            lambda plan: executable(plan, checked.config).to_dict(),
        )
        inbox = Inbox(
            self._check_submitted,
            adapt=self._controller.adapted,
            more=self._controller.about,
            takes_gpus=self._controller.no_gpus(checked.ranks_may_change()),
        )
        self._driver = Driver(checked.run_dir, inbox, self._state)
        self._answers = Answers(checked.nereus.timeout_s)
        self._preparing = Preparing(checked, self._driver, ranks, self._answers)
        self.snapshots = JobSnapshots(checked, ranks, self._answers)
        self._transitions = Transitions(
            checked, self._driver, ranks, self._answers, self._preparing, self.snapshots
        )
        self._memory: dict[str, int] = {}  # of the ranks, asked before they were busy in a window
        self._collecting: Mapping[Any, int] = {}  # what ranks were asked for in this window

    def start(self) -> None:
        """Make the workers' engines units, and check that they are what the configuration says.

        Raises: WorkersFailed; RuntimeError if verl built another layout than configured;
            SnapshotError: the state to go on from cannot be restored.
        """
        answers = call_all(
            self._ranks.workers,
            "setup",
            worker.setup,
            *self._ranks.setup.args(),
            timeout_s=SETUP_TIMEOUT_S,
        )
        self._ranks.set_places(answers)
        configured = self._transitions.layouts
        for answer in answers:
            built = {name: Layout.from_dict(f) for name, f in answer["layouts"].items()}
            if any(not _same_ranks(built[name], configured[name]) for name in configured):
                raise RuntimeError(
                    f"verl built {listed(built)} on rank {answer['rank']}, its configuration "
                    f"says {listed(configured)}; please report this with the job's settings"
                )
        self._transitions.layouts = built
        if self.checked.resume is not None:
            self._resume(self.checked.resume)
        if self.checked.ranks_change():
            self._transitions.rollout.find_servers()
        self._driver.begin(
            source="verl",
            packages=PACKAGES,
            world_size=len(self._ranks),
            plan=self.layouts(),
            config=dataclasses.asdict(self.checked.nereus) | {"schedule": self._schedule()},
        )
        if missing := self._ranks.missing(self.checked.most_ranks()):
            say(f"warning: {missing}")
        say(f"on; start {listed(built)}; {len(self.checked.targets)} transitions scheduled")
        if self.checked.nereus.control:
            name = str(jobconfig.select(self.checked.config, "trainer.experiment_name", ""))
            self._driver.listen(name)
        if self._controller.wanted:
            self._controller.begin(self._setting, self.describe(), self.epoch())

    def _resume(self, found: Resume) -> None:
        """Raises: SnapshotError."""
        for line in resume.words(found, self.checked.run_dir, self.checked.units):
            say(line)
        self.snapshots.restore(found)

    def _setting(self) -> JobSetting:
        """What the controller is told of this job."""
        ranks = self._ranks
        (device,) = self._answers.call(ranks.current[:1], "device", worker.device)
        if not device["memory_bytes"]:  # of a CPU without a budget: the host's, shared
            device["memory_bytes"] = worker.host_bytes() // len(ranks)
        most = max(ranks.in_cluster(), self.checked.most_ranks())
        steps = int(ranks.trainer.total_training_steps)
        return setting.job_setting(self.checked, self.capabilities(), device, most, steps)

    def close(self) -> None:
        """Take no more commands; the rollout is over."""
        self._controller.close()
        self._driver.close()
        try:
            self._transitions.rollout.close()
        except Exception as error:  # what ended the job counts, not this
            say(f"the rollout's servers may have left shared memory behind: {error!r}")

    # -- the port -------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return capabilities.capabilities(self.checked.config, verl_private.verl_version())

    def describe(self) -> GlobalPlan:
        config = self.checked.config
        assignments = {}
        for name, layout in self._transitions.layouts.items():
            fixed = knobs.fixed_knobs(config, self.checked.units[name])
            for stage in knobs.STAGES[name]:
                live = self._transitions.knobs[name].knobs(stage)
                assignments[stage] = Assignment(layout, Knobs(**fixed, **live))
        rollout = self._transitions.rollout.plan
        assignments[ModelStage.ACTOR_GENERATE] = Assignment(
            rollout.layout(len(self._ranks)), rollout.knobs()
        )
        return GlobalPlan(assignments, name=f"epoch-{self.epoch()}")

    def epoch(self) -> int:
        return self._driver.epoch

    def leases(self) -> tuple[Lease, ...]:
        """The ranks and, where more may join, what Ray has free, or as much of it as `nereus gpus`
        said; until Ray drains their nodes, or as it was said."""
        world, now_s = self.world_size(), time.time()
        if not self.checked.ranks_may_change():
            return (Lease(world),)
        leaving_s = [until - now_s for until in self._ranks.draining().values()]
        granted = self._driver.inbox.granted()
        return leases_of(world, self._ranks.free(), leaving_s, granted, time.monotonic())

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
            for name, layout in self._transitions.layouts.items()
        )

    def execute(self, proposal: Proposal) -> TransitionRecord:
        self._driver.require_epoch(proposal)
        now = self._transitions.in_force()
        return self.transition(asked.proposed(self.checked, now, proposal.plan))

    def transition(
        self, plan: Asked, predicted: Mapping[str, float] = MappingProxyType({})
    ) -> TransitionRecord:
        """As `Transitions.run`."""
        return self._transitions.run(plan, predicted)

    # -- what the trainer calls -----------------------------------------------------------------

    @property
    def rollout_is_synced(self) -> bool:
        """At this boundary: the rollout has the weights in force, and is awake."""
        return self._transitions.rollout_is_synced

    def layouts(self) -> dict[str, Any]:
        """The layouts in force, by unit, as dicts."""
        return {name: layout.to_dict() for name, layout in self._transitions.layouts.items()}

    def layout(self, unit: str) -> Layout:
        return self._transitions.layouts[unit]

    def unit_knobs(self, unit: str) -> UnitKnobs:
        return self._transitions.knobs[unit]

    def rollout(self) -> RolloutPlan:
        return self._transitions.rollout.plan

    def world_size(self) -> int:
        return len(self._ranks)

    def data_parallelism_changed(self) -> bool:
        """Whether a unit that trains has another dp than at the job's start."""
        return any(
            layout.dp != self.checked.layouts[name].dp
            for name, layout in self._transitions.layouts.items()
            if name != "ref"
        )

    def is_due(self, step: int) -> bool:
        """Whether there may be something to run at the end of `step`."""
        with self._controller.spending():
            waiting = self._driver.inbox.waiting()
        return step in self.checked.targets or waiting

    def at_boundary(self, step: int) -> TransitionRecord | None:
        """Run what is due at the end of `step`: see `Driver.at_boundary`."""
        self._transitions.rollout_is_synced = False
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
        failure = "what ranks do in the background could not begin"
        with last_words.if_lost(failure, step, self.checked.config):
            if self._transitions.garbage or layouts:
                self._memory = self.memory()
            if self._transitions.garbage:
                self._transitions.garbage = False
                self._collecting = submit(self._ranks.workers, worker.collect_garbage)
            if layouts:
                self._preparing.start(step, layouts)

    def end_window(self) -> None:
        """The ranks are needed again: what they left behind is done.

        Raises: TransitionFailed: a rank could not do it.
        """
        collecting, self._collecting = self._collecting, {}
        failure = "what a transition left behind could not be cleared away"
        with last_words.if_lost(failure, self._driver.step, self.checked.config):
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

    def take_snapshot(self, step: int, data: Callable[[], Any]) -> None:
        """Take one if it is due at the end of `step`. Args: data: as `JobSnapshots.after_step`."""
        self.snapshots.after_step(step, self.epoch(), self.layouts(), data)

    def save_stamp(self, folder: Any) -> None:
        """Write the layouts in force where a checkpoint is about to be saved."""
        now = self._transitions.in_force()
        config = self.checked.config
        stamp.write(folder, now.layouts, now.knobs, config, self.epoch(), now.rollout)

    # -- what is due ----------------------------------------------------------------------------

    def _scheduled(self, step: int) -> Scheduled | None:
        """What is scheduled after `step`, None if nothing is."""
        if step not in self.checked.targets:
            return None
        checked, now = self.checked, self._transitions.in_force()
        return Scheduled(
            asked.would_change(checked, now, step),
            lambda: self.transition(asked.scheduled(checked, now, step)),
        )

    def _run_submitted(self, submitted: Submitted) -> TransitionRecord:
        """Raises: SpecError, TransitionFailed."""
        with self._controller.spending():
            plan = asked.submitted(self.checked, self._transitions.in_force(), submitted.plan)
        return self.transition(plan, submitted.predicted)

    def _check_submitted(self, plan: Mapping[str, Any]) -> str:
        """What a plan changes as things are, in words. Raises: SpecError if it cannot be run."""
        now = self._transitions.in_force()
        changes = asked.submitted(self.checked, now, plan).changes(now).words()
        if not changes:
            raise SpecError(f"nothing to change: {listed(now.layouts)} is in force")
        return ", ".join(changes)

    def _due_in_window(self, step: int) -> Mapping[str, Layout]:
        """The layouts, by unit, that are to be prepared in the background."""
        now, inbox = self._transitions.in_force(), self._driver.inbox
        try:
            if step in self.checked.targets:
                if inbox.paused:
                    return {}
                wanted = self._transitions.wanted(asked.scheduled(self.checked, now, step))
            else:
                plan = inbox.pending_plan()
                if plan is None:
                    return {}
                wanted = self._transitions.wanted(asked.submitted(self.checked, now, plan))
        except SpecError:
            return {}  # the boundary says so
        # Where ranks join or leave, everything waits: claiming them beside generation was not run.
        return wanted.layouts if wanted.ranks is None else {}

    def _state(self) -> dict[str, Any]:
        """For those who command the job."""
        self._controller.look_at(self.describe)
        return {
            "world_size": len(self._ranks),
            "gpus": len(self._ranks),
            "nodes": [rank.host for rank in self._ranks.current],
            "plan": self.layouts(),
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
