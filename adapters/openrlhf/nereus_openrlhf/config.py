"""The `--nereus.*` flags as a typed, checked record.

A schedule maps a training step to what holds from the end of that step on, as JSON or YAML:

    --nereus.schedule '{2: {dp: 1, sharding: zero3},
                        4: {actor: {dp: 2}, critic: {sharding: zero1}},
                        6: {rollout: {replicas: 2}}}'

The fields of a layout are those of `nereus_plugins.spec.Layout` that DeepSpeed knows: `dp`
(data-parallel ranks), `tp` (AutoTP, one for all models), `sharding` (none, zero1, zero2, zero3:
ZeRO's stages). Fields without a model hold for all models that train, `tp` for all models; what is
left out stays as it is. `rollout` has the number of vLLM
engines, `replicas`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_plugins.control.schedule import check_schedule
from nereus_plugins.controller.config import RATIOS, SETTINGS, ControllerConfig, read_settings
from nereus_plugins.spec import FrozenMap, Record, SpecError
from nereus_plugins.spec.layout import MOST_RANKS
from nereus_plugins.spec.record import (
    as_float,
    load_yaml,
    require,
    require_bool,
    require_choice,
    require_int,
    require_number,
    shown,
    unknown_key,
)

PREFIX = "--nereus."
UNITS = ("actor", "critic", "ref", "reward")
TRAINED = ("actor", "critic")
ROLLOUT = "rollout"
ROLLOUT_FIELDS = ("replicas",)
LAYOUT_FIELDS = ("dp", "tp", "sharding")
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}  # ZeRO's, by `Layout.sharding`


@dataclasses.dataclass(frozen=True)
class NereusConfig(Record):
    """Settings of Nereus for one job; names and meaning as in the verl adapter.

    Attributes:
        enable: false leaves OpenRLHF exactly as it is.
        schedule: step -> plan (see the module's text) that holds after that step.
        run_dir: where records and the journal go; None: `nereus` under --ckpt.path.
        checksum: verify every message of a transition on both ends.
        staging_mib: packing buffer on each rank, in MiB; None: what suits the back end.
        timeout_s: how long a rank waits for the others in one phase of a transition.
        claim_timeout_s: how long a plan with more ranks waits for Ray to have them.
        control: take commands from the job's user while it runs (`nereus transition`, `status`,
            `pause`, `resume`), on the loopback interface of the trainer's process.
        controller: have the job change its plan by itself: --nereus.controller.mode off, observe
            (says what it would do: `nereus decisions`), advise (what it proposes waits for `nereus
            approve`) or act; further settings, --nereus.controller.confidence and the like, are in
            docs/controller.md.
    """

    enable: bool = False
    schedule: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=FrozenMap)
    run_dir: str | None = None
    checksum: bool = True
    staging_mib: int | None = None
    timeout_s: float = 300.0
    claim_timeout_s: float = 60.0
    control: bool = True
    controller: ControllerConfig | None = None

    def __post_init__(self) -> None:
        for name in ("enable", "checksum", "control"):
            require_bool("nereus", name, getattr(self, name))
        if self.staging_mib is not None:
            require_int("nereus", "staging_mib", self.staging_mib)
        for name in ("timeout_s", "claim_timeout_s"):
            require_number("nereus", name, getattr(self, name), above=0.0)
        require(
            self.run_dir is None or (isinstance(self.run_dir, str) and self.run_dir != ""),
            f"nereus.run_dir must be a directory, got {shown(self.run_dir)}",
        )
        require(
            self.controller is None or self.control,
            "nereus.controller.mode: the controller gives the job its plans as commands; set "
            "--nereus.control true, or --nereus.controller.mode off",
        )
        schedule = check_schedule(self.schedule, check_plan, "{2: {dp: 1}}")
        object.__setattr__(self, "schedule", schedule)


CONTROLLER = "controller"
NAMES = (
    *(f.name for f in dataclasses.fields(NereusConfig) if f.name != CONTROLLER),
    *(f"{CONTROLLER}.{name}" for name in SETTINGS),
)
_NUMBERS = ("timeout_s", "claim_timeout_s", *(f"{CONTROLLER}.{n}" for n in RATIOS))


def split(words: Sequence[str]) -> tuple[NereusConfig, list[str]]:
    """(settings of Nereus, the other words, which are OpenRLHF's) of a command line.

    A flag takes its value from the next word or after "="; a switch may stand alone.

    Raises: SpecError naming the flag.
    """
    given: dict[str, Any] = {}
    rest: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, text = word[len(PREFIX) :].partition("=")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            raise SpecError(f"{PREFIX}{name} is not a flag of Nereus{hint} It has {_listed()}")
        require(name not in given, f"{PREFIX}{name} is given twice")
        if not equals and at < len(words) and not words[at].startswith("--"):
            text = words[at]
            at += 1
        elif not equals:
            text = "true"
        given[name] = _value(name, text)
    inside = f"{CONTROLLER}."
    of_job = {name: value for name, value in given.items() if not name.startswith(inside)}
    settings = {n.removeprefix(inside): v for n, v in given.items() if n.startswith(inside)}
    controller = read_settings(settings, f"{PREFIX}{CONTROLLER}")
    return NereusConfig(**of_job, controller=controller), rest


def _listed() -> str:
    return ", ".join(PREFIX + name for name in NAMES)


def _value(name: str, text: str) -> Any:
    """Raises: SpecError where `text` is not YAML, or has a key twice."""
    if name == "run_dir":
        return text
    value = load_yaml(text, f"{PREFIX}{name}")
    if name in _NUMBERS and type(value) is int:
        return as_float(value)
    return FrozenMap() if name == "schedule" and value is None else value


def check_plan(plan: Any, where: str) -> Mapping[str, Any]:
    """One plan as it is written in the schedule. Raises: SpecError naming the setting."""
    require(
        isinstance(plan, Mapping) and len(plan) > 0,
        f"{where} must be fields of a layout, or models with such, got {shown(plan)}",
    )
    of_units = {key: value for key, value in plan.items() if key != ROLLOUT}
    if ROLLOUT in plan:
        _check_fields(plan[ROLLOUT], ROLLOUT_FIELDS, f"{where}.{ROLLOUT}")
    if set(of_units) & set(UNITS) or any(isinstance(v, Mapping) for v in of_units.values()):
        for unit, fields in of_units.items():
            if unit not in UNITS:
                raise unknown_key(unit, (*UNITS, ROLLOUT), where)
            _check_fields(fields, LAYOUT_FIELDS, f"{where}.{unit}")
    elif of_units:
        _check_fields(of_units, (*LAYOUT_FIELDS, ROLLOUT), where)
    return plan


def _check_fields(fields: Any, valid: Sequence[str], where: str) -> None:
    require(
        isinstance(fields, Mapping) and len(fields) > 0,
        f"{where} must be a mapping with some of {', '.join(valid)}, got {shown(fields)}",
    )
    for key, value in fields.items():
        if key not in valid:
            raise unknown_key(key, valid, where)
        if key == "sharding":
            require_choice(where, key, value, tuple(STAGES))
        else:
            require_int(where, key, value)
            require(value <= MOST_RANKS, f"{where}.{key} must be at most {MOST_RANKS}")


def by_unit(plan: Mapping[str, Any], units: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Layout fields by model of a checked plan; `units` are the job's."""
    fields = {key: value for key, value in plan.items() if key != ROLLOUT}
    if set(fields) & set(UNITS):
        return fields
    tp = {key: value for key, value in fields.items() if key == "tp"}
    found = {unit: fields if unit in TRAINED else tp for unit in units}
    return {unit: of_unit for unit, of_unit in found.items() if of_unit}
