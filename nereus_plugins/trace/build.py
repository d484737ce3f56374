"""Composing a trace from series, naming every source and every assumption on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from nereus_plugins.spec import LengthDistribution, SpecError
from nereus_plugins.spec.record import require

from . import series
from .conditions import MOST_STEPS, Setting, Source, Trace
from .record import Record, RecordError, RunRecord, StepRecord, TransitionRecord, read_records

SHAPES = ("as-measured", "reversed", "steady", "oscillating:K")
TAIL = LengthDistribution.lognormal(1000.0, 0.6)
# A response limit leaves the longest mean this much room, where none is given.
_ROOM = 1.5


class Parts(NamedTuple):
    """What a trace is composed of.

    Attributes:
        gpus_max: the most GPUs; the cluster's.
        availability: a series of instances, or "stairs:FROM:COUNT"; None: always gpus_max.
        lengths: a series of mean lengths; run: which of its runs.
        shape: one of `SHAPES`.
        tail: a histogram of lengths; None: log-normal with sigma 0.6.
        steps: default as many as the run has.
        max_response_tokens: where responses are cut; default the power of two with half again the
            longest mean as room.
        wall_clock: GPUs by seconds instead of by steps.
    """

    gpus_max: int
    lengths: Path
    run: str | None = None
    availability: str | None = None
    shape: str = "as-measured"
    tail: Path | None = None
    steps: int | None = None
    max_response_tokens: int | None = None
    wall_clock: bool = False


class _Notes:
    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.assumptions: list[str] = []

    def source(self, what: str, path: Path, used: str) -> None:
        origin, licence = KNOWN.get(series.digest(path), ("", ""))
        self.sources.append(Source(what, path.name, used, origin, licence, series.digest(path)))
        if not origin:
            self.assumptions.append(f"{path.name}: origin and licence are not known to Nereus")


# Origin and licence of the public series, by the SHA-256 of the file.
_ORZ = ("Open-Reasoner-Zero @ 3fdd9a0, figure/train_curve.png, digitised (+-40 tokens)", "MIT")
_BAMBOO = "uclasystem/bamboo @ 8080929, traces"
KNOWN: dict[str, tuple[str, str]] = {
    "6969025e76ecf919f9afd773c15cbb553b6bec1862d3b4f9178acea1ad805ceb": _ORZ,
    "51f718eaca39c05bf200767698ccfd91e84b9fac9cdaa33ebb04df4aebdf2310": (
        f"{_BAMBOO}/gcloud: GCP preemptible A100, one an instance",
        "MIT",
    ),
    "da818218d87723d8f07824e38e262ef9c5da8cfc38dd2a6509ef8c0b56e4eda4": (
        f"{_BAMBOO}/p3-trace.csv: AWS spot p3 nodes",
        "MIT",
    ),
    "325410edebd7712c32cd39384711a469fba4dcfa4b826e8cfd32a5a3104c9e0f": (
        "alibaba/ServeGen @ f891d11: a day of DeepSeek-R1 serving, not of RL rollouts",
        "Apache-2.0",
    ),
}


def compose(name: str, setting: Setting, parts: Parts, seed: int = 0) -> Trace:
    """The trace of these parts.

    Raises: SpecError naming file and column, or the option at fault; OSError.
    """
    notes = _Notes()
    require(parts.gpus_max >= 1, f"--gpus-max must be at least 1, got {parts.gpus_max}")
    require(
        parts.steps is None or 1 <= parts.steps <= MOST_STEPS,
        f"--steps must be 1 to {MOST_STEPS}, got {parts.steps}",
    )
    means = _means(parts, notes)
    gpus = _gpus(parts, len(means), setting.cluster.gpus_per_node, notes)
    tail = _tail(parts.tail, notes)
    longest = max(means)
    limit = parts.max_response_tokens or 2 ** math.ceil(math.log2(_ROOM * longest))
    require(
        limit >= longest,
        f"--max-response {limit} is below the longest mean of {longest:.0f} tokens: raise it",
    )
    notes.assumptions.append(
        f"responses are cut at {limit} tokens"
        + ("" if parts.max_response_tokens else ", the power of two above 1.5 x the longest mean")
    )
    notes.assumptions.append(
        f"job: {setting.job.actor.name}, {setting.job.algorithm}, {setting.job.backend}; "
        f"{setting.prompts_per_step} prompts x {setting.samples_per_prompt}; GPUs "
        f"{setting.cluster.gpu.name}, {setting.cluster.gpus_per_node} a node"
    )
    return Trace(
        name=name,
        sources=tuple(notes.sources),
        assumptions=tuple(notes.assumptions),
        setting=setting,
        mean_response_tokens=tuple(round(m, 2) for m in means),
        gpus=gpus,
        tail=tail,
        max_response_tokens=limit,
        indexed_by="wall_clock" if parts.wall_clock else "step",
        seed=seed,
    )


def _means(parts: Parts, notes: _Notes) -> list[float]:
    found = series.read_lengths(parts.lengths, parts.run)
    steps = parts.steps or len(found.steps)
    values = list(found.mean_tokens)
    used = f"run {found.run}, " if found.run else ""
    used += f"{len(values)} steps from {found.steps[0]} on"
    if len(values) != steps:
        notes.assumptions.append(
            f"lengths: the run's {len(values)} steps are stretched to {steps}, linear in between"
        )
    means = series.resampled(values, steps)
    shape, _, period = parts.shape.partition(":")
    if shape == "reversed":
        means.reverse()
        notes.assumptions.append("lengths: read backwards, so that they fall; no job did that")
    elif shape == "steady":
        middle = sorted(means)[len(means) // 2]
        means = [middle] * steps
        notes.assumptions.append(f"lengths: always the run's median of {middle:.0f} tokens")
    elif shape == "oscillating":
        require(
            period.isdigit() and int(period) > 0,
            f"--shape {parts.shape}: write oscillating:K, K steps long on each side",
        )
        ordered = sorted(means)
        sides = (ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10])
        means = [sides[step // int(period) % 2] for step in range(steps)]
        notes.assumptions.append(
            f"lengths: flip every {period} steps between the run's 10 % and 90 % quantile, "
            f"{sides[0]:.0f} and {sides[1]:.0f} tokens; no job did that"
        )
    else:
        require(
            parts.shape == "as-measured",
            f"--shape must be one of {', '.join(SHAPES)}; got {parts.shape!r}",
        )
    notes.source("lengths", parts.lengths, used)
    return means


def _gpus(parts: Parts, steps: int, per_node: int, notes: _Notes) -> tuple[tuple[float, int], ...]:
    most = parts.gpus_max
    if parts.availability is None:
        notes.assumptions.append(f"GPUs: always {most}")
        return ((0.0, most),)
    if parts.availability.startswith("stairs"):
        return _stairs(parts, steps, per_node, notes)
    path = Path(parts.availability)
    found = series.read_availability(path)
    used = f"{len(found.points)} entries over {found.duration_s / 3600:.1f} h"
    if found.holes_s:
        hours = ", ".join(f"{hole / 3600:.1f}" for hole in found.holes_s)
        used += f"; stretches without an entry of {hours} h cut out"
    notes.source("gpus", path, used)
    scale = most / found.peak
    if scale != 1.0 or per_node > 1:
        notes.assumptions.append(
            f"GPUs: scaled, the series' peak of {found.peak} instances to {most} GPUs "
            f"(x {scale:g}), whole nodes of {per_node}, at least one node"
        )
    if parts.wall_clock:
        notes.assumptions.append(
            "GPUs by wall clock: the series begins with the job; then its last number holds"
        )
        points = [(at, _whole_nodes(count * scale, per_node)) for at, count in found.points]
    else:
        notes.assumptions.append(
            f"GPUs by step: the series' {found.duration_s / 3600:.1f} h are spread over {steps} "
            "steps; GPUs count in a step that they are there for the whole of"
        )
        step_s = found.duration_s / steps
        points = [
            (
                float(k),
                _whole_nodes(found.least_between(k * step_s, (k + 1) * step_s) * scale, per_node),
            )
            for k in range(steps)
        ]
    return _changes(points)


def _stairs(
    parts: Parts, steps: int, per_node: int, notes: _Notes
) -> tuple[tuple[float, int], ...]:
    match = re.fullmatch(r"stairs:(\d{1,7}):(\d{1,4})", parts.availability or "")
    first, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= parts.gpus_max or count < 2:
        raise SpecError(
            f"--availability {parts.availability}: write stairs:FROM:COUNT, FROM at most "
            "--gpus-max and COUNT, the number of levels, at least 2"
        )
    require(not parts.wall_clock, "--availability stairs: has no seconds: leave --wall-clock out")
    points = [
        (
            float(level * steps // count),
            _whole_nodes(first + (parts.gpus_max - first) * level / (count - 1), per_node),
        )
        for level in range(count)
    ]
    notes.assumptions.append(
        f"GPUs: granted in {count} equal levels from {first} to {parts.gpus_max}, none revoked; "
        "not from a public series"
    )
    return _changes(points)


def _whole_nodes(count: float, per_node: int) -> int:
    return max(1, int(count / per_node + 1e-9)) * per_node


def _changes(points: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """The first of each stretch of equal numbers."""
    return tuple(next(iter(same)) for _, same in groupby(points, key=lambda p: p[1]))


def _tail(path: Path | None, notes: _Notes) -> tuple[tuple[float, float], ...]:
    if path is None:
        mean = TAIL.mean_tokens()
        inner = [(p, round(TAIL.quantile(p) / mean, 5)) for p in series.PROBABILITIES[1:-1]]
        notes.assumptions.append("tail of lengths: log-normal, sigma 0.6")
        return ((0.0, 0.0), *inner, (1.0, inner[-1][1]))
    notes.source("tail", path, "output_tokens, as shape: lengths over their mean")
    notes.assumptions.append(
        f"tail of lengths: the shape of {path.name} at every step, scaled to the step's mean after "
        "the cut; vary it"
    )
    return series.read_tail(path)


class Recorded(NamedTuple):
    """What a recorded job met. steps: (GPUs, mean tokens of responses) of each, in order."""

    steps: tuple[tuple[int, float], ...]
    longest_tokens: float

    @property
    def gpus_max(self) -> int:
        return max(count for count, _ in self.steps)


def read_recorded(run: Path) -> Recorded:
    """Steps that were run again after a restart count once, as they last ran.

    Raises: SpecError where the records do not follow the schema or lack a step; OSError.
    """
    steps: dict[int, tuple[int, float]] = {}
    longest = 1.0
    world = _World()
    try:
        for record in read_records(run):
            gpus = world.after(record)
            if isinstance(record, StepRecord) and record.samples > 0:
                if "response" not in record.tokens:
                    raise SpecError(f"{run}: step {record.step} has no tokens of responses")
                mean = max(1.0, record.tokens["response"] / record.samples)
                most = record.metrics.get("response_length/max", mean)
                longest = max(longest, mean, most if math.isfinite(most) else mean)
                steps[record.step] = (gpus, mean)
    except RecordError as error:
        raise SpecError(str(error)) from None
    if not steps:
        raise SpecError(f"{run}: no step with samples: nothing to replay")
    listed = tuple(steps[step] for step in sorted(steps))
    if any(count < 1 for count, _ in listed):
        raise SpecError(f"{run}: no run record before the first step: the GPUs are not known")
    return Recorded(listed, longest)


def from_records(name: str, setting: Setting, run: Path, seed: int = 0) -> Trace:
    """The conditions that a recorded job met: GPUs and mean lengths of each of its steps.

    Raises: SpecError: as `read_recorded`; a cluster that is too small. OSError.
    """
    found = read_recorded(run)
    listed = found.steps
    most_gpus = found.gpus_max
    if most_gpus > setting.cluster.world_size:
        raise SpecError(
            f"{run}: the job had {most_gpus} GPUs, the cluster {setting.cluster.world_size}: "
            f"give --gpus-max {most_gpus}"
        )
    file = run / "records.jsonl" if run.is_dir() else run
    notes = _Notes()
    tail = _tail(None, notes)
    return Trace(
        name=name,
        sources=(
            Source(
                "gpus, lengths", file.name, f"{len(listed)} recorded steps", "a recorded job",
                "", series.digest(file),
            ),
        ),
        assumptions=(
            *notes.assumptions,
            "what the job could have had besides the GPUs that it used is not recorded",
        ),
        setting=setting,
        mean_response_tokens=tuple(round(mean, 2) for _, mean in listed),
        gpus=_changes([(float(k), count) for k, (count, _) in enumerate(listed)]),
        tail=tail,
        max_response_tokens=math.ceil(found.longest_tokens),
        seed=seed,
        note="GPUs and mean lengths are those of one recorded job.",
    )  # fmt: skip


class _World:
    """How many GPUs a recorded job had, as its records are read in their order."""

    def __init__(self) -> None:
        self.gpus = 0
        self.next: tuple[int, int] | None = None

    def after(self, record: Record) -> int:
        """GPUs of the job when `record` was made; 0 before any says."""
        if isinstance(record, RunRecord):
            self.gpus, self.next = record.world_size, None
        elif isinstance(record, TransitionRecord):
            # A live job writes it before the record of the step that it follows.
            after = record.ranks.get("to")
            if record.outcome == "committed" and isinstance(after, int):
                self.next = (record.step, after)
        elif isinstance(record, StepRecord):
            if self.next is not None and record.step > self.next[0]:
                self.gpus, self.next = self.next[1], None
            said = record.metrics.get("nereus/world_size", 0.0)
            if math.isfinite(said) and said >= 1:
                self.gpus = int(said)
        return self.gpus
