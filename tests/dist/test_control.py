"""Votes through the store: agreement, disagreement, and ranks that do not come."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from nereus_plugins.transport.control import Control, Disagreement, RankLost

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
        assert outcome.ok, outcome
        ranks, spent, phase = outcome.value
        assert (ranks, phase) == ((0,), "move")
        assert spent < 5


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
