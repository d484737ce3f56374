"""The same comparison under other assumptions: one is varied at a time, the rest stays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nereus_plugins.spec import SpecError
from nereus_plugins.trace.conditions import Trace

from .compare import Runs, differences
from .simulated import Request


class Setting(NamedTuple):
    """One other value of one assumption. name: a folder's. text: for people."""

    name: str
    text: str
    request: Request


def _tail(request: Request) -> Iterator[Setting]:
    """Lengths over their mean to a power: below 1 they are more alike, above 1 less."""
    for power, text in ((0.6, "lengths more alike"), (1.4, "heavier tail")):
        points = tuple((p, ratio**power) for p, ratio in request.trace.tail)
        trace = dataclasses.replace(request.trace, tail=points)
        yield Setting(
            f"tail-{power:g}", f"{text} (ratios to the power {power:g})", _on(request, trace)
        )


def _noise(request: Request) -> Iterator[Setting]:
    for noise in (0.0, 0.10):
        truth = dataclasses.replace(request.truth, noise=noise)
        yield Setting(
            f"noise-{noise:g}", f"noise of a stage {noise:.0%}",
            dataclasses.replace(request, truth=truth),
        )  # fmt: skip


def _bandwidth(request: Request) -> Iterator[Setting]:
    cluster = request.trace.setting.cluster
    for factor in (0.25, 4.0):
        link = dataclasses.replace(
            cluster.inter_node,
            bandwidth_bytes_per_s=factor * cluster.inter_node.bandwidth_bytes_per_s,
        )
        other = dataclasses.replace(cluster, inter_node=link)
        setting = dataclasses.replace(request.trace.setting, cluster=other)
        trace = dataclasses.replace(request.trace, setting=setting)
        yield Setting(
            f"bandwidth-{factor:g}", f"bandwidth between nodes x {factor:g}", _on(request, trace)
        )


def _relaunch(request: Request) -> Iterator[Setting]:
    for seconds in (60.0, 600.0):
        constants = dataclasses.replace(request.constants, relaunch_s=seconds)
        yield Setting(
            f"relaunch-{seconds:g}", f"starting the job again {seconds:g} s",
            dataclasses.replace(request, constants=constants),
        )  # fmt: skip


def _engines(request: Request) -> Iterator[Setting]:
    for seconds in (5.0, 120.0):
        constants = dataclasses.replace(request.constants, engine_start_s=seconds)
        yield Setting(
            f"engines-{seconds:g}", f"starting rollout engines {seconds:g} s",
            dataclasses.replace(request, constants=constants),
        )  # fmt: skip


def _availability(request: Request) -> Iterator[Setting]:
    """Whole nodes, at least one."""
    node = request.trace.setting.cluster.gpus_per_node
    for factor in (0.5, 0.75):
        gpus = tuple(
            (at, min(count, max(node, node * round(factor * count / node))))
            for at, count in request.trace.gpus
        )
        trace = dataclasses.replace(request.trace, gpus=gpus)
        yield Setting(f"availability-{factor:g}", f"GPUs x {factor:g}", _on(request, trace))


def _error(request: Request) -> Iterator[Setting]:
    for spread in (0.05, 0.10, 0.20):
        truth = dataclasses.replace(request.truth, stage_spread=spread, layout_spread=spread)
        yield Setting(
            f"error-{spread:g}", f"cost model off by {spread:.0%}, by stage and by layout",
            dataclasses.replace(request, truth=truth),
        )  # fmt: skip


ASSUMPTIONS = {
    "tail": _tail,
    "noise": _noise,
    "bandwidth": _bandwidth,
    "relaunch": _relaunch,
    "engines": _engines,
    "availability": _availability,
    "error": _error,
}


def _on(request: Request, trace: Trace) -> Request:
    return dataclasses.replace(request, trace=trace)


def settings(request: Request, names: str) -> list[Setting]:
    """Every other setting of the assumptions `names` ("all", or comma-separated).

    Raises: SpecError: an assumption that is not known.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if chosen == ["all"]:
        chosen = list(ASSUMPTIONS)
    for name in chosen or [names]:
        if name not in ASSUMPTIONS:
            raise SpecError(f"--vary {name!r}: choose from all, {', '.join(ASSUMPTIONS)}")
    return [one for name in dict.fromkeys(chosen) for one in ASSUMPTIONS[name](request)]


def tabulated(base: Runs, varied: Sequence[tuple[Setting, Runs]], baseline: str) -> dict[str, Any]:
    """Each policy's difference in `run_s` against the baseline, by setting.

    Returns: rows: name and text of a setting, and by policy the difference as `statistics.paired`
    has it (None where a run did not reach its end); verdicts: by policy, in words, in how many
    settings it is faster.
    """
    rows = [_row("as given", "as given", base, baseline)]
    rows += [_row(one.name, one.text, runs, baseline) for one, runs in varied]
    names = [name for name in base if name != baseline]
    return {"rows": rows, "verdicts": {name: _verdict(name, rows) for name in names}}


def _row(name: str, text: str, runs: Runs, baseline: str) -> dict[str, Any]:
    found = differences(runs, baseline)
    each = {n: found[n]["run_s"] if n in found else None for n in runs if n != baseline}
    return {"name": name, "text": text, "differences": each}


def faster(difference: Mapping[str, Any] | None) -> bool:
    """Whether run time is less, beyond its interval where there is one."""
    if difference is None:
        return False
    most = difference["mean"] if difference["high"] is None else difference["high"]
    return bool(most < 0 and math.isfinite(most))


def _verdict(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    won = [row["text"] for row in rows if faster(row["differences"].get(name))]
    if not won:
        return f"faster in none of {len(rows)} settings"
    if len(won) == 1 < len(rows):
        return f"faster in one setting only, of {len(rows)}: {won[0]}"
    if len(won) == len(rows):
        return f"faster in all {len(rows)} settings"
    lost = [row["text"] for row in rows if row["text"] not in won]
    return f"faster in {len(won)} of {len(rows)} settings; not: {'; '.join(lost)}"
