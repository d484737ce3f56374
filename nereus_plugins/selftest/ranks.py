"""Start the ranks of a selftest on this machine: one process each, under a hard time limit.

On CPU the processes are forked from a server that has imported torch and the frameworks once, as
that takes longer than most proofs. The store they meet at is served by the parent, so that it
outlives any rank that a proof kills.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import logging
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Bench:
    """What a proof needs to know about the rank it runs on.

    Attributes:
        rank, world: this rank and the number of ranks.
        device: where its model lives.
        folder: a directory all ranks share, for checkpoints.
        timeout_s: how long to wait for a peer before giving up.
    """

    rank: int
    world: int
    device: torch.device
    folder: Path
    timeout_s: float


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its function returned, or the traceback, or neither if it died."""

    rank: int
    value: Any
    error: str | None
    exitcode: int | None


def prepare_process(device: str) -> None:
    """Make this process ready to import the frameworks; before anything imports Megatron-core."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if device == "cpu":
        # Only a CPU machine needs it, and only there it must be installed with the package.
        from nereus_cpu import deepspeed, megatron

        megatron.install()
        if importlib.util.find_spec("deepspeed") is not None:
            deepspeed.install()


def end_with_parent() -> None:
    """Have this process killed when the one that started it is gone, however that ended.

    For processes of `multiprocessing`; one that waits for a peer would wait on alone otherwise.
    """
    parent = mp.parent_process()
    if parent is None:
        raise RuntimeError("not a process that multiprocessing started")
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    _end_children()
    os.kill(os.getpid(), signal.SIGKILL)


def end_now() -> NoReturn:
    """End this process, and those that it started, without closing anything else in order.

    Groups shared with a peer that failed cannot be closed in order. Megatron-core's checkpoints
    leave a process behind that only an orderly exit would end.
    """
    _end_children()
    os._exit(0)


def _end_children() -> None:
    for child in mp.active_children():
        child.kill()


def run_on_ranks(
    function: str,
    world: int,
    *args: Any,
    device: str,
    folder: Path,
    limit_s: float,
    timeout_s: float = 60.0,
) -> list[Ended]:
    """Run `module:name` as `f(bench, *args)` on `world` ranks; never raises for what they did.

    Args:
        function: "package.module:name"; it returns something JSON-able.
        args: JSON-able.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        limit_s: after which ranks still running are killed.
        timeout_s: how long a rank waits for a peer.
    """
    # A killed rank makes torch's store report what the check itself says; ranks inherit this.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = _context(device)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes, readers = [], []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        settings = json.dumps([function, world, args, device, str(folder), timeout_s])
        process = context.Process(target=_main, args=(rank, store.port, settings, writer))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    said: dict[int, Any] = {}
    waiting = {reader: rank for rank, reader in enumerate(readers)}
    deadline = time.monotonic() + limit_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            try:
                said[rank] = json.loads(ready.recv_bytes())
            except EOFError:
                continue
            if said[rank][1] is not None:
                # Peers of a rank that failed learn it within their own timeout, or never.
                deadline = min(deadline, time.monotonic() + timeout_s + 10)
    ended = []
    for rank, process in enumerate(processes):
        late = readers[rank] in waiting
        if late:
            process.kill()
        process.join(timeout=10)
        value, error = said.get(rank, (None, None))
        if late:
            error = f"still running after its time limit ({limit_s:g} s) or that of a failed peer"
        ended.append(Ended(rank, value, error, process.exitcode))
        readers[rank].close()
    return ended


def _context(device: str) -> Any:
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["nereus_plugins.selftest.preload"])
    return context


def _main(rank: int, port: int, settings: str, pipe: Connection) -> None:
    function, world, args, device, folder, timeout_s = json.loads(settings)
    answer: tuple[Any, str | None]
    try:
        end_with_parent()
        prepare_process(device)
        if device == "cuda":
            torch.cuda.set_device(rank)
            place = torch.device("cuda", rank)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            place = torch.device("cpu")
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",  # as RL frameworks do
            store=dist.TCPStore("127.0.0.1", port, None, False),
            rank=rank,
            world_size=world,
            timeout=limit,
        )
        module, name = function.split(":")
        call: Callable[..., Any] = getattr(importlib.import_module(module), name)
        bench = Bench(rank, world, place, Path(folder), timeout_s)
        answer = (call(bench, *args), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()
    end_now()
