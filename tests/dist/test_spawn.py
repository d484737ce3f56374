"""The helper that other tests stand on: values, failures and hangs are told apart."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from .spawn import RankFailed, run_ranks, run_ranks_outcomes


def _sum(rank: int, world: int, base: int) -> int:
    value = torch.tensor(base + rank)
    dist.all_reduce(value)
    return int(value)


def _misbehave(rank: int, world: int, kind: str) -> int:
    if rank == 1:
        if kind == "raise":
            raise ValueError("this rank is broken")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return rank


def test_values_come_back_by_rank() -> None:
    assert run_ranks(_sum, 3, 10, timeout_s=60) == [33, 33, 33]


@pytest.mark.parametrize(
    ("kind", "message"), [("raise", "this rank is broken"), ("kill", "exit -9"), ("hang", "limit")]
)
def test_failures_are_named(kind: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_ranks(_misbehave, 2, kind, timeout_s=6 if kind == "hang" else 60)


def test_outcomes_do_not_raise() -> None:
    outcomes = run_ranks_outcomes(_misbehave, 3, "kill", timeout_s=60)
    assert [o.value for o in outcomes] == [0, None, 2]
    assert [o.exitcode for o in outcomes] == [0, -9, 0]
