"""A trace: the conditions that a job meets, for the simulator. No measurement of speed is in it.

    {"schema": "nereus.trace/1", "name": "growth", "note": ..., "sources": [...],
     "assumptions": [...], "setting": {job, cluster, batch}, "indexed_by": "step",
     "gpus": [[0, 48], [12, 56], ...], "mean_response_tokens": [...], ...}

Lengths belong to the progress of training: they are given by step. GPUs are given by step, so that
every policy meets the same conditions at the same step (the comparison), or by wall clock, so that
a slower policy meets them at other steps (reported apart).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import (
    ClusterSpec,
    LengthDistribution,
    Record,
    SpecError,
    WorkloadSpec,
)
from nereus_plugins.spec.record import (
    load_json,
    read_text,
    require,
    require_choice,
    require_int,
    require_number,
    shown,
)

from . import files

SCHEMA = "nereus.trace/1"
INDEXED_BY = ("step", "wall_clock")
NOT_MEASURED_TOGETHER = (
    "No public data set measured these together: GPUs, lengths and tail come from different jobs "
    "and are combined here by assumption."
)
# Means this close are one: conditions alike are estimated once.
SAME_LENGTH = 1.01
MOST_STEPS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Source(Record):
    """Where a series comes from.

    Attributes:
        what: what of the trace it gives: "gpus", "lengths" or "tail".
        file: its name.
        used: which part, and how.
        origin: repository and commit, or the run.
        licence: of the series.
        sha256: of the file as it was read.
    """

    what: str
    file: str
    used: str = ""
    origin: str = ""
    licence: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                isinstance(value, str), f"Source.{field.name} must be a text, got {shown(value)}"
            )


@dataclasses.dataclass(frozen=True)
class Setting(Record):
    """The job that meets the conditions, and the largest cluster that they reach.

    Attributes:
        job: models, algorithm, backend.
        cluster: all devices that are ever there.
        prompt_tokens: lengths of prompts.
        prompts_per_step, samples_per_prompt, mini_batch_prompts, epochs: as in a workload.
    """

    job: JobSpec
    cluster: ClusterSpec
    prompt_tokens: LengthDistribution
    prompts_per_step: int
    samples_per_prompt: int = 1
    mini_batch_prompts: int | None = None
    epochs: int = 1

    def __post_init__(self) -> None:
        self.workload(LengthDistribution.fixed(1))  # its own checks

    def workload(self, response_tokens: LengthDistribution) -> WorkloadSpec:
        """The workload of one iteration with these lengths of responses."""
        return WorkloadSpec(
            self.prompts_per_step,
            self.prompt_tokens,
            response_tokens,
            self.samples_per_prompt,
            self.mini_batch_prompts,
            self.epochs,
        )


class Conditions(NamedTuple):
    """What one step meets. gpus: devices 0 .. gpus-1 are there."""

    gpus: int
    response_tokens: LengthDistribution


@dataclasses.dataclass(frozen=True)
class Trace(Record):
    """Conditions of a job, step by step.

    Attributes:
        name: for reports.
        sources: every series that went into it.
        assumptions: everything that was not measured, in words.
        setting: the job and cluster that are simulated unless others are asked for.
        mean_response_tokens: by step, from the first; as many as the trace has steps.
        gpus: (from, number) ascending in `from`, which is a step (the first is 0) or a second of
            the job's run time; a number holds until the next.
        tail: (probability, length over the mean) of responses, ascending from 0 to 1.
        max_response_tokens: where responses are cut.
        indexed_by: "step" or "wall_clock": what `from` is.
        seed: of the simulator's noise unless another is asked for.
        note: what a reader must know.
    """

    name: str
    sources: tuple[Source, ...]
    assumptions: tuple[str, ...]
    setting: Setting
    mean_response_tokens: tuple[float, ...]
    gpus: tuple[tuple[float, int], ...]
    tail: tuple[tuple[float, float], ...]
    max_response_tokens: int
    indexed_by: str = "step"
    seed: int = 0
    note: str = NOT_MEASURED_TOGETHER

    def __post_init__(self) -> None:
        for name in ("name", "note"):
            require(isinstance(getattr(self, name), str), f"Trace.{name} must be a text")
        require_choice("Trace", "indexed_by", self.indexed_by, INDEXED_BY)
        require_int("Trace", "max_response_tokens", self.max_response_tokens)
        require_int("Trace", "seed", self.seed, minimum=0)
        require(
            0 < len(self.mean_response_tokens) <= MOST_STEPS,
            f"Trace.mean_response_tokens must have 1 to {MOST_STEPS} steps",
        )
        for step, mean in enumerate(self.mean_response_tokens):
            require_number(
                "Trace",
                f"mean_response_tokens[{step}]",
                mean,
                minimum=1,
                maximum=self.max_response_tokens,
            )
        require(len(self.gpus) > 0, "Trace.gpus is empty: it starts with [0, number of GPUs]")
        most = self.setting.cluster.world_size
        for index, (at, count) in enumerate(self.gpus):
            require_number("Trace", f"gpus[{index}][0]", at, minimum=0)
            require_int("Trace", f"gpus[{index}][1]", count)
            require(
                count <= most,
                f"Trace.gpus[{index}] has {count} GPUs, its setting's cluster {most}: enlarge it",
            )
        require(self.gpus[0][0] == 0, "Trace.gpus must start at 0")
        require(all(a[0] < b[0] for a, b in pairwise(self.gpus)), "Trace.gpus must ascend in time")
        require(len(self.tail) >= 2, "Trace.tail needs at least 2 points")
        for index, (probability, ratio) in enumerate(self.tail):
            require_number("Trace", f"tail[{index}][0]", probability, minimum=0, maximum=1)
            require_number("Trace", f"tail[{index}][1]", ratio, minimum=0, maximum=1e6)
        require(
            self.tail[0][0] == 0
            and self.tail[-1][0] == 1
            and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.tail))
            and self.tail[-1][1] > 0,
            "Trace.tail must ascend from probability 0 to 1 with lengths that do not fall",
        )

    @property
    def steps(self) -> int:
        return len(self.mean_response_tokens)

    def conditions(self, step: int, elapsed_s: float) -> Conditions:
        """Of `step` (from 0), `elapsed_s` seconds into the run.

        Raises: IndexError for a step that the trace does not have.
        """
        at = step if self.indexed_by == "step" else elapsed_s
        starts, counts = _columns(self)
        gpus = counts[bisect.bisect_right(starts, at) - 1]
        return Conditions(gpus, self.response_tokens(self.mean_response_tokens[step]))

    def response_tokens(self, mean_tokens: float) -> LengthDistribution:
        """Lengths of responses with (to 1 %) this mean after the cut, and the trace's tail."""
        grid = math.log(SAME_LENGTH)
        rounded = math.exp(grid * round(math.log(max(1.0, mean_tokens)) / grid))
        return _scaled(self.tail, min(rounded, self.max_response_tokens), self.max_response_tokens)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "note": self.note, **super().to_dict()}

    def save(self, path: Path) -> None:
        """The file is there whole or as it was before. Raises: OSError."""
        files.replace(path, (_pretty(self.to_dict()), "\n"))


@functools.lru_cache(maxsize=64)
def _columns(trace: Trace) -> tuple[list[float], list[int]]:
    return [float(at) for at, _ in trace.gpus], [count for _, count in trace.gpus]


@functools.lru_cache(maxsize=4096)
def _scaled(
    tail: tuple[tuple[float, float], ...], mean_tokens: float, max_tokens: int
) -> LengthDistribution:
    """The tail times what makes its mean, once cut at `max_tokens`, `mean_tokens`."""

    def of(scale: float) -> LengthDistribution:
        points = tuple((p, max(1.0, ratio * scale)) for p, ratio in tail)
        return LengthDistribution("quantiles", quantiles=points, max_tokens=max_tokens)

    low = high = mean_tokens
    while of(high).mean_tokens() < mean_tokens * 0.999 and high < 1e3 * max_tokens:
        high *= 2
    while of(low).mean_tokens() > mean_tokens and low > 1e-3:
        low /= 2
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if of(middle).mean_tokens() < mean_tokens else (low, middle)
    return of(high)


def scaled_lengths(
    shape: LengthDistribution, mean_tokens: float, max_tokens: int
) -> LengthDistribution:
    """Lengths of this shape, scaled so that their mean, once cut at `max_tokens`, is this one."""
    if shape.kind == "fixed":
        return LengthDistribution.fixed(max(1, round(min(mean_tokens, max_tokens))))
    if shape.quantiles is not None:
        return _scaled(shape.quantiles, mean_tokens, max_tokens)
    normal = NormalDist()
    points = tuple(
        (i / 64, math.exp((shape.sigma or 0.0) * normal.inv_cdf(min(max(i / 64, 1e-4), 1 - 1e-4))))
        for i in range(65)
    )
    return _scaled(points, mean_tokens, max_tokens)


def _pretty(data: dict[str, Any]) -> str:
    """JSON with long columns in few lines."""
    parts = []
    for key, value in data.items():
        if key in ("mean_response_tokens", "gpus", "tail"):
            text = json.dumps(value)
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def load(path: Path) -> Trace:
    """A trace file. Raises: SpecError naming the file and the field; OSError."""
    data = load_json(read_text(path), f"{path}: not a trace")
    if not isinstance(data, dict) or "schema" not in data:
        raise SpecError(f"{path}: not a trace: no 'schema' field ({SCHEMA})")
    if data["schema"] != SCHEMA:
        raise SpecError(
            f"{path}: schema {shown(data['schema'])} is not known to this version, which "
            f"reads {SCHEMA}"
        )
    try:
        return Trace.from_dict({k: v for k, v in data.items() if k != "schema"})
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def shipped_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "data" / "traces"


def find(name: str) -> Trace:
    """A trace file by its path, or a shipped trace by its name.

    Raises: SpecError naming the shipped ones; OSError.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return load(path)
    names = sorted(p.stem for p in shipped_folder().glob("*.json"))
    if name not in names:
        raise SpecError(f"no trace {name!r}: give a file, or one of {', '.join(names)}")
    return load(shipped_folder() / f"{name}.json")
