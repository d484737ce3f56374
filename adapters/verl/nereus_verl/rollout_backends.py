"""What Nereus has to know of each of verl's rollouts, by `actor_rollout_ref.rollout.name`.

A rollout that is not here stays as it was launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from nereus_verl.jobconfig import select


class RolloutBackend(Protocol):
    """One of verl's rollouts.

    Attributes:
        name: verl's.
        takes_memory_fraction: whether servers are launched with `gpu_memory_utilization`.
    """

    name: str
    takes_memory_fraction: bool

    def as_held(self, weight: torch.Tensor) -> torch.Tensor:
        """In a training process: a full weight as the servers hold it once it is synced. What
        becomes of it must be exact, or the same bits on both sides."""
        ...

    def held(self, replica: Any, timeout_s: float) -> list[Mapping[str, str]]:
        """In the driver: what the servers of verl's `replica` hold, as fingerprints by the names
        that training streams (`nereus_plugins.transport.fingerprint`); one mapping for each place
        that holds all weights."""
        ...

    def launch_parts(self, replica: Any, timeout_s: float) -> Mapping[str, float]:
        """In the driver: seconds of the launch of `replica`'s servers by part ("load", "compile",
        "capture", "profile"), as far as they tell; the longest of its servers."""
        ...


class HFBackend:
    """The CPU rollout of `nereus_cpu`: one server holds the full model in fp32."""

    name = "hf_cpu"
    takes_memory_fraction = False

    def as_held(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def held(self, replica: Any, timeout_s: float) -> list[Mapping[str, str]]:
        import ray

        asked = [server.fingerprints.remote() for server in replica.servers]
        found: list[Mapping[str, str]] = ray.get(asked, timeout=timeout_s)
        return found

    def launch_parts(self, replica: Any, timeout_s: float) -> Mapping[str, float]:
        import ray

        (server,) = replica.servers
        parts: Mapping[str, float] = ray.get(server.launch_seconds.remote(), timeout=timeout_s)
        return parts


BACKENDS: Mapping[str, RolloutBackend] = {backend.name: backend for backend in (HFBackend(),)}


def backend_of(config: Mapping[str, Any]) -> RolloutBackend | None:
    """Of a job with verl's `config`; None where its rollout stays as it is."""
    return BACKENDS.get(str(select(config, "actor_rollout_ref.rollout.name")))
