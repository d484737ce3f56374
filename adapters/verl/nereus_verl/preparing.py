"""The driver's side of preparing a transition's target: in the background, or while all wait.

In the background (`nereus_verl.background`) it is started at the end of a step and not waited for.
What was started serves at the boundary where it is still what is due, the ranks did not give up,
and the state was not trained meanwhile; otherwise it is dropped, and prepared while all wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_plugins.control.attempt import Attempt, given_up
from nereus_plugins.control.driver import Driver
from nereus_plugins.spec import Layout
from nereus_verl import last_words, worker
from nereus_verl.answers import Answers
from nereus_verl.background import AWAKE_RESERVE, Window
from nereus_verl.driver import submit
from nereus_verl.preflight import Preflight
from nereus_verl.ranks import Change, Rank, Ranks


@dataclass(frozen=True)
class Started:
    """A preparation under way in the background.

    epoch: that it is an attempt at. layouts: by unit. submitted: what to collect
    (`driver.submit`). obstacle: why nothing was submitted, "" if something was.
    """

    epoch: int
    layouts: Mapping[str, Layout]
    window: Window
    submitted: Mapping[Any, int]
    obstacle: str


class Preparing:
    """
    Args:
        checked: the job's settings. driver: its books. ranks: all of them. answers: theirs.
    """

    def __init__(self, checked: Preflight, driver: Driver, ranks: Ranks, answers: Answers) -> None:
        self._checked = checked
        self._driver = driver
        self._ranks = ranks
        self._answers = answers
        self._started: Started | None = None

    def start(self, step: int, layouts: Mapping[str, Layout]) -> None:
        """Have the ranks begin, for the boundary after `step`. Does not wait for it.

        Raises: WorkersFailed.
        """
        current = self._ranks.current
        looks = self._answers.call(current, "look", worker.look, list(layouts), AWAKE_RESERVE)
        obstacle = next((look["obstacle"] for look in looks if look["obstacle"]), "")
        epoch, (address, port) = self._driver.next_attempt(), looks[0]["store"]
        share = self._checked.nereus.background_share
        window = Window(share, address, port, f"nereus.window.{epoch}")
        submitted: Mapping[Any, int] = {}
        if not obstacle:
            budget = self._budget(lambda: [look["free_bytes"] for look in looks])
            arguments = _arguments(layouts, epoch, step, current)
            submitted = submit(self._ranks.workers, worker.prepare, *arguments, budget, window)
        self._started = Started(epoch, layouts, window, submitted, obstacle)
        self._driver.inbox.doing("prepare, in the background", step)

    def use_for(
        self, layouts: Mapping[str, Layout], change: Change | None
    ) -> tuple[int | None, str]:
        """Have what was started, if anything was, serve for a transition of these units.

        Args: change: of the set of ranks, None if they stay.

        Returns: the epoch that it is an attempt at, None: there is nothing to use; and why not, ""
            where nothing was started.

        Raises: TransitionFailed: a rank that the job needs is gone.
        """
        if self._started is None:
            return None, ""
        if change is None and layouts == self._started.layouts:
            self._started.window.end()
            return self._started.epoch, ""
        self.drop()
        return None, "another plan was prepared"

    def drop(self) -> None:
        """Give up what was started, if anything still is: it is not what was due.

        Raises: TransitionFailed: a rank that the job needs is gone.
        """
        started, self._started = self._started, None
        if started is None:
            return
        if not started.obstacle:
            started.window.end()
            failure = "what was prepared in the background could not be given up"
            with last_words.if_lost(failure, self._driver.step, self._checked.config):
                answers = self._answers.collect(started.submitted, "prepare")
                if not any("aborted" in answer for answer in answers):
                    self._answers.call(self._ranks.current, "abort", worker.abort)
        self._driver.inbox.doing("")

    def answers(
        self,
        attempt: Attempt,
        layouts: Mapping[str, Layout],
        ranks: Sequence[Rank],
        change: Change | None,
    ) -> list[dict[str, Any]]:
        """Of the ranks that take part, once all have prepared or given up (`worker.prepare`).

        Args: layouts: by unit. ranks: that take part. change: of their set, over whose union this
            runs.

        Raises: WorkersFailed; TransitionFailed: only some gave up.
        """
        prepared = self._prepared_meanwhile(attempt)
        if prepared is not None:
            return prepared

        def call(phase: str, function: Any, *args: Any) -> list[Any]:
            return self._answers.call(
                ranks, phase, function, *args, change=change, epoch=attempt.epoch
            )

        names = list(layouts)
        budget = self._budget(lambda: call("free_memory", worker.free_memory, names))
        arguments = _arguments(layouts, attempt.epoch, attempt.step, ranks)
        return call("prepare", worker.prepare, *arguments, budget)

    def _prepared_meanwhile(self, attempt: Attempt) -> list[dict[str, Any]] | None:
        """The ranks' answers to what was started, once they are there; None if the attempt is to be
        prepared now."""
        started, self._started = self._started, None
        if started is None:
            return None
        why = started.obstacle
        if not why:
            begin_s = time.perf_counter()
            answers = self._answers.collect(started.submitted, "prepare")
            waited_s = time.perf_counter() - begin_s
            why = given_up(answers)
            if not why:
                stale = self._answers.call(self._ranks.current, "prepare", worker.stale)
                names = sorted({name for of_rank in stale for name in of_rank})
                if not names:
                    attempt.hidden(max(answer["seconds"] for answer in answers), waited_s)
                    return answers
                self._answers.call(self._ranks.current, "abort", worker.abort)
                why = f"{', '.join(names)} was trained or loaded meanwhile"
        attempt.exposed(why)
        attempt.epoch = self._driver.next_attempt()  # ranks have voted under the other number
        return None

    def _budget(self, free_bytes: Callable[[], list[int | None]]) -> int | None:
        """Device bytes for old and new state of units on one rank; the same for all.

        Args: free_bytes: asked where the settings do not say; None: no limit.
        """
        fixed = self._checked.nereus.memory_budget_gib
        if fixed is not None:
            return int(fixed * (1 << 30))
        known = [value for value in free_bytes() if isinstance(value, int)]
        return min(known) if known else None


def _arguments(
    layouts: Mapping[str, Layout], epoch: int, step: int, ranks: Sequence[Rank]
) -> tuple[Any, ...]:
    """Of `worker.prepare`, up to the memory budget."""
    wanted = {name: layout.to_dict() for name, layout in layouts.items()}
    hosts = [rank.host for rank in ranks]
    node_of = tuple(sorted(set(hosts)).index(host) for host in hosts)
    return wanted, epoch, step, node_of
