"""`nereus calibrate`: learn from the log of a run that has already happened.

Reads verl's console log (its lines `step:12 - actor/entropy:0.2 - timing_s/gen:62.9 - ...`), a CSV
with the same names as columns, or TensorBoard's event files. Every step is estimated with its own
lengths, compared with what was measured, and taught to the calibration, which is saved for
`nereus estimate --calibration`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

from . import cli
from .calibration import Calibration
from .estimate import estimate
from .tensorboard_log import is_event_file, read_scalars

# verl's timers, by the stage that they are part of; its `reward` holds functions too, so that a
# reward model alone has a name of its own where it is timed (OpenRLHF's records, the simulator).
TIMERS: dict[ModelStage, tuple[str, ...]] = {
    ModelStage.ACTOR_GENERATE: ("timing_s/gen",),
    ModelStage.REWARD_SCORE: ("timing_s/reward_score",),
    ModelStage.REF_LOGPROB: ("timing_s/ref",),
    ModelStage.CRITIC_VALUES: ("timing_s/values",),
    ModelStage.CRITIC_TRAIN: ("timing_s/update_critic",),
    ModelStage.ACTOR_TRAIN: ("timing_s/update_actor", "timing_s/old_log_prob"),
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d+)\s+-\s+(.*)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_VALUE = re.compile(rf"([\w./@-]+):(?:np\.float\d+\()?({_NUMBER})\)?")


class Observed(NamedTuple):
    """A step as it was measured: metrics by verl's names, and layouts by unit where known."""

    metrics: Mapping[str, float]
    layouts: Mapping[str, Layout]


def read_log(path: str | Path) -> Iterator[Observed]:
    """Each step's metrics, in the order of the file; steps without timers are left out.

    Raises: OSError if the file cannot be read; SpecError if it is no CSV, by whose name it goes.
    """
    for metrics in _read_metrics(Path(path)):
        yield Observed(metrics, {})


def _read_metrics(path: Path) -> Iterator[dict[str, float]]:
    if path.is_dir() or is_event_file(path):
        yield from read_scalars(path)
        return
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            try:
                for row in csv.DictReader(file):
                    named = ((k, _number(v)) for k, v in row.items() if k)
                    yield {k: v for k, v in named if v is not None}
            except csv.Error as error:
                raise SpecError(f"{path}: not CSV: {error}") from None
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _STEP.search(_ANSI.sub("", line))
            if match:
                metrics = {k: float(v) for k, v in _VALUE.findall(match[2])}
                if any(k.startswith("timing_s/") for k in metrics):
                    yield {"step": float(match[1]), **metrics}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def measured_seconds(metrics: Mapping[str, float]) -> dict[ModelStage, float]:
    """Seconds of each stage whose main timer the step has."""
    out = {}
    for stage, timers in TIMERS.items():
        total = sum(metrics.get(timer, 0.0) for timer in timers)
        if timers[0] in metrics and 0 < total < math.inf:
            out[stage] = total
    return out


def step_workload(base: WorkloadSpec, metrics: Mapping[str, float]) -> WorkloadSpec | None:
    """The workload with this step's lengths; None where the log has none.

    Lengths are rounded to 3 %, so that steps alike are estimated once.
    """
    response, prompt = metrics.get("response_length/mean"), metrics.get("prompt_length/mean")
    if response is None or not 0 < response < math.inf:
        return None
    if prompt is None or not 0 < prompt < math.inf:
        prompt = 1.0
    limit = base.response_tokens.max_tokens
    longest = metrics.get("response_length/max", float(limit or response))
    if not 0 < longest < math.inf:
        longest = response

    def rounded(value: float) -> int:
        return max(1, round(1.03 ** round(math.log(value) / math.log(1.03))))

    sigma = base.response_tokens.sigma or 0.6
    # The median that has this mean, the cut at the longest neglected.
    median = rounded(response) / math.exp(sigma * sigma / 2)
    return dataclasses.replace(
        base,
        prompt_tokens=LengthDistribution.fixed(rounded(prompt)),
        response_tokens=LengthDistribution.lognormal(
            max(1.0, median), sigma, max_tokens=max(rounded(longest), rounded(response))
        ),
    )


def _in_layouts(plan: GlobalPlan, layouts: Mapping[str, Layout]) -> GlobalPlan:
    """The plan with the layouts that a step ran in; stages of other units as they are."""
    changed: dict[ModelStage, Assignment] = {
        stage: Assignment(layouts[stage.model], a.knobs)
        for stage, a in plan.assignments.items()
        if stage is not ModelStage.ACTOR_GENERATE and stage.model in layouts
    }
    return GlobalPlan({**plan.assignments, **changed}, name=plan.name)


def main(arguments: Sequence[str], read: Callable[[Path], Iterator[Observed]] = read_log) -> int:
    """`read`: how the log is read.

    Exit status: 0 learned, 2 wrong usage or bad input, also a log with nothing to learn from.
    """
    parser = cli.parser()
    parser.prog = "nereus calibrate"
    parser.description = __doc__.splitlines()[0] if __doc__ else None
    parser.epilog = None
    parser.add_argument(
        "log",
        type=Path,
        help="verl console log, CSV of its metrics, TensorBoard files, or a run directory",
    )
    parser.add_argument("--out", type=Path, required=True, help="where the calibration is saved")
    args = parser.parse_args(arguments)
    learned = Calibration()
    steps = outliers = 0
    try:
        job, cluster = cli.job_from(args), cli.cluster_from(args)
        plan, base = cli.plan_from(args, job, cluster), cli.workload_from(args)
        cache: dict[tuple[WorkloadSpec, GlobalPlan], dict[ModelStage, float]] = {}
        before: Mapping[str, Layout] = {}
        for metrics, layouts in read(args.log):
            workload, measured = step_workload(base, metrics), measured_seconds(metrics)
            if workload is None or not measured:
                continue
            if before and layouts != before:
                learned.after_transition()
            before = layouts
            ran_in = _in_layouts(plan, layouts)
            key = (workload, ran_in)
            if key not in cache:
                result = estimate(job, ran_in, cluster, workload)
                cache[key] = {s: e.seconds for s, e in result.stages.items()}
            outliers += len(learned.observe(ran_in.assignments, cache[key], measured))
            steps += 1
        if not steps:
            print(
                f"nereus calibrate: {args.log} has no step with timing_s/... and "
                "response_length/mean",
                file=sys.stderr,
            )
            return 2
        learned.save(args.out)
    except (SpecError, OSError) as error:
        print(f"nereus calibrate: {error}", file=sys.stderr)
        return 2
    print(f"{steps} steps, {outliers} outlying stage times; saved to {args.out}")
    for (stage, layout), known in learned.seconds_filters.items():
        print(
            f"  {stage!s:15} {layout!s:24} measured / predicted {known.ratio:.2f}, "
            f"noise {100 * known.noise:.1f} %"
        )
    return 0
