"""A server of the CPU rollout that fails, in the process that it really runs in.

The file that NEREUS_TEST_SERVER_FAULTS names has a fault a line. Each server of replica 1 takes one
as it is launched: "launch" (it does not start), "sync" (it takes no weights), "hang", "die" (while
it takes them), "flip" (one bit of them), "" (none).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
import torch
from nereus_cpu.rollout import HFServer, server_name

from tests.e2e.observe import SERVER_FAULTS


class BrokenServer(HFServer):
    def __init__(self, *args: Any) -> None:
        self.fault = ""
        if ray.get_runtime_context().get_actor_name() == server_name(1):
            file = Path(os.environ[SERVER_FAULTS])
            self.fault, *left = file.read_text().split("\n")
            file.write_text("\n".join(left))
        if self.fault == "launch":
            raise MemoryError("no memory for a model")
        super().__init__(*args)

    async def load_weights(self, named: list[tuple[str, torch.Tensor]], global_steps: int) -> None:
        if self.fault == "sync":
            raise ValueError("no weights today")
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "die":
            os._exit(1)
        await super().load_weights(named, global_steps)
        if self.fault == "flip":
            weight = next(iter(self._model.state_dict().values()))
            weight.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
