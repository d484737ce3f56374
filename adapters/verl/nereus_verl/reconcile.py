"""The rollout is derived state: it is reconciled with a plan after training state is committed.

    end what must go -> every rank makes its side anew -> launch -> sync weights -> check

A replica is kept where its layout and its ranks stay. Nothing generates before every replica's
weights were synced and found to be those that training streamed (fingerprints); where any of this
fails, the layout before is launched, synced and checked in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus_plugins.control.workers import WorkersFailed, brief
from nereus_plugins.gtg.report import Timed
from nereus_plugins.transport import fingerprint
from nereus_verl import rollout_worker, verl_private
from nereus_verl.driver import call_all
from nereus_verl.ranks import DRIVER_PATIENCE, SETUP_TIMEOUT_S, Ranks
from nereus_verl.rollout import RolloutPlan
from nereus_verl.rollout_backends import RolloutBackend


class RolloutLost(RuntimeError):
    """Neither the planned rollout nor the one before could be had: nothing can generate."""


class _DidNotFollow(RuntimeError):
    """The rollout could not be reconciled with one plan; says why."""


def kept(
    now: Mapping[int, Sequence[Hashable]],
    wanted: Mapping[int, Sequence[Hashable]],
    same_launch: bool,
) -> list[int]:
    """Which replicas stay as they are.

    Args:
        now, wanted: replica -> the processes that it is for, by rank.
        same_launch: whether servers would be launched as they were.
    """
    return [n for n, own in now.items() if same_launch and tuple(wanted.get(n, ())) == tuple(own)]


@dataclass
class RolloutReport:
    """How the rollout followed one plan.

    Attributes:
        before, target: plans. world: ranks of the job.
        kept, ended, launched: numbers of replicas; ended and launched also on the way back.
        fell_back: why `before` is in force and not `target`; "" if `target` is.
        replicas: by number: the server's address, seconds of its launch by part, where launched.
        fingerprint: of the weights that every replica holds. tensors: how many these are.
        seconds: by part, as the driver saw them.
    """

    before: RolloutPlan
    target: RolloutPlan
    world: int
    kept: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    fell_back: str = ""
    replicas: dict[int, dict[str, Any]] = field(default_factory=dict)
    fingerprint: str = ""
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For the record."""
        sizes = {"from": self.before, "to": self.target}
        return {
            **{name: plan.to_dict() for name, plan in sizes.items()},
            "ranks": self.world,
            "kept": self.kept,
            "ended": self.ended,
            "launched": self.launched,
            "fell_back": self.fell_back,
            "replicas": [{"replica": n, **one} for n, one in sorted(self.replicas.items())],
            "fingerprint": self.fingerprint,
            "tensors": self.tensors,
        }


class Rollout:
    """The rollout of a job, as its driver sees it.

    Args:
        ranks: of the job. backend: None where the rollout stays as it was launched.
        plan: in force.
    """

    def __init__(self, ranks: Ranks, backend: RolloutBackend | None, plan: RolloutPlan) -> None:
        self.plan = plan
        self._ranks = ranks
        self._backend = backend

    def find_servers(self) -> None:
        """Have every rank find its server, where each has a placement group of its own.

        Raises: WorkersFailed; RuntimeError with a rank's reason.
        """
        if self._backend is None or not self._backend.counts_local_ranks:
            return
        failed = self._call("rebuild_rollout", rollout_worker.rebuild, {})
        if reasons := [reason for reason in failed if reason]:
            raise RuntimeError(f"the rollout's side in a training process: {reasons[0]}")

    def follow(self, target: RolloutPlan, step: int) -> RolloutReport:
        """Reconcile with `target`, on the ranks as they are; `plan` says what came of it.

        Args: step: the trainer's, which the weights are of.

        Raises:
            WorkersFailed: a training rank is gone.
            RolloutLost: no rollout is left.
        """
        before, world = self.plan, len(self._ranks)
        report = RolloutReport(before, target, world)
        try:
            self._reconcile(target, step, report)
        except _DidNotFollow as error:
            if before == target or world % before.ranks:
                raise RolloutLost(str(error)) from error
            report.fell_back = str(error)
            try:
                self._reconcile(before, step, report)
            except _DidNotFollow as again:
                raise RolloutLost(f"{error}; nor could it go back to {before}: {again}") from again
        return report

    def _reconcile(self, target: RolloutPlan, step: int, report: RolloutReport) -> None:
        """Raises: WorkersFailed, _DidNotFollow."""
        same = target == self.plan
        self.plan = target
        try:
            launched = self._launch(target, same, report)
            sent = self._sync(launched, step, report)
            self._check(launched, sent, report)
        except (WorkersFailed, _DidNotFollow):
            raise
        except Exception as error:  # verl's and the engines' own
            raise _DidNotFollow(
                f"the rollout did not follow to {target}: {brief(error)}"
            ) from error

    def _launch(
        self, target: RolloutPlan, same_launch: bool, report: RolloutReport
    ) -> dict[int, Any]:
        """End and launch replicas; those that were launched, by number."""
        trainer, seconds = self._ranks.trainer, report.seconds
        replicas = {int(one.replica_rank): one for one in verl_private.replicas_of(trainer)}
        workers = verl_private.identities(self._ranks.workers)
        wanted = {
            n: workers[target.ranks * n : target.ranks * (n + 1)]
            for n in range(target.replicas(len(workers)))
        }
        now = {n: verl_private.identities(one.workers) for n, one in replicas.items()}
        stay = kept(now, wanted, same_launch)
        gone, new = [n for n in now if n not in stay], [n for n in wanted if n not in stay]
        with Timed(seconds, "end"):
            self._end([replicas[n] for n in gone])
            verl_private.end_replicas(trainer, [replicas[n] for n in gone])
        report.kept, report.ended = stay, [*report.ended, *gone]
        report.replicas = {n: {"server": replicas[n].server_address} for n in stay}
        with Timed(seconds, "adapters"):
            verl_private.set_rollout_settings(trainer, target.settings())
            failed = self._call("rebuild_rollout", rollout_worker.rebuild, target.settings())
            _require_none(failed)
        with Timed(seconds, "launch"):
            launched = verl_private.launch_replicas(trainer, new, SETUP_TIMEOUT_S, self._end)
        report.launched = [*report.launched, *new]
        verl_private.route_to(trainer, launched)
        return dict(zip(new, launched, strict=True))

    def close(self) -> None:
        """The job is over: have servers leave nothing behind on their nodes."""
        self._end(verl_private.replicas_of(self._ranks.trainer))

    def _end(self, replicas: Sequence[Any]) -> None:
        if self._backend is not None:
            self._backend.end(replicas, self._ranks.setup.timeout_s)

    def _sync(
        self, launched: Mapping[int, Any], step: int, report: RolloutReport
    ) -> Mapping[str, str]:
        """Returns: fingerprints of the weights that were streamed, by name."""
        assert self._backend is not None
        limit_s = self._ranks.setup.timeout_s * DRIVER_PATIENCE
        for replica in verl_private.replicas_of(self._ranks.trainer):
            self._backend.expect(replica, int(replica.replica_rank) in launched, limit_s)
        self._call("sync_rollout", rollout_worker.watch, self._backend.name)
        with Timed(report.seconds, "sync"):
            verl_private.sync_rollout(self._ranks.trainer, step)
        answers = self._call("sync_rollout", rollout_worker.watched)
        _require_none([answer["failed"] for answer in answers])
        sent: Mapping[str, str] = answers[0]["sent"]
        return sent

    def _check(
        self, launched: Mapping[int, Any], sent: Mapping[str, str], report: RolloutReport
    ) -> None:
        """Compare what every replica holds with what was streamed to it."""
        assert self._backend is not None
        limit_s = self._ranks.setup.timeout_s * DRIVER_PATIENCE
        with Timed(report.seconds, "check"):
            for replica in verl_private.replicas_of(self._ranks.trainer):
                number = int(replica.replica_rank)
                for held in self._backend.held(replica, limit_s):
                    wrong = fingerprint.differences(sent, held)
                    if wrong:
                        raise _DidNotFollow(
                            f"replica {number} holds other weights than were synced to it: "
                            f"{'; '.join(wrong[:3])}"
                            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
                        )
                if number in launched:
                    parts = dict(self._backend.launch_parts(replica, limit_s))
                    one = {"server": replica.server_address, "seconds": parts}
                    report.replicas[number] = one
        report.fingerprint = fingerprint.of_all(sent)
        report.tensors = len(sent)

    def _call(self, phase: str, function: Any, *args: Any) -> list[Any]:
        limit_s = self._ranks.setup.timeout_s * DRIVER_PATIENCE
        return call_all(self._ranks.workers, phase, function, *args, timeout_s=limit_s)


def _require_none(failures: Sequence[str]) -> None:
    """Raises: _DidNotFollow where a rank says that it failed."""
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(failures) if reason]
    if failed:
        raise _DidNotFollow(failed[0])
