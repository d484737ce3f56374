"""What one iteration works through, and how the weights are updated."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

from .record import (
    Record,
    SpecError,
    require,
    require_choice,
    require_int,
    require_number,
    shown,
)

if TYPE_CHECKING:
    import numpy as np

KINDS = ("fixed", "lognormal", "quantiles")
MOST_SIGMA = 10.0  # more is a typing error: the mean would be 10^21 times the median
MOST_SEQUENCES = 1 << 18  # of an iteration; estimates look at every one of them
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LengthDistribution(Record):
    """Lengths of prompts or responses, in tokens; at least 1, at most `max_tokens`.

    Attributes:
        kind: which of the following describes it:
            "fixed": every sequence has `tokens`;
            "lognormal": `median_tokens`, and `sigma` of the logarithm;
            "quantiles": `quantiles`, pairs (probability, tokens) ascending in both from
            probability 0 to 1, linear in between, as measured from a run.
        max_tokens: longer ones are cut here (the rollout's response limit); None for no limit.
    """

    kind: str
    tokens: int | None = None
    median_tokens: float | None = None
    sigma: float | None = None
    quantiles: tuple[tuple[float, float], ...] | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require_choice("LengthDistribution", "kind", self.kind, KINDS)
        of_kind = {
            "fixed": ("tokens",),
            "lognormal": ("median_tokens", "sigma"),
            "quantiles": ("quantiles",),
        }
        for kind, names in of_kind.items():
            for name in names:
                require(
                    (getattr(self, name) is not None) == (kind == self.kind),
                    f"LengthDistribution of kind {self.kind!r} "
                    + (f"needs {name}" if kind == self.kind else f"takes no {name}"),
                )
        if self.tokens is not None:
            require_int("LengthDistribution", "tokens", self.tokens)
        if self.median_tokens is not None:
            require_number("LengthDistribution", "median_tokens", self.median_tokens, minimum=1)
        if self.sigma is not None:
            require_number("LengthDistribution", "sigma", self.sigma, above=0, maximum=MOST_SIGMA)
        if self.max_tokens is not None:
            require_int("LengthDistribution", "max_tokens", self.max_tokens)
        if self.quantiles is not None:
            for index, point in enumerate(self.quantiles):
                for place, value in enumerate(point):
                    require_number("LengthDistribution", f"quantiles[{index}][{place}]", value)
            points = tuple((float(p), float(t)) for p, t in self.quantiles)
            object.__setattr__(self, "quantiles", points)
            require(
                len(points) >= 2
                and points[0][0] == 0.0
                and points[-1][0] == 1.0
                and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
                and points[0][1] >= 1.0
                and math.isfinite(points[-1][1]),
                "LengthDistribution.quantiles must ascend from probability 0 to 1 with lengths "
                "that do not fall, the first at least 1 token",
            )

    @classmethod
    def fixed(cls, tokens: int) -> LengthDistribution:
        return cls("fixed", tokens=tokens)

    @classmethod
    def lognormal(
        cls, median_tokens: float, sigma: float, *, max_tokens: int | None = None
    ) -> LengthDistribution:
        return cls("lognormal", median_tokens=median_tokens, sigma=sigma, max_tokens=max_tokens)

    def quantile(self, probability: float) -> float:
        """Length in tokens that a sequence stays within with this probability, 0 < p < 1."""
        if not 0.0 < probability < 1.0:
            raise SpecError(f"probability must lie between 0 and 1, got {shown(probability)}")
        if self.kind == "fixed":
            value = float(self.tokens or 0)
        elif self.kind == "lognormal":
            z = NormalDist().inv_cdf(probability)
            value = (self.median_tokens or 0.0) * math.exp((self.sigma or 0.0) * z)
        else:
            points = self.quantiles or ()
            value = next(
                t0 + (t1 - t0) * (probability - p0) / (p1 - p0)
                for (p0, t0), (p1, t1) in pairwise(points)
                if probability <= p1
            )
        return self._clip(value)

    def mean_tokens(self) -> float:
        """Expected length, with the cut at max_tokens (exact but for the floor of 1 token)."""
        cap = math.inf if self.max_tokens is None else float(self.max_tokens)
        if self.kind == "fixed":
            return min(float(self.tokens or 0), cap)
        if self.kind == "lognormal":
            mu, sigma = math.log(self.median_tokens or 1.0), self.sigma or 1.0
            mean = math.exp(mu + sigma * sigma / 2)
            if math.isinf(cap):
                return mean
            cut, normal = (math.log(cap) - mu) / sigma, NormalDist()
            return mean * normal.cdf(cut - sigma) + cap * (1.0 - normal.cdf(cut))
        points = self.quantiles or ()
        total = 0.0
        for (p0, t0), (p1, t1) in pairwise(points):
            if t1 <= cap or t1 == t0:
                total += (p1 - p0) * min((t0 + t1) / 2, cap)
            elif t0 >= cap:
                total += (p1 - p0) * cap
            else:  # the cut lies inside this piece
                part = (cap - t0) / (t1 - t0)
                total += (p1 - p0) * (part * (t0 + cap) / 2 + (1 - part) * cap)
        return total

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """`n` lengths in tokens, int64 [n], whole numbers of at least 1."""
        import numpy as np

        if self.kind == "fixed":
            values = np.full(n, self.tokens, np.float64)
        elif self.kind == "lognormal":
            values = rng.lognormal(math.log(self.median_tokens or 1.0), self.sigma or 0.0, n)
        else:
            points = np.asarray(self.quantiles, np.float64)
            values = np.interp(rng.random(n), points[:, 0], points[:, 1])
        high = np.inf if self.max_tokens is None else self.max_tokens
        return np.clip(np.rint(values), 1, high).astype(np.int64)

    def _clip(self, value: float) -> float:
        return max(1.0, value if self.max_tokens is None else min(value, float(self.max_tokens)))


@dataclasses.dataclass(frozen=True)
class WorkloadSpec(Record):
    """One iteration of the job.

    Attributes:
        prompts_per_step: prompts of one iteration (verl: data.train_batch_size).
        prompt_tokens: their lengths.
        response_tokens: lengths of what is generated.
        samples_per_prompt: responses to each prompt (verl: rollout.n).
        mini_batch_prompts: prompts of one optimizer step (verl: ppo_mini_batch_size); None means
            all of them.
        epochs: passes over the batch in training.
    """

    prompts_per_step: int
    prompt_tokens: LengthDistribution
    response_tokens: LengthDistribution
    samples_per_prompt: int = 1
    mini_batch_prompts: int | None = None
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "epochs"):
            require_int("WorkloadSpec", name, getattr(self, name))
        for name in ("prompt_tokens", "response_tokens"):
            if not isinstance(getattr(self, name), LengthDistribution):
                raise SpecError(f"WorkloadSpec.{name} must be a LengthDistribution")
        if self.mini_batch_prompts is None:
            object.__setattr__(self, "mini_batch_prompts", self.prompts_per_step)
        require_int("WorkloadSpec", "mini_batch_prompts", self.mini_batch_prompts)
        require(
            self.sequences_per_step <= MOST_SEQUENCES,
            f"WorkloadSpec: prompts_per_step * samples_per_prompt = {self.sequences_per_step} "
            f"sequences; {MOST_SEQUENCES} is most",
        )
        require(
            self.prompts_per_step % (self.mini_batch_prompts or 1) == 0,
            f"mini_batch_prompts={self.mini_batch_prompts} must divide "
            f"prompts_per_step={self.prompts_per_step}",
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences generated in one iteration."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs * (self.prompts_per_step // (self.mini_batch_prompts or 1))


@dataclasses.dataclass(frozen=True)
class OptimizerSpec(Record):
    """What the optimizer keeps for each parameter.

    Attributes:
        name: "adam" (also AdamW): two moments for each parameter.
        master_dtype: dtype of the weights that the optimizer updates; where parameters have the
            same dtype, they are their own masters and no copy exists.
        moments_dtype: dtype of exp_avg and exp_avg_sq.

    Whether data-parallel ranks share out this state is the layout's `sharding`.
    """

    name: str = "adam"
    master_dtype: str = "float32"
    moments_dtype: str = "float32"

    def __post_init__(self) -> None:
        require_choice("OptimizerSpec", "name", self.name, ("adam",))
        for name in ("master_dtype", "moments_dtype"):
            require_choice("OptimizerSpec", name, getattr(self, name), DTYPES)
