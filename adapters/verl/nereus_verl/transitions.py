"""Transitions of a verl job as transactions, and what is in force by them.

prepare -> the journal -> commit -> release    where units move, each on all ranks
           the journal -> commit               of knobs alone
           the journal                         of the rollout alone
-> the rollout follows, where it or the ranks change; what fails there falls back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_plugins.control.attempt import Attempt, TransitionFailed
from nereus_plugins.control.driver import Driver, say
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import TransitionRecord
from nereus_verl import asked, capabilities, knobs, last_words, verl_private, worker
from nereus_verl.answers import Answers
from nereus_verl.asked import Asked, InForce
from nereus_verl.knobs import UnitKnobs
from nereus_verl.preflight import Preflight
from nereus_verl.preparing import Preparing
from nereus_verl.ranks import Change, ClaimFailed, Rank, Ranks
from nereus_verl.reconcile import Rollout, RolloutLost
from nereus_verl.rollout import RolloutPlan, check_rollout
from nereus_verl.rollout_backends import backend_of
from nereus_verl.snapshots import JobSnapshots


class RolloutFailed(TransitionFailed):
    """The training state is in its new layout, but the rollout could not follow: the job must end.
    A checkpoint can be saved first."""


@dataclass(frozen=True)
class Wanted:
    """What a transition changes of what is in force.

    Attributes:
        ranks: the change of their set; None: they stay.
        layouts: by unit that moves. knobs: by unit whose knobs change.
        rollout: after it.
    """

    ranks: Change | None
    layouts: Mapping[str, Layout]
    knobs: Mapping[str, UnitKnobs]
    rollout: RolloutPlan


class Transitions:
    """
    Args:
        checked: what was found before the job started. driver: its books.
        ranks: all of them. answers: theirs. preparing: what prepares their targets.
        snapshots: of their state.

    Attributes:
        layouts, knobs: in force, by unit. rollout: the job's.
        rollout_is_synced: at this boundary.
        garbage: ranks have some to collect, of a transition that was prepared in the background.
    """

    def __init__(
        self,
        checked: Preflight,
        driver: Driver,
        ranks: Ranks,
        answers: Answers,
        preparing: Preparing,
        snapshots: JobSnapshots,
    ) -> None:
        self.layouts = dict(checked.layouts)
        self.knobs = dict(checked.knobs)
        self.rollout = Rollout(ranks, backend_of(checked.config), checked.rollout)
        self.rollout_is_synced = False
        self.garbage = False
        self._checked = checked
        self._driver = driver
        self._ranks = ranks
        self._answers = answers
        self._preparing = preparing
        self._snapshots = snapshots

    def in_force(self) -> InForce:
        return InForce(dict(self.layouts), dict(self.knobs), self.rollout.plan)

    def wanted(self, plan: Asked) -> Wanted:
        """Raises: SpecError: the plan cannot be run by this job."""
        checked, where = self._checked, plan.where
        after = self.knobs | dict(plan.knobs)
        world = capabilities.check_targets(
            checked.config, checked.models, self.layouts, plan.targets, where, plan.leave, after
        )
        check_rollout(
            plan.rollout,
            config=checked.config,
            current=self.rollout.plan,
            world=world,
            where=where,
        )
        change = self._ranks.change_to(world, plan.leave)
        layouts = {
            name: plan.targets.get(name, layout)
            for name, layout in self.layouts.items()
            if change is not None or plan.targets.get(name, layout) != layout
        }
        switched = {name: new for name, new in after.items() if new != self.knobs[name]}
        return Wanted(change, layouts, switched, plan.rollout)

    def run(self, plan: Asked, predicted: Mapping[str, float]) -> TransitionRecord:
        """One transition of the named units, as a transaction; then the rollout follows.

        Args: predicted: what its controller expects of it, for the record.

        Returns: the record, also when it was aborted: then the old layouts are in force.

        Raises:
            SpecError: the plan cannot be run by this job.
            TransitionFailed: the job must end (RolloutFailed: after a checkpoint).
        """
        wanted = self.wanted(plan)
        epoch, exposed = self._preparing.use_for(wanted.layouts, wanted.ranks)
        changes = asked.changes(self.in_force(), wanted.layouts, wanted.knobs, wanted.rollout)
        attempt = self._driver.attempt(changes, epoch=epoch, predicted=predicted)
        attempt.exposed(exposed)
        if changes.words():
            say(f"step {attempt.step}: {attempt.listed()} ...")
            try:
                self._change(attempt, wanted)
            except (WorkersFailed, TransitionFailed) as error:
                attempt.ended("failed", str(error))
                # First, as looking for last words may fail: what is not in force is taken back.
                undone = self._driver.failed(attempt)
                if isinstance(error, RolloutFailed):
                    raise RolloutFailed(
                        f"after the transition of step {attempt.step} ({attempt.listed()}) "
                        f"training state is whole, but the job cannot go on: {error}{undone}"
                    ) from error
                words = last_words.of_attempt(attempt, self._checked.config, self._checked.run_dir)
                raise TransitionFailed(words + undone) from error
        return self._driver.finished(attempt)

    def _change(self, attempt: Attempt, wanted: Wanted) -> None:
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

    def _execute_on_other_ranks(self, attempt: Attempt, wanted: Wanted, change: Change) -> None:
        """As `_execute`, with ranks that join before and ranks that leave after it."""
        attempt.ranks = change.to_dict()
        # One under way is written by all ranks of this world together. In any other transition it
        # is written on: it is of a copy that is nobody else's.
        if self._snapshots.begun:
            with attempt.timed("snapshot"):
                self._snapshots.end()
        try:
            with attempt.timed("claim"):
                layouts = {name: layout.to_dict() for name, layout in self.layouts.items()}
                change.claim(layouts, attempt.step, self._checked.nereus.claim_timeout_s)
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

    def _execute(self, attempt: Attempt, wanted: Wanted, ranks: Sequence[Rank]) -> None:
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
        self.layouts.update(wanted.layouts)
        self.knobs |= wanted.knobs
        self._driver.epoch = attempt.epoch
        for group in self._ranks.groups:
            verl_private.forget_dispatch(group)
        with attempt.timed("release"):
            self.garbage = "hidden_s" in attempt.background
            values = self._unit_values(self.knobs)
            answers = call("release", worker.release, values, self.garbage)
        attempt.released(answers)

    def _change_knobs(self, attempt: Attempt, wanted: Wanted) -> None:
        """A transition that moves nothing: committed in the journal, then set on every rank."""
        if not self._committed_in_journal(attempt, wanted, self._ranks.names):
            return
        with attempt.timed("commit"):
            values = self._unit_values(wanted.knobs)
            self._answers.call(self._ranks.current, "commit", worker.set_knobs, values)
        self.knobs |= wanted.knobs
        self._driver.epoch = attempt.epoch

    def _change_rollout(self, attempt: Attempt, wanted: Wanted) -> None:
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

    def _follow_with_rollout(self, attempt: Attempt, wanted: Wanted) -> None:
        """After the commit: reconcile the rollout, where it or the ranks change."""
        if wanted.ranks is None and wanted.rollout == self.rollout.plan:
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
                report = self.rollout.follow(rollout, attempt.step)
            except RolloutLost as error:
                raise RolloutFailed(str(error)) from error
        attempt.rollout = report.to_dict()
        attempt.seconds |= {f"rollout.{part}": spent for part, spent in report.seconds.items()}
        self.rollout_is_synced = True
        if not report.fell_back:
            return ""
        return f"the rollout stays as it was, {report.before}: {report.fell_back}"

    def _committed_in_journal(self, attempt: Attempt, wanted: Wanted, names: Sequence[str]) -> bool:
        """Write the commit; where it cannot be written, the attempt is aborted.

        The rollout is not in it: derived state, which follows later and may fall back. Records and
        checkpoints say what is in force.
        """
        after: dict[str, Any] = {
            name: layout.to_dict() for name, layout in {**self.layouts, **wanted.layouts}.items()
        }
        unit_knobs = {**self.knobs, **wanted.knobs}
        if unit_knobs != self._checked.knobs:
            after["knobs"] = {name: one.to_dict() for name, one in unit_knobs.items()}
        return self._driver.commit(attempt, after, names)

    def _unit_values(self, unit_knobs: Mapping[str, UnitKnobs]) -> dict[str, Any]:
        checked = self._checked
        return {
            name: knobs.unit_values(checked.config, checked.units[name], one)
            for name, one in unit_knobs.items()
        }
