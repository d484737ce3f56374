"""Every check that needs no process: a job that cannot be adapted ends before it takes a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_openrlhf import capabilities, openrlhf_private
from nereus_openrlhf.config import ROLLOUT, NereusConfig, by_unit
from nereus_plugins.control.driver import check_run_dir
from nereus_plugins.spec import Layout, ModelSpec, SpecError

# What `run` raises where the job, as it is configured, cannot run.
REFUSALS = (SpecError, capabilities.Refused, openrlhf_private.UnsupportedOpenRlhf)


@dataclass(frozen=True)
class Preflight:
    """What is known of a job before it starts.

    layouts: by model, at the start. targets: step -> model -> layout; replicas: step -> number of
    vLLM engines, for the scheduled steps.
    """

    nereus: NereusConfig
    models: Mapping[str, ModelSpec]
    layouts: Mapping[str, Layout]
    targets: Mapping[int, Mapping[str, Layout]]
    replicas: Mapping[int, int]
    run_dir: Path


def run(nereus: NereusConfig, args: Any) -> Preflight:
    """Check everything that can be checked before processes exist.

    Args: args: as OpenRLHF's own parser and checks leave them.

    Raises: one of REFUSALS.
    """
    openrlhf_private.check_version()
    refused = capabilities.refused_by(args)
    if refused:
        raise capabilities.Refused(
            "this job cannot change its layout while it runs (leave --nereus.enable out to train "
            "with a fixed one):\n  - " + "\n  - ".join(refused)
        )
    layouts = {unit: capabilities.start_layout(args, unit) for unit in capabilities.units(args)}
    engines = args.vllm.num_engines
    if not engines:
        raise SpecError("--vllm.num_engines: OpenRLHF 0.11 generates with vLLM: give at least 1")
    capabilities.check_layouts(args, layouts, "the layout at the start")
    targets: dict[int, Mapping[str, Layout]] = {}
    replicas: dict[int, int] = {}
    current = dict(layouts)
    for step, plan in nereus.schedule.items():
        where = f"nereus.schedule.{step}"
        targets[step], replicas[step] = plan_targets(args, plan, current, engines, where)
        current.update(targets[step])
        engines = replicas[step]
    models = {
        unit: ModelSpec.from_hf_config(hf_config(args, unit), value_head=unit in _SCALAR)
        for unit in layouts
    }
    return Preflight(nereus, models, layouts, targets, replicas, _run_dir(nereus, args))


_SCALAR = ("critic", "reward")


def plan_targets(
    args: Any, plan: Mapping[str, Any], current: Mapping[str, Layout], engines: int, where: str
) -> tuple[dict[str, Layout], int]:
    """(target layouts by model, number of vLLM engines) of a checked plan.

    Args: current, engines: what it starts from. where: the setting, for messages.

    Raises: SpecError naming `where` and the flag that is in the way.
    """
    targets: dict[str, Layout] = {}
    for unit, fields in by_unit(plan, tuple(current)).items():
        if unit not in current:
            raise SpecError(
                f"{where}.{unit}: this job has no {unit}; its models are {', '.join(current)}"
            )
        targets[unit] = dataclasses.replace(current[unit], **fields)
    after = {**current, **targets}
    replicas = int(plan.get(ROLLOUT, {}).get("replicas", engines))
    capabilities.check_layouts(args, after, where)
    capabilities.check_rollout(args, after["actor"], replicas, where)
    return targets, replicas


def _run_dir(nereus: NereusConfig, args: Any) -> Path:
    """Raises: SpecError if the job cannot have it."""
    return check_run_dir(Path.cwd() / (nereus.run_dir or Path(args.ckpt.path) / "nereus"))


def hf_config(args: Any, unit: str) -> Mapping[str, Any]:
    """What the file with a model says of it. Raises: SpecError naming the flag."""
    from transformers import PretrainedConfig

    path = getattr(args, "actor" if unit == "ref" else unit).model_name_or_path
    flag = f"--{'actor' if unit == 'ref' else unit}.model_name_or_path"
    try:
        # The file alone: code that comes with a model is OpenRLHF's to run.
        fields: Mapping[str, Any] = PretrainedConfig.get_config_dict(path)[0]
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag} {path}: its configuration cannot be read: {error}") from None
    return fields
