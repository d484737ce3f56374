"""Colours with a meaning: layouts, stages, phases."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from nereus_plugins.trace.show import layout_text

from .figures import PARTS
from .series import AGAIN, FAILURES, OTHER_STAGE, RESTARTS, TRANSITIONS

# Hues that are apart from each other, in the order in which layouts appear.
_HUES = (212, 28, 152, 328, 268, 50, 184, 2, 92, 300, 236, 128)
STAGE_FILLS: Mapping[str, str] = {
    "gen": "hsl(212 60% 55%)",
    "reward": "hsl(184 45% 48%)",
    "reward_score": "hsl(174 42% 42%)",
    "old_log_prob": "hsl(160 38% 52%)",
    "ref": "hsl(140 35% 62%)",
    "values": "hsl(90 35% 55%)",
    "adv": "hsl(66 40% 50%)",
    "update_critic": "hsl(44 68% 54%)",
    "update_actor": "hsl(28 75% 56%)",
    "update_weights": "hsl(268 40% 62%)",
    "save_checkpoint": "hsl(300 25% 58%)",
    OTHER_STAGE: "hsl(215 10% 68%)",
    TRANSITIONS: "hsl(330 65% 52%)",
    RESTARTS: "hsl(350 70% 45%)",
    FAILURES: "hsl(0 75% 35%)",
    AGAIN: "hsl(15 55% 40%)",
}
PART_FILLS: Mapping[str, str] = {
    part: f"hsl({hue} 52% 55%)"
    for part, hue in zip((*PARTS, "other"), (268, 184, 212, 152, 44, 300, 350, 215), strict=True)
} | {"other": "hsl(215 10% 65%)"}


def phase_fill(phase: str) -> str:
    """One colour for a phase wherever it appears, near its part's."""
    part = next((name for name, phases in PARTS.items() if phase in phases), None)
    if part is not None:
        return PART_FILLS[part]
    return f"hsl({zlib.crc32(phase.encode()) % 360} 18% 60%)"


class LayoutColours:
    """A hue for each layout without its dp; lighter where dp is small, darker where it is large.

    Attributes:
        names: what each hue stands for, in order of appearance -> fill in the middle of its range.
    """

    def __init__(self, layouts: Iterable[Mapping[str, Any]]) -> None:
        self._dp: dict[str, set[int]] = {}
        for fields in layouts:
            key, dp = _apart(fields)
            self._dp.setdefault(key, set()).add(dp)
        self._hue = {key: _HUES[i % len(_HUES)] for i, key in enumerate(self._dp)}
        self._pale = {key: i // len(_HUES) for i, key in enumerate(self._dp)}

    @property
    def names(self) -> dict[str, str]:
        return {key: self._fill(key, 0.5) for key in self._dp}

    def fill(self, fields: Mapping[str, Any]) -> str:
        key, dp = _apart(fields)
        low, high = min(self._dp[key]), max(self._dp[key])
        if low == high:
            return self._fill(key, 0.5)
        return self._fill(key, math.log(dp / low) / math.log(high / low))

    def _fill(self, key: str, dark: float) -> str:
        saturation = 62 - 24 * min(2, self._pale[key])
        return f"hsl({self._hue[key]} {saturation}% {76 - 40 * dark:.0f}%)"


def _apart(fields: Mapping[str, Any]) -> tuple[str, int]:
    """(the layout without its dp, in words; its dp)."""
    text = layout_text(fields)
    found = re.search(r" DP(\d+)\b", text)
    return (text.replace(found[0], "", 1), int(found[1])) if found else (text, 1)
