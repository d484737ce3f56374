"""Run a function on N gloo ranks, each a process of its own, under a hard time limit.

Processes come from a fork server that has imported torch once, so that a start costs tens of
milliseconds and no child inherits the threads of the test process. The store that the ranks meet
at is served by the test process: it outlives any rank that a test kills.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.selftest.ranks import end_now, end_with_parent


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `value` is what the function returned; `error` the traceback if it raised, or where its threads
    were when the time limit ended it; `exitcode` the exit status (negative: killed by that signal);
    `timed_out` says that the time limit ended it.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0 and not self.timed_out


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds the first traceback."""


def _child(
    rank: int,
    world: int,
    port: int,
    timeout_s: float,
    pipe: Connection,
    stacks: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    end_with_parent()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        _run(rank, world, port, timeout_s, pipe, fn, args)


def _run(
    rank: int,
    world: int,
    port: int,
    timeout_s: float,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        value = fn(rank, world, *args)
        pipe.send((value, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    end_now()


def run_ranks_outcomes(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
    grace_s: float = 120.0,
) -> list[Outcome]:
    """Run `fn(rank, world, *args)` on `world` ranks and return how each one ended, by rank.

    `fn` must be importable (a module-level function); it finds the default gloo group initialised.
    After the first rank fails the others get `grace_s` to end by themselves. Never raises for what
    the ranks did.
    """
    with tempfile.TemporaryDirectory(prefix="nereus-ranks-") as folder:
        return _outcomes(fn, world, args, timeout_s, grace_s, Path(folder))


def _outcomes(
    fn: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    timeout_s: float,
    grace_s: float,
    folder: Path,
) -> list[Outcome]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    readers: list[Connection] = []
    processes = []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_child,
            args=(rank, world, store.port, timeout_s, writer, folder / str(rank), fn, args),
            daemon=False,
        )
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    results: dict[int, tuple[Any, str | None]] = {}
    open_ranks = {reader: rank for rank, reader in enumerate(readers)}
    deadline = time.monotonic() + timeout_s
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(open_ranks), timeout=left):
            assert isinstance(ready, Connection)
            rank = open_ranks.pop(ready)
            try:
                results[rank] = ready.recv()
            except EOFError:  # the process died without a word
                results[rank] = (None, None)
            processes[rank].join(timeout=10)
            if results[rank][1] is not None or processes[rank].exitcode != 0:
                deadline = min(deadline, time.monotonic() + grace_s)
    outcomes = []
    for rank, process in enumerate(processes):
        timed_out = rank not in results
        value, error = results.get(rank, (None, None))
        if timed_out:
            error = _where(process, folder / str(rank))
        if process.is_alive():
            process.kill()
        process.join(timeout=10)
        outcomes.append(Outcome(rank, value, error, process.exitcode, timed_out))
        readers[rank].close()
        process.close()
    return outcomes


def _where(process: BaseProcess, stacks: Path) -> str | None:
    """Where the threads of a process are that has not ended; None if it does not say so."""
    if not stacks.exists() or not process.is_alive():
        return None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + 5
    while not (text := stacks.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)  # to its end
    return stacks.read_text() if text else None


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `fn(rank, world, *args)` on `world` ranks; return the values by rank.

    Raises `RankFailed` with a traceback if a rank raises, dies, or does not end within
    `timeout_s`.
    """
    outcomes = run_ranks_outcomes(fn, world, *args, timeout_s=timeout_s, grace_s=5.0)
    bad = [o for o in outcomes if not o.ok]
    if bad:
        # A rank that raised says more than one that was cut off waiting for it.
        first = min(bad, key=lambda o: (o.error is None, o.timed_out))
        states = ", ".join(
            f"rank {o.rank}: "
            + ("time limit" if o.timed_out else "raised" if o.error else f"exit {o.exitcode}")
            for o in bad
        )
        raise RankFailed(f"{states}\nrank {first.rank}:\n{first.error or 'no traceback'}")
    return [o.value for o in outcomes]
