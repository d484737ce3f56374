"""How the simulated cluster really behaves: what the cost model does not know, and chance.

The truth multiplies the cost model's seconds by a hidden factor for each stage and another for each
of its layouts, and adds seconds that do not scale with the work. They are drawn from the seed and
stay for the run, so that a calibration has something to learn and something to carry over. Chance
is drawn by step, so that every policy has the same luck at the same step.
"""

from __future__ import annotations

import dataclasses
import math
import zlib

import numpy as np
from numpy.typing import NDArray

from nereus_plugins.cost.estimate import Placed
from nereus_plugins.spec import Assignment, Layout, ModelStage, Record
from nereus_plugins.spec.record import require_number

STAGES = tuple(ModelStage)


# Probabilities, seconds, steps; a spread or a factor above 10 is no cluster.
_MOST = {"slow_rank_starts": 1.0, "stall": 1.0, "fixed_s": 1e6, "slow_rank_steps": 1e9}


@dataclasses.dataclass(frozen=True)
class TruthSpec(Record):
    """Spreads of what is hidden and of chance (all assumed; vary them). Zeros make the cost model
    the truth.

    Attributes:
        stage_spread, layout_spread: standard deviation of the log of a stage's factor on seconds,
            and of each of its layouts'.
        fixed_s: mean of the seconds of a stage that do not scale with its work.
        memory_stage_spread, memory_layout_spread: the same of peak bytes.
        noise: standard deviation of the log of one stage's seconds in one step.
        memory_noise: of its bytes.
        slow_rank_starts: probability that a rank becomes slow in a step.
        slow_rank_steps: how many steps it stays so, on average.
        slow_rank_factor: how much it slows every stage at most (from 1.1 up, evenly).
        stall: probability of a step that takes 2 to 6 times as long.
    """

    stage_spread: float = 0.15
    layout_spread: float = 0.04
    fixed_s: float = 1.0
    memory_stage_spread: float = 0.015
    memory_layout_spread: float = 0.005
    noise: float = 0.03
    memory_noise: float = 0.004
    slow_rank_starts: float = 0.003
    slow_rank_steps: float = 10.0
    slow_rank_factor: float = 1.5
    stall: float = 0.001

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            most = _MOST.get(field.name, 10.0)
            least = 1.0 if field.name in ("slow_rank_factor", "slow_rank_steps") else 0.0
            require_number(
                "TruthSpec", field.name, getattr(self, field.name), minimum=least, maximum=most
            )


NO_SURPRISE = TruthSpec(
    stage_spread=0.0, layout_spread=0.0, fixed_s=0.0, memory_stage_spread=0.0,
    memory_layout_spread=0.0, noise=0.0, memory_noise=0.0, slow_rank_starts=0.0,
    slow_rank_factor=1.0, stall=0.0,
)  # fmt: skip


class Truth:
    """Hidden factors of one seed; what `estimate` takes as a calibration to say what really is."""

    def __init__(self, spec: TruthSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._drawn: dict[tuple[str, ModelStage, Layout | None], float] = {}

    def seconds(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> float:
        spec, layout = self.spec, assignment.layout
        factor = math.exp(
            spec.stage_spread * self._normal("seconds", stage, None)
            + spec.layout_spread * self._normal("seconds", stage, layout)
        )
        fixed_s = spec.fixed_s * -math.log(self._uniform("fixed", stage))
        return factor * predicted_s + fixed_s

    def bytes(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_bytes: float
    ) -> float:
        if stage is ModelStage.ACTOR_GENERATE:
            return predicted_bytes  # an engine takes the share it is given
        spec = self.spec
        return predicted_bytes * math.exp(
            spec.memory_stage_spread * self._normal("bytes", stage, None)
            + spec.memory_layout_spread * self._normal("bytes", stage, assignment.layout)
        )

    def _rng(self, what: str, stage: ModelStage, layout: Layout | None) -> np.random.Generator:
        key = zlib.crc32(f"{what} {stage} {layout}".encode())
        return np.random.default_rng([self.seed, key])

    def _normal(self, what: str, stage: ModelStage, layout: Layout | None) -> float:
        key = (what, stage, layout)
        if key not in self._drawn:
            self._drawn[key] = float(self._rng(*key).standard_normal())
        return self._drawn[key]

    def _uniform(self, what: str, stage: ModelStage) -> float:
        """In (0, 1]."""
        key = (what, stage, None)
        if key not in self._drawn:
            self._drawn[key] = 1.0 - float(self._rng(*key).random())
        return self._drawn[key]


class Chance:
    """What each step of a run meets by chance.

    seconds: float64[steps, len(STAGES)], factors on each stage's seconds, slow ranks and stalls
    included. bytes: the same of bytes. longest: float64[steps] in (0, 1), the quantile among all
    sequences of a step that its longest response has.
    """

    def __init__(self, spec: TruthSpec, seed: int, steps: int, sequences: int) -> None:
        rng = np.random.default_rng([seed, steps])
        shape = (steps, len(STAGES))
        self.seconds: NDArray[np.float64] = np.exp(spec.noise * rng.standard_normal(shape))
        self.bytes: NDArray[np.float64] = np.exp(spec.memory_noise * rng.standard_normal(shape))
        self.longest: NDArray[np.float64] = rng.random(steps) ** (1.0 / max(1, sequences))
        self.slow: NDArray[np.float64] = np.ones(steps)
        most = max(1.1, spec.slow_rank_factor)
        for start in np.flatnonzero(rng.random(steps) < spec.slow_rank_starts):
            length = int(rng.geometric(1.0 / spec.slow_rank_steps))
            self.slow[start : start + length] *= rng.uniform(1.1, most)
        stalled = rng.random(steps) < spec.stall
        self.slow[stalled] *= rng.uniform(2.0, 6.0, int(stalled.sum()))
        self.seconds *= self.slow[:, None]

    def factors(self, step: int, stage: ModelStage) -> tuple[float, float]:
        """On a stage's seconds and bytes in one step."""
        column = STAGES.index(stage)
        # An engine takes the share of memory it is given.
        larger = 1.0 if stage is ModelStage.ACTOR_GENERATE else float(self.bytes[step, column])
        return float(self.seconds[step, column]), larger


@dataclasses.dataclass(frozen=True)
class StepTruth:
    """The truth in one step, chance included."""

    truth: Truth
    chance: Chance
    step: int

    def seconds(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> float:
        slower, _ = self.chance.factors(self.step, stage)
        return slower * self.truth.seconds(stage, assignment, predicted_s)

    def bytes(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_bytes: float
    ) -> float:
        _, larger = self.chance.factors(self.step, stage)
        return larger * self.truth.bytes(stage, assignment, predicted_bytes)
