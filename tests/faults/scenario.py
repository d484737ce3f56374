"""What is done to a job, chosen by a seed: which transition, and which fault strikes it where."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nereus_plugins.gtg.faults import PHASES
from nereus_plugins.selftest.cases import FSDP2, MEGATRON, Case


def _first(shape: Callable[[Case], bool]) -> list[Case]:
    """One case a back end: what jobs without a fault do is found out once a case."""
    return [next(case for case in cases if shape(case)) for cases in (FSDP2, MEGATRON)]


# A transition by kind.
TRANSITIONS = {
    "grow": _first(lambda case: case.source.world_size < case.ranks <= 4),
    "shrink": _first(lambda case: case.target.world_size < case.ranks <= 4),
    "reshape": _first(lambda case: case.source.world_size == case.target.world_size == 4),
}
TRANSITIONS["staged"] = TRANSITIONS["reshape"]

# Of the rank's side, by its phase ("in"), or by a signal from outside at any moment ("at").
IN_PHASE = ("raise", "kill", "delay", "hang", "corrupt")
AT_A_MOMENT = ("kill", "stop", "pause")
# Of the driver's.
OF_THE_JOURNAL = ("full disk", "torn line")
# In a transition a rank waits so long for its peers: what is shorter is late, what is longer is
# lost. In a step, where a busy machine must not be taken for a fault, longer.
TIMEOUT_S = 5.0
STEP_TIMEOUT_S = 25.0
SHORT_S = (0.05, 1.0)
LONG_S = 4 * TIMEOUT_S
MOMENTS = ("train", "prepare", "commit", "release")


@dataclass(frozen=True)
class Scenario:
    """One seed's.

    Attributes:
        transition: its kind. case: the layouts, and the model.
        fault: its kind. where: the phase, or the moment of the job, that it strikes in.
        rank: that it strikes; -1: the driver.
        part: of the time that the moment takes without a fault, after which it strikes.
        seconds: how long a rank is late.
    """

    seed: int
    transition: str
    case: Case
    fault: str
    where: str
    rank: int
    part: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "driver" if self.rank < 0 else f"rank {self.rank}"
        what = f"{self.fault} of {who} in {self.where}"
        return f"seed {self.seed}: {what}, {self.transition} {self.case}"

    @property
    def staged(self) -> bool:
        return self.transition == "staged"

    @property
    def promised(self) -> frozenset[str]:
        """What may become of the job (`strike.Outcome.how`)."""
        if self.fault in ("delay", "pause"):  # late, and no more: the same as without
            fetched = self.where == "fetch"  # which only an abort does
            return frozenset({"aborted" if self.where == "train" or fetched else "committed"})
        if self.fault == "raise":
            # Once it is committed, what fails is said, and holds nothing up. What is parked and
            # cannot be had back is gone.
            how = {"release": "committed", "fetch": "restarted"}.get(self.where, "aborted")
            return frozenset({how})
        if self.fault in ("corrupt", "full disk"):
            return frozenset({"aborted"})
        if self.where in MOMENTS:  # by the clock: it may come when all is over
            over = "aborted" if self.where == "train" else "committed"
            return frozenset({"restarted", over})
        return frozenset({"restarted"})


def scenario(seed: int, backends: Sequence[str] = ("fsdp2", "megatron")) -> Scenario:
    """The scenario of a seed. Kinds of transition take turns, so that few seeds have all."""
    chance = random.Random(seed)
    transition = list(TRANSITIONS)[seed % len(TRANSITIONS)]
    case = chance.choice([c for c in TRANSITIONS[transition] if c.backend in backends])
    rank = chance.randrange(case.ranks)
    kind = chance.choices(("phase", "moment", "journal"), (6, 4, 1))[0]
    if kind == "journal":
        return Scenario(
            seed, transition, case, chance.choice(OF_THE_JOURNAL), "journal", -1, chance.random()
        )
    if kind == "moment":
        fault = chance.choice(AT_A_MOMENT)
        # Training takes the most time of a job, and so meets the most faults.
        where = chance.choices(MOMENTS, (2, 4, 1, 1))[0]
        return Scenario(
            seed, transition, case, fault, where, rank, chance.random(), chance.uniform(*SHORT_S)
        )
    fault = chance.choice(IN_PHASE)
    phases = [phase for phase in PHASES if transition == "staged" or phase not in ("park", "fetch")]
    where = "verify" if fault == "corrupt" else chance.choice(phases)
    seconds = {"delay": chance.uniform(*SHORT_S), "hang": LONG_S}.get(fault, 0.0)
    return Scenario(seed, transition, case, fault, where, rank, 0.0, seconds)
