"""From figures of single runs to a comparison: means, paired differences, the oracle's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .statistics import METHOD, paired

# What is compared pair by pair.
COMPARED = (
    "step_s_mean",
    "step_s_p50",
    "step_s_p99",
    "run_s",
    "run_s_per_step",
    "tokens_per_s_per_gpu",
    "gpu_hours",
)
ALWAYS = (
    "step_s_mean",
    "step_s_p99",
    "tokens_per_s_per_gpu",
    "transitions",
    "transition_share",
    "oom",
    "run_s",
)
ORACLE, HINDSIGHT = "oracle", "static_hindsight"
# Below this saving of the oracle, a share of it says nothing.
LEAST_SAVING = 0.02

# By name (a policy or a job), the figures of each of its runs, in the order of the pairs.
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def comparison(runs: Runs, baseline: str) -> dict[str, Any]:
    """What is the same in measured and simulated reports, JSON-able."""
    return {
        "policies": {name: mean_figures(each) for name, each in runs.items()},
        "runs": {name: [dict(one) for one in each] for name, each in runs.items()},
        "baseline": baseline,
        "differences": differences(runs, baseline),
        "differences_method": METHOD,
        "oracle": oracle_shares(runs),
    }


def mean_figures(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the runs that have it; texts that differ are joined; lists stay with
    their runs.

    `stopped` is empty where every run reached its end. Every name has the figures' usual keys,
    None where no run has them.
    """
    named = (key for one in each for key, value in one.items() if not isinstance(value, list))
    keys = dict.fromkeys((*named, *ALWAYS, "stopped"))
    found = {key: _mean([one[key] for one in each if one.get(key) is not None]) for key in keys}
    return found | {"stopped": found["stopped"] or ""}


def _mean(values: Sequence[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], str):
        return "; ".join(dict.fromkeys(text for text in values if text))
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for one in values for name in one)
        return {name: sum(one.get(name, 0.0) for one in values) / len(values) for name in names}
    mean = float(np.mean(values))
    whole = all(isinstance(value, int) for value in values) and mean.is_integer()
    return int(mean) if whole else mean


def differences(runs: Runs, baseline: str) -> dict[str, dict[str, Any]]:
    """By name and figure, `statistics.paired` against the baseline.

    Names with a run that did not reach its end, or with another number of runs, have none.
    """
    out: dict[str, dict[str, Any]] = {}
    base = runs[baseline]
    for name, each in runs.items():
        if name == baseline or len(each) != len(base) or _any_stopped(each) or _any_stopped(base):
            continue
        out[name] = {
            key: paired([one[key] for one in each], [one[key] for one in base])
            for key in COMPARED
            if all(one.get(key) and one[key] > 0 for one in (*each, *base))
        }
    return out


def oracle_shares(runs: Runs) -> dict[str, Any] | None:
    """How much of what the oracle saves over the best fixed plan each policy saves, in `run_s`.

    None without both of them. shares: by policy; None where the oracle saves under 2 %, and then
    `against_hindsight` says what the policy gains or loses. free_saving: what no policy of the
    oracle's candidates can exceed, transitions being free; None where the oracle does not say.
    """
    if ORACLE not in runs or HINDSIGHT not in runs:
        return None
    if _any_stopped(runs[ORACLE]) or _any_stopped(runs[HINDSIGHT]):
        return None
    best, fixed = (
        float(np.mean([one["run_s"] for one in runs[name]])) for name in (ORACLE, HINDSIGHT)
    )
    saving = 1.0 - best / fixed
    shares: dict[str, float | None] = {}
    gains: dict[str, float] = {}
    for name, each in runs.items():
        if name in (ORACLE, HINDSIGHT) or _any_stopped(each):
            continue
        took = float(np.mean([one["run_s"] for one in each]))
        gains[name] = 1.0 - took / fixed
        shares[name] = (fixed - took) / (fixed - best) if saving >= LEAST_SAVING else None
    free = [one["about"]["free_s"] for one in runs[ORACLE] if "free_s" in one.get("about", {})]
    return {
        "saving": saving,
        "free_saving": 1.0 - float(np.mean(free)) / fixed if free else None,
        "shares": shares,
        "against_hindsight": gains,
        "note": (
            "of run_s, over static_hindsight, means over seeds"
            if saving >= LEAST_SAVING
            else "the oracle saves under 2 %: a share of that says nothing"
        ),
    }


def _any_stopped(each: Sequence[Mapping[str, Any]]) -> bool:
    return any(one.get("stopped") or "run_s" not in one for one in each)
