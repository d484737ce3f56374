"""FSDP2 on 4 gloo ranks: the proofs of `nereus selftest`."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from nereus_plugins.emu.described.torch_private import clear_sharding_cache
from nereus_plugins.selftest import run, run_killed
from nereus_plugins.selftest.cases import cases

from . import selftest_checks
from .spawn import run_ranks


def test_moves_round_trips_and_checkpoints_are_bit_exact() -> None:
    checks = run("bit_exact", "fsdp2", 4, False, device="cpu")
    selftest_checks.all_passed(checks)
    for proof in ("moved bit-exact", "there and back", "equal to a checkpoint"):
        assert selftest_checks.count(checks, proof) == len(cases("fsdp2", 4))


def test_a_failure_in_any_phase_leaves_the_old_layout_training() -> None:
    selftest_checks.all_passed(run("failures", "fsdp2", 2, device="cpu"))


@pytest.mark.parametrize("phase", ["move", "commit"])
def test_a_killed_rank_is_named_and_nobody_hangs(phase: str) -> None:
    checks = run_killed("fsdp2", phase, device="cpu")
    selftest_checks.all_passed(checks)
    assert checks[0].seconds < 60
    assert "rank(s) 1" in checks[0].detail


def _train_on_a_mesh(names: tuple[str, str]) -> None:
    groups = [dist.new_group([0]) for _ in names]
    ranks = torch.zeros((1, 1), dtype=torch.int)
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
    model: Any = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in groups:
        dist.destroy_process_group(group)


def _held_after_each_mesh(rank: int, world: int) -> list[tuple[int, int, int]]:
    held = []
    for number in range(4):  # by other names another mesh, which is cached for itself
        _train_on_a_mesh((f"ddp{number}", f"fsdp{number}"))
        clear_sharding_cache()
        gc.collect()
        meshes = sum(isinstance(one, DeviceMesh) for one in gc.get_objects())
        process = psutil.Process()
        held.append((meshes, process.num_fds(), process.num_threads()))
    return held


def test_a_mesh_that_is_over_keeps_no_groups() -> None:
    """torch caches by mesh, and the mesh has its groups, with their threads and connections."""
    (held,) = run_ranks(_held_after_each_mesh, 1)
    assert held[0][0] == 0
    assert held[1:] == [held[1]] * 3
