"""What the job's ranks answer, watched: which of them the job can lose, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nereus_plugins.control.workers import WorkersFailed, collect
from nereus_verl import worker
from nereus_verl.driver import submit
from nereus_verl.ranks import DRIVER_PATIENCE, Change, Rank


class Answers:
    """Args: timeout_s: nereus.timeout_s."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def call(
        self,
        ranks: Sequence[Rank],
        phase: str,
        function: Any,
        *args: Any,
        change: Change | None = None,
        epoch: int = 0,
    ) -> list[Any]:
        """Run `function(worker, *args)` in the processes of `ranks`; results by rank.

        Args:
            phase: what is being done.
            change: of the set of ranks, over whose union this runs. epoch: of the attempt then.

        Raises: WorkersFailed: a rank that the job needs is gone.
        """
        submitted = submit([rank.worker for rank in ranks], function, *args)
        return self.collect(submitted, phase, change, epoch)

    def collect(
        self,
        submitted: Mapping[Any, int],
        phase: str,
        change: Change | None = None,
        epoch: int = 0,
    ) -> list[Any]:
        """As `call`, of what `driver.submit` returned."""
        return collect(submitted, phase, **self.watching(phase, change, epoch))

    def watching(self, phase: str, change: Change | None, epoch: int) -> dict[str, Any]:
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
            "timeout_s": self._timeout_s * DRIVER_PATIENCE,
            "hopeless": hopeless,
            "without": without,
            "meanwhile": meanwhile,
        }


def _lost_ranks(answer: Any, change: Change | None) -> str:
    """Why the job cannot go on after a rank's answer, "" if it can."""
    aborted = answer.get("aborted") if isinstance(answer, dict) else None
    ranks = [] if not aborted else aborted["lost_ranks"]
    needed = [rank for rank in ranks if change is None or not change.can_lose(rank)]
    if not aborted or not needed:
        return ""
    lost = ", ".join(map(str, needed))
    return f"rank(s) {lost} are dead or hung; {aborted['phase']}: {aborted['reason']}"
