"""The rollout's side in one worker process: made anew, and watched while weights are synced to it.

Called by the driver through `verl_private.call_worker`, like the functions of `nereus_verl.worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nereus_plugins.control.workers import brief
from nereus_plugins.transport import fingerprint
from nereus_verl import verl_private
from nereus_verl.rollout_backends import BACKENDS, RolloutBackend

if TYPE_CHECKING:
    from nereus_verl.worker import RankState

_WATCH = "_nereus_watch"


def drop(state: RankState, worker: Any, world: dist.ProcessGroup | None = None) -> None:
    """Drop this rank's side of the rollout and its process groups. Waits for no peer.

    Args: world: that the rollout was made in, where it is no longer the default.
    """
    for role in verl_private.rollout_roles(worker):
        mesh = verl_private.rollout_mesh(role)
        for group in mesh.get_all_groups() if mesh is not None else []:
            if group is not world:
                state.rollout_groups.add(group)
        verl_private.forget_rollout(role)
    state.rollout_groups.destroy()


def rebuild(worker: Any, settings: Mapping[str, Any]) -> str:
    """Make this rank's side of the rollout anew, for servers that are launched next. Collective.

    Args:
        settings: verl's, dotted path to value (`RolloutPlan.settings`).

    Returns: why it could not be made, "" if it was.
    """
    from nereus_verl.worker import STATE

    state: RankState = getattr(worker, STATE)
    try:
        drop(state, worker)
        with state.rollout_groups.collect(state.options.timeout_s):
            for role in verl_private.rollout_roles(worker):
                verl_private.set_rollout_config(role, settings)
                verl_private.build_rollout(role)
    except Exception as error:
        return brief(error)
    return ""


class _Watch:
    """Over one sync of weights: what was streamed, and what failed.

    A failure is kept instead of raised, so that this rank still walks all weights and meets its
    peers in verl's barrier: they can sync again, to other servers, in the same process groups.
    """

    def __init__(self, role: Any, backend: RolloutBackend | None, timeout_s: float) -> None:
        self._role = role
        self._backend = backend
        self._timeout_s = timeout_s
        self.sent: dict[str, str] = {}
        self.failed = ""
        rollout = role.rollout
        resume, update = rollout.resume, rollout.update_weights

        async def watched_resume(*args: Any, **kwargs: Any) -> None:
            await self._kept(lambda: resume(*args, **kwargs))

        async def watched_update(weights: Any, *args: Any, **kwargs: Any) -> None:
            streamed = self._streamed(weights)
            await self._kept(lambda: update(streamed, *args, **kwargs))
            for _ in streamed:  # what is left after a failure: producing a weight is collective
                pass

        rollout.resume, rollout.update_weights = watched_resume, watched_update
        verl_private.limit_weight_sockets(timeout_s)

    def end(self) -> None:
        verl_private.limit_weight_sockets(None)
        for name in ("resume", "update_weights"):
            vars(self._role.rollout).pop(name, None)

    async def _kept(self, call: Callable[[], Awaitable[Any]]) -> None:
        if self.failed:
            return
        try:
            await asyncio.wait_for(call(), self._timeout_s)
        except asyncio.TimeoutError:
            self._fail(f"no answer of a server within {self._timeout_s:g} s (nereus.timeout_s)")
        except Exception as error:
            self._fail(brief(error))

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why

    def _streamed(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            if self._backend is not None and not self.failed:
                try:
                    self.sent[name] = fingerprint.of_tensor(self._backend.as_held(full))
                except Exception as error:
                    self._fail(f"no fingerprint of {name}: {brief(error)}")
            yield name, full


def watch(worker: Any, name: str) -> None:
    """Watch the next sync of weights. Local.

    Args: name: of verl's rollout; rank 0 takes the fingerprints of what is streamed to it.
    """
    from nereus_verl.worker import STATE

    state: RankState = getattr(worker, STATE)
    backend = BACKENDS[name] if state.transition.rank == 0 else None
    roles = verl_private.rollout_roles(worker)
    setattr(worker, _WATCH, [_Watch(role, backend, state.options.timeout_s) for role in roles])


def watched(worker: Any) -> dict[str, Any]:
    """End watching. Returns: {"failed": reason or "", "sent": fingerprints by name (rank 0)}."""
    watches: list[_Watch] = getattr(worker, _WATCH)
    delattr(worker, _WATCH)
    sent: dict[str, str] = {}
    for one in watches:
        one.end()
        sent |= one.sent
    return {"failed": next((one.failed for one in watches if one.failed), ""), "sent": sent}
