"""Every check that needs no worker: a job that cannot be adapted ends before it takes a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_plugins.control.driver import check_run_dir, make_folder
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.spec import Layout, ModelSpec, SpecError
from nereus_verl import capabilities, jobconfig, knobs, resume, stamp, verl_private
from nereus_verl.config import LEAVE, NereusConfig, plan_layouts
from nereus_verl.jobconfig import UnitConfig, select
from nereus_verl.knobs import UnitKnobs, plan_knobs
from nereus_verl.resume import Resume
from nereus_verl.rollout import RolloutPlan, plan_rollout, start_rollout


@dataclass(frozen=True)
class Preflight:
    """What is known of a job before it starts.

    config: verl's configuration, resolved, as plain dicts. layouts: by unit, at the start.
    targets: step -> unit -> layout, for the scheduled steps still to come. A checkpoint or snapshot
        to resume from was saved before the transition of its own step, so that one is still to
        come.
    leave: step -> ranks that a plan names to leave.
    knobs: by unit, at the start. knob_targets: step -> unit -> knobs.
    rollout: at the start. rollout_targets: step -> rollout.
    resume: the snapshot that the job goes on from, None if from none.
    """

    nereus: NereusConfig
    config: Mapping[str, Any]
    units: Mapping[str, UnitConfig]
    models: Mapping[str, ModelSpec]
    layouts: Mapping[str, Layout]
    targets: Mapping[int, Mapping[str, Layout]]
    leave: Mapping[int, tuple[int, ...]]
    knobs: Mapping[str, UnitKnobs]
    knob_targets: Mapping[int, Mapping[str, UnitKnobs]]
    rollout: RolloutPlan
    rollout_targets: Mapping[int, RolloutPlan]
    run_dir: Path
    resume: Resume | None = None

    def ranks_change(self) -> bool:
        """Whether a scheduled plan changes the set of ranks, or the controller may."""
        if self.nereus.controller is not None and self.ranks_may_change():
            return True
        return any(self.leave.values()) or any(
            layout.world_size != self.world_size()
            for targets in self.targets.values()
            for layout in targets.values()
        )

    def ranks_may_change(self) -> bool:
        """Whether ranks may join and leave this job."""
        return not capabilities.devices_fixed(self.config)

    def most_ranks(self) -> int:
        """The most that the job ever has, as scheduled."""
        layouts = [self.layouts, *self.targets.values()]
        return max(layout.world_size for by_unit in layouts for layout in by_unit.values())

    def world_size(self) -> int:
        """Ranks at the start."""
        return next(iter(self.layouts.values())).world_size


# What `run` raises where the job, as it is configured, cannot run.
REFUSALS = (
    SpecError,
    capabilities.Refused,
    verl_private.UnsupportedVerl,
    stamp.LayoutMismatch,
    SnapshotError,
)


def run(config: Mapping[str, Any]) -> Preflight:
    """Check everything that can be checked before workers exist.

    Raises:
        UnsupportedVerl, Refused: the job uses something that does not survive a transition.
        SpecError: a setting of `nereus`, or a scheduled plan that this job cannot run.
        LayoutMismatch: the checkpoint to resume from was saved in another layout.
        SnapshotError: there are snapshots, and none can be used.
    """
    nereus = NereusConfig.from_dict(config["nereus"])
    verl_private.check_version()
    last = select(config, "trainer.total_training_steps")
    if last is not None:
        check_reached(nereus.schedule, int(last), "trainer.total_training_steps")
    refused = capabilities.refused_by(config)
    if refused:
        raise capabilities.Refused(
            "this job cannot change its layout while it runs (set nereus.enable=false to train "
            "with a fixed one):\n  - " + "\n  - ".join(refused)
        )
    units = jobconfig.units(config)
    layouts = {name: jobconfig.start_layout(config, unit) for name, unit in units.items()}
    models = {
        name: capabilities.check_model(
            name, _hf_config(config, unit), megatron=unit.strategy == "megatron"
        )
        for name, unit in units.items()
    }
    resumed = stamp.resume_folder(config)
    done = 0 if resumed is None else stamp.step_of(resumed)
    snapshot = None
    if nereus.snapshot is not None:
        make_folder("nereus.snapshot.folder", resume.place(nereus.snapshot))
        checkpoint = None if resumed is None else done
        snapshot = resume.newest(nereus.snapshot, config, units, checkpoint)
    if snapshot is not None:
        done = snapshot.step
    elif resumed is not None:
        stamp.check(resumed, layouts, config)
    targets: dict[int, Mapping[str, Layout]] = {}
    leave: dict[int, tuple[int, ...]] = {}
    current = dict(layouts)
    start = {name: knobs.start_knobs(config, unit) for name, unit in units.items()}
    knob_targets: dict[int, Mapping[str, UnitKnobs]] = {}
    in_force = dict(start)
    rollout = generate = start_rollout(config)
    rollout_targets: dict[int, RolloutPlan] = {}
    for step, plan in nereus.schedule.items():
        if step < done:
            continue
        targets[step], leave[step], knob_targets[step] = plan_targets(
            config, models, plan, current, in_force, f"nereus.schedule.{step}"
        )
        in_force.update(knob_targets[step])
        current.update(targets[step])
        generate = rollout_targets[step] = plan_rollout(
            plan,
            config=config,
            current=generate,
            world=next(iter(current.values())).world_size,
            where=f"nereus.schedule.{step}",
        )
    run_dir = _run_dir(nereus, config)
    return Preflight(
        nereus=nereus,
        config=config,
        units=units,
        models=models,
        layouts=layouts,
        targets=targets,
        leave=leave,
        knobs=start,
        knob_targets=knob_targets,
        rollout=rollout,
        rollout_targets=rollout_targets,
        run_dir=run_dir,
        resume=snapshot,
    )


def plan_targets(
    config: Mapping[str, Any],
    models: Mapping[str, ModelSpec],
    plan: Mapping[str, Any],
    current: Mapping[str, Layout],
    unit_knobs: Mapping[str, UnitKnobs],
    where: str,
) -> tuple[dict[str, Layout], tuple[int, ...], dict[str, UnitKnobs]]:
    """What a plan means for the job, checked: (target layouts by unit, ranks that must leave, by
    unit its knobs where the plan says any).

    Args:
        config: verl's. models: by unit. plan: as checked by `config.check_plan`.
        current, unit_knobs: what it starts from, by unit. where: the setting, for messages.

    Raises: SpecError naming `where` or verl's setting that is in the way.
    """
    targets = plan_layouts(
        plan,
        units={
            name: jobconfig.engine_defaults(config, unit)
            for name, unit in capabilities.changeable(config).items()
        },
        current=current,
        backend=jobconfig.units(config)["actor"].strategy,
        where=where,
    )
    leave = tuple(plan.get(LEAVE, ()))
    changed = plan_knobs(
        plan, config=config, units=jobconfig.units(config), current=unit_knobs, where=where
    )
    after = {**unit_knobs, **changed}
    capabilities.check_targets(config, models, current, targets, where, leave, after)
    return targets, leave, changed


def check_ahead(config: Mapping[str, Any]) -> None:
    """`run` in the process that starts the job, before Ray: says no early, where it can be sure.

    The trainer runs in another process, perhaps on another host: what cannot be read here is left
    to `run` there.

    Raises: one of REFUSALS.
    """
    if any(_is_remote(_model_path(config, unit)) for unit in jobconfig.units(config).values()):
        NereusConfig.from_dict(config["nereus"])  # to know a remote model, it would be copied here
        return
    try:
        run(config)
    except REFUSALS:
        raise
    except Exception as error:
        print(f"nereus: could not be checked before the job starts: {error!r}", flush=True)


def check_reached(steps: Iterable[int], last: int, setting: str) -> None:
    """Raises: SpecError naming the first of the scheduled `steps` that comes after `last`, the step
    at which training ends because of `setting`."""
    late = sorted(step for step in steps if step > last)
    if late:
        raise SpecError(
            f"nereus.schedule.{late[0]}: would never be run, as training ends with step {last} "
            f"({setting}); remove it from nereus.schedule, or train longer"
        )


def _run_dir(nereus: NereusConfig, config: Mapping[str, Any]) -> Path:
    """Raises: SpecError if the job cannot have it."""
    folder = Path.cwd() / str(config["trainer"]["default_local_dir"]) / "nereus"
    if nereus.run_dir is not None:
        folder = Path.cwd() / nereus.run_dir
    return check_run_dir(folder)


def _model_path(config: Mapping[str, Any], unit: UnitConfig) -> str:
    return str(select(config, f"{unit.model_path}.path"))


def _is_remote(path: str) -> bool:
    return "://" in path


def _hf_config(config: Mapping[str, Any], unit: UnitConfig) -> Mapping[str, Any]:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    path = _model_path(config, unit)
    trust = bool(select(config, f"{unit.model_path}.trust_remote_code", False))
    loaded = AutoConfig.from_pretrained(copy_to_local(path), trust_remote_code=trust)
    fields: Mapping[str, Any] = loaded.to_dict()
    return fields
