"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: writes down, before and after every transition,
what the units and the rollout's servers hold, and which actors and placement groups there are.

Nothing of the job changes: the driver's `VerlJob.transition` is called as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

FILE = "NEREUS_TEST_OBSERVED"
ROLLOUT_FAILS = "NEREUS_TEST_ROLLOUT_FAILS"  # set: no rollout server can be launched again
SERVER_FAULTS = "NEREUS_TEST_SERVER_FAULTS"  # see tests.e2e.broken_server
UNEXPECTED = "NEREUS_TEST_UNEXPECTED"  # set: the job does not know at its start that ranks change
# A step: the job is paused while its transition is being prepared.
PAUSES_MEANWHILE = "NEREUS_TEST_PAUSES_MEANWHILE"
# A step: units train while its transition is being prepared.
TRAINS_MEANWHILE = "NEREUS_TEST_TRAINS_MEANWHILE"

# Set: a controller that dies is started again at once, however often.
RESTARTS_AT_ONCE = "NEREUS_TEST_RESTARTS_AT_ONCE"


def environment(file: Path) -> dict[str, str]:
    """The variables that load this module into a job; it writes to `file`."""
    return {FILE: str(file), **loaded()}


def loaded() -> dict[str, str]:
    """The variables that load this module into a job."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {"VERL_USE_EXTERNAL_MODULES": __name__, "PYTHONPATH": path}


def read(file: Path) -> list[dict[str, Any]]:
    """One observation before and one after every transition: {"units", "servers", "actors",
    "groups", "bundles"}."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def held(worker: Any) -> dict[str, Any]:
    """In a worker process: every unit's `parts`."""
    from nereus_verl.worker import STATE

    return parts(getattr(worker, STATE).units)


def parts(units: dict[str, Any]) -> dict[str, Any]:
    """This rank's shards of every unit, as (name, offset, global shape, content)."""
    out = {}
    for name, unit in units.items():
        described = unit.described()
        shards = [(s.name, s.box.offset, s.global_shape, s.view.clone()) for s in described.shards]
        out[name] = {"shards": shards, "scalars": described.scalars}
    return out


def digests(parts: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By unit and tensor, the digest of the whole tensor, put together from all ranks' parts."""
    import torch

    out: dict[str, dict[str, str]] = {}
    for unit in parts[0]:
        whole: dict[str, Any] = {}
        seen: dict[str, Any] = {}
        for part in parts:
            for name, offset, shape, content in part[unit]["shards"]:
                tensor = whole.setdefault(name, torch.zeros(shape, dtype=content.dtype))
                mask = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
                at = tuple(slice(o, o + s) for o, s in zip(offset, content.shape, strict=True))
                assert not mask[at].any() or tensor[at].equal(content), f"replicas of {name} differ"
                tensor[at], mask[at] = content, True
        assert all(mask.all() for mask in seen.values())
        out[unit] = {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in sorted(whole.items())
        }
        scalars = json.dumps(_merged([part[unit]["scalars"] for part in parts]), sort_keys=True)
        out[unit]["scalars"] = hashlib.sha256(scalars.encode()).hexdigest()
    return out


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' scalars but generators, which belong to places of a layout."""
    from nereus_plugins.emu.described.base import merge_scalars
    from nereus_plugins.gtg.scalars import RNG

    return {key: value for key, value in merge_scalars(parts).items() if key != RNG}


def served(server: Any) -> dict[str, str]:
    """In a server of the CPU rollout: digests of all weights that it generates with."""
    import torch

    return {
        name: hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in server._model.state_dict().items()
    }


def _servers() -> dict[str, dict[str, str]]:
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(True)]
    servers = {name: ray.get_actor(name) for name in names if "hf_server" in name}
    return {name: ray.get(one.__ray_call__.remote(served)) for name, one in servers.items()}


def _observe(job: Any) -> None:
    import ray
    from nereus_verl.driver import call_all

    parts = call_all(job._ranks.workers, "observe", held, timeout_s=60.0)
    table = ray.util.placement_group_table().values()
    line = {
        "units": digests(parts),
        "servers": _servers(),
        "actors": sorted(actor["name"] for actor in ray.util.list_named_actors(True)),
        "groups": sum(group["state"] == "CREATED" for group in table),
        "bundles": ray.available_resources().get("GPU", 0.0),
    }
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


def _watch(module: ModuleType) -> None:
    transition = module.VerlJob.transition

    def watched(job: Any, *args: Any) -> Any:
        _observe(job)
        record = transition(job, *args)
        _observe(job)
        return record

    module.VerlJob.transition = watched  # type: ignore[attr-defined]


def _train_once(worker: Any) -> None:
    """In a worker process: an optimizer step of every unit that has an optimizer (FSDP2)."""
    import torch
    from nereus_verl.worker import STATE

    for engine in getattr(worker, STATE).engines.values():
        if engine.optimizer is not None:
            for parameter in engine.module.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            engine.optimizer_step()


def _interfere(module: ModuleType) -> None:
    begin_window = module.VerlJob.begin_window

    def begin_and_interfere(job: Any, step: int) -> None:
        from nereus_verl.driver import submit

        begin_window(job, step)
        if str(step) == os.environ.get(TRAINS_MEANWHILE):
            submit(job._ranks.workers, _train_once)
        if str(step) == os.environ.get(PAUSES_MEANWHILE):
            job._driver.inbox.pause(job.epoch())

    module.VerlJob.begin_window = begin_and_interfere  # type: ignore[attr-defined]


def _expect_no_change(module: ModuleType) -> None:
    """As in a job whose plans come while it runs: it starts in verl's own placement groups."""
    module.Preflight.ranks_change = lambda checked: False  # type: ignore[attr-defined]


def _restart_at_once(module: ModuleType) -> None:
    module.BACK_OFF_S = 0.0  # type: ignore[attr-defined]
    module.RESTARTS = 1000  # type: ignore[attr-defined]


def _launch_nothing(module: ModuleType) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("none left for a server")

    module.launch_replicas = fail  # type: ignore[attr-defined]


def _break_servers(module: ModuleType) -> None:
    """The driver launches servers that fail as the file says."""
    if not hasattr(module, "HFServer"):  # in a server, which is importing it just now
        return
    from tests.e2e.broken_server import BrokenServer

    module.HFServer = BrokenServer  # type: ignore[attr-defined]


# Tests import this file too, beside others that need `VerlJob` as it is.
if os.environ.get(FILE):
    after_import("nereus_verl.job", _watch)
if os.environ.get(TRAINS_MEANWHILE) or os.environ.get(PAUSES_MEANWHILE):
    after_import("nereus_verl.job", _interfere)
if os.environ.get(ROLLOUT_FAILS):
    after_import("nereus_verl.verl_private", _launch_nothing)
if os.environ.get(SERVER_FAULTS):
    after_import("nereus_cpu.rollout", _break_servers)
if os.environ.get(RESTARTS_AT_ONCE):
    after_import("nereus_plugins.control.beside", _restart_at_once)
if os.environ.get(UNEXPECTED):
    after_import("nereus_verl.preflight", _expect_no_change)
