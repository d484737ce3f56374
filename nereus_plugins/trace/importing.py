"""`nereus trace import`: the log of a framework or tracker as the record of a job.

What a record needs and a log may not say is derived where the log's own figures give it, and asked
for where they do not:

    seconds of a step   timing_s/step, perf/time_per_step or timing/step_total; else the sum of
                        the stages (then `assumptions` in the run's record say so)
    samples             rollout/num_samples; total tokens / mean length; else --samples
    GPUs                total tokens / (seconds * tokens a second and GPU); else --gpus
    time of day         the tracker's; else seconds since the log's first step began
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.spec import GlobalPlan, SpecError

from . import files, installed, logs
from .record import SAME_TIMER, Record, RunRecord, StepRecord

# A log's own names, by what they say; the first that a step has counts.
_STEP_S = ("timing_s/step", "perf/time_per_step", "timing/step_total")
_RESPONSE = ("response_length/mean", "rollout/response_length_mean", "response_length")
_PROMPT = ("prompt_length/mean",)
_SAMPLES = ("rollout/num_samples",)
_TOTAL = ("perf/total_num_tokens",)
_MEMORY = {
    "allocated": "perf/max_memory_allocated_gb",
    "reserved": "perf/max_memory_reserved_gb",
    "host_rss": "perf/cpu_memory_used_gb",
}
# Timers that are parts of another one, or no stage of training.
_NOT_A_STAGE = frozenset({"step", "testing", "save_checkpoint", "generate_sequences", "reshard"})
_MOST = 1e12  # tokens of a sequence
_SOURCES = {"verl": "verl", "openrlhf": "openrlhf"}


def records(
    kind: str,
    path: Path,
    *,
    run: str | None = None,
    samples: int | None = None,
    gpus: int | None = None,
    plan: GlobalPlan | None = None,
    ran_here: bool = False,
) -> list[Record]:
    """The run's record and one a step.

    Args:
        kind: one of `logs.KINDS`.
        run: which run, of a file that holds several.
        samples: sequences of a step, where the log does not say.
        gpus: GPUs of the job, where the log does not say.
        plan: the plan it ran in.
        ran_here: whether the job ran in this environment, whose packages it then names.

    Raises: SpecError naming file, line and field; OSError.
    """
    entries = [
        entry._replace(metrics=_plain(entry.metrics)) for entry in logs.read(kind, path, run)
    ]
    assumptions: list[str] = []
    steps: list[StepRecord] = []
    clock_s = 0.0
    in_plan: dict[str, Any] = {}
    for stage, a in plan.assignments.items() if plan is not None else ():
        unit = "rollout" if stage.value == "actor-generate" else stage.model
        in_plan[unit] = a.layout.to_dict()
    for entry in entries:
        step_s = _step_s(entry, assumptions)
        clock_s += step_s
        steps.append(_step(entry, step_s, samples, clock_s, in_plan))
    if gpus is None:
        gpus = next((n for e in entries if (n := _gpus(e.metrics)) is not None), None)
    if gpus is None:
        raise SpecError(f"{path}: the log does not say how many GPUs the job had: give --gpus")
    source = _SOURCES.get(kind) or (
        "openrlhf" if any("ppo_train" in s.stages_s for s in steps) else "verl"
    )
    config: dict[str, Any] = {"imported": {"kind": kind, "file": path.name}}
    if run is not None:
        config["imported"]["run"] = run
    if assumptions:
        config["assumptions"] = assumptions
    first = steps[0]
    started = RunRecord(
        run_id=path.stem,
        time_unix_s=first.time_unix_s - first.step_s,
        source=source,
        versions=installed.versions(installed.SOFTWARE[source]) if ran_here else {},
        world_size=gpus,
        plan=in_plan,
        config=config,
    )
    return [started, *steps]


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names without the group that trackers put OpenRLHF's under."""
    return {name.removeprefix("train/"): value for name, value in metrics.items()}


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _stages(metrics: Mapping[str, float]) -> dict[str, float]:
    out = {}
    for name, value in metrics.items():
        group, _, timer = name.partition("/")
        if group in ("timing_s", "timing") and timer and value >= 0:
            out[SAME_TIMER.get(timer, timer)] = value
    return out


def _step_s(entry: logs.Entry, assumptions: list[str]) -> float:
    stages = _stages(entry.metrics)
    seconds = _first(entry.metrics, _STEP_S)
    if seconds is None:
        seconds = sum(value for name, value in stages.items() if name not in _NOT_A_STAGE)
        text = "a step takes the sum of its stages, since the log has no timer of the whole"
        if text not in assumptions:
            assumptions.append(text)
    if seconds <= 0:
        raise SpecError(
            f"{entry.where}: step {entry.step} has no seconds: one of {', '.join(_STEP_S)} or the "
            "stages' timers must be above 0"
        )
    return seconds


def _samples(entry: logs.Entry, given: int | None) -> int:
    metrics = entry.metrics
    if given is not None:
        return given
    known = _first(metrics, _SAMPLES)
    total, response, prompt = (_first(metrics, n) for n in (_TOTAL, _RESPONSE, _PROMPT))
    if known is None and total and response is not None and prompt is not None:
        length = response + prompt
        known = total / length if length > 0 else None
    if known is None or not 0.5 <= known < 1e12:
        raise SpecError(
            f"{entry.where}: step {entry.step} does not say how many sequences it had: give "
            "--samples (verl: train_batch_size * rollout.n)"
        )
    return round(known)


def _step(
    entry: logs.Entry, step_s: float, given: int | None, clock_s: float, plan: Mapping[str, Any]
) -> StepRecord:
    metrics = entry.metrics
    response, prompt = _first(metrics, _RESPONSE), _first(metrics, _PROMPT)
    if response is None or not 0 <= response < _MOST:
        raise SpecError(
            f"{entry.where}: step {entry.step} has no mean length of responses: one of "
            f"{', '.join(_RESPONSE)} is needed, from 0 to {_MOST:g} tokens"
        )
    samples = _samples(entry, given)
    if prompt is None and "total_length" in metrics:
        prompt = max(0.0, metrics["total_length"] - response)
    if prompt is not None and not 0 <= prompt < _MOST:
        raise SpecError(
            f"{entry.where}: step {entry.step} has prompts of {prompt:g} tokens: mend the value"
        )
    tokens = {"response": round(response * samples)}
    if prompt is not None:
        tokens["prompt"] = round(prompt * samples)
        tokens["total"] = tokens["prompt"] + tokens["response"]
    consumed = {*_MEMORY.values(), *_STEP_S}
    kept = {
        name: value
        for name, value in metrics.items()
        if name not in consumed and not name.startswith(("timing_s/", "timing/", "timing_per_"))
    }
    kept["response_length/mean"] = response
    return StepRecord(
        step=entry.step,
        epoch=0,
        time_unix_s=clock_s if entry.time_unix_s is None else entry.time_unix_s,
        step_s=step_s,
        stages_s=_stages(metrics),
        tokens=tokens,
        samples=samples,
        memory_bytes={
            name: round(metrics[key] * 2**30)
            for name, key in _MEMORY.items()
            if 0 <= metrics.get(key, -1.0) < 1e9
        },
        metrics=kept,
        plan=plan,
    )


def _gpus(metrics: Mapping[str, float]) -> int | None:
    """verl's throughput is a GPU's."""
    total, rate = _first(metrics, _TOTAL), metrics.get("perf/throughput")
    seconds = _first(metrics, ("perf/time_per_step", "timing_s/step"))
    if not total or not rate or not seconds or min(total, rate, seconds) <= 0:
        return None
    count = total / (rate * seconds)
    whole = round(count) if math.isfinite(count) and count < 1e7 else 0
    return whole if whole >= 1 and abs(count - whole) < 0.05 * whole else None


def write(found: Sequence[Record], path: Path) -> None:
    """The records as JSON lines; the file is there whole or not at all."""
    files.replace(path, _lines(found))


def _lines(found: Sequence[Record]) -> Iterator[str]:
    for record in found:
        yield json.dumps(record.to_dict(), separators=(",", ":")) + "\n"
