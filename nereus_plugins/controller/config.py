"""How the controller decides: few settings, each with a default that suits a job of hours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus_plugins.spec import Record
from nereus_plugins.spec.record import (
    require,
    require_choice,
    require_int,
    require_number,
    shown,
    unknown_key,
)

MODES = ("observe", "advise", "act")


@dataclasses.dataclass(frozen=True)
class ControllerConfig(Record):
    """
    Attributes:
        mode: "observe" (writes what it would do), "advise" (a proposal waits for
            `nereus approve`), "act" (the job executes proposals at its next boundary).
        confidence: probability with which an unforced transition must pay for itself.
        least_gain: part of a step's seconds that an unforced transition must save.
        look_ahead_steps: a plan whose memory is forecast to run out within so many steps is left.
        budget: part of the run time that unforced transitions may cost beyond what they bring,
            against the best plan that could have been held.
        dwell_steps: steps in a plan before an unforced transition may leave it.
    """

    mode: str = "act"
    confidence: float = 0.65
    least_gain: float = 0.02
    look_ahead_steps: int = 3
    budget: float = 0.04
    dwell_steps: int = 5

    def __post_init__(self) -> None:
        name = "ControllerConfig"
        require_choice(name, "mode", self.mode, MODES)
        require_number(name, "confidence", self.confidence, minimum=0.5, maximum=0.999)
        require_number(name, "least_gain", self.least_gain, minimum=0.0, maximum=1.0)
        require_int(name, "look_ahead_steps", self.look_ahead_steps)
        require_number(name, "budget", self.budget, minimum=0.0, maximum=1.0)
        require_int(name, "dwell_steps", self.dwell_steps, minimum=0)


SETTINGS = tuple(field.name for field in dataclasses.fields(ControllerConfig))
RATIOS = ("confidence", "least_gain", "budget")  # of these, those that need not be whole


def read_settings(settings: Any, where: str) -> ControllerConfig | None:
    """Of a job, as its configuration has them; None: mode off, or no mode.

    Args: where: the setting that holds them, for messages.

    Raises: SpecError naming the setting.
    """
    if settings is None:
        return None
    require(
        isinstance(settings, Mapping),
        f"{where} must be a mapping of settings, like {{mode: act}}, got {shown(settings)}",
    )
    # YAML reads a bare off as false.
    if settings.get("mode", False) in (False, "off"):
        for key in settings:
            if key not in SETTINGS:
                raise unknown_key(key, SETTINGS, where)
        return None
    require(
        settings["mode"] in MODES,
        f"{where}.mode must be one of off, {', '.join(MODES)}; got {shown(settings['mode'])}",
    )
    return ControllerConfig.from_dict(settings, where=where)
