"""OpenRLHF's groups of Ray actors, whose members can change. Importing this imports OpenRLHF.

Two processes hold a copy of a group: the launcher, which at the end of the run has the actor group
save the model; and the trainer's, which has all work done. The trainer's copy changes; the
launcher's asks who its members are.
"""

from __future__ import annotations

from typing import Any

import ray

from nereus_openrlhf import openrlhf_private

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
    """OpenRLHF's `RayActorGroup`; in the launcher's process and, pickled, in the trainer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asks = False
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

    def set_handles(self, handles: list[Any]) -> None:
        """Have these members from now on, in every process."""
        self._handles = list(handles)
        ray.get(self._members.set.remote(self._handles))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_asks": False}  # of the trainer's copy
