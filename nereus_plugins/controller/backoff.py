"""Back-off from GPUs that are taken away before they have repaid the way there and back.

A scheduler that takes whatever the job begins to use, and offers it again once the job has left it,
would have the two chase each other. Each time that this happens in a row the job waits longer
before it takes more GPUs than it has; once a grant has repaid, it is as if it never happened.

GPUs that only come and go stay on offer while the job waits: it waits no longer than until it has
missed by that what the last grant cost, then twice as much, four times, and so on (the
deterministic rent-or-buy rule with doubling). So waiting costs little where GPUs bring much, and a
scheduler that chases the job gets it to move a number of times that grows with the logarithm of
the run.
"""

from __future__ import annotations

import dataclasses

# Steps to wait at most after the second such grant in a row, twice as many after each further one.
FIRST_STEPS, MOST_STEPS = 10, 160


@dataclasses.dataclass
class BackOff:
    """
    Attributes:
        since: after which step the job took the GPUs that it has; None: they were its own.
        saves_s: a step, as expected of them. stall_s: what the way there took.
        lost: grants in a row that did not repay.
        until: after how many steps of the run it may take more GPUs again.
        enough_s: of seconds missed, after which it may before. missed_s: so far.
        offer: the step in which it was told of GPUs last, and what they would have saved in it.
    """

    since: int | None = None
    saves_s: float = 0.0
    stall_s: float = 0.0
    lost: int = 0
    until: int = 0
    enough_s: float = 0.0
    missed_s: float = 0.0
    offer: tuple[int, float] | None = None

    def took(self, step: int, saves_s: float, stall_s: float) -> None:
        """The job has gone to more GPUs, because that saves so much a step."""
        self.since, self.saves_s, self.stall_s = step, saves_s, stall_s

    def left(self, step: int, stall_s: float) -> None:
        """It had to leave GPUs."""
        if self.since is None:
            return
        cost_s = self.stall_s + stall_s
        repaid = (step - self.since) * self.saves_s >= cost_s
        self.since = None
        self.lost = 0 if repaid else self.lost + 1
        self.missed_s, self.offer = 0.0, None
        if self.lost > 1:
            times = 1 << min(self.lost - 2, 30)
            self.until = step + min(FIRST_STEPS * times, MOST_STEPS)
            self.enough_s = cost_s * times

    def waits(self, step: int, saves_s: float) -> bool:
        """Whether it does not take more GPUs yet that would save so much a step; 0: none are
        offered. To be asked when that changes, and now and then."""
        if self.offer is not None:
            told, saved_s = self.offer
            self.missed_s += (step - told) * saved_s
        self.offer = (step, saves_s)
        return step < self.until and self.missed_s < self.enough_s

    def __str__(self) -> str:
        return (
            f"GPUs were taken away before they had repaid, {self.lost} times in a row: no others "
            f"are used before step {self.until}, or before {self.enough_s:.0f} s were missed"
        )
