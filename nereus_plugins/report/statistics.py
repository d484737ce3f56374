"""Paired differences over seeds, with intervals by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
METHOD = (
    "logarithm of the ratio of each pair (same seed, same conditions); its mean and 95 % interval "
    "over pairs by Student's t, given as relative differences; no interval with one pair"
)


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t, for a probability above one half.

    The distribution function of a whole number of degrees of freedom is a finite sum (Abramowitz
    and Stegun, 26.7.3 and 26.7.4), which is inverted by bisection.
    """
    if not 0.5 < probability < 1.0 or freedom < 1:
        raise ValueError(f"no t quantile of {probability} with {freedom} degrees of freedom")
    inside = 2.0 * probability - 1.0
    low, high = 0.0, 1.0
    while _within(high, freedom) < inside:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _within(middle, freedom) < inside else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(-t < T < t)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total


def paired(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Relative differences `value / baseline - 1` of pairs, all of them above 0.

    Means and intervals are of the logarithms of the ratios, so that twice and half are equally
    far, and nothing falls below -1.

    Returns: mean; low and high of the interval (None with one pair); pairs: every difference.
    Raises: ValueError: not as many of one as of the other, or none.
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(f"{len(values)} values and {len(baseline)} of the baseline are no pairs")
    found = np.log(np.array(values, float) / np.array(baseline, float))
    mean = float(found.mean())
    low = high = None
    if len(found) > 1:
        spread = float(found.std(ddof=1)) / math.sqrt(len(found))
        half = t_quantile(0.5 + CONFIDENCE / 2, len(found) - 1) * spread
        low, high = math.expm1(mean - half), math.expm1(mean + half)
    pairs = [float(one) for one in np.expm1(found)]
    return {"mean": math.expm1(mean), "low": low, "high": high, "pairs": pairs}
