"""A job by its name in Ray: where its run directory is.

A live job keeps a small actor in its Ray namespace, which says where the job can be commanded, and
ends with it. It holds no token: commands go as ever to the endpoint that the run directory names.
Ray is imported where it is needed only.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from nereus_plugins.control.client import NoLiveJob

PREFIX = "ray:"  # of a job's name on the command line
ACTOR_PREFIX = "nereus-job-"
CONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 15.0


class _Sign:
    """What a job says of itself."""

    def __init__(self, says: dict[str, str]) -> None:
        self._says = says

    def read(self) -> dict[str, str]:
        return self._says


def publish(run_dir: Path, run_id: str, name: str) -> Any:
    """Have the job found by `name`. To be called in the job's driver; does not wait.

    Returns: what keeps it so, while it is held; None in a process that is not connected to Ray.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        return None
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    says = {
        "run_dir": str(run_dir.absolute()),
        "run_id": run_id,
        "name": name,
        "host": socket.gethostname(),
    }
    actor: Any = ray.remote(_Sign)
    return actor.options(
        name=ACTOR_PREFIX + run_id, num_cpus=0, scheduling_strategy=here, max_concurrency=1
    ).remote(says)


def find(name: str) -> Path:
    """The run directory of the live job `name`, in the cluster that RAY_ADDRESS names, or in the
    one that runs on this host.

    Args: name: its Ray namespace, the name that it gave itself (verl: trainer.experiment_name), or
        the beginning of its run id; "": the only one in the cluster.

    Raises: NoLiveJob: there is none, or more than one, or Ray cannot be reached.
    """
    jobs = _jobs()
    found = [job for job in jobs if not name or _is_called(job, name)]
    if len(found) != 1:
        listed = "".join(
            f"\n  {job['name']} in namespace {job['namespace']}, run {job['run_id'][:8]}: "
            f"{job['run_dir']} on {job['host']}"
            for job in found or jobs
        )
        wanted = f" called {name!r}" if name else ""
        which = "are more than one" if found else "is none"
        there = "; there are:" if listed else ""
        raise NoLiveJob(f"of live jobs{wanted} in this Ray cluster there {which}{there}{listed}")
    (job,) = found
    run_dir = Path(job["run_dir"])
    if not run_dir.is_dir():
        raise NoLiveJob(
            f"{run_dir}, the job's run directory, is not on this host; its driver runs on host "
            f"{job['host']}: run this command there"
        )
    return run_dir


def _is_called(job: dict[str, str], name: str) -> bool:
    return name in (job["namespace"], job["name"]) or job["run_id"].startswith(name)


def reach(address: str) -> bool:
    """Whether an address is host:port; somebody listens there then.

    Raises: OSError: nobody does. OverflowError: there is no such port.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return False
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN_S).close()
    return True


def _check_address(address: str) -> None:
    """Raises: NoLiveJob where Ray would wait for minutes for the cluster at `address`, or start
    one."""
    if address == "local":
        raise NoLiveJob("RAY_ADDRESS=local starts a new Ray cluster; set it to that of the job")
    try:
        reach(address)  # of another form: for Ray to say
    except (OSError, OverflowError) as error:
        raise NoLiveJob(
            f"no Ray cluster can be reached at {address} (RAY_ADDRESS): {error}"
        ) from None


def _jobs() -> list[dict[str, str]]:
    """What the live jobs of the cluster say, with their namespaces."""
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise NoLiveJob("finding a job by its name in Ray takes Ray in this environment") from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    _check_address(address)
    joined = not ray.is_initialized()
    try:
        if joined:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        jobs = []
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith(ACTOR_PREFIX):
                try:
                    handle: Any = ray.get_actor(actor["name"], actor["namespace"])
                    says = ray.get(handle.read.remote(), timeout=ANSWER_WITHIN_S)
                except (ValueError, RayError):  # it has just ended
                    continue
                jobs.append({**says, "namespace": actor["namespace"]})
        return jobs
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        why = str(error).strip().partition("\n")[0]
        raise NoLiveJob(
            f"no Ray cluster can be reached at {address} (RAY_ADDRESS): {why}"
        ) from None
    finally:
        if joined and ray.is_initialized():
            ray.shutdown()
