"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: writes down what the units hold when a snapshot
of them is taken and after one was restored, and the processes of the ranks.

Nothing of the job changes: the driver's `JobSnapshots` are called as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

from tests.e2e import observe

FILE = "NEREUS_TEST_SNAPSHOTS"


def environment(file: Path) -> dict[str, str]:
    """The variables that load this module into a job; it appends to `file`."""
    path = observe.environment(file)["PYTHONPATH"]
    return {FILE: str(file), "VERL_USE_EXTERNAL_MODULES": __name__, "PYTHONPATH": path}


def read(file: Path) -> list[dict[str, Any]]:
    """In order: {"what": "taken" or "restored", "step", "pids", "units": digests}."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def _pid(worker: Any) -> int:
    return os.getpid()


def _write(snapshots: Any, what: str, step: int) -> None:
    from nereus_verl.driver import call_all

    workers = snapshots._ranks.workers
    units = observe.digests(call_all(workers, "observe", observe.held, timeout_s=60.0))
    units.pop("ref", None)
    pids = call_all(workers, "observe", _pid, timeout_s=60.0)
    line = {"what": what, "step": step, "pids": pids, "units": units}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


def _watch(module: ModuleType) -> None:
    take, restore = module.JobSnapshots.after_step, module.JobSnapshots.restore

    def taking(snapshots: Any, step: int, *args: Any) -> None:
        if step % snapshots._settings.every == 0:
            _write(snapshots, "taken", step)
        take(snapshots, step, *args)

    def restoring(snapshots: Any, found: Any) -> None:
        restore(snapshots, found)
        _write(snapshots, "restored", found.step)

    module.JobSnapshots.after_step = taking  # type: ignore[attr-defined]
    module.JobSnapshots.restore = restoring  # type: ignore[attr-defined]


if FILE in os.environ:
    after_import("nereus_verl.snapshots", _watch)
