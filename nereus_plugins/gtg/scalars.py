"""State that is not a box, on its way between ranks: step counters, hyperparameters, schedulers,
generator states.

Each source rank reports a JSON-able dict; `emu.described.base.merge_scalars` makes them one: what
several ranks report under one key must be equal, dicts are merged key by key. Generator states
stand under "rng", keyed by the coordinate "tp,pp,dp" of the rank that holds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nereus_plugins.spec import Layout

RNG = "rng"


class ScalarError(ValueError):
    """Scalars that cannot travel, or that a target did not take over."""


def encode(scalars: Mapping[str, Any]) -> bytes:
    """Canonical JSON; equal scalars give equal bytes. Raises ScalarError if not JSON-able."""
    try:
        text = json.dumps(scalars, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ScalarError(f"scalars are not JSON-able: {error}") from error
    return text.encode()


def check_loaded(expected: Mapping[str, Any], loaded: Mapping[str, Any]) -> int:
    """Check that what a target reports after loading is what was loaded; returns leaves compared.

    Only keys in both are compared: a target may hold fewer (its own pipeline stage). Generator
    states are the adapter's to place and are not compared. Raises ScalarError naming the key.
    """
    compared = 0

    def check(want: Mapping[str, Any], have: Mapping[str, Any], path: str) -> None:
        nonlocal compared
        for key in want.keys() & have.keys():
            where = f"{path}.{key}" if path else str(key)
            if where == RNG:
                continue
            if isinstance(want[key], Mapping) and isinstance(have[key], Mapping):
                check(want[key], have[key], where)
                continue
            compared += 1
            if _differ(want[key], have[key]):
                raise ScalarError(
                    f"scalar {where!r} is {_short(have[key])} in the target after loading "
                    f"{_short(want[key])}"
                )

    check(expected, loaded, "")
    return compared


def coordinate(layout: Layout, rank: int) -> str:
    """The key of a rank's generator state: "tp,pp,dp"."""
    place = layout.coord(rank)
    return f"{place.tp},{place.pp},{place.dp}"


def derived_seed(seed: int, step: int, coordinate: str) -> int:
    """A 63-bit seed for a coordinate that did not exist before, the same wherever it is derived."""
    digest = hashlib.sha256(f"nereus:{seed}:{step}:{coordinate}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _differ(a: Any, b: Any) -> bool:
    # Compared as JSON, so that a tuple equals the list it becomes on the way, and NaN equals NaN.
    return json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
