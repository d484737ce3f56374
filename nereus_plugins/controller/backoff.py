"""Back-off from GPUs that are taken away before they have repaid the way there and back.

A scheduler that takes whatever the job begins to use, and offers it again once the job has left it,
would have the two chase each other. Each time that this happens in a row the job waits longer
before it takes more GPUs than it has; once a grant has repaid, it is as if it never happened.
"""

from __future__ import annotations

import dataclasses

# Steps to wait after the second such grant in a row, twice as many after each further one, at most.
FIRST_STEPS, MOST_STEPS = 10, 160


@dataclasses.dataclass
class BackOff:
    """
    Attributes:
        since: after which step the job took the GPUs that it has; None: they were its own.
        saves_s: a step, as expected of them. stall_s: what the way there took.
        lost: grants in a row that did not repay.
        until: after how many steps of the run it may take more GPUs again.
    """

    since: int | None = None
    saves_s: float = 0.0
    stall_s: float = 0.0
    lost: int = 0
    until: int = 0

    def took(self, step: int, saves_s: float, stall_s: float) -> None:
        """The job has gone to more GPUs, because that saves so much a step."""
        self.since, self.saves_s, self.stall_s = step, saves_s, stall_s

    def left(self, step: int, stall_s: float) -> None:
        """It had to leave GPUs."""
        if self.since is None:
            return
        repaid = (step - self.since) * self.saves_s >= self.stall_s + stall_s
        self.since = None
        self.lost = 0 if repaid else self.lost + 1
        if self.lost > 1:
            self.until = step + min(FIRST_STEPS << min(self.lost - 2, 30), MOST_STEPS)

    def waits(self, step: int) -> bool:
        return step < self.until

    def __str__(self) -> str:
        return (
            f"GPUs were taken away before they had repaid, {self.lost} times in a row: no others "
            f"are used before step {self.until}"
        )
