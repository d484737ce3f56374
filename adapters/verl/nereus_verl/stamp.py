"""The layout that a checkpoint was saved in, written beside it and checked before it is loaded.

verl's checkpoints can only be loaded in the layout they were saved in, and after a transition that
is not the one the job's command line says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_plugins.spec import Layout, SpecError
from nereus_plugins.spec.record import load_json, read_text, require, require_int, shown
from nereus_plugins.trace import files
from nereus_verl import jobconfig
from nereus_verl.knobs import UnitKnobs, knob_settings
from nereus_verl.rollout import RolloutPlan

FILE = "nereus_layout.json"
SCHEMA_VERSION = 1


class LayoutMismatch(RuntimeError):
    """A checkpoint is to be loaded in another layout than it was saved in."""


def write(
    folder: Path,
    layouts: Mapping[str, Layout],
    unit_knobs: Mapping[str, UnitKnobs],
    config: Mapping[str, Any],
    epoch: int,
    rollout: RolloutPlan,
) -> Path:
    """Stamp the checkpoint in `folder` (verl's global_step_N).

    Args:
        layouts: by unit, as saved. unit_knobs: by unit, in force; a checkpoint can be loaded
            with others. config: verl's. epoch: of the plan in force. rollout: in force; as with
            knobs, any will do.
    """
    units = jobconfig.units(config)
    stamp = {
        "schema_version": SCHEMA_VERSION,
        "world_size": next(iter(layouts.values())).world_size,
        "epoch": epoch,
        "layouts": {name: layout.to_dict() for name, layout in layouts.items()},
        "settings": {
            path: value
            for name, layout in layouts.items()
            for path, value in jobconfig.layout_settings(units[name], layout).items()
        }
        | {
            path: value
            for name, one in unit_knobs.items()
            for path, value in knob_settings(config, units[name], one).items()
        }
        | rollout.settings(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    files.replace(path, (json.dumps(stamp, indent=2), "\n"))
    return path


def check(folder: Path, layouts: Mapping[str, Layout], config: Mapping[str, Any]) -> None:
    """Check that the checkpoint in `folder` was saved in `layouts`; without a stamp, it passes.

    Args:
        layouts: by unit, those the job starts in.

    Raises: LayoutMismatch naming the settings to start with, or what is wrong with the stamp.
    """
    path = folder / FILE
    if not path.exists():
        return
    try:
        ranks, saved = _read(path)
    except (OSError, SpecError) as error:
        raise LayoutMismatch(
            f"{error}. This file says which layout the checkpoint was saved in: resume from "
            "another one (trainer.resume_from_path); or, if this job starts in that layout, remove "
            "the file"
        ) from None
    world = jobconfig.world_size(config)
    if ranks != world:
        raise LayoutMismatch(
            f"{folder} was saved by {ranks} ranks, this job has {world}; set "
            f"trainer.nnodes and trainer.n_gpus_per_node to start with {ranks}"
        )
    differ = [name for name in layouts if name in saved and saved[name] != layouts[name]]
    # The reference is not in a checkpoint; it may start in any layout.
    differ = [name for name in differ if name != "ref"]
    if not differ:
        return
    was = ", ".join(f"{name} {saved[name]}" for name in differ)
    now = ", ".join(f"{name} {layouts[name]}" for name in differ)
    units = jobconfig.units(config)
    settings = " ".join(
        f"{key}={value}"
        for name in differ
        for key, value in jobconfig.layout_settings(units[name], saved[name]).items()
    )
    raise LayoutMismatch(
        f"{folder} was saved in another layout than this job starts in: saved {was}; now {now}. "
        f"Start the job with: {settings}"
    )


def _read(path: Path) -> tuple[int, dict[str, Layout]]:
    """(ranks, layouts by unit) of a stamp. Raises: SpecError naming file and field; OSError."""
    stamp = load_json(read_text(path), str(path))
    require(isinstance(stamp, dict), f"{path}: expected an object, got {shown(stamp)}")
    version, layouts = stamp.get("schema_version"), stamp.get("layouts")
    require(
        version == SCHEMA_VERSION,
        f"{path}: schema version {shown(version)} is not known to this version (it reads "
        f"{SCHEMA_VERSION})",
    )
    require_int(str(path), "world_size", stamp.get("world_size"))
    require(
        isinstance(layouts, dict),
        f"{path}: layouts must map units to layouts, got {shown(layouts)}",
    )
    return stamp["world_size"], {
        name: Layout.from_dict(fields, where=f"{path}: layouts.{name}")
        for name, fields in layouts.items()
    }


def resume_folder(config: Mapping[str, Any]) -> Path | None:
    """The checkpoint that verl will resume from, by its own rules; None: from scratch."""
    trainer = config["trainer"]
    mode = trainer.get("resume_mode", "auto")
    if mode == "resume_path" and trainer.get("resume_from_path"):
        return Path.cwd() / str(trainer["resume_from_path"])
    return latest_checkpoint(config) if mode == "auto" else None


def latest_checkpoint(config: Mapping[str, Any]) -> Path | None:
    """The newest complete checkpoint in trainer.default_local_dir, or None."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    latest = find_latest_ckpt_path(str(Path.cwd() / str(config["trainer"]["default_local_dir"])))
    return None if latest is None else Path(latest)


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder named global_step_N. Raises: SpecError for another name."""
    step = folder.name.rpartition("_")[2]
    if not step.isdecimal():
        raise SpecError(
            f"trainer.resume_from_path: {folder} is no checkpoint; give a folder global_step_N"
        )
    return int(step)
