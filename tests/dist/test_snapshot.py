"""Snapshots of live jobs, restored through boxes into the same layout and into another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from nereus_plugins.selftest import run
from nereus_plugins.selftest.cases import FAILURE
from nereus_plugins.selftest.ranks import Bench

from . import selftest_checks


@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_a_snapshot_restores_into_any_layout(backend: str) -> None:
    checks = run("restore", backend, 2, device="cpu", module=__name__)
    selftest_checks.all_passed(checks)
    assert len(checks) == 2


def restore(bench: Bench, backend: str) -> list[dict[str, Any]]:
    """On a rank: train, take a snapshot, train on, restore; the state is the snapshot's again."""
    from nereus_plugins.emu import snapshot
    from nereus_plugins.emu.described.base import merge_scalars
    from nereus_plugins.emu.moves import plan_moves
    from nereus_plugins.selftest.compare import differences, whole_state
    from nereus_plugins.selftest.proofs import make_job
    from nereus_plugins.transport.metadata import gather_bytes, gather_tables
    from nereus_plugins.transport.torch_transport import TorchTransport

    case = FAILURE[backend]
    job = make_job(case, case.source, bench, seed=1)
    other = make_job(case, case.target, bench, seed=5)
    job.train_step(0)
    taken = snapshot.take(job.described())
    wanted = whole_state(job.described(), bench.device)
    job.train_step(1)
    group = dist.new_group(list(range(bench.world)))
    table = gather_tables(taken.table(bench.rank), group)
    parts = gather_bytes(json.dumps(taken.scalars).encode(), group)
    scalars = merge_scalars([json.loads(part) for part in parts])
    transport = TorchTransport(group)
    out = []
    for target in (job, other):
        unit = target.described()
        moves = plan_moves(table, gather_tables(unit.table(bench.rank), group), rank=bench.rank)
        transport.exchange(moves, taken.shards, unit.shards)
        transport.verify()
        target.current.load_scalars(scalars)
        found = differences(wanted, whole_state(target.described(), bench.device))
        out.append(
            {"proof": "snapshot restored", "subject": str(target.layout()), "passed": not found}
            | {"seconds": 0.0, "detail": "; ".join(found[:3])}
        )
    transport.close()
    job.close()
    other.close()
    return out
