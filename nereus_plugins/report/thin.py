"""A long trace as a short one, for quick looks and for varying assumptions."""

from __future__ import annotations

import dataclasses

from nereus_plugins.spec import SpecError
from nereus_plugins.trace.conditions import Trace


def thinned(trace: Trace, steps: int) -> Trace:
    """Every so many-th step of the trace, its GPUs closer together in the same measure.

    What a transition costs then has fewer steps to pay for it; the trace says so.

    Raises: SpecError: the trace has fewer steps.
    """
    if steps > trace.steps:
        raise SpecError(f"--steps {steps}: trace {trace.name} has {trace.steps}")
    if steps == trace.steps:
        return trace
    means = trace.mean_response_tokens
    ratio = steps / trace.steps
    gpus: dict[float, int] = {}
    for at, count in trace.gpus:
        gpus[float(int(at * ratio)) if trace.indexed_by == "step" else at * ratio] = count
    return dataclasses.replace(
        trace,
        name=f"{trace.name}, {steps} of {trace.steps} steps",
        mean_response_tokens=tuple(means[int(i / ratio)] for i in range(steps)),
        gpus=tuple(sorted(gpus.items())),
        assumptions=(
            *trace.assumptions,
            f"thinned from {trace.steps} steps to {steps}: conditions change that much faster, and "
            "a transition has fewer steps that pay for it",
        ),
    )
