"""The job port of a running OpenRLHF job: the one caller of its model actors about layouts,
between iterations. It lives in the process of OpenRLHF's trainer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray

from nereus_openrlhf import capabilities, openrlhf_private, setting, worker
from nereus_openrlhf.config import ROLLOUT, check_plan
from nereus_openrlhf.engines import Engines, EnginesLost
from nereus_openrlhf.planned import as_written, described
from nereus_openrlhf.preflight import Preflight, plan_targets
from nereus_openrlhf.ranks import (
    DRIVER_PATIENCE,
    SETUP_TIMEOUT_S,
    Change,
    ClaimFailed,
    Seats,
    UnitRanks,
    call,
    join,
)
from nereus_openrlhf.stage_times import StageTimes
from nereus_plugins.control import ray_private
from nereus_plugins.control.attempt import Attempt, Changes, TransitionFailed, listed
from nereus_plugins.control.driver import SUBMITTED, Driver, Scheduled, say
from nereus_plugins.control.inbox import Inbox, Submitted
from nereus_plugins.control.job_controller import JobController
from nereus_plugins.control.lent import leases_of
from nereus_plugins.control.workers import WorkersFailed, collect
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.job import Capabilities, Lease, Proposal, UnitInfo
from nereus_plugins.spec import GlobalPlan, Layout, SpecError
from nereus_plugins.trace import installed
from nereus_plugins.trace.record import RECORDS_FILE, StepRecord, TransitionRecord

PACKAGES = ("nereus-plugins", *installed.SOFTWARE["openrlhf"])


class OpenRlhfJob:
    """Implements `nereus_plugins.job.JobPort`.

    Args:
        checked: what was found before the job started.
        trainer: OpenRLHF's, whose models are built.
        engine_groups: placement groups of the engines, where each has its own.
    """

    def __init__(self, checked: Preflight, trainer: Any, engine_groups: Sequence[Any] = ()) -> None:
        self.checked = checked
        self._trainer = trainer
        self._args = trainer.args
        self._layouts = dict(checked.layouts)
        self._ranks: dict[str, UnitRanks] = {}
        self._engines = Engines(trainer, engine_groups)
        self._stage_times = StageTimes()
        self._controller = JobController(
            checked.nereus.controller,
            checked.run_dir,
            self.leases,
            lambda plan: as_written(plan, self.describe(), SUBMITTED),
        )
        fixed = bool(self._args.train.colocate_all)
        inbox = Inbox(
            self._check_submitted,
            adapt=self._controller.adapted,
            more=self._controller.about,
            takes_gpus=self._controller.no_gpus(not fixed),
            fewest_gpus=capabilities.fewest_gpus(self._args),
        )
        self._driver = Driver(checked.run_dir, inbox, self._state)

    def start(self) -> None:
        """Make the models units, and check that they are what the arguments say.

        Raises: WorkersFailed; RuntimeError if OpenRLHF built another layout.
        """
        seats: dict[tuple[str, ...], Seats] = {}
        for name, group in openrlhf_private.groups_of(self._trainer).items():
            together = openrlhf_private.colocated_with(self._args, name)
            group.stage_times = self._stage_times
            group.unit = name
            if together not in seats:
                handles = group._actor_handlers
                placed = ray.get(
                    [openrlhf_private.call_worker(handle, worker.placement) for handle in handles]
                )
                seats[together] = Seats.of(placed)
            share = openrlhf_private.gpus_per_actor(self._args, name)
            self._ranks[name] = ranks = UnitRanks(name, group, seats[together], share)
            answers = self._ask(ranks, "setup", worker.setup, *self._told(name))
            ranks.hosts = [answer["host"] for answer in answers]
            ranks.backend = answers[0]["backend"]
            built = [Layout.from_dict(answer["layout"]) for answer in answers]
            if any(layout != self._layouts[name] for layout in built):
                raise RuntimeError(
                    f"OpenRLHF built {name} in {built[0]}, its arguments say "
                    f"{self._layouts[name]}; please report this with the job's arguments"
                )
        self._driver.begin(
            source="openrlhf",
            packages=PACKAGES,
            world_size=self.world_size(),
            plan=self.layouts(),
            config=dataclasses.asdict(self.checked.nereus) | {"schedule": self._schedule()},
        )
        say(f"on; start {listed(self._layouts)}; {len(self.checked.targets)} transitions scheduled")
        if self.checked.nereus.control:
            self._driver.listen(str(self._args.logger.wandb.run_name))
        if self._controller.wanted:
            self._controller.begin(self._setting, self.describe(), self.epoch())

    def _setting(self) -> JobSetting:
        """What the controller is told of this job."""
        first = self._ranks["actor"]
        (device,) = collect(
            {openrlhf_private.call_worker(first.handles[0], worker.device): 0},
            "device",
            timeout_s=SETUP_TIMEOUT_S,
        )
        if not device["memory_bytes"]:  # a CPU has the host's, shared
            used = sum(len(ranks) for ranks in self._ranks.values()) + len(self._engines)
            device["memory_bytes"] = device["host_bytes"] // used
        nodes = [int(node["Resources"].get("GPU", 0.0)) for node in ray.nodes() if node["Alive"]]
        return setting.job_setting(
            self._args,
            self.checked.models,
            self.capabilities(),
            device,
            max(sum(nodes), self._used_gpus()),
            max(nodes),
            openrlhf_private.steps_of(self._trainer),
        )

    def _told(self, name: str) -> tuple[Any, ...]:
        """What every process is told about the job: the arguments of `worker.setup`."""
        options = self.checked.nereus
        staging = None if options.staging_mib is None else options.staging_mib << 20
        return name, options.checksum, staging, options.timeout_s, self.epoch()

    def _ask(self, ranks: UnitRanks, phase: str, function: Any, *args: Any) -> list[Any]:
        submitted = {
            openrlhf_private.call_worker(handle, function, *args): rank
            for rank, handle in enumerate(ranks.handles)
        }
        return collect(submitted, phase, timeout_s=SETUP_TIMEOUT_S)

    def close(self) -> None:
        """Take no more commands."""
        self._controller.close()
        self._driver.close()

    # -- the port -------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return capabilities.capabilities(self._args)

    def describe(self) -> GlobalPlan:
        name = f"epoch-{self.epoch()}"
        return described(self._args, self._layouts, len(self._engines), name)

    def epoch(self) -> int:
        return self._driver.epoch

    def leases(self) -> tuple[Lease, ...]:
        """The GPUs of the plan in force, seats that nobody sits on, and what Ray has free; or as
        `nereus gpus` said last."""
        used = self._used_gpus()
        if self._args.train.colocate_all:
            return (Lease(used),)
        seats = {id(ranks.seats): ranks.seats for ranks in self._ranks.values()}
        empty = sum(len(of) - self._used(of) for of in seats.values())
        free = empty + ray_private.free("GPU")
        return leases_of(used, free, (), self._driver.inbox.granted(), time.monotonic())

    def _used_gpus(self) -> int:
        engines = len(self._engines) * self._args.vllm.tensor_parallel_size
        return self.world_size() + (0 if self._args.train.colocate_all else engines)

    def observe(self) -> StepRecord | None:
        return self._driver.last

    def units(self) -> tuple[UnitInfo, ...]:
        return tuple(
            UnitInfo(
                name=name,
                model=self.checked.models[name],
                stages=frozenset(capabilities.STAGES_OF[name]),
                layout=layout,
                trainable=name in ("actor", "critic"),
            )
            for name, layout in self._layouts.items()
        )

    def execute(self, proposal: Proposal) -> TransitionRecord:
        self._driver.require_epoch(proposal)
        where = f"plan {proposal.plan.name!r}"
        targets = self._targets(as_written(proposal.plan, self.describe(), where), where)
        return self.transition(*targets, where)

    # -- what the trainer calls -----------------------------------------------------------------

    def layouts(self) -> dict[str, Any]:
        """The layouts in force, by model, as dicts."""
        return {name: layout.to_dict() for name, layout in self._layouts.items()}

    def layout(self, unit: str) -> Layout:
        return self._layouts[unit]

    def replicas(self) -> int:
        """How many vLLM engines there are."""
        return len(self._engines)

    def world_size(self) -> int:
        """Ranks of all models, those that share GPUs counted once."""
        used: dict[int, int] = {}
        for ranks in self._ranks.values():
            used[id(ranks.seats)] = max(used.get(id(ranks.seats), 0), len(ranks))
        return sum(used.values())

    def is_due(self, step: int) -> bool:
        """Whether there may be something to run at the end of `step`."""
        with self._controller.spending():
            waiting = self._driver.inbox.waiting()
        return step in self.checked.targets or waiting

    def at_boundary(self, step: int) -> TransitionRecord | None:
        """Run what is due at the end of `step`: see `Driver.at_boundary`."""
        return self._driver.at_boundary(step, self._scheduled(step), self._run_submitted)

    def write_step(self, record: StepRecord) -> None:
        self._driver.write_step(record)

    def controller_ms(self) -> float | None:
        """What the driver spent on the controller since it was asked last; None: there is none."""
        return self._controller.spent_ms()

    def stage_seconds(self) -> dict[str, float]:
        """Of each model-stage since it was asked last: see `StageTimes`."""
        return self._stage_times.take()

    def memory(self) -> dict[str, int]:
        """The largest value over all ranks of what `worker.memory` reports."""
        answers = [
            answer
            for ranks in self._ranks.values()
            for answer in self._ask(ranks, "memory", worker.memory)
        ]
        return {key: max(one[key] for one in answers) for key in answers[0]}

    # -- what is due ----------------------------------------------------------------------------

    def _scheduled(self, step: int) -> Scheduled | None:
        """What is scheduled after `step`, None if nothing is."""
        if step not in self.checked.targets:
            return None
        targets = self.checked.targets[step]
        return Scheduled(self._changes(targets), lambda: self._run_scheduled(step, targets))

    def _run_scheduled(self, step: int, targets: Mapping[str, Layout]) -> TransitionRecord:
        """Raises: SpecError, TransitionFailed."""
        where, plan = f"nereus.schedule.{step}", self.checked.nereus.schedule[step]
        capabilities.check_layouts(self._args, {**self._layouts, **targets}, where)
        replicas = self.checked.replicas[step] if ROLLOUT in plan else len(self._engines)
        return self.transition(targets, replicas, where)

    def _run_submitted(self, submitted: Submitted) -> TransitionRecord:
        """Raises: SpecError, TransitionFailed."""
        with self._controller.spending():
            targets = self._targets(submitted.plan)
        return self.transition(*targets, SUBMITTED, submitted.predicted)

    def _targets(
        self, plan: Mapping[str, Any], where: str = SUBMITTED
    ) -> tuple[dict[str, Layout], int]:
        checked = check_plan(plan, where)
        return plan_targets(self._args, checked, dict(self._layouts), len(self._engines), where)

    def _check_submitted(self, plan: Mapping[str, Any]) -> str:
        """What a plan changes as things are, in words. Raises: SpecError if it cannot be run."""
        targets, replicas = self._targets(plan)
        differ = {n: t for n, t in targets.items() if t != self._layouts[n]}
        changes = self._changes(differ, replicas).words()
        if not changes:
            raise SpecError(f"nothing to change: {listed(self._layouts)} is in force")
        return ", ".join(changes)

    def _changes(self, targets: Mapping[str, Layout], replicas: int | None = None) -> Changes:
        """Args: replicas: of vLLM; None: they stay."""
        before = len(self._engines)
        engines = [] if replicas in (None, before) else [f"vLLM engines {before} -> {replicas}"]
        return Changes({n: (self._layouts[n], t) for n, t in targets.items()}, others=engines)

    def _state(self) -> dict[str, Any]:
        """For those who command the job."""
        self._controller.look_at(self.describe)
        return {
            "world_size": self.world_size(),
            "gpus": self._used_gpus(),
            "nodes": sorted({host for ranks in self._ranks.values() for host in ranks.hosts}),
            "plan": self.layouts(),
        }

    # -- the transaction ------------------------------------------------------------------------

    def transition(
        self,
        targets: Mapping[str, Layout],
        replicas: int,
        where: str,
        predicted: Mapping[str, float] = MappingProxyType({}),
    ) -> TransitionRecord:
        """One transition of the named models, as a transaction; then vLLM's engines follow.

        Args:
            targets: by model; others stay. replicas: of vLLM. where: what asked, for messages.
            predicted: what the controller expects of it, for its record.

        Returns: the record, also when it was aborted: then the old layouts are in force.

        Raises: SpecError: not a plan of this job. TransitionFailed: the job must end.
        """
        changes = {n: t for n, t in targets.items() if t != self._layouts[n]}
        capabilities.check_rollout(
            self._args, {**self._layouts, **changes}["actor"], replicas, where
        )
        attempt = self._driver.attempt(self._changes(changes, replicas), predicted=predicted)
        if not attempt.changes.words():
            return self._driver.finished(attempt)
        say(f"step {attempt.step}: {attempt.listed()} ...")
        try:
            if changes:
                self._execute(attempt, changes)
            elif not self._committed_in_journal(attempt, {}):
                return self._driver.finished(attempt)
            if attempt.outcome == "committed" and replicas != len(self._engines):
                self._change_engines(attempt, replicas, alone=not changes)
        except (WorkersFailed, TransitionFailed, EnginesLost) as error:
            attempt.ended("failed", str(error))
            words = self._last_words(attempt)
            raise TransitionFailed(words + self._driver.failed(attempt)) from error
        return self._driver.finished(attempt)

    def _execute(self, attempt: Attempt, targets: Mapping[str, Layout]) -> None:
        options = self.checked.nereus
        limit_s = options.timeout_s * DRIVER_PATIENCE
        changes = [Change(self._ranks[n], self._layouts[n], t) for n, t in targets.items()]
        votes = worker.votes_of(attempt.epoch)
        try:
            with attempt.timed("claim"):
                self._claim(changes)
            attempt.ranks = self._rank_changes(changes)
            with attempt.timed("join"):
                join(changes, options.timeout_s)
            with attempt.timed("prepare"):
                answers = call(
                    changes,
                    "prepare",
                    worker.prepare,
                    lambda change: (
                        [
                            (
                                change.after.to_dict(),
                                attempt.epoch,
                                change.node_of,
                                self._args,
                                self._trainer.max_steps,
                            )
                        ]
                        * len(change.union)
                    ),
                    timeout_s=limit_s,
                    votes=votes,
                )
        except ClaimFailed as error:
            attempt.ended("aborted", str(error))
            self._withdraw(attempt, changes)
            return
        gave_up = [attempt.gave_up(of_change) for of_change in answers]
        if any(gave_up):
            self._abort([c for c, why in zip(changes, gave_up, strict=True) if not why])
            self._withdraw(attempt, changes)
            return
        attempt.prepared([[answer["report"] for answer in of_change] for of_change in answers])
        if not self._committed_in_journal(attempt, targets):
            self._abort(changes)
            self._withdraw(attempt, changes)
            return
        with attempt.timed("commit"):
            answers = self._each(changes, "commit", worker.commit, limit_s, votes)
        gave_up = [attempt.gave_up(of_change) for of_change in answers]
        if any(gave_up):
            self._driver.take_back(attempt)
            if not all(gave_up):
                raise TransitionFailed(
                    f"only some models switched to their new layout: {attempt.reason}"
                )
            self._withdraw(attempt, changes)
            return
        self._layouts.update(targets)
        self._driver.epoch = attempt.epoch
        with attempt.timed("release"):
            released = self._each(changes, "release", worker.release, limit_s, votes)
            attempt.released([answer for of_change in released for answer in of_change])
        with attempt.timed("follow"):
            call(
                changes,
                "follow",
                worker.settle,
                lambda change: [()] * len(change.order),
                timeout_s=limit_s,
                handles=lambda change: [change.union[place] for place in change.order],
            )
            for change in changes:
                change.follow(self._args, self._used)

    def _rank_changes(self, changes: Sequence[Change]) -> dict[str, Any]:
        """For the record: ranks of all models, each counted, where their number changes."""
        if all(len(change.ranks) == change.after.world_size for change in changes):
            return {}
        before = sum(len(ranks) for ranks in self._ranks.values())
        growth = sum(change.after.world_size - len(change.ranks) for change in changes)
        return {
            "from": before,
            "to": before + growth,
            "joined": [name for change in changes for name in change.joined_names],
            "left": [name for change in changes for name in change.left_names],
            "nodes": sorted({host for change in changes for host in change.hosts}),
        }

    def _each(
        self, changes: Sequence[Change], phase: str, function: Any, limit_s: float, votes: str
    ) -> list[list[Any]]:
        return call(
            changes,
            phase,
            function,
            lambda change: [()] * len(change.union),
            timeout_s=limit_s,
            votes=votes,
        )

    def _used(self, seats: Seats) -> int:
        """How many of these seats ranks sit on."""
        return max(len(ranks) for ranks in self._ranks.values() if ranks.seats is seats)

    def _claim(self, changes: Sequence[Change]) -> None:
        """Raises: ClaimFailed."""
        growing = [change for change in changes if change.after.world_size > len(change.ranks)]
        for change in growing:
            change.start(self.checked.nereus.claim_timeout_s)
        if not growing:
            return
        try:
            states = call(
                growing,
                "claim",
                worker.briefing,
                lambda change: [()],
                timeout_s=SETUP_TIMEOUT_S,
                handles=lambda change: change.ranks.handles[:1],
            )
            generators = {c.name: state for c, (state,) in zip(growing, states, strict=True)}
            answers = call(
                growing,
                "claim",
                worker.enter,
                lambda change: (
                    [
                        (
                            *self._told(change.name),
                            change.ranks.backend,
                            change.before.to_dict(),
                            generators[change.name],
                        )
                    ]
                    * len(change.joined)
                ),
                timeout_s=SETUP_TIMEOUT_S,
                handles=lambda change: change.joined,
            )
        except WorkersFailed as error:
            raise ClaimFailed(f"a process for a new rank did not start: {error}") from error
        for change, of_change in zip(growing, answers, strict=True):
            change.entered(of_change)

    def _abort(self, changes: Sequence[Change]) -> None:
        limit_s = self.checked.nereus.timeout_s * DRIVER_PATIENCE
        if changes:
            self._each(changes, "abort", worker.abort, limit_s, "")

    def _withdraw(self, attempt: Attempt, changes: Sequence[Change]) -> None:
        """Be as before: old ranks in their world, what was claimed returned to Ray."""
        with attempt.timed("give_back"):
            call(
                changes,
                "withdraw",
                worker.withdraw,
                lambda change: [()] * len(change.ranks),
                timeout_s=self.checked.nereus.timeout_s,
                handles=lambda change: change.ranks.handles,
            )
            for change in changes:
                change.give_back()

    def _committed_in_journal(self, attempt: Attempt, targets: Mapping[str, Layout]) -> bool:
        """Write the commit; where it cannot be written, the attempt is aborted."""
        layouts = {**self._layouts, **targets}
        after = {name: layout.to_dict() for name, layout in layouts.items()}
        names = [f"{name}-{i}" for name, one in layouts.items() for i in range(one.world_size)]
        return self._driver.commit(attempt, after, names)

    def _change_engines(self, attempt: Attempt, replicas: int, *, alone: bool) -> None:
        """Raises: EnginesLost: none are left that could generate."""
        before = len(self._engines)
        with attempt.timed("rollout"):
            options = self.checked.nereus
            fell_back = self._engines.change_to(
                replicas,
                self._ranks["actor"].handles,
                options.timeout_s,
                options.claim_timeout_s,
            )
        tp = self._args.vllm.tensor_parallel_size
        after = before if fell_back else replicas
        attempt.rollout = {
            "from": {"tp": tp, "replicas": before},
            "to": {"tp": tp, "replicas": replicas},
            "kept": list(range(min(before, after))),
            "ended": list(range(after, before)),
            "launched": list(range(before, after)),
            "fell_back": fell_back,
            "replicas": [],
        }
        if not alone:
            attempt.reason = "; ".join(filter(None, (attempt.reason, fell_back)))
        elif fell_back:
            attempt.ended("aborted", fell_back)
            self._driver.take_back(attempt)
        else:
            self._driver.epoch = attempt.epoch

    def _last_words(self, attempt: Attempt) -> str:
        return (
            f"the transition after step {attempt.step} ({attempt.listed()}) failed: "
            f"{attempt.reason}. The job ends here; restart it with --ckpt.load_enable from what is "
            f"saved in {self._args.ckpt.path} (in the layout that it was saved in: the journal has "
            f"them). Records: {self.checked.run_dir / RECORDS_FILE}"
        )

    def _schedule(self) -> dict[str, Any]:
        return {
            str(step): {name: layout.to_dict() for name, layout in targets.items()}
            | {ROLLOUT: {"replicas": self.checked.replicas[step]}}
            for step, targets in self.checked.targets.items()
        }
