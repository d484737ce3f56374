"""verl's vLLM rollout with what the rollout of a plan needs: asking a server's workers, and the
parts of its launch. Loaded only in jobs that have Nereus on and roll out with vLLM.

verl chooses a rollout's replicas by name in a registry, and its vLLM server has hooks for
subclasses; none of them is documented. Tested with vLLM in `requirements/vllm.txt`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

NAME = "vllm"
_VLLM_FILES = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
_LONGEST_FOLDER = 40  # of the 107 bytes of a socket's name, besides a folder's and vLLM's


class VLLMServer(vLLMHttpServer):
    """Ray actor: verl's server, whose workers have `vllm_worker.WorkerExtension`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.nereus_began = time.perf_counter()
        self.nereus_shared_memory: list[Path] = []
        self.nereus_sockets = _own_sockets()
        super().__init__(*args, **kwargs)

    def _get_worker_extension_cls(self) -> str:
        return "nereus_verl.vllm_worker.WorkerExtension"

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.nereus_launched_s = time.perf_counter() - self.nereus_began
        self.nereus_shared_memory = _shared_memory()

    async def nereus_ask(self, method: str, *args: Any) -> list[Any]:
        """One answer of every worker of the replica to a method of `WorkerExtension`."""
        answers: list[Any] = await self.engine.collective_rpc(method, args=args)
        return answers

    async def nereus_launch_seconds(self) -> dict[str, float]:
        """By part, the slowest worker's; "start" is what is left: processes and imports."""
        found: dict[str, float] = {}
        for parts in await self.nereus_ask("nereus_launch_seconds"):
            found |= {part: max(found.get(part, 0.0), spent) for part, spent in parts.items()}
        known = sum(spent for part, spent in found.items() if part != "compile")
        return {"start": self.nereus_launched_s - known, **found}

    async def nereus_end(self) -> None:
        """End the engine's processes, and remove the shared memory and the sockets that they leave
        behind; also after a launch that failed half-way."""
        files = {*self.nereus_shared_memory, *_shared_memory()}
        try:
            await asyncio.to_thread(self.engine.shutdown)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
            if self.nereus_sockets is not None:
                shutil.rmtree(self.nereus_sockets, ignore_errors=True)


def _own_sockets() -> Path | None:
    """Have vLLM make the sockets between its processes in a folder of this server's, which is
    returned. None: it would have a longer name than sockets can have."""
    folder = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    if len(folder) > _LONGEST_FOLDER:
        return None
    own = tempfile.mkdtemp(prefix="nereus-vllm-", dir=folder)
    os.environ["VLLM_RPC_BASE_PATH"] = own
    return Path(own)


def _shared_memory() -> list[Path]:
    """vLLM's files in shared memory that this process and those below it have mapped."""
    this = psutil.Process()
    lines: list[str] = []
    for one in (this, *this.children(recursive=True)):
        with suppress(OSError):  # it has ended
            lines += Path(f"/proc/{one.pid}/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines}
    return [Path(file) for file in files if file.startswith(_VLLM_FILES)]


class VLLMReplica(vLLMReplica):
    """verl's replica, with that server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(VLLMServer)


def install() -> None:
    """In the driver, before it launches a server: have verl launch these."""
    RolloutReplicaRegistry.register(NAME, lambda: VLLMReplica)
