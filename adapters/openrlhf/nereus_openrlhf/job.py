"""The job port of a running OpenRLHF job: the one caller of its model actors about layouts,
between iterations. It lives in the process of OpenRLHF's trainer."""

from __future__ import annotations

import dataclasses
import platform
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray

from nereus_openrlhf import capabilities, openrlhf_private, worker
from nereus_openrlhf.config import ROLLOUT, check_plan
from nereus_openrlhf.engines import Engines, EnginesLost
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
from nereus_plugins.control import by_ray, messages
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.server import Server
from nereus_plugins.control.workers import WorkersFailed, collect
from nereus_plugins.gtg.journal import EpochError, Journal, JournalError
from nereus_plugins.gtg.report import Timed, merge_unit_reports
from nereus_plugins.job import Capabilities, Gpus, Proposal, StaleProposal, UnitInfo
from nereus_plugins.spec import Assignment, GlobalPlan, Layout, ModelStage, SpecError
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
    now_s,
)

JOURNAL_FILE = "journal.jsonl"
SUBMITTED = "plan"  # what messages call a submitted plan
PACKAGES = ("nereus-plugins", "openrlhf", "deepspeed", "torch", "ray", "transformers", "vllm")


class TransitionFailed(RuntimeError):
    """State was lost with a dead or broken rank: the job must end; says what to restart from."""


class OpenRlhfJob:
    """Implements `nereus_plugins.job.JobPort`.

    Args:
        checked: what was found before the job started.
        trainer: OpenRLHF's, whose models are built.
    """

    def __init__(self, checked: Preflight, trainer: Any) -> None:
        self.checked = checked
        self._trainer = trainer
        self._args = trainer.args
        self._layouts = dict(checked.layouts)
        self._ranks: dict[str, UnitRanks] = {}
        self._engines = Engines(trainer)
        self._records = RecordWriter(checked.run_dir)
        self._journal = Journal(checked.run_dir / JOURNAL_FILE)
        # Epochs go on from an earlier run of the same job; each attempt takes one.
        self._attempts = max((record.epoch for record in self._journal.read()), default=0)
        self._epoch = self._attempts
        self._step = 0
        self._last: StepRecord | None = None
        self._inbox = Inbox(self._check_submitted)
        self._server: Server | None = None
        self._sign: Any = None

    def start(self) -> None:
        """Make the models units, and check that they are what the arguments say.

        Raises: WorkersFailed; RuntimeError if OpenRLHF built another layout.
        """
        seats: dict[tuple[str, ...], Seats] = {}
        for name, group in openrlhf_private.groups_of(self._trainer).items():
            together = openrlhf_private.colocated_with(self._args, name)
            first = group._actor_handlers[0]
            if together not in seats:
                placed = ray.get(openrlhf_private.call_worker(first, worker.placement))
                seats[together] = Seats(
                    [(placed, bundle) for bundle in range(len(group._actor_handlers))]
                )
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
        run_id = uuid.uuid4().hex
        self._records.write(
            RunRecord(
                run_id=run_id,
                time_unix_s=now_s(),
                source="openrlhf",
                versions=_versions(),
                world_size=self.world_size(),
                plan=self.layouts(),
                config=dataclasses.asdict(self.checked.nereus) | {"schedule": self._schedule()},
            )
        )
        say(
            f"on; start {_listed(self._layouts)}; {len(self.checked.targets)} transitions scheduled"
        )
        if self.checked.nereus.control:
            self._listen(run_id)

    def _told(self, name: str) -> tuple[Any, ...]:
        """What every process is told about the job: the arguments of `worker.setup`."""
        options = self.checked.nereus
        staging = None if options.staging_mib is None else options.staging_mib << 20
        return name, options.checksum, staging, options.timeout_s, self._epoch

    def _ask(self, ranks: UnitRanks, phase: str, function: Any, *args: Any) -> list[Any]:
        submitted = {
            openrlhf_private.call_worker(handle, function, *args): rank
            for rank, handle in enumerate(ranks.handles)
        }
        return collect(submitted, phase, timeout_s=SETUP_TIMEOUT_S)

    def close(self) -> None:
        """Take no more commands."""
        self._sign = None
        if self._server is not None:
            self._server.close()

    # -- the port -------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return capabilities.capabilities(self._args)

    def describe(self) -> GlobalPlan:
        assignments = {
            stage: Assignment(layout)
            for name, layout in self._layouts.items()
            for stage in capabilities.STAGES_OF[name]
        }
        assignments[ModelStage.ACTOR_GENERATE] = Assignment(
            Layout(tp=self._args.vllm.tensor_parallel_size, dp=len(self._engines))
        )
        return GlobalPlan(assignments, name=f"epoch-{self._epoch}")

    def epoch(self) -> int:
        return self._epoch

    def gpus(self) -> Gpus:
        """What the plan in force uses, and what Ray has free where ranks may join."""
        used = self.world_size() + len(self._engines) * self._args.vllm.tensor_parallel_size
        if self._args.train.colocate_all:
            return Gpus(self.world_size())
        return Gpus(used + int(ray.available_resources().get("GPU", 0.0)))

    def observe(self) -> StepRecord | None:
        return self._last

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
        if proposal.epoch != self._epoch:
            raise StaleProposal(
                f"proposed for epoch {proposal.epoch}, the job is in epoch {self._epoch}"
            )
        targets: dict[str, Layout] = {}
        replicas = len(self._engines)
        for stage, one in proposal.plan.assignments.items():
            if stage is ModelStage.ACTOR_GENERATE:
                replicas = one.layout.dp
            elif stage.model in self._layouts:
                targets[stage.model] = one.layout
        where = f"plan {proposal.plan.name!r}"
        capabilities.check_layouts(self._args, self._layouts | targets, where)
        return self.transition(targets, replicas, where)

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
        return step in self.checked.targets or self._inbox.waiting()

    def at_boundary(self, step: int) -> TransitionRecord | None:
        """Run what is due at the end of `step`, one transition at most; None if nothing is.

        What is scheduled goes first; a submitted plan then waits for the next boundary, and is
        refused if the epoch has changed.

        Raises: TransitionFailed: the job must end.
        """
        self._step = step
        record = None
        if step in self.checked.targets:
            record = self._run_scheduled(step)
        elif (submitted := self._inbox.pull(step)) is not None:
            record = self._run_submitted(submitted.plan)
        self._inbox.doing("")
        return record

    def write_step(self, record: StepRecord) -> None:
        self._last = record
        self._step = record.step
        self._record(record)
        self._inform()

    def memory(self) -> dict[str, int]:
        """The largest value over all ranks of what `worker.memory` reports."""
        answers = [
            answer
            for ranks in self._ranks.values()
            for answer in self._ask(ranks, "memory", worker.memory)
        ]
        return {key: max(one[key] for one in answers) for key in answers[0]}

    # -- what is due ----------------------------------------------------------------------------

    def _run_scheduled(self, step: int) -> TransitionRecord:
        """The schedule was checked before the job started; where an earlier transition was aborted
        or skipped since, a plan may not fit what is in force, and is aborted too."""
        targets, where = self.checked.targets[step], f"nereus.schedule.{step}"
        run = _Run(self._epoch, step, {n: (self._layouts[n], t) for n, t in targets.items()})
        if self._inbox.paused:
            run.outcome = "skipped"
            run.reason = "the job was paused; `nereus transition` can submit the plan"
            return self._finished(run)
        try:
            capabilities.check_layouts(self._args, {**self._layouts, **targets}, where)
        except SpecError as error:
            run.epoch = self._next_attempt()
            run.outcome, run.reason = "aborted", str(error)
            return self._finished(run)
        plan = self.checked.nereus.schedule[step]
        replicas = self.checked.replicas[step] if ROLLOUT in plan else len(self._engines)
        return self.transition(targets, replicas, where)

    def _run_submitted(self, plan: Mapping[str, Any]) -> TransitionRecord | None:
        try:
            record = self.transition(*self._targets(plan), SUBMITTED)
        except SpecError as error:
            self._inbox.answer(messages.REFUSED, str(error), by_plan=True)
            return None
        except TransitionFailed as error:
            self._inbox.answer(messages.FAILED, str(error))
            raise
        self._inbox.answer(record.outcome, record.reason)
        return record

    def _targets(self, plan: Mapping[str, Any]) -> tuple[dict[str, Layout], int]:
        checked = check_plan(plan, SUBMITTED)
        return plan_targets(self._args, checked, dict(self._layouts), len(self._engines), SUBMITTED)

    def _check_submitted(self, plan: Mapping[str, Any]) -> str:
        """What a plan changes as things are, in words. Raises: SpecError if it cannot be run."""
        targets, replicas = self._targets(plan)
        changes = [
            f"{name} {self._layouts[name]} -> {layout}"
            for name, layout in targets.items()
            if layout != self._layouts[name]
        ]
        if replicas != len(self._engines):
            changes.append(f"vLLM engines {len(self._engines)} -> {replicas}")
        if not changes:
            raise SpecError(f"nothing to change: {_listed(self._layouts)} is in force")
        return ", ".join(changes)

    def _listen(self, run_id: str) -> None:
        self._inform()
        try:
            self._server = Server(self.checked.run_dir, self._inbox, run_id, self._epoch)
        except OSError as error:
            say(f"takes no commands while it runs (nereus.control): {error}")
            return
        name = str(self._args.logger.wandb.run_name)
        self._sign = by_ray.publish(self.checked.run_dir, run_id, name)
        say(f"takes commands: nereus status {self.checked.run_dir}")

    def _inform(self) -> None:
        """Tell those who command the job how it is now."""
        self._inbox.inform(
            epoch=self._epoch,
            step=self._step,
            world_size=self.world_size(),
            nodes=sorted({host for ranks in self._ranks.values() for host in ranks.hosts}),
            plan=self.layouts(),
        )
        if self._server is not None:
            try:
                self._server.moved_to(self._epoch)
            except OSError as error:
                say(f"step {self._step}: {messages.ENDPOINT_FILE} could not be written: {error}")

    # -- the transaction ------------------------------------------------------------------------

    def transition(
        self, targets: Mapping[str, Layout], replicas: int, where: str
    ) -> TransitionRecord:
        """One transition of the named models, as a transaction; then vLLM's engines follow.

        Args: targets: by model; others stay. replicas: of vLLM. where: what asked, for messages.

        Returns: the record, also when it was aborted: then the old layouts are in force.

        Raises: SpecError: not a plan of this job. TransitionFailed: the job must end.
        """
        changes = {n: t for n, t in targets.items() if t != self._layouts[n]}
        capabilities.check_rollout(
            self._args, {**self._layouts, **changes}["actor"], replicas, where
        )
        run = _Run(
            self._next_attempt(),
            self._step,
            {n: (self._layouts[n], t) for n, t in changes.items()},
            (len(self._engines), replicas),
            self._inbox.doing,
        )
        if not changes and replicas == len(self._engines):
            return self._finished(run)
        say(f"step {self._step}: {run.listed()} ...")
        try:
            if changes:
                self._execute(run, changes)
            elif not self._committed_in_journal(run, {}):
                return self._finished(run)
            if run.outcome == "committed" and replicas != len(self._engines):
                self._change_engines(run, replicas, alone=not changes)
        except (WorkersFailed, TransitionFailed, EnginesLost) as error:
            run.outcome, run.reason = "failed", str(error)
            self._fail(run, error)
        return self._finished(run)

    def _execute(self, run: _Run, targets: Mapping[str, Layout]) -> None:
        options = self.checked.nereus
        limit_s = options.timeout_s * DRIVER_PATIENCE
        changes = [Change(self._ranks[n], self._layouts[n], t) for n, t in targets.items()]
        votes = worker.votes_of(run.epoch)
        try:
            with run.timed("claim"):
                self._claim(changes)
            run.ranks = self._rank_changes(changes)
            with run.timed("join"):
                join(changes, options.timeout_s)
            with run.timed("prepare"):
                answers = call(
                    changes,
                    "prepare",
                    worker.prepare,
                    lambda change: (
                        [
                            (
                                change.after.to_dict(),
                                run.epoch,
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
            run.outcome, run.reason = "aborted", str(error)
            self._withdraw(run, changes)
            return
        gave_up = [run.gave_up(of_change) for of_change in answers]
        if any(gave_up):
            self._abort([c for c, why in zip(changes, gave_up, strict=True) if not why])
            self._withdraw(run, changes)
            return
        run.prepared([[answer["report"] for answer in of_change] for of_change in answers])
        if not self._committed_in_journal(run, targets):
            self._abort(changes)
            self._withdraw(run, changes)
            return
        with run.timed("commit"):
            answers = self._each(changes, "commit", worker.commit, limit_s, votes)
        gave_up = [run.gave_up(of_change) for of_change in answers]
        if any(gave_up):
            run.reason += self._take_back(run)
            if not all(gave_up):
                raise TransitionFailed(
                    f"only some models switched to their new layout: {run.reason}"
                )
            self._withdraw(run, changes)
            return
        self._layouts.update(targets)
        self._epoch = run.epoch
        with run.timed("release"):
            run.released(self._each(changes, "release", worker.release, limit_s, votes))
        with run.timed("follow"):
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

    def _withdraw(self, run: _Run, changes: Sequence[Change]) -> None:
        """Be as before: old ranks in their world, what was claimed returned to Ray."""
        with run.timed("give_back"):
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

    def _committed_in_journal(self, run: _Run, targets: Mapping[str, Layout]) -> bool:
        """Write the commit; where it cannot be written, `run` is aborted."""
        layouts = {**self._layouts, **targets}
        after = {name: layout.to_dict() for name, layout in layouts.items()}
        names = [f"{name}-{i}" for name, one in layouts.items() for i in range(one.world_size)]
        try:
            with run.timed("journal"):
                self._journal.commit(
                    epoch=run.epoch, plan=after, digest=run.digest, step=self._step, ranks=names
                )
        except (OSError, JournalError, EpochError) as error:
            run.outcome, run.reason = "aborted", f"the journal was not written: {error}"
            return False
        return True

    def _take_back(self, run: _Run) -> str:
        """Take back the commit in the journal. Returns: why that failed, "" if it did not."""
        try:
            self._journal.abort(epoch=run.epoch, reason=run.reason)
        except (OSError, JournalError, EpochError) as error:
            return f"; the journal still says that it was committed: {error}"
        return ""

    def _change_engines(self, run: _Run, replicas: int, *, alone: bool) -> None:
        """Raises: EnginesLost: none are left that could generate."""
        with run.timed("rollout"):
            fell_back = self._engines.change_to(
                replicas, self._ranks["actor"].handles, self.checked.nereus.timeout_s
            )
        run.rollout_report = {
            "from": {"replicas": run.replicas[0]},
            "to": {"replicas": replicas},
            "fell_back": fell_back,
        }
        if not alone:
            run.reason = "; ".join(filter(None, (run.reason, fell_back)))
        elif fell_back:
            run.outcome = "aborted"
            run.reason = fell_back + self._take_back(run)
        else:
            self._epoch = run.epoch

    def _fail(self, run: _Run, error: Exception) -> None:
        """Raises: TransitionFailed with the last words of the job."""
        folder = self._args.ckpt.path
        words = (
            f"the transition after step {self._step} ({run.listed()}) failed: {run.reason}. The "
            f"job ends here; restart it with --ckpt.load_enable from what is saved in {folder} (in "
            "the layout that it was saved in: the journal has them). Records: "
            f"{self.checked.run_dir / RECORDS_FILE}"
        )
        self._record(run.record())
        raise TransitionFailed(words) from error

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def _finished(self, run: _Run) -> TransitionRecord:
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

    def _schedule(self) -> dict[str, Any]:
        return {
            str(step): {name: layout.to_dict() for name, layout in targets.items()}
            | {ROLLOUT: {"replicas": self.checked.replicas[step]}}
            for step, targets in self.checked.targets.items()
        }


class _Run:
    """One transition as the driver sees it, on its way to a record.

    Args:
        changes: by model, layouts before and after. replicas: of vLLM before and after.
        doing: told each phase as it begins, and the step.
    """

    def __init__(
        self,
        epoch: int,
        step: int,
        changes: Mapping[str, tuple[Layout, Layout]],
        replicas: tuple[int, int] = (0, 0),
        doing: Callable[[str, int], None] = lambda phase, step: None,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.changes = changes
        self.replicas = replicas
        self._doing = doing
        self.outcome = "committed"
        self.reason = ""
        self.digest = ""
        self.ranks: dict[str, Any] = {}
        self.units: dict[str, Any] = {}
        self.rollout_report: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def timed(self, phase: str) -> Timed:
        self._doing(phase, self.step)
        return Timed(self.seconds, phase)

    def gave_up(self, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the ranks of a model gave up, and with them the transition."""
        given_up = [answer["aborted"] for answer in answers if "aborted" in answer]
        if not given_up:
            return False
        first = given_up[0]
        self.outcome = "aborted"
        self.reason = f"rank {first['rank']} in {first['phase']}: {first['reason']}"
        if len(given_up) != len(answers):
            raise TransitionFailed(f"only some ranks gave up: {self.reason}")
        return True

    def prepared(self, reports: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Args: reports: by model, of each rank."""
        self.digest = ":".join(of_model[0]["digest"] for of_model in reports)
        for of_model in reports:
            for name in of_model[0]["units"]:
                self.units[name] = merge_unit_reports([one["units"][name] for one in of_model])
                self.units[name]["mode"] = of_model[0]["mode"]
            for phase in of_model[0]["seconds"]:
                key = f"prepare.{phase}"
                spent = max(one["seconds"].get(phase, 0.0) for one in of_model)
                self.seconds[key] = max(self.seconds.get(key, 0.0), spent)

    def released(self, answers: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        failed = [one["failed"] for of_model in answers for one in of_model if one["failed"]]
        if failed:
            self.reason = failed[0]

    def record(self) -> TransitionRecord:
        return TransitionRecord(
            step=self.step,
            epoch=self.epoch,
            time_unix_s=now_s(),
            outcome=self.outcome,
            reason=self.reason,
            units=self.units
            or {n: {"from": str(old), "to": str(new)} for n, (old, new) in self.changes.items()},
            seconds=self.seconds,
            digest=self.digest,
            ranks=self.ranks,
            rollout=self.rollout_report,
        )

    def listed(self) -> str:
        parts = [f"{name} {old} -> {new}" for name, (old, new) in self.changes.items()]
        if self.replicas[0] != self.replicas[1]:
            parts.append(f"vLLM engines {self.replicas[0]} -> {self.replicas[1]}")
        return ", ".join(parts) or "nothing to change"

    def summary(self) -> str:
        if self.outcome == "skipped":
            return f"scheduled transition skipped: {self.reason}"
        if self.outcome == "aborted":
            return f"transition aborted, the old layout trains on: {self.reason}"
        wire = sum(unit.get("bytes_wire", 0) for unit in self.units.values())
        stalled = sum(value for phase, value in self.seconds.items() if "." not in phase)
        note = f"; {self.reason}" if self.reason else ""
        return (
            f"epoch {self.epoch} committed: {self.listed()}; {wire / 1e6:.1f} MB between ranks, "
            f"{stalled:.2f} s{note}"
        )


def say(text: str) -> None:
    """One line on the job's console."""
    print(f"nereus: {text}", file=sys.stdout, flush=True)


def _listed(layouts: Mapping[str, Layout]) -> str:
    return ", ".join(f"{name} {layout}" for name, layout in layouts.items())


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out
