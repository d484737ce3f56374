"""The `nereus` Hydra group as a typed, checked record.

A schedule maps a training step to the layouts that hold from the end of that step on:

    nereus:
      schedule:
        5: {tp: 1, pp: 2}                                  # every unit
        10: {actor: {shard_size: 2}, critic: {ulysses: 2}} # unit by unit; the others stay
        15: {ranks: 4, tp: 2}                              # on four ranks from now on
        20: {ranks: 2, actor: {ulysses: 2}}                # on two; the others follow by dp
        25: {leave: [0]}                                   # rank 0 leaves, another joins for it
        30: {actor: {token_budget_tokens: 8192}}           # larger micro-batches; nothing moves
        35: {actor: {recompute: full}, critic: {offload_optimizer: true}}
        45: {rollout: {tp: 2, memory_fraction: 0.5}}       # servers of the rollout, launched anew

The fields of a layout are those of `nereus_plugins.spec.Layout`. What is left out is 1; `dp` left
out takes the remaining ranks; `ranks` left out is what the layouts take, which is the number in
force where they leave `dp` out; `sharding` and `sequence_parallel` left out are what verl's own
settings make the engine do. Of `nereus_plugins.spec.Knobs` those in SIZES and SWITCHES can change,
beside a layout or alone: what names knobs only keeps its layout, and knobs left out stay as they
are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_plugins.control.schedule import check_schedule
from nereus_plugins.controller.config import ControllerConfig, read_settings
from nereus_plugins.spec import Assignment, FrozenMap, GlobalPlan, Knobs, Layout, Record, SpecError
from nereus_plugins.spec.layout import MOST_RANKS
from nereus_plugins.spec.record import (
    as_float,
    divisors_text,
    require,
    require_bool,
    require_int,
    require_number,
    shown,
    unknown_key,
)

UNITS = ("actor", "critic", "ref")
BACKENDS = ("fsdp2", "megatron")
RANKS, LEAVE, ROLLOUT = "ranks", "leave", "rollout"
BESIDE = (RANKS, LEAVE, ROLLOUT)  # what stands beside units in a plan
ROLLOUT_FIELDS = ("tp", "replicas", "memory_fraction")
LAYOUT_FIELDS = tuple(f.name for f in dataclasses.fields(Layout))
KNOB_FIELDS = tuple(f.name for f in dataclasses.fields(Knobs))
# The knobs that can change: sizes of a micro-batch, and what is switched in a live engine.
SIZES = ("micro_batch", "token_budget_tokens")
SWITCHES = ("recompute", "offload_params", "offload_optimizer")
OF_TRAINING = ("recompute", "offload_optimizer")  # of these, what only a unit that trains has
AUTO = "auto"
UNIT_FIELDS = (*LAYOUT_FIELDS, *KNOB_FIELDS)


@dataclasses.dataclass(frozen=True)
class SnapshotConfig(Record):
    """Settings under `nereus.snapshot`.

    Attributes:
        folder: of the job's snapshots, on a file system that all nodes share.
        every: steps from one to the next, or "auto": from what they cost and `between_failures_s`.
        between_failures_s: mean time between failures of the whole job.
        keep: how many complete ones stay.
    """

    folder: str
    every: int | str = 10
    between_failures_s: float | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        where = "nereus.snapshot"
        require(
            isinstance(self.folder, str) and self.folder != "",
            f"{where}.folder must be a directory or null, got {shown(self.folder)}",
        )
        if self.every != AUTO:
            require(
                type(self.every) is int and self.every >= 1,
                f"{where}.every must be a number of steps of at least 1, or auto; got "
                f"{shown(self.every)}",
            )
        if self.between_failures_s is not None:
            require_number(where, "between_failures_s", self.between_failures_s, above=0.0)
        require(
            (self.every == AUTO) == (self.between_failures_s is not None),
            f"{where}.between_failures_s goes with {where}.every=auto, and only with it",
        )
        require_int(where, "keep", self.keep)

    def interval(self) -> dict[str, Any]:
        """As arguments of `nereus_plugins.snapshot.interval.Due`."""
        if self.every == AUTO:
            return {"between_failures_s": self.between_failures_s}
        return {"every_steps": self.every}


@dataclasses.dataclass(frozen=True)
class NereusConfig(Record):
    """Settings of the `nereus` group.

    Attributes:
        enable: false leaves verl exactly as it is.
        schedule: step -> layouts (see the module's text) that hold after that step.
        run_dir: where records and the journal go; None: `nereus` under
            trainer.default_local_dir.
        checksum: verify every message of a transition on both ends.
        staging_mib: packing buffer on each rank, in MiB: the most that one message carries; None:
            what suits the back end.
        timeout_s: how long a rank waits for the others in one phase of a transition.
        step_timeout_s: how long a step may take, with its transition, checkpoint and validation,
            before the job is ended, as a process hangs; None: without limit.
        claim_timeout_s: how long a plan with more ranks waits for Ray to have them.
        control: take commands from the job's user while it runs (`nereus transition`, `status`,
            `pause`, `resume`), on the driver's loopback interface.
        background: prepare a transition while the rollout generates the next batch.
        background_share: of that time, how much moving state may take on each rank.
        controller: when and how the job changes its plan by itself; None: it does not.
        snapshot: where and how often the job's state is kept, to be started again from; None: it
            is not.
        memory_budget_gib: device memory of one rank that old and new layout may take together;
            what does not fit is parked in host memory meanwhile. None: what is free at the time on
            an accelerator, no limit on CPU.
    """

    enable: bool = True
    schedule: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=FrozenMap)
    run_dir: str | None = None
    checksum: bool = True
    staging_mib: int | None = None
    timeout_s: float = 300.0
    step_timeout_s: float | None = None
    claim_timeout_s: float = 60.0
    background: bool = False
    background_share: float = 0.25
    memory_budget_gib: float | None = None
    control: bool = True
    controller: ControllerConfig | None = None
    snapshot: SnapshotConfig | None = None

    def __post_init__(self) -> None:
        require_bool("nereus", "enable", self.enable)
        require_bool("nereus", "checksum", self.checksum)
        require_bool("nereus", "control", self.control)
        require_bool("nereus", "background", self.background)
        if self.staging_mib is not None:
            require_int("nereus", "staging_mib", self.staging_mib)
        require_number("nereus", "timeout_s", self.timeout_s, above=0.0)
        if self.step_timeout_s is not None:
            require_number("nereus", "step_timeout_s", self.step_timeout_s, above=0.0)
        require_number("nereus", "claim_timeout_s", self.claim_timeout_s, above=0.0)
        require_number("nereus", "background_share", self.background_share, above=0.0)
        require(
            self.background_share <= 1.0,
            "nereus.background_share is a part of the time, above 0 and at most 1, got "
            f"{shown(self.background_share)}",
        )
        if self.memory_budget_gib is not None:
            require_number("nereus", "memory_budget_gib", self.memory_budget_gib, above=0.0)
        require(
            self.run_dir is None or (isinstance(self.run_dir, str) and self.run_dir != ""),
            f"nereus.run_dir must be a directory or null, got {shown(self.run_dir)}",
        )
        require(
            self.controller is None or self.control,
            "nereus.controller.mode: the controller gives the job its plans as commands; set "
            "nereus.control=true, or nereus.controller.mode=off",
        )
        schedule = check_schedule(self.schedule, _check_scheduled, "{5: {tp: 2}}")
        object.__setattr__(self, "schedule", schedule)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str | None = None) -> NereusConfig:
        """Raises: SpecError naming the setting, and for an unknown one the nearest valid."""
        if not isinstance(data, Mapping):
            raise SpecError(f"nereus: expected a mapping of settings, got {shown(data)}")
        names = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise unknown_key(key, names, "nereus")
        values = dict(data)
        for name in ("timeout_s", "step_timeout_s", "claim_timeout_s", "background_share"):
            if isinstance(values.get(name), int) and not isinstance(values[name], bool):
                values[name] = as_float(values[name])
        if values.get("schedule") is None:
            values.pop("schedule", None)
        values["controller"] = read_settings(values.get("controller"), "nereus.controller")
        values["snapshot"] = _snapshot(values.get("snapshot"))
        return cls(**values)


def _snapshot(settings: Any) -> SnapshotConfig | None:
    """Raises: SpecError naming the setting."""
    where = "nereus.snapshot"
    if settings is None:
        return None
    require(
        isinstance(settings, Mapping),
        f"{where} must be a mapping of settings, like {{folder: /shared/snapshots}}, got "
        f"{shown(settings)}",
    )
    for key in settings:
        if key not in (names := [f.name for f in dataclasses.fields(SnapshotConfig)]):
            raise unknown_key(key, names, where)
    if settings.get("folder") is None:
        return None
    values = dict(settings)
    if type(values.get("between_failures_s")) is int:
        values["between_failures_s"] = as_float(values["between_failures_s"])
    return SnapshotConfig(**values)


def _check_scheduled(plan: Any, where: str) -> Mapping[str, Any]:
    """Raises: SpecError naming the setting."""
    require(
        isinstance(plan, Mapping) and len(plan) > 0,
        f"{where} must be fields of layout or knobs, or units with such, got {shown(plan)}",
    )
    return check_plan(plan, where)


def check_plan(plan: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """One plan as it is written in the schedule. Raises: SpecError naming the setting."""
    if "assignments" in plan:
        for key in BESIDE:
            require(
                key not in plan,
                f"{where}: {key} cannot stand beside assignments, which say it all (the rollout is "
                f"actor-generate's); leave {key} out, or write units instead of assignments",
            )
        GlobalPlan.from_dict(plan, where=where)
        return plan
    whole, plan = plan, {key: value for key, value in plan.items() if key not in BESIDE}
    if RANKS in whole:
        require_int(where, RANKS, whole[RANKS])
        require(whole[RANKS] <= MOST_RANKS, f"{where}.{RANKS} must be at most {MOST_RANKS}")
    _check_leave(whole.get(LEAVE, ()), f"{where}.{LEAVE}")
    if ROLLOUT in whole:
        _check_rollout(whole[ROLLOUT], f"{where}.{ROLLOUT}")
    if set(plan) & set(UNITS) or any(isinstance(value, Mapping) for value in plan.values()):
        for unit, layout in plan.items():
            if unit not in UNITS:
                raise unknown_key(unit, (*UNITS, *BESIDE), where)
            require(
                isinstance(layout, Mapping),
                f"{where}.{unit} must be fields of layout or knobs, like {{tp: 2}}, got "
                f"{shown(layout)}",
            )
            _check_fields(layout, UNIT_FIELDS, f"{where}.{unit}")
        return whole
    _check_fields(plan, (*UNIT_FIELDS, *BESIDE), where)
    return whole


def _check_rollout(fields: Any, where: str) -> None:
    require(
        isinstance(fields, Mapping) and len(fields) > 0,
        f"{where} must be a mapping with some of {', '.join(ROLLOUT_FIELDS)}, like {{tp: 2}}, got "
        f"{shown(fields)}",
    )
    _check_fields(fields, ROLLOUT_FIELDS, where)


def _check_leave(ranks: Any, where: str) -> None:
    require(
        isinstance(ranks, (list, tuple))
        and all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in ranks)
        and len(set(ranks)) == len(ranks),
        f"{where} must list ranks, like [0, 3], each once, got {shown(ranks)}",
    )


def _check_fields(layout: Mapping[str, Any], valid: Sequence[str], where: str) -> None:
    for key in layout:
        require(
            key not in BESIDE or key in valid,
            f"{where}: {key} is of the whole job; write it beside the units, not inside one",
        )
        if key not in valid:
            raise unknown_key(key, valid, where)


@dataclasses.dataclass(frozen=True)
class EngineDefaults:
    """What a unit's engine does where a plan says nothing.

    optimizer_sharded: Megatron's distributed optimizer is on. sequence_parallel: with tp > 1.
    """

    optimizer_sharded: bool = True
    sequence_parallel: bool = False


def resolve_layout(
    fields: Mapping[str, Any],
    *,
    backend: str,
    world_size: int,
    fixed: bool,
    defaults: EngineDefaults,
    where: str,
) -> Layout:
    """The layout that `fields` mean for an engine.

    Args:
        fields: layout fields as written in the schedule.
        backend: "fsdp2" or "megatron".
        world_size: ranks that a layout without `dp` takes.
        fixed: whether a layout with `dp` must take as many.
        defaults: for what is left out.
        where: the setting that `fields` stand under, for error messages.

    Raises: SpecError naming `where`.
    """
    values = dict(fields)
    others = 1
    for name in ("tp", "pp", "cp", "ulysses"):
        value = values.get(name, 1)
        require_int(where, name, value)
        others *= value
    if "dp" in values and not fixed:
        require_int(where, "dp", values["dp"])
        world_size = values["dp"] * others
    if world_size % others:
        raise SpecError(
            f"{where}: tp*pp*cp*ulysses = {others} must divide {world_size} ranks; it may be "
            f"{divisors_text(world_size)}"
        )
    values.setdefault("dp", world_size // others)
    if backend == "fsdp2":
        if values.get("shard_size") in (None, world_size):
            values.pop("shard_size", None)
            values.setdefault("sharding", "fsdp")
        else:
            values.setdefault("sharding", "hsdp")
    else:
        values.setdefault("sharding", "zero1" if defaults.optimizer_sharded else "none")
        if values.get("tp", 1) > 1:
            values.setdefault("sequence_parallel", defaults.sequence_parallel)
    try:
        layout = Layout.from_dict(values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    require(
        layout.world_size == world_size,
        f"{where}: layout {layout} takes {layout.world_size} ranks, the plan says {world_size}; "
        "leave dp out, or correct it",
    )
    return layout


def plan_layouts(
    plan: Mapping[str, Any],
    *,
    units: Mapping[str, EngineDefaults],
    current: Mapping[str, Layout],
    backend: str,
    where: str,
) -> dict[str, Layout]:
    """Unit -> target layout of one scheduled plan; units that stay as they are are left out.

    Args:
        plan: as checked by `NereusConfig`.
        units: the job's units that can change. current: layouts before it, by unit.

    Raises: SpecError naming the setting.
    """
    if "assignments" in plan:
        return global_plan_layouts(GlobalPlan.from_dict(plan, where=where), current, where)
    fixed = RANKS in plan
    ranks = int(plan.get(RANKS, next(iter(current.values())).world_size))
    plan = {
        unit: {name: value for name, value in fields.items() if name in LAYOUT_FIELDS}
        for unit, fields in by_unit(plan, units).items()
        if not _only_knobs(fields)
    }
    if fixed:
        plan = {unit: plan.get(unit, _but_for_dp(current[unit], ranks)) for unit in units} | plan
    out: dict[str, Layout] = {}
    for unit, fields in plan.items():
        require(
            unit in current,
            f"{where}.{unit}: this job has no {unit}; its units are {', '.join(current)}",
        )
        out[unit] = resolve_layout(
            fields,
            backend=backend,
            world_size=ranks,
            fixed=fixed,
            defaults=units.get(unit, EngineDefaults()),
            where=f"{where}.{unit}",
        )
    return out


def by_unit(plan: Mapping[str, Any], units: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Unit -> its fields in a plan other than a global one, which may give all `units` the same."""
    plan = {key: value for key, value in plan.items() if key not in BESIDE}
    if plan and not set(plan) & set(UNITS):
        return {unit: plan for unit in units}
    return plan


def _only_knobs(fields: Mapping[str, Any]) -> bool:
    return bool(fields) and set(fields) <= set(KNOB_FIELDS)


def _but_for_dp(layout: Layout, ranks: int) -> dict[str, Any]:
    """The fields of a layout that follows to `ranks` ranks by its data parallelism."""
    fields = layout.to_dict()
    for name in ("dp", "sharding"):
        fields.pop(name, None)
    if (layout.shard_size or 0) >= ranks:
        fields.pop("shard_size")
    return fields


def check_devices(assignment: Assignment, where: str) -> None:
    """Raises: SpecError for devices that a unit of verl's colocated workers cannot be put on."""
    require(
        assignment.devices == tuple(range(assignment.layout.world_size)),
        f"{where}: devices cannot be chosen: every unit works on all of the job's ranks, in their "
        "order; leave devices out",
    )


def global_plan_layouts(
    plan: GlobalPlan, units: Mapping[str, Any], where: str
) -> dict[str, Layout]:
    """Unit -> layout of a global plan, whose stages of one unit must agree.

    The rollout (actor-generate) has no unit: see `rollout.global_plan_rollout`.

    Raises: SpecError naming the stage.
    """
    out: dict[str, Layout] = {}
    for stage, assignment in plan.assignments.items():
        if stage.value == "actor-generate":
            continue
        unit = stage.model
        require(
            unit in units,
            f"{where}: {stage} has no unit in this job; leave it out (the units: "
            f"{', '.join(units)})",
        )
        check_devices(assignment, f"{where}: {stage}")
        require(
            out.setdefault(unit, assignment.layout) == assignment.layout,
            f"{where}: the stages of {unit} share one set of weights, so {stage} must have the "
            f"layout of the others ({out[unit]}), got {assignment.layout}",
        )
    return out
