"""verl's profilers choose by rank whom they profile: a process whose rank changes chooses anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nereus_verl import verl_private
from verl.utils.profiler import DistProfiler, ProfilerConfig


def process(rank: int, **config: Any) -> tuple[Any, Any]:
    """(verl's colocated worker, the role worker in it) of a process that profiles rank 1."""
    fields = {"tool": None, "ranks": [1], "all_ranks": False, "tool_config": None}
    profiler = DistProfiler(
        rank, config=ProfilerConfig(**fields | config), tool_config=None, save_file_prefix="critic"
    )
    place = {
        "_configure_with_store": lambda store: None,
        "_local_rank": 0,
        "_local_world_size": 1,
    }
    role = SimpleNamespace(profiler=profiler, **place)
    return SimpleNamespace(worker_dict={"critic": role}, **place), role


@pytest.mark.parametrize("new", [0, 1])
def test_a_profiler_follows_the_rank(new: int) -> None:
    worker, role = process(1 - new, enable=True)
    before = role.profiler
    verl_private.set_rank(worker, new, 2, "127.0.0.1", 1)
    assert role.profiler is not before
    assert role.profiler.rank == new
    assert role.profiler.check_this_rank() == (new == 1)
    assert role.profiler.save_file_prefix == "critic"


def test_one_that_runs_over_the_boundary_is_stopped() -> None:
    worker, role = process(1, enable=True)
    before = role.profiler
    before.start()
    assert before.check_this_step()
    verl_private.set_rank(worker, 0, 2, "127.0.0.1", 1)
    assert not before.check_this_step()


def test_one_that_is_off_stays() -> None:
    worker, role = process(1, enable=False)
    before = role.profiler
    verl_private.set_rank(worker, 0, 2, "127.0.0.1", 1)
    assert role.profiler is before
