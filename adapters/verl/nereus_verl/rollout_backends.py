"""What Nereus has to know of each of verl's rollouts, by `actor_rollout_ref.rollout.name`.

A rollout that is not here stays as it was launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nereus_verl.jobconfig import select

if TYPE_CHECKING:
    import torch


class RolloutBackend(Protocol):
    """One of verl's rollouts.

    Attributes:
        name: verl's.
        takes_memory_fraction: whether servers are launched with `gpu_memory_utilization`.
        counts_local_ranks: whether a rank's side of it asks for the rank's place on its node, which
            verl does not know where every rank has a placement group of its own.
    """

    name: str
    takes_memory_fraction: bool
    counts_local_ranks: bool

    def install(self) -> None:
        """In the driver, before verl launches a server."""
        ...

    def expect(self, replica: Any, launched: bool, timeout_s: float) -> None:
        """In the driver, before a sync of weights to verl's `replica`, which may be the first one
        since it was launched."""
        ...

    def end(self, replicas: Sequence[Any], timeout_s: float) -> None:
        """In the driver, before the servers of these replicas are killed: have them give back what
        a killed process does not. One that does not answer is left to be killed."""
        ...

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
    counts_local_ranks = False

    def install(self) -> None:
        return

    def expect(self, replica: Any, launched: bool, timeout_s: float) -> None:
        return

    def end(self, replicas: Sequence[Any], timeout_s: float) -> None:
        return

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


class VLLMBackend:
    """verl's vLLM rollout. Each worker of a server takes the full weights as they are streamed, and
    keeps its part of them in vLLM's own form: what is compared is what arrived at the worker, and
    after a launch that no parameter was left unwritten."""

    name = "vllm"
    takes_memory_fraction = True
    counts_local_ranks = True

    def install(self) -> None:
        from nereus_verl import vllm_private

        vllm_private.install()

    def expect(self, replica: Any, launched: bool, timeout_s: float) -> None:
        self._ask(replica, timeout_s, "nereus_watch", launched)

    def end(self, replicas: Sequence[Any], timeout_s: float) -> None:
        import ray

        asked = [server.nereus_end.remote() for replica in replicas for server in replica.servers]
        ended, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        for one in ended:
            with suppress(ray.exceptions.RayError):  # a dead server, or an engine that never was
                ray.get(one)

    def as_held(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def held(self, replica: Any, timeout_s: float) -> list[Mapping[str, str]]:
        answers = self._ask(replica, timeout_s, "nereus_watched")
        for worker, answer in enumerate(answers):
            if answer["unwritten"]:
                raise RuntimeError(
                    f"vLLM's worker {worker} of replica {replica.replica_rank} has parameters that "
                    f"no synced weight was written to: {', '.join(answer['unwritten'][:3])}"
                )
        return [answer["received"] for answer in answers]

    def launch_parts(self, replica: Any, timeout_s: float) -> Mapping[str, float]:
        import ray

        server = replica.servers[0]
        parts: Mapping[str, float] = ray.get(
            server.nereus_launch_seconds.remote(), timeout=timeout_s
        )
        return parts

    def _ask(self, replica: Any, timeout_s: float, method: str, *args: Any) -> list[Any]:
        import ray

        # The server of the first node has the engine, which reaches the workers of all nodes.
        asked = replica.servers[0].nereus_ask.remote(method, *args)
        answers: list[Any] = ray.get(asked, timeout=timeout_s)
        return answers


BACKENDS: Mapping[str, RolloutBackend] = {
    backend.name: backend for backend in (HFBackend(), VLLMBackend())
}


def backend_of(config: Mapping[str, Any]) -> RolloutBackend | None:
    """Of a job with verl's `config`; None where its rollout stays as it is."""
    rollout = "actor_rollout_ref.rollout"
    backend = BACKENDS.get(str(select(config, f"{rollout}.name")))
    fixed = (
        bool(select(config, f"{rollout}.disaggregation.enabled"))
        or int(select(config, f"{rollout}.data_parallel_size", 1)) > 1
        or select(config, f"{rollout}.quantization") is not None
    )
    return None if fixed and isinstance(backend, VLLMBackend) else backend
