"""A transition is prepared while its units are idle.

From the end of a step, once the rollout has the step's weights, until the batch of the next step is
there, no training rank is called: that is the *window*. The driver starts the preparation as it
begins and does not wait; the boundary is where it ends. There the driver asks for the result, and
runs what is due as ever. So whatever may have happened meanwhile (the plan was withdrawn, the state
was trained, state would have to be parked, a rank ran out of memory), a preparation that does not
serve is dropped, and the transition is prepared again, once, while everything waits.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

CONNECT_S = 10.0
# Of a device's memory, what generation may still come to take while a transition is prepared.
AWAKE_RESERVE = 0.1


@dataclass(frozen=True)
class Window:
    """What ranks are told of it: by an entry in their store, the driver says that it is over.

    share: of the time, that moving state may take meanwhile. address, port: of the store.
    """

    share: float
    address: str
    port: int
    key: str

    def watched(self) -> Callable[[], bool]:
        """On a rank: asks whether the window is over. It is, if the store cannot be reached."""
        try:
            store = self._connect()
        except (RuntimeError, dist.DistError):
            return lambda: True

        def over() -> bool:
            try:
                return bool(store.check([self.key]))
            except (RuntimeError, dist.DistError):
                return True

        return over

    def end(self) -> None:
        """In the driver: nothing runs beside the transition any more."""
        with suppress(RuntimeError, dist.DistError):  # then it goes on at its share
            self._connect().set(self.key, "over")

    def _connect(self) -> dist.TCPStore:
        limit = datetime.timedelta(seconds=CONNECT_S)
        return dist.TCPStore(self.address, self.port, is_master=False, timeout=limit)


def store_address() -> tuple[str, int]:
    """On a rank: where the store of the world is served."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def obstacle(name: str, engine: Any, on_accelerator: bool) -> str:
    """Why a unit cannot be moved while the rollout is awake, "" if it can."""
    if on_accelerator and (engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled):
        return (
            f"{name} is kept in host memory between stages, and must be loaded into device memory "
            "that the rollout holds"
        )
    return ""
