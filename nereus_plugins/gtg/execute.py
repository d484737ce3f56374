"""The rank side of a transition: runs this rank's part of the schedule as a transaction.

    prepare -> (the driver writes its journal) -> commit -> release

Between prepare and commit the units may be left alone for as long as other stages run. What they
were prepared from has a version; the commit is refused where it changed since.

Every step is run, its failure caught, and put to a vote of all ranks; so all ranks leave a step the
same way. A rank that fails says so before it waits for the others; all name the first that failed.
If any rank failed before the commit, every rank gives back what it built, brings parked storages
back, breaks the transition's process group, and raises the same `TransitionAborted`: the old layout
is current and unchanged. A rank that fails in the middle of an exchange breaks its connections, so
that its peers fail at once instead of waiting.

The steps, their order and what is parked come from the compiled graph (`gtg.compile`). Its first
rounds, up to the first agreement, are the same in every transition, and find out what the graph is
made of.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nereus_plugins.emu.described.base import (
    DescribedUnit,
    LocalShard,
    Scalars,
    merge_scalars,
    unique_storages,
)
from nereus_plugins.emu.moves import MoveTable, plan_moves
from nereus_plugins.emu.storage import ParkedStorages, park
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.emu.tiling import check_tiling
from nereus_plugins.emu.unit import BuiltUnit, ElasticUnit
from nereus_plugins.gtg.build import UnitChange, build_graph
from nereus_plugins.gtg.compile import Schedule, compile_graph
from nereus_plugins.gtg.faults import inject
from nereus_plugins.gtg.graph import ByteArray, Node, Step
from nereus_plugins.gtg.journal import EpochError
from nereus_plugins.gtg.report import PrepareReport, ReleaseReport, Timed, UnitReport
from nereus_plugins.gtg.scalars import check_loaded, encode
from nereus_plugins.spec import Layout
from nereus_plugins.transport.base import ChecksumError, Progress, TransportError
from nereus_plugins.transport.control import Control, ControlError, Disagreement, RankLost, Vote
from nereus_plugins.transport.metadata import gather_bytes, gather_tables, transfer_backend
from nereus_plugins.transport.pace import Pace
from nereus_plugins.transport.torch_private import groups_named, name_groups_from
from nereus_plugins.transport.torch_transport import TorchTransport

logger = logging.getLogger(__name__)

# What an exchange may take on a device, in messages; the transport adds one for digests.
_STAGING_BUFFERS = 6

# By how much the predicted bytes between two ranks may differ from the described ones, as a part
# of the larger, before the report says so: padding is not predicted to the byte.
PREDICTION_TOLERANCE = 0.01

# Steps in which a rank waits for its peers in ways that cannot be broken from outside.
_WAITING = (Step.FORM_GROUPS, Step.BUILD, Step.AGREE)

# Steps in which ranks pause while other stages run, each as its own part of the work asks.
_PACED = (Step.MOVE, Step.VERIFY)

# Attempts in this process, the same number on all ranks.
_attempts = itertools.count(1)


@dataclass(frozen=True)
class TransitionOptions:
    """How transitions are executed.

    Attributes:
        staging_bytes: largest message; None: the transport's default for its back end.
        checksum: compare every target with its source after the move, read again at both ends.
        timeout_s: how long an exchange or the forming of a group may stand still; with a
            `background_share`, so many times longer as pauses make it.
        memory_budget_bytes: device memory that the units' old and new state may take together;
            None: no limit. Where both do not fit, the old state is parked in host memory.
        node_of: the node of each rank, so that moves stay on a node where they can; None: one node.
        progress: called, during each unit's exchange, with the bytes that this rank has moved and
            has to move; may differ between ranks.
        background_share: other stages run meanwhile: exchanges and verifying take at most this
            share of the time, and a transition that would have to park state is aborted. None: as
            fast as it goes.
        hurry: asked, with a share, while state is moved: whether there is nothing to leave the rest
            to any more.
        host_free_bytes: asked, where state is to be parked, what memory this node has left for it;
            may differ between ranks.
    """

    staging_bytes: int | None = None
    checksum: bool = True
    timeout_s: float = 300.0
    memory_budget_bytes: int | None = None
    node_of: tuple[int, ...] | None = None
    background_share: float | None = None
    # Not in the text by which ranks compare their options:
    progress: Progress | None = field(default=None, repr=False, compare=False)
    host_free_bytes: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    hurry: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)


class TransitionAborted(RuntimeError):
    """A transition did not happen; the same on all ranks. The old layout is current, unchanged.

    Attributes:
        phase: where it failed. rank: the rank that failed first, as far as can be told.
        reason: what that rank raised. lost_ranks: ranks that are dead or hung; with any, the old
        layout's groups are broken too and the job must end or be rebuilt.
    """

    def __init__(
        self, phase: str, rank: int, reason: str, lost_ranks: tuple[int, ...] = ()
    ) -> None:
        after = (
            "the old layout's state is intact on the ranks that are left"
            if lost_ranks
            else "the old layout is current and unchanged"
        )
        super().__init__(f"transition aborted in {phase} by rank {rank}: {reason}; {after}")
        self.phase = phase
        self.rank = rank
        self.reason = reason
        self.lost_ranks = lost_ranks


class StaleState(RuntimeError):
    """The training state has changed since a transition was prepared from it."""


class TransitionUnrecoverable(RuntimeError):
    """An abort could not bring the old layout back, or a commit broke in the middle: end the job
    and restart it from its last checkpoint."""


class ReleaseFailed(RuntimeError):
    """The new layout is current and correct, but memory or groups of the old one were not freed.

    Attributes: rank, reason: as of the first rank that failed.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            f"releasing the old layout failed on rank {rank}: {reason}; the new layout is current"
        )
        self.rank = rank
        self.reason = reason


@dataclass
class _Attempt:
    """What one transition holds on this rank between its steps."""

    epoch: int
    number: int
    target: dict[str, Layout]
    predicted: Mapping[str, ShardTable]
    build_bytes: Mapping[str, Mapping[int, int]]
    report: PrepareReport
    source: dict[str, DescribedUnit] = field(default_factory=dict)
    source_tables: dict[str, ShardTable] = field(default_factory=dict)
    scalars: dict[str, Scalars] = field(default_factory=dict)
    schedule: Schedule | None = None
    versions: dict[str, int] = field(default_factory=dict)
    round_index: int = 0
    vote: str = ""  # by name, the one that this rank comes to next
    transport: TorchTransport | None = None
    group: dist.ProcessGroup | None = None
    parked: dict[str, list[ParkedStorages]] = field(default_factory=dict)
    built: dict[str, BuiltUnit] = field(default_factory=dict)
    described: dict[str, DescribedUnit] = field(default_factory=dict)
    target_tables: dict[str, ShardTable] = field(default_factory=dict)
    moves: dict[str, MoveTable] = field(default_factory=dict)
    old: dict[str, BuiltUnit] = field(default_factory=dict)
    committed: bool = False
    release_report: ReleaseReport | None = None

    def forget_source(self) -> None:
        """Drop every view of the old state, so that releasing it frees its memory."""
        self.source.clear()
        self.described.clear()
        self.moves.clear()


class RankTransition:
    """Executes transitions of this rank's units. All ranks call the same methods in order.

    Args:
        units: by name; the same names on all ranks.
        rank, world: of the default process group; while the set of ranks changes, of one that holds
            the old ranks and the new.
        control: votes among the same ranks.
    """

    def __init__(
        self,
        units: Mapping[str, ElasticUnit],
        *,
        rank: int,
        world: int,
        control: Control,
        options: TransitionOptions,
    ) -> None:
        self.units = dict(units)
        self.rank = rank
        self.world = world
        self.control = control
        self.options = options
        self.epoch = 0
        self._attempt: _Attempt | None = None

    def prepare(
        self,
        target: Mapping[str, Layout],
        epoch: int,
        predicted: Mapping[str, ShardTable] | None = None,
        build_bytes: Mapping[str, Mapping[int, int]] | None = None,
        *,
        attempt: int | None = None,
        ranks_change: bool = False,
    ) -> PrepareReport:
        """Build the target layouts and fill them; the old ones stay current.

        Args:
            target: layouts by unit; units left out, or in that layout already, stay as they are.
            epoch: larger than that of the last committed transition.
            predicted: by unit, the predicted shard table of the target. Needed with a memory
                budget; without one it is only compared with what was built.
            build_bytes: by unit and rank, device memory that building the target takes besides its
                shards (`emu.feasibility.gradient_bytes_by_rank`, where the framework allocates
                gradients with the model); counted against the memory budget.
            attempt: the number of this attempt in the job, the same on all ranks; None: counted in
                this process, which serves as long as all ranks were there from the start.
            ranks_change: the layouts stand on other ranks than before, so that units move also
                where their layout stays the same.

        Raises:
            TransitionAborted: on all ranks alike, after the old state was brought back.
            TransitionUnrecoverable: on all ranks alike, if that failed.
            ValueError, EpochError: on all ranks, before anything was done.
        """
        begun = self._begin(target, epoch, predicted or {}, build_bytes or {}, ranks_change)
        if attempt is not None:
            begun.number = attempt
        self._attempt = begun
        if not begun.target:
            return begun.report
        for index, (step, subject) in enumerate(_PROLOGUE):
            self._run(index, step, subject, list(begun.target))
        schedule = begun.schedule
        assert schedule is not None
        for index, round_ in enumerate(schedule.rounds):
            if round_.step is Step.COMMIT:
                break
            if index >= len(_PROLOGUE):
                nodes = [schedule.graph.nodes[i] for i in round_.nodes]
                self._run(index, round_.step, nodes[0].subject, self._names(nodes))
        return begun.report

    def stale(self) -> tuple[str, ...]:
        """Prepared units whose training state has changed since, on this rank: they are to be
        prepared again (`abort` first)."""
        versions = self._prepared().versions
        return tuple(n for n, prepared in versions.items() if self.units[n].version() != prepared)

    def commit(self) -> None:
        """Make the prepared layouts current. Votes once, then switches locally.

        Raises:
            TransitionAborted: a rank is gone, failed before any switched, or holds a state that
                has changed since it was prepared; as in `prepare`.
            TransitionUnrecoverable: this rank broke while switching.
        """
        attempt = self._prepared()
        attempt.release_report = ReleaseReport(attempt.epoch, self.rank)
        if attempt.target:
            self._vote_step(Step.COMMIT, "commit", self._check_fresh)
            try:
                for name in attempt.target:
                    attempt.old[name] = self.units[name].switch(attempt.built[name])
            except Exception as error:
                raise TransitionUnrecoverable(
                    f"rank {self.rank} failed while switching layouts: {_reason(error)}; end the "
                    "job and restart it from its last checkpoint"
                ) from error
        attempt.committed = True
        self.epoch = attempt.epoch

    def release(self) -> ReleaseReport:
        """Free the old layouts and the transition's group.

        Raises:
            ReleaseFailed: on all ranks alike; whatever could be freed was freed.
        """
        attempt = self._attempt
        if attempt is None or not attempt.committed:
            raise RuntimeError("release() follows commit()")
        report = attempt.release_report
        assert report is not None
        self._attempt = None
        if not attempt.target:
            return report
        begin = time.perf_counter()
        for name, source in attempt.source.items():
            _give_up(source, attempt.described[name])
        attempt.forget_source()
        error = self._catch(inject, "release", self.rank, attempt.epoch)
        for name in attempt.target:
            start = time.perf_counter()
            failure = self._catch(self.units[name].release, attempt.old.pop(name))
            error = error or failure
            for parked in attempt.parked.pop(name, []):
                parked.drop()
            report.units[name] = time.perf_counter() - start
        if attempt.transport is not None:
            error = self._catch(attempt.transport.close) or error
        error = self._settle(attempt) or error
        report.seconds["commit"] = attempt.report.seconds.pop("commit", 0.0)
        try:
            failed = self._vote(attempt, "release", error)
        except RankLost as lost:
            raise ReleaseFailed(lost.ranks[0], str(lost)) from lost
        report.seconds["release"] = time.perf_counter() - begin
        if failed is not None:
            raise ReleaseFailed(*failed) from error
        return report

    def abort(self) -> tuple[int, ...]:
        """Give up a prepared transition: the old layouts stay. All ranks together.

        Returns: ranks that are dead or hung, as `TransitionAborted.lost_ranks`.

        Raises: TransitionUnrecoverable: the old state could not be brought back.
        """
        attempt = self._prepared()
        return self._recover(attempt, "abort", lost=())

    # ------------------------------------------------------------------ steps

    def _begin(
        self,
        target: Mapping[str, Layout],
        epoch: int,
        predicted: Mapping[str, ShardTable],
        build_bytes: Mapping[str, Mapping[int, int]],
        ranks_change: bool,
    ) -> _Attempt:
        if self._attempt is not None:
            raise RuntimeError("a transition is under way: commit() and release(), or abort() it")
        if epoch <= self.epoch:
            raise EpochError(f"epoch {epoch} is stale: this rank is in epoch {self.epoch}")
        unknown = sorted(set(target) - set(self.units))
        if unknown:
            raise ValueError(
                f"no unit {unknown[0]!r} in this job; units: {', '.join(sorted(self.units))}"
            )
        changes = {
            name: target[name]
            for name in sorted(target)
            if ranks_change or target[name] != self.units[name].layout()
        }
        for name, layout in changes.items():
            if layout.world_size > self.world:
                raise ValueError(
                    f"layout {layout} of {name} takes {layout.world_size} ranks, the job has "
                    f"{self.world}"
                )
        report = PrepareReport(epoch, self.rank, "unchanged", "")
        for name, layout in changes.items():
            report.units[name] = UnitReport(str(self.units[name].layout()), str(layout))
        return _Attempt(epoch, next(_attempts), changes, predicted, build_bytes, report)

    def _run(self, index: int, step: Step, subject: str, names: list[str]) -> None:
        """One round: this rank's part of it, then a vote."""
        attempt = self._prepared()
        attempt.round_index = index
        work: dict[tuple[Step, str], Callable[[_Attempt, list[str]], None]] = {
            (Step.FREE_GRADIENTS, "source"): self._free_gradients,
            (Step.DESCRIBE, "source"): self._describe_source,
            (Step.FORM_GROUPS, ""): self._form_groups,
            (Step.PLAN, "source"): self._plan_source,
            (Step.AGREE, "source"): self._agree_schedule,
            (Step.PARK, "source"): self._park,
            (Step.BUILD, ""): self._build,
            (Step.DESCRIBE, "target"): self._describe_target,
            (Step.PLAN, "target"): self._plan_target,
            (Step.AGREE, "target"): self._agree_moves,
            (Step.MOVE, ""): self._move,
            (Step.VERIFY, ""): self._verify,
        }
        label = f"{index}.{step.value}"
        if step in _WAITING:  # begin only when all ranks are known to be here
            self._vote_step(step, f"{label}.ready", lambda: None, injected=False)
        run = work[step, subject]
        self._vote_step(step, label, lambda: run(attempt, names))

    def _check_fresh(self) -> None:
        if stale := self.stale():
            raise StaleState(f"{', '.join(stale)} was trained or loaded after it was prepared")

    def _free_gradients(self, attempt: _Attempt, names: list[str]) -> None:
        for name in names:
            with self._timed(attempt, name, "free_gradients"):
                self.units[name].free_gradients()

    def _describe_source(self, attempt: _Attempt, names: list[str]) -> None:
        for name in names:
            attempt.versions[name] = self.units[name].version()
            with self._timed(attempt, name, "describe"):
                attempt.source[name] = self.units[name].described()

    def _form_groups(self, attempt: _Attempt, names: list[str]) -> None:
        timeout_s = self.options.timeout_s * self._slowed()
        timeout = datetime.timedelta(seconds=timeout_s)
        # Not the default group's back end, which may be one for each kind of device.
        group = dist.new_group(list(range(self.world)), timeout=timeout, backend=transfer_backend())
        assert group is not None
        attempt.group = group
        attempt.transport = TorchTransport(
            group,
            staging_bytes=self.options.staging_bytes,
            staging_buffers=_STAGING_BUFFERS,
            checksum=self.options.checksum,
            timeout_s=timeout_s,
            progress=self.options.progress,
            pace=Pace(self.options.background_share or 1.0, self.options.hurry),
            peer_failed=lambda: self.control.voted_against(attempt.vote),
        )

    def _plan_source(self, attempt: _Attempt, names: list[str]) -> None:
        changes = []
        for name in names:
            with self._timed(attempt, name, "plan"):
                unit = attempt.source[name]
                table = self._gather(attempt, unit.table(self.rank))
                attempt.source_tables[name] = table
                attempt.scalars[name] = self._gather_scalars(attempt, unit)
            changes.append(
                UnitChange(
                    name=name,
                    source_layout=self.units[name].layout(),
                    target_layout=attempt.target[name],
                    source=table,
                    target=attempt.predicted.get(name),
                    build_bytes=self._by_rank(attempt.build_bytes.get(name, {})),
                )
            )
        assert attempt.transport is not None
        graph = build_graph(
            changes,
            world=self.world,
            memory_budget_bytes=self.options.memory_budget_bytes,
            staging_bytes=(_STAGING_BUFFERS + 1) * attempt.transport.staging_bytes,
        )
        attempt.schedule = compile_graph(graph)
        attempt.report.mode = attempt.schedule.mode
        attempt.report.digest = attempt.schedule.digest
        if attempt.schedule.mode == "staged" and self.options.background_share is not None:
            raise ValueError(
                "old and new state do not fit the device memory together, and units keep their "
                "state while other stages run"
            )
        self._check_host_memory(attempt.schedule)

    def _check_host_memory(self, schedule: Schedule) -> None:
        """Raises: ValueError: this node lacks the memory for what its ranks are to park."""
        nodes = self.options.node_of or (0,) * self.world
        here = [rank for rank in range(self.world) if nodes[rank] == nodes[self.rank]]
        needed = int(schedule.peak_host_bytes[here].sum())
        if not needed or self.options.host_free_bytes is None:
            return
        free = self.options.host_free_bytes()
        if needed > free:
            raise ValueError(
                f"old and new state do not fit the device memory together, and parking the old one "
                f"takes {needed / 2**30:.2f} GiB of this node's host memory, of which "
                f"{free / 2**30:.2f} GiB are free; free some of it, or raise "
                "memory_budget_bytes if the device has more"
            )

    def _agree_schedule(self, attempt: _Attempt, names: list[str]) -> None:
        options = repr(self.options).encode()
        digest = hashlib.sha256(attempt.report.digest.encode() + options).hexdigest()
        self._agree(attempt, "schedule", digest)

    def _park(self, attempt: _Attempt, names: list[str]) -> None:
        schedule = attempt.schedule
        assert schedule is not None
        for name in names:
            with self._timed(attempt, name, "park"):
                unit = schedule.graph.units.index(name)
                keys = schedule.parked(attempt.round_index, unit, self.rank)
                storages = attempt.source[name].storages()
                parked = park([storages[key] for key in keys])
                attempt.parked.setdefault(name, []).append(parked)
                attempt.report.units[name].bytes_parked += parked.nbytes

    def _build(self, attempt: _Attempt, names: list[str]) -> None:
        for name in names:
            with self._timed(attempt, name, "build"):
                attempt.built[name] = self.units[name].build(attempt.target[name])

    def _describe_target(self, attempt: _Attempt, names: list[str]) -> None:
        for name in names:
            with self._timed(attempt, name, "describe"):
                attempt.described[name] = attempt.built[name].described()

    def _plan_target(self, attempt: _Attempt, names: list[str]) -> None:
        for name in names:
            with self._timed(attempt, name, "plan"):
                unit = attempt.described[name]
                table = self._gather(attempt, unit.table(self.rank))
                attempt.target_tables[name] = table
                check_tiling(table)
                self._check_ranks(attempt, name, table)
                _check_nothing_dropped(name, attempt.source_tables[name], table)
                attempt.moves[name] = self._moves(attempt.source_tables[name], table)
                report = attempt.report.units[name]
                report.verified["tensors_tiled"] = len(table.tensors)
                if name in attempt.predicted:
                    self._compare_prediction(attempt, name)

    def _compare_prediction(self, attempt: _Attempt, name: str) -> None:
        """Report how the predicted target differs from the built one, which alone is moved to."""
        report = attempt.report.units[name]
        try:
            predicted = self._moves(attempt.source_tables[name], attempt.predicted[name])
            report.prediction = _pair_differences(predicted, attempt.moves[name])
        except Exception as error:
            report.prediction_error = _reason(error)

    def _agree_moves(self, attempt: _Attempt, names: list[str]) -> None:
        # The moves follow from the tables by a rule; who holds the same tables plans the same.
        digest = hashlib.sha256(attempt.report.digest.encode())
        for name in names:
            for table in (attempt.source_tables[name], attempt.target_tables[name]):
                digest.update(table.to_bytes())
        self._agree(attempt, "moves", digest.hexdigest())

    def _agree(self, attempt: _Attempt, what: str, digest: str) -> None:
        self.control.agree(
            f"{what}.{attempt.epoch}.{attempt.number}",
            digest,
            leave=lambda: self.control.voted_against(attempt.vote),
        )

    def _move(self, attempt: _Attempt, names: list[str]) -> None:
        assert attempt.transport is not None
        for name in names:
            with self._timed(attempt, name, "move"):
                source = attempt.source[name].shards
                for parked in attempt.parked.get(name, []):
                    source = _from_host(source, parked)
                done = attempt.transport.exchange(
                    attempt.moves[name], source, attempt.described[name].shards
                )
            report = attempt.report.units[name]
            report.bytes_sent = done.bytes_sent
            report.bytes_received = done.bytes_received
            report.bytes_local = done.bytes_local
            report.messages = done.messages_sent + done.messages_received

    def _verify(self, attempt: _Attempt, names: list[str]) -> None:
        assert attempt.transport is not None
        if self.options.checksum:
            attempt.transport.verify()
        for name in names:
            report = attempt.report.units[name]
            if self.options.checksum:
                report.verified["bytes"] = report.bytes_received + report.bytes_local
            with self._timed(attempt, name, "verify"):
                if attempt.described[name].shards:
                    attempt.built[name].load_scalars(attempt.scalars[name])
                    loaded = attempt.built[name].described().scalars
                    report.verified["scalars"] = check_loaded(attempt.scalars[name], loaded)

    # ------------------------------------------------------------------ votes and recovery

    def _vote_step(
        self, step: Step, label: str, work: Callable[[], None], *, injected: bool = True
    ) -> None:
        """Run `work` and vote on how it went; if any rank failed, recover and raise."""
        attempt = self._prepared()
        attempt.vote = self._vote_name(attempt, label)
        begin = time.perf_counter()

        def run() -> None:
            if injected and inject(step.value, self.rank, attempt.epoch):
                _flip_a_byte(attempt.described.values())
            work()

        error = self._catch(run)
        if error is not None and attempt.transport is not None:
            self._catch(attempt.transport.abort)  # `error` is what there is to report
        lost: tuple[int, ...] = ()
        # A rank that failed waits for peers that wait for it.
        patience_s = self.control.timeout_s + (self.options.timeout_s if step in _WAITING else 0.0)
        if step in _PACED:
            patience_s *= self._slowed()
        try:
            failed = self._vote(attempt, label, error, patience_s)
        except RankLost as missing:
            lost = missing.ranks
            own = _first_failure([v for v in missing.votes if not _said_echo(v)])
            failed = own or (lost[0], str(missing))
            error = error or missing
        seconds = attempt.report.seconds
        seconds[step.value] = seconds.get(step.value, 0.0) + time.perf_counter() - begin
        if failed is None:
            return
        lost = self._recover(attempt, step.value, lost)
        raise TransitionAborted(step.value, *failed, lost) from error

    def _vote(
        self,
        attempt: _Attempt,
        label: str,
        error: Exception | None,
        timeout_s: float | None = None,
    ) -> tuple[int, str] | None:
        """(rank, reason) of the failure that all ranks name, or None if none failed.

        Ranks that have formed different numbers of groups name them alike from here on.
        """
        said: dict[str, Any] = {"groups_named": groups_named()}
        if error is not None:
            said |= {"echo": _is_echo(error), "reason": _reason(error)}
        votes = self.control.vote(
            self._vote_name(attempt, label), error is None, json.dumps(said), timeout_s=timeout_s
        )
        name_groups_from(max(json.loads(vote.payload)["groups_named"] for vote in votes))
        return _first_failure(votes)

    @staticmethod
    def _vote_name(attempt: _Attempt, label: str) -> str:
        return f"transition.{attempt.epoch}.{label}"

    def _recover(self, attempt: _Attempt, phase: str, lost: tuple[int, ...]) -> tuple[int, ...]:
        """Give back the target, bring parked storages back; then nothing of the attempt is left.

        Returns: the lost ranks, with those that were lost on the way. The others have recovered;
        whether the old layout needs the lost ones is not known here.
        """
        self._attempt = None
        attempt.described.clear()
        attempt.moves.clear()
        attempt.group = None  # a gloo group closes its sockets once nothing refers to it
        error: Exception | None = None
        if attempt.transport is not None:
            error = self._catch(attempt.transport.abort)
        for name in reversed(list(attempt.built)):
            built = attempt.built.pop(name)
            error = self._catch(self.units[name].release, built) or error
        # Only a state that is all there can be settled.
        unfetched = self._catch(self._fetch, attempt) if attempt.parked else None
        error = unfetched or self._settle(attempt) or error
        if error is not None and not any(unit.shards for unit in attempt.source.values()):
            # What it could not give back is memory and groups of the target: the old layout holds
            # nothing here, and a process that was to join ends.
            logger.warning("rank %d could not give back its target: %s", self.rank, _reason(error))
            error = None
        if lost:
            if error is not None:
                raise TransitionUnrecoverable(_not_recovered(phase, self.rank, _reason(error)))
            return lost
        try:
            failed = self._vote(attempt, "recovered", error)
        except RankLost as missing:
            lost, failed = missing.ranks, _first_failure(missing.votes)
        if failed is not None:
            raise TransitionUnrecoverable(_not_recovered(phase, *failed)) from error
        return lost

    def _settle(self, attempt: _Attempt) -> Exception | None:
        error: Exception | None = None
        for name in attempt.target:
            error = self._catch(self.units[name].settle) or error
        return error

    def _fetch(self, attempt: _Attempt) -> None:
        try:
            inject("fetch", self.rank, attempt.epoch)
        finally:
            for one_unit in attempt.parked.values():
                for parked in one_unit:
                    parked.fetch()

    # ------------------------------------------------------------------ small parts

    def _slowed(self) -> float:
        """How many times longer peers may take that leave other work its share."""
        return 1.0 / (self.options.background_share or 1.0)

    def _prepared(self) -> _Attempt:
        if self._attempt is None or self._attempt.committed:
            raise RuntimeError("no transition is prepared")
        return self._attempt

    def _names(self, nodes: Sequence[Node]) -> list[str]:
        """The units of a round that concern this rank; all of them for a step of all units."""
        attempt = self._prepared()
        assert attempt.schedule is not None
        names = []
        for node in nodes:
            if node.unit < 0:
                return list(attempt.target)
            if self.rank in node.ranks:
                names.append(attempt.schedule.graph.units[node.unit])
        return names

    def _check_ranks(self, attempt: _Attempt, name: str, table: ShardTable) -> None:
        """The schedule was made for ranks that a prediction named: the built ones must be those."""
        schedule = attempt.schedule
        assert schedule is not None
        unit = schedule.graph.units.index(name)
        move = next(n for n in schedule.graph.nodes if n.step is Step.MOVE and n.unit == unit)
        other = np.setdiff1d(table.rank, move.ranks)
        if len(other):
            raise ValueError(
                f"the built target of {name} has shards on ranks {other.tolist()}, where its "
                "predicted table has none"
            )

    def _moves(self, source: ShardTable, target: ShardTable) -> MoveTable:
        return plan_moves(source, target, node_of=self.options.node_of, rank=self.rank)

    def _by_rank(self, nbytes: Mapping[int, int]) -> ByteArray:
        return np.array([nbytes.get(rank, 0) for rank in range(self.world)], np.int64)

    def _gather(self, attempt: _Attempt, table: ShardTable) -> ShardTable:
        assert attempt.group is not None
        assert attempt.transport is not None
        try:
            return gather_tables(table, attempt.group, attempt.transport.wait_for_device)
        except TransportError:
            raise
        except RuntimeError as error:
            raise TransportError(f"gathering shard tables failed: {error}") from error

    def _gather_scalars(self, attempt: _Attempt, unit: DescribedUnit) -> Scalars:
        assert attempt.group is not None
        assert attempt.transport is not None
        mine = encode(unit.scalars) if unit.shards else b""
        try:
            parts = gather_bytes(mine, attempt.group, attempt.transport.wait_for_device)
        except TransportError:
            raise
        except RuntimeError as error:
            raise TransportError(f"gathering scalars failed: {error}") from error
        return merge_scalars([json.loads(part) for part in parts if part])

    @staticmethod
    def _catch(work: Callable[..., Any], *args: Any) -> Exception | None:
        try:
            work(*args)
        except Exception as error:
            _clear_frames(error)
            return error
        return None

    @staticmethod
    def _timed(attempt: _Attempt, name: str, phase: str) -> Timed:
        return Timed(attempt.report.units[name].seconds, phase)


# The rounds that every transition begins with; build.py makes the same nodes.
_PROLOGUE = (
    (Step.FREE_GRADIENTS, "source"),
    (Step.FORM_GROUPS, ""),
    (Step.DESCRIBE, "source"),
    (Step.PLAN, "source"),
    (Step.AGREE, "source"),
)


def _from_host(shards: Sequence[LocalShard], parked: ParkedStorages) -> list[LocalShard]:
    """The same shards, those in parked storages as views of the host copy."""
    return [
        LocalShard(s.name, s.box, s.global_shape, parked.view_of(s.view))
        if parked.holds(s.view)
        else s
        for s in shards
    ]


def _give_up(source: DescribedUnit, target: DescribedUnit) -> None:
    """Free the memory of a layout that is over, whatever still refers to it: models hang together
    in cycles, and live until somebody collects the garbage."""
    kept = unique_storages(target.shards)
    for identity, storage in unique_storages(source.shards).items():
        if identity not in kept and storage.resizable():
            storage.resize_(0)


def _check_nothing_dropped(name: str, source: ShardTable, target: ShardTable) -> None:
    """Raises: ValueError if the source has a tensor that the target does not: it would be lost."""
    missing = {t.name for t in source.tensors} - {t.name for t in target.tensors}
    if missing:
        raise ValueError(
            f"the target of {name} lacks {len(missing)} tensor(s) of the source, such as "
            f"{min(missing)!r}: their content would be lost"
        )


def _pair_differences(predicted: MoveTable, described: MoveTable) -> list[dict[str, int]]:
    """Pairs of ranks between which the two tables move numbers of bytes that differ by more than
    PREDICTION_TOLERANCE of the larger."""
    tables = []
    for moves in (predicted, described):
        src, dst, nbytes = (column.tolist() for column in moves.pair_bytes())
        tables.append(dict(zip(zip(src, dst, strict=True), nbytes, strict=True)))
    differences = []
    for src, dst in sorted(set(tables[0]) | set(tables[1])):
        was, found = (table.get((src, dst), 0) for table in tables)
        if abs(was - found) > PREDICTION_TOLERANCE * max(was, found):
            pair = {"src": src, "dst": dst, "predicted_bytes": was, "described_bytes": found}
            differences.append(pair)
    return differences


def _flip_a_byte(units: Any) -> None:
    """Fault injection: flip one byte of the first target view that has any."""
    for unit in units:
        for shard in unit.shards:
            if shard.view.numel():
                storage = shard.view.untyped_storage()
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                data[shard.view.storage_offset() * shard.view.element_size()] ^= 0xFF
                return


def _first_failure(votes: Sequence[Vote]) -> tuple[int, str] | None:
    """(rank, reason) of the vote to blame, or None: what failed by itself before what a peer's
    failure caused, then the first to say so."""
    against = [vote for vote in votes if not vote.ok]
    if not against:
        return None
    first = min(against, key=lambda vote: (_said_echo(vote), vote.order))
    return first.rank, json.loads(first.payload)["reason"]


def _said_echo(vote: Vote) -> bool:
    return not vote.ok and bool(json.loads(vote.payload)["echo"])


def _is_echo(error: Exception) -> bool:
    """Whether the failure may be only what a peer's failure caused here: torch.distributed says
    that a connection broke by a plain RuntimeError, which the transport passes on as the cause."""
    if isinstance(error, dist.DistError | ControlError):
        return not isinstance(error, Disagreement)
    if isinstance(error, ChecksumError) or not isinstance(error, TransportError):
        return False
    cause = error.__cause__
    return cause is None or type(cause) is RuntimeError or isinstance(cause, dist.DistError)


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error came through: they hold views of the target,
    whose memory is needed to bring the source back."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _not_recovered(phase: str, rank: int, reason: str) -> str:
    return (
        f"the transition failed in {phase} and the old layout could not be brought back on rank "
        f"{rank}: {reason}; end the job and restart it from its last checkpoint"
    )
