"""vLLM's engines: how many there are. They hold nothing that training needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from nereus_openrlhf import openrlhf_private
from nereus_plugins.control.workers import WorkersFailed, brief, collect


class EnginesLost(RuntimeError):
    """No set of engines is left that could be given weights: the job must end."""


class Engines:
    """
    Args:
        trainer: OpenRLHF's, in whose process this is.
        groups: placement groups of the first engines, where each has its own; else Ray does not get
            back what they leave.
    """

    def __init__(self, trainer: Any, groups: Sequence[Any] = ()) -> None:
        self._trainer = trainer
        first = trainer.vllm_engines or ()
        self._groups: list[Any] = list(groups) or [None] * len(first)

    def __len__(self) -> int:
        return len(self._trainer.vllm_engines)

    def change_to(
        self, count: int, actors: Sequence[Any], timeout_s: float, claim_timeout_s: float
    ) -> str:
        """Have `count` engines with the actor's weights: further ones are started, the last end.

        Args:
            actors: Ray handles of the actor's ranks. timeout_s: for forming the group.
            claim_timeout_s: how long Ray may take to have the GPUs of one.

        Returns: why it stayed as it was, "" if it did not.

        Raises: EnginesLost.
        """
        old = list(self._trainer.vllm_engines)
        added: list[Any] = []
        groups: list[Any] = []
        try:
            if count > len(old):
                more = count - len(old)
                openrlhf_private.start_engines(
                    self._trainer.args, more, len(old), added, groups, claim_timeout_s
                )
            self._use([*old, *added][:count], actors, timeout_s)
        except (ray.exceptions.RayError, WorkersFailed, RuntimeError, ValueError) as error:
            _end(added, groups)
            try:
                self._use(old, actors, timeout_s)
            except (ray.exceptions.RayError, WorkersFailed) as lost:
                raise EnginesLost(
                    f"vLLM's engines could not be changed ({brief(error)}), nor be as before: "
                    f"{brief(lost)}"
                ) from error
            return f"vLLM's engines stay as they were, {len(old)}: {brief(error)}"
        _end(old[count:], self._groups[count:])
        self._groups = [*self._groups, *groups][:count]
        return ""

    def _use(self, engines: Sequence[Any], actors: Sequence[Any], timeout_s: float) -> None:
        submitted = {
            openrlhf_private.call_worker(
                actor, openrlhf_private.sync_with, list(engines), len(engines)
            ): rank
            for rank, actor in enumerate(actors)
        }
        collect(submitted, "rollout", timeout_s=timeout_s)
        openrlhf_private.set_engines(self._trainer, engines)
        self._trainer.broadcast_to_vllm()


def _end(engines: Sequence[Any], groups: Sequence[Any]) -> None:
    """End engines, and return their placement groups to Ray, where they have some."""
    for engine in engines:
        ray.kill(engine)
    for group in groups:
        if group is not None:
            ray.util.remove_placement_group(group)
