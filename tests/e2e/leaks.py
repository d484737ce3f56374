"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: writes down, after every transition, what the job
holds of the machine. Nothing of the job changes.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

FILE = "NEREUS_TEST_HELD"
GONE_WITHIN_S = 10.0  # a process that was ended


def environment(file: Path) -> dict[str, str]:
    """The variables that load this module into a job; it writes to `file`."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {FILE: str(file), "VERL_USE_EXTERNAL_MODULES": __name__, "PYTHONPATH": path}


def read(file: Path) -> list[dict[str, Any]]:
    """One line after every transition: {"processes": of the job, by title, "files": of its run
    directory, "shared_memory": paths in /dev/shm that its driver and ranks have open, "driver",
    "rank 0": each {"pid", "descriptors", "threads", "process_groups", "rss_bytes"}}."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def of_process(worker: Any = None) -> dict[str, Any]:
    """What this process holds."""
    import psutil

    from nereus_plugins.transport.groups import live_group_count

    gc.collect()
    process = psutil.Process()
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        "pid": process.pid,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "process_groups": live_group_count(),
        "rss_bytes": process.memory_info().rss,
        "shared_memory": sorted({p for p in (*opened, *mapped) if p.startswith("/dev/shm/")}),
    }


def _descriptors() -> list[int]:
    out = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):  # not the one of the listing
            out.append(int(name))
    return out


def _processes() -> list[str]:
    """Titles of all processes that Ray started for this job, but for idle ones that it keeps."""
    import psutil

    raylet = psutil.Process(os.getppid())
    titles = []
    for process in raylet.children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        title = line[0].split(".")[0] if line and line[0].startswith("ray::") else ""
        if title and not title.startswith("ray::IDLE"):
            titles.append(title)
    return sorted(titles)


def _held(job: Any) -> None:
    from nereus_verl.driver import call_all

    ranks = call_all(job._ranks.workers, "held", of_process, timeout_s=60.0)
    driver = of_process()
    deadline = time.monotonic() + GONE_WITHIN_S
    while (processes := _processes()).count("ray::WorkerDict") > len(ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    run_dir = job.checked.run_dir
    shared = {path for one in (driver, *ranks) for path in one["shared_memory"]}
    line = {
        "processes": processes,
        "files": sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*")),
        "shared_memory": sorted(shared),
        "driver": driver,
        "rank 0": ranks[0],
    }
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


def _watch(module: ModuleType) -> None:
    transition = module.VerlJob.transition

    def watched(job: Any, *args: Any, **kwargs: Any) -> Any:
        record = transition(job, *args, **kwargs)
        _held(job)
        return record

    module.VerlJob.transition = watched  # type: ignore[attr-defined]


# Tests import this file too, beside others that need `VerlJob` as it is.
if os.environ.get(FILE):
    after_import("nereus_verl.job", _watch)
