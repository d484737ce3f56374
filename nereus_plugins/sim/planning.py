"""What policies ask the planner for: plans for so many GPUs and such lengths, remembered."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from nereus_plugins import __version__
from nereus_plugins.controller.plans import ANCHOR, NO_HURRY
from nereus_plugins.cost.estimate import Calibration, estimate
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.planner import Planned, plan
from nereus_plugins.planner.cli import limits_of
from nereus_plugins.planner.search import MARGIN
from nereus_plugins.spec import (
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    SpecError,
)
from nereus_plugins.trace.conditions import Setting


class Known(NamedTuple):
    """What whoever starts the job knows.

    gpus, response_tokens: of the first step. max_response_tokens: the configured limit.
    """

    setting: Setting
    gpus: int
    response_tokens: LengthDistribution
    max_response_tokens: int


class Rules(NamedTuple):
    """What plans a framework can be launched in, beside the limits of `limits_of`.

    colocated: all models on the same GPUs. uneven: pipeline stages of unequal size as well, which
    no transition reaches.
    """

    colocated: bool = False
    uneven: bool = False


class Planning:
    """The planner of one job; answers are kept.

    truth: what it is calibrated with where it plans in hindsight; else it is not calibrated.
    """

    def __init__(
        self,
        known: Known,
        rules: Rules = Rules(),  # noqa: B008
        truth: Calibration | None = None,
    ) -> None:
        self.known = known
        self.rules = rules
        self.truth = truth
        # By GPUs and memory: what re-planning for other lengths begins from.
        self._last: dict[tuple[int, float], Planned] = {}
        self._iteration_s: dict[tuple[object, LengthDistribution], float] = {}
        self._seconds: dict[tuple[object, LengthDistribution, float], float | None] = {}
        self._best: dict[tuple[int, LengthDistribution, float], GlobalPlan | None] = {}

    def best(
        self, gpus: int, response_tokens: LengthDistribution, memory: float = 1.0
    ) -> GlobalPlan | None:
        """The fastest plan that fits, None if none does.

        memory: the part of each GPU's memory to plan for.
        """
        key = (gpus, response_tokens, memory)
        if key not in self._best:
            setting = self.known.setting
            cluster = setting.cluster
            if memory != 1.0:
                less = round(memory * cluster.gpu.memory_bytes)
                gpu = dataclasses.replace(cluster.gpu, memory_bytes=less)
                cluster = dataclasses.replace(cluster, gpu=gpu)
            try:
                found = plan(
                    setting.job,
                    cluster,
                    setting.workload(response_tokens),
                    self.truth,
                    gpus=gpus,
                    capabilities=dataclasses.replace(
                        capabilities_of(setting.job), colocated=self.rules.colocated
                    ),
                    current=None if self.rules.uneven else ANCHOR,
                    horizon_steps=NO_HURRY,
                    after=self._last.get((gpus, memory)),
                )
                self._last[gpus, memory] = found
                self._best[key] = found.plan if found.estimate.fits else None
            except SpecError:
                self._best[key] = None
        return self._best[key]

    def sized(
        self, gpus: int, memory: float = 1.0, mean_tokens: float | None = None
    ) -> GlobalPlan | None:
        """The fastest plan for the first lengths in which the longest allowed response fits; where
        none does, half of it, and so on. mean_tokens: as of `sized_lengths`."""
        setting = self.known.setting
        sequences = setting.prompts_per_step * setting.samples_per_prompt
        first = self.known.response_tokens.quantile(1.0 - 0.5 / max(2, sequences))
        tokens = self.known.max_response_tokens
        while True:
            found = self.best(gpus, self.sized_lengths(tokens, mean_tokens), memory)
            if found is not None or tokens <= first:
                return found
            tokens = max(tokens // 2, math.floor(first))

    def sized_lengths(
        self, tokens: int | None = None, mean_tokens: float | None = None
    ) -> LengthDistribution:
        """The first lengths, with one response of a step at the configured limit, or `tokens`.

        mean_tokens: instead of the first lengths, those with this mean.
        """
        setting = self.known.setting
        sequences = setting.prompts_per_step * setting.samples_per_prompt
        longest = tokens or self.known.max_response_tokens
        usual = self.known.response_tokens if mean_tokens is None else self.lengths_of(mean_tokens)
        return with_longest(usual, longest, 1.0 / max(2, sequences))

    def lengths_of(self, mean_tokens: float) -> LengthDistribution:
        """The first lengths, scaled to (within 5 %) this mean."""
        first = self.known.response_tokens
        grid = math.log(1.1)
        bucket = round(math.log(max(1.0, mean_tokens) / first.mean_tokens()) / grid)
        points = tuple((p, max(1.0, t * math.exp(grid * bucket))) for p, t in _points(first))
        most = self.known.max_response_tokens
        return LengthDistribution("quantiles", quantiles=points, max_tokens=most)

    def iteration_s(self, chosen: GlobalPlan, response_tokens: LengthDistribution) -> float:
        """Predicted seconds of an iteration, whether it fits or not."""
        key = (chosen.assignments, response_tokens)
        if key not in self._iteration_s:
            setting = self.known.setting
            workload = setting.workload(response_tokens)
            result = estimate(setting.job, chosen, setting.cluster, workload, self.truth)
            self._iteration_s[key] = result.iteration_s
        return self._iteration_s[key]

    def seconds(
        self, chosen: GlobalPlan, response_tokens: LengthDistribution, memory: float = 1.0
    ) -> float | None:
        """Predicted seconds of an iteration, None if it does not fit with the planner's margin.

        memory: the part of each GPU's memory to fit into.
        """
        key = (chosen.assignments, response_tokens, memory)
        if key not in self._seconds:
            self._seconds[key] = self._estimated(chosen, response_tokens, memory)
        return self._seconds[key]

    def _estimated(
        self, chosen: GlobalPlan, response_tokens: LengthDistribution, memory: float
    ) -> float | None:
        setting = self.known.setting
        workload = setting.workload(response_tokens)
        try:
            result = estimate(setting.job, chosen, setting.cluster, workload, self.truth)
        except SpecError:
            return None
        part = memory * (1.0 - MARGIN)
        room = all(s.reserved_bytes <= part * s.capacity_bytes for s in result.stages.values())
        return result.iteration_s if room and result.fits else None


def with_longest(lengths: LengthDistribution, tokens: int, share: float) -> LengthDistribution:
    """The same lengths, but for the `share` longest, which have `tokens`."""
    points = [(p, min(t, float(tokens))) for p, t in _points(lengths) if p < 1.0 - share]
    edge = max(1.0 - share, points[-1][0] + 1e-12)
    points.append((edge, min(lengths.quantile(min(edge, 1.0 - 1e-12)), float(tokens))))
    points.append((edge + (1.0 - edge) / 1000, float(tokens)))
    points.append((1.0, float(tokens)))
    return LengthDistribution("quantiles", quantiles=tuple(points), max_tokens=tokens)


def _points(lengths: LengthDistribution) -> tuple[tuple[float, float], ...]:
    if lengths.quantiles is not None:
        return lengths.quantiles
    grid = [i / 64 for i in range(1, 64)]
    first = lengths.quantile(1e-9)
    return (
        (0.0, first),
        *((p, lengths.quantile(p)) for p in grid),
        (1.0, lengths.quantile(1 - 1e-9)),
    )


def capabilities_of(job: JobSpec) -> Capabilities:
    """What the simulator carries out."""
    every = StageCapability(
        layout_fields=frozenset(f.name for f in dataclasses.fields(Layout)),
        knob_fields=frozenset(f.name for f in dataclasses.fields(Knobs)),
    )
    limits = limits_of(job)
    return Capabilities(
        framework="simulator",
        framework_version=__version__,
        stages=dict.fromkeys(job.stages(), every),
        coupled=limits.coupled if limits is not None else (),
        devices_fixed=False,
        refused=(),
    )
