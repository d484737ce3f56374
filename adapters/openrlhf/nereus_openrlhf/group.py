"""OpenRLHF's groups of Ray actors, whose members can change. Importing this imports OpenRLHF.

Two processes hold a copy of a group: the launcher, which at the end of the run has the actor group
save the model; and the trainer's, which has all work done. The trainer's copy changes; the
launcher's asks who its members are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.openrlhf_private import SingleSeats
from nereus_openrlhf.stage_times import StageTimes

_Base: Any = openrlhf_private.group_class()


class _Members:
    """The members of one group, kept by a Ray actor that lives as long as the launcher's copy."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def set(self, handles: list[Any]) -> None:
        self._handles = handles

    def get(self) -> list[Any]:
        return self._handles


class ElasticGroup(_Base):
    """OpenRLHF's `RayActorGroup`; in the launcher's process and, pickled, in the trainer's.

    Args: single_seats: whether each rank gets a placement group of its own, so that Ray gets back
        the GPU of any that leaves.

    Attributes: stage_times, unit: in the trainer's process, who is told what the group was asked,
        and of which model it is.
    """

    def __init__(self, *args: Any, single_seats: bool = False, **kwargs: Any) -> None:
        self._asks = False
        self._single_seats = single_seats
        self.stage_times: StageTimes | None = None
        self.unit = ""
        super().__init__(*args, **kwargs)
        self._members = ray.remote(num_cpus=0)(_Members).remote()
        self.set_handles(self._handles)
        self._asks = True

    @property
    def _actor_handlers(self) -> list[Any]:
        if self._asks:
            self._handles = ray.get(self._members.get.remote())
        return self._handles

    @_actor_handlers.setter
    def _actor_handlers(self, handles: list[Any]) -> None:
        self._handles = handles

    def _initiate_actors(self, pg: Any, num_gpus_per_actor: float) -> None:
        if not self._single_seats:
            super()._initiate_actors(pg, num_gpus_per_actor)
            return
        ranks = self._num_nodes * self._num_gpus_per_node
        seats = pg if isinstance(pg, SingleSeats) else SingleSeats(ranks)
        self._handles = openrlhf_private.start_ranks(self, seats.groups, num_gpus_per_actor)

    def async_run_method(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._watched(method_name, super().async_run_method(method_name, *args, **kwargs))

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> Any:
        return self._watched(method_name, super().async_run_method_batch(method_name, **kwargs))

    def _watched(self, method: str, answers: Sequence[Any]) -> Sequence[Any]:
        if self.stage_times is not None:
            self.stage_times.watch(self.unit, method, answers)
        return answers

    def set_handles(self, handles: list[Any]) -> None:
        """Have these members from now on, in every process."""
        self._handles = list(handles)
        ray.get(self._members.set.remote(self._handles))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_asks": False, "stage_times": None}  # of the trainer's copy
