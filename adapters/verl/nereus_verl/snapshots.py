"""Snapshots of a verl job, in its driver: when they are taken, and what became of them.

Whatever fails here costs the job snapshots and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from nereus_plugins.control.driver import say
from nereus_plugins.control.workers import WorkersFailed, brief
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.interval import Due
from nereus_verl import json_state, resume, snapshot_worker
from nereus_verl.answers import Answers
from nereus_verl.preflight import Preflight
from nereus_verl.ranks import Ranks
from nereus_verl.resume import Resume

_MIB = 1 << 20
# Of nereus.timeout_s: how long the job waits for a snapshot to be written, where the next one is
# due or its ranks are to part. Some leave because their node is about to go.
_PATIENCE = 0.1


class JobSnapshots:
    """
    Args:
        checked: what was found before the job started. ranks: the job's. answers: theirs.

    Attributes:
        on: whether the job takes any; no more after a failure that is not a snapshot's own.
        begun: in the world as it is: its ranks hold a group for them, and perhaps write one.
    """

    def __init__(self, checked: Preflight, ranks: Ranks, answers: Answers) -> None:
        self._settings = checked.nereus.snapshot
        self._config = checked.config
        self._timeout_s = checked.nereus.timeout_s
        self._ranks = ranks
        self._answers = answers
        self.on = self._settings is not None
        self.begun = False
        self._due = Due(**({} if self._settings is None else self._settings.interval()))
        self._under_way: int | None = None  # after which step
        self._last: Mapping[str, Any] | None = None
        self._background_s = 0.0  # how long the last one took to write
        self._waited_s = 0.0
        self._missed = 0

    def restore(self, found: Resume) -> None:
        """Fill the units of all ranks.

        Raises: SnapshotError: it is damaged or of another model; says what to do.
        """
        path, begin_s = found.snapshot.path, time.monotonic()
        try:
            read = self._call(
                "restore",
                snapshot_worker.restore,
                str(path),
                found.step,
                self._named(),
                self._timeout_s,
            )
        except WorkersFailed as error:
            raise SnapshotError(
                f"the job cannot go on from the snapshot after step {found.step}: {error}. If it "
                f"is damaged, remove {path}: the same command goes on from the one before. To "
                "start without snapshots, set nereus.snapshot.folder to another directory"
            ) from error
        seconds = time.monotonic() - begin_s
        say(f"restored step {found.step}: {sum(read) / _MIB:.1f} MiB read in {seconds:.2f} s")

    def after_step(
        self, step: int, epoch: int, plan: Mapping[str, Any], data: Callable[[], Any]
    ) -> None:
        """Take one if it is due; at the boundary, before its transition. Where none is, nothing is
        asked of the ranks but, while they write one, whether they have.

        Args: epoch, plan: in force. data: gives the state of verl's data loader.
        """
        if not self.on:
            return
        begin_s = time.monotonic()
        due = self._due.after_step(step, begin_s)
        try:
            self._look(_PATIENCE * self._timeout_s if due else 0.0)
            if due:
                self._take(step, epoch, plan, data)
        except Exception as error:
            self.on = False
            self._missed += 1
            say(
                f"after step {step} no snapshot could be taken, nor will any more be; the job "
                f"trains on: {brief(error)}"
            )
            self.end()
        now_s = time.monotonic()
        self._waited_s += now_s - begin_s
        self._due.goes_on(now_s, beside=self._under_way is not None)

    def _look(self, limit_s: float) -> None:
        """What became of the one under way, if one is. Args: limit_s: how long it is waited for.

        Raises: WorkersFailed.
        """
        if self._under_way is None:
            return
        answers = self._call("snapshot", snapshot_worker.ended, limit_s)
        if not all(answer["ended"] for answer in answers):
            return
        self._under_way = None
        self._heard(answers)
        if any(answer["lost"] for answer in answers):
            say("ranks did not hear of each other in the last snapshot; they begin anew")
            self.end()

    def _take(
        self, step: int, epoch: int, plan: Mapping[str, Any], data: Callable[[], Any]
    ) -> None:
        """Raises: WorkersFailed; NotJson; what `data` raises."""
        if self._under_way is not None:
            waited_s = _PATIENCE * self._timeout_s
            after = f"the one after step {self._under_way}"
            self._put_off(step, f"{after} is not written yet, which was waited {waited_s:g} s for")
            return
        if not self._begin(step):
            return
        begin_s = time.monotonic()
        state = json_state.to_json(data(), "the data loader's state")
        answers = self._call("snapshot", snapshot_worker.take, step, epoch, plan, state)
        if any(answer["lost"] for answer in answers):
            self._heard(answers)
            self._put_off(step, "ranks did not hear of each other; they begin anew")
            self.end()
        elif why := answers[0]["not_begun"]:
            self._put_off(step, why)
        else:
            self._under_way = step
            blocked_s = time.monotonic() - begin_s
            self._due.begun(step, self._due.costs(blocked_s, self._background_s))

    def _put_off(self, step: int, why: str) -> None:
        self._missed += 1
        self._due.not_begun(step)
        say(
            f"after step {step} no snapshot could be taken; it is tried again from step "
            f"{self._due.next_step} on, and the job trains on: {why}"
        )

    def end(self) -> None:
        """The ranks that take them are about to part: wait a while for the one under way, and give
        it up if it is not written by then. The next ones to be due begin again.

        What fails here, fails again in what the ranks do next if the job needs it.
        """
        self._end(_PATIENCE * self._timeout_s)

    def finish(self) -> None:
        """Wait for the one under way, as the job ends well."""
        self._end(None)

    def _end(self, limit_s: float | None) -> None:
        if not self.begun:
            return
        self.begun, self._under_way = False, None
        try:
            self._heard(self._call("snapshot", snapshot_worker.end, limit_s))
        except Exception as error:
            say(f"the last snapshot may not be whole: {brief(error)}")

    def waited_ms(self) -> float | None:
        """What training has waited for snapshots since this was asked last; None: it takes none."""
        if self._settings is None:
            return None
        waited_s, self._waited_s = self._waited_s, 0.0
        return 1e3 * waited_s

    def missed(self) -> int:
        """How many were due and could not be begun since this was asked last."""
        missed, self._missed = self._missed, 0
        return missed

    def last_words(self) -> None:
        """Of a job that fails."""
        if words := resume.newest_words(self._settings, self._config):
            say(words)

    def _begin(self, step: int) -> bool:
        """Whether the ranks take snapshots now; as the first after `step` is due they begin."""
        if self.begun:
            return True
        assert self._settings is not None
        options = {"folder": str(resume.place(self._settings)), "keep": self._settings.keep}
        self.begun = True  # perhaps on some ranks only
        try:
            self._call("snapshot", snapshot_worker.begin, options, self._named(), self._timeout_s)
        except WorkersFailed as error:
            self._put_off(step, f"ranks could not begin: {brief(error)}")
            self.end()
            return False
        return True

    def _named(self) -> int:
        return max(self._call("snapshot", snapshot_worker.named))

    def _call(self, phase: str, function: Any, *args: Any) -> list[Any]:
        return self._answers.call(self._ranks.current, phase, function, *args)

    def _heard(self, answers: list[Any]) -> None:
        """Say what became of the last snapshot, once. All ranks' are alike, but for a lost peer."""
        last = answers[0]["last"]
        if last is None or last == self._last:
            return
        first = self._last is None
        self._last = last
        self._background_s = max(answer["last"]["background_s"] for answer in answers)
        if last["error"]:
            say(
                f"the snapshot after step {last['step']} failed, the job trains on: {last['error']}"
            )
            return
        if first:
            mib = sum(answer["last"]["nbytes"] for answer in answers) / _MIB
            say(
                f"the first snapshot, after step {last['step']}, is whole: {mib:.1f} MiB, copied "
                f"in {1e3 * last['blocked_s']:.0f} ms and written in {last['background_s']:.2f} s "
                f"beside the job, {last['path']}"
            )
