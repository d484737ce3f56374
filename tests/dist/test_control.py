"""Votes through the store: agreement, disagreement, and ranks that do not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nereus_plugins.transport.control import (
    Control,
    Disagreement,
    PeerFailed,
    RankLost,
    StoreLost,
    report_lost,
)
from nereus_plugins.transport.torch_private import clone_default_store

from .spawn import run_ranks, run_ranks_outcomes


def _vote(rank: int, world: int) -> list[list[tuple[int, bool, str]]]:
    control = Control(rank, world, timeout_s=20)
    votes = []
    for _ in range(3):  # one name may be used again
        cast = control.vote("build", rank != 1, "no memory" if rank == 1 else "")
        votes.append([(v.rank, v.ok, v.payload) for v in cast])
    return votes


def test_all_ranks_see_all_votes() -> None:
    cast = [(0, True, ""), (1, False, "no memory"), (2, True, "")]
    assert run_ranks(_vote, 3, timeout_s=60) == [[cast] * 3] * 3


def _agree(rank: int, world: int, digests: list[str]) -> tuple[int, ...]:
    control = Control(rank, world, timeout_s=20)
    control.agree("plan", "same")
    if len(set(digests)) == 1:
        control.agree("plan", digests[rank])
        return ()
    with pytest.raises(Disagreement, match="differ in 'plan'") as caught:
        control.agree("plan", digests[rank])
    return caught.value.ranks


@pytest.mark.parametrize(
    ("digests", "odd"), [(["a", "a", "a"], ()), (["a", "b", "a"], (1,)), (["a", "b", "c"], (1, 2))]
)
def test_a_disagreement_names_ranks(digests: list[str], odd: tuple[int, ...]) -> None:
    assert run_ranks(_agree, 3, digests, timeout_s=60) == [odd] * 3


def _lost(rank: int, world: int, how: str) -> tuple[tuple[int, ...], float, str]:
    control = Control(rank, world, timeout_s=2)
    control.vote("plan", True)
    dist.destroy_process_group()  # votes need no process group
    if rank == 0:
        if how == "kill":
            os._exit(9)
        time.sleep(5)
        return (), 0.0, ""
    start = time.monotonic()
    with pytest.raises(RankLost) as caught:
        control.vote("move", True)
    return caught.value.ranks, time.monotonic() - start, caught.value.phase


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_missing_rank_is_named_in_time(how: str) -> None:
    outcomes = run_ranks_outcomes(_lost, 3, how, timeout_s=60)
    assert outcomes[0].exitcode == (9 if how == "kill" else 0)
    for outcome in outcomes[1:]:
        assert outcome.ok, str(outcome.error or outcome)
        ranks, spent, phase = outcome.value
        assert (ranks, phase) == ((0,), "move")
        assert spent < 5


class _Slow:
    """A store that takes its time after everything that is set."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        time.sleep(0.5)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _reported(rank: int, world: int, agree: bool) -> tuple[tuple[int, ...], float, str]:
    control = Control(rank, world, timeout_s=60)
    if rank == 2:  # its peers are in the next vote as soon as it has voted
        vars(control)["_store"] = _Slow(vars(control)["_store"])
    control.vote("warm", True)
    if rank == 2:
        os._exit(9)
    over = threading.Event()

    def report() -> None:
        store = clone_default_store()
        while not over.wait(1):  # it is dead by then
            report_lost(store, "nereus", [2])

    if rank == 0:
        threading.Thread(target=report, daemon=True).start()
    start = time.monotonic()

    def wait() -> None:
        if agree:
            control.agree("plan", "same", leave=lambda: control.voted_against("step"))
        control.vote("move", True)

    with pytest.raises(RankLost, match="reported dead") as caught:
        wait()
    over.set()
    return caught.value.ranks, time.monotonic() - start, caught.value.phase


@pytest.mark.parametrize(("agree", "phase"), [(False, "move"), (True, "plan")])
def test_a_rank_that_is_reported_lost_is_not_waited_for(agree: bool, phase: str) -> None:
    outcomes = run_ranks_outcomes(_reported, 3, agree, timeout_s=60)
    for outcome in outcomes[:2]:
        assert outcome.ok, str(outcome.error or outcome)
        ranks, spent, missed = outcome.value
        assert (ranks, missed) == ((2,), phase)
        assert spent < 10


def _late(rank: int, world: int) -> tuple[int, ...]:
    control = Control(rank, world, timeout_s=2)
    control.vote("warm", True)
    time.sleep((0.0, 1.0, 2.5)[rank])
    with pytest.raises(RankLost) as caught:
        control.vote("move", rank != 1, "own error" if rank == 1 else "")
    cast = [(vote.rank, vote.ok, vote.payload) for vote in caught.value.votes]
    assert cast == [(0, True, ""), (1, False, "own error")]
    return caught.value.ranks


def test_a_rank_that_comes_late_does_not_split_the_vote() -> None:
    """Rank 0 gives up on rank 2 before that comes; rank 1 still would have waited for it."""
    assert run_ranks(_late, 3, timeout_s=60) == [(2,)] * 3


def _order(rank: int, world: int) -> list[int]:
    control = Control(rank, world, timeout_s=20)
    control.vote("build", True)
    if rank == 1:
        assert not control.voted_against("build")
    if rank == 0:  # waits for rank 1 to fail, then fails too
        while not control.voted_against("build"):
            time.sleep(0.01)
    return [v.order for v in control.vote("build", rank == 2)]


def test_the_first_failure_is_known() -> None:
    assert run_ranks(_order, 3, timeout_s=60) == [[2, 1, 0]] * 3


def _leave(rank: int, world: int) -> float:
    control = Control(rank, world, timeout_s=20)
    control.vote("warm", True)
    begin = time.monotonic()
    if rank != 1:
        with pytest.raises(PeerFailed):
            control.agree("plan", "same", leave=lambda: control.voted_against("step"))
    control.vote("step", rank != 1)
    return time.monotonic() - begin


def test_a_vote_is_left_when_a_peer_failed_before_it() -> None:
    assert max(run_ranks(_leave, 3, timeout_s=60)) < 10


def _keys(rank: int, world: int) -> tuple[int, int]:
    control = Control(rank, world, timeout_s=20)
    store = dist.distributed_c10d._get_default_store()
    control.vote("warm", True)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(20):
        control.vote("again", True, "x" * 100)
    dist.barrier()
    return before, store.num_keys()


def test_votes_leave_no_keys() -> None:
    for before, after in run_ranks(_keys, 3, timeout_s=60):
        assert after <= before


def _lose_the_store(rank: int, world: int, folder: str) -> str:
    """A store served by a process of its own, which is killed while rank 0 waits in a vote."""
    file = Path(folder) / "port"
    if rank == 1:
        code = (
            "import pathlib, sys, time; from torch.distributed import TCPStore; "
            "store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False); "
            "scratch = pathlib.Path(sys.argv[1] + '.new'); scratch.write_text(str(store.port)); "
            "scratch.rename(sys.argv[1]); time.sleep(600)"
        )
        server = subprocess.Popen([sys.executable, "-c", code, str(file)])
    while not file.exists():
        time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", int(file.read_text()), None, False)
    control = Control(rank, world, timeout_s=60, store=store)
    control.vote("warm", True)
    if rank == 1:
        time.sleep(1)  # rank 0 is in the vote
        server.kill()
        server.wait()
    with pytest.raises(StoreLost, match="cannot be reached") as lost:
        control.vote("build", True)
    with pytest.raises(StoreLost):
        control.voted_against("build")
    return str(lost.value)


def test_a_store_that_dies_is_not_taken_for_a_lost_rank(tmp_path: Path) -> None:
    for said in run_ranks(_lose_the_store, 2, str(tmp_path), timeout_s=120):
        assert "'build': the process that serves it (usually rank 0) is gone" in said
