"""The driver of a job that faults strike, as a trainer's: its ranks, its journal, its snapshots."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nereus_plugins.gtg.journal import Journal, JournalError
from nereus_plugins.selftest.cases import Case
from nereus_plugins.spec import Layout
from tests.faults import rank as rank_side

START_S = 120.0


class Hang(AssertionError):
    """Ranks did not answer in a time in which every wait of theirs is over."""


class Lost(Exception):
    """Ranks died or were given up: their state is gone with them."""

    def __init__(self, ranks: tuple[int, ...], said: str) -> None:
        super().__init__(said)
        self.ranks = ranks


class Ranks:
    """Processes of one job, all in one layout at first.

    Args: limit_s: for an answer to any command. grace_s: for those of the others, once one failed.
    """

    def __init__(self, case: Case, layout: Layout, limit_s: float, grace_s: float) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["nereus_plugins.selftest.preload"])
        self._limit_s, self._grace_s = limit_s, grace_s
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        for rank in range(case.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_side.main,
                args=(rank, case.ranks, self._store.port, theirs, case, layout),
            )
            process.start()
            theirs.close()
            self._pipes[rank], self._processes[rank] = ours, process
        try:
            self._answers(START_S)
        except BaseException:
            self.close()
            raise

    def call(self, command: str, *arguments: Any) -> dict[int, dict[str, Any]]:
        """Have all ranks do it; what each answered, {"failed": "died"} of one that is gone.

        Raises: Hang.
        """
        message = json.dumps([command, arguments]).encode()
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # it is dead
                pipe.send_bytes(message)
        return self._answers(self._limit_s)

    def all(self, command: str, *arguments: Any) -> list[Any]:
        """As `call`, where every rank has to succeed; values by rank. Raises: Lost, Hang."""
        answers = self.call(command, *arguments)
        check_alive(answers)
        assert all("value" in answer for answer in answers.values()), answers
        return [answer["value"] for answer in answers.values()]

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(10)
        for pipe in self._pipes.values():
            pipe.close()

    def _answers(self, limit_s: float) -> dict[int, dict[str, Any]]:
        waiting = {pipe: rank for rank, pipe in self._pipes.items()}
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                if not any("failed" in answer for answer in answers.values()):
                    late = sorted(waiting.values())
                    raise Hang(f"ranks {late} did not answer within {limit_s:g} s: {answers}")
                for rank in waiting.values():  # others failed for want of it
                    self._processes[rank].kill()
                    answers[rank] = {"failed": "died", "said": "given up"}
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = {"failed": "died", "said": "its process died"}
                if "failed" in answers[rank]:
                    # What one rank fails for, its peers learn within their own time limit.
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return dict(sorted(answers.items()))


def check_alive(answers: dict[int, dict[str, Any]]) -> None:
    """Raises: Lost: a rank is gone, or others gave one up."""
    ends = ("died", "unrecoverable")
    gone = {rank for rank, answer in answers.items() if answer.get("failed") in ends}
    gone |= {rank for answer in answers.values() for rank in answer.get("lost", ())}
    if gone:
        said = "; ".join(str(a.get("said", "")) for a in answers.values() if "failed" in a)
        raise Lost(tuple(sorted(gone)), said)


class Driver:
    """Runs transitions of a job as a trainer does, with a journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder / "journal.jsonl")
        self.epoch = 0

    def transition(self, ranks: Ranks, layout: Layout, step: int, full_disk: bool = False) -> str:
        """Returns: "committed", "aborted".

        Raises: Lost; Hang; AssertionError where ranks did not leave a phase alike.
        """
        self.epoch += 1
        answers = ranks.call("prepare", layout.to_dict(), self.epoch)
        check_alive(answers)
        if any("failed" in answer for answer in answers.values()):
            assert {answer.get("failed") for answer in answers.values()} == {"aborted"}, answers
            return "aborted"
        try:
            with _full_disk() if full_disk else contextlib.nullcontext():
                self.journal.commit(
                    epoch=self.epoch, plan=layout.to_dict(), digest=str(self.epoch), step=step
                )
        except OSError:
            ranks.all("abort")
            return "aborted"
        answers = ranks.call("commit")
        if any("failed" in answer for answer in answers.values()):
            self.journal.abort(epoch=self.epoch, reason="a rank failed in the commit")
            check_alive(answers)
            assert {answer.get("failed") for answer in answers.values()} == {"aborted"}, answers
            return "aborted"
        answers = ranks.call("release")
        check_alive(answers)
        # The new layout is in force; what could not be freed is said.
        assert {a.get("failed") for a in answers.values()} in ({None}, {"release"}), answers
        return "committed"

    def layout_in_force(self, otherwise: Layout) -> Layout:
        """As the journal says, which a driver that is started again reads."""
        try:
            record = self.journal.current()
        except JournalError as error:
            raise AssertionError(f"the journal cannot be read: {error}") from error
        return otherwise if record is None else Layout.from_dict(record.plan)


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """No file of this process can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def after(seconds: float, strike: Callable[[], None]) -> threading.Timer:
    """Have it strike once so many seconds are over."""
    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    return timer
