"""Snapshots of live jobs on disk: taken while they train, restored into every layout of a table, by
the job itself and by one of another number of ranks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nereus_plugins.selftest import SNAPSHOTS, run, snapshots
from nereus_plugins.selftest.ranks import Ended
from nereus_plugins.selftest.snapshots import run_restarted

from . import selftest_checks

deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: the openrlhf environment has it"
)
BACKENDS = ["megatron", "fsdp2", pytest.param("deepspeed", marks=deepspeed)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_on_disk_restores_into_every_layout(backend: str) -> None:
    checks = run("restored", backend, 4, True, device="cpu", module=SNAPSHOTS)
    selftest_checks.all_passed(checks)
    assert selftest_checks.count(checks, "snapshot restored") >= 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_of_another_number_of_ranks_restores_it(backend: str) -> None:
    selftest_checks.all_passed(run_restarted(backend, device="cpu", limit_s=300.0))


def test_each_rank_that_failed_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [Ended(0, None, "no memory", 1), Ended(1, None, None, -9)]
    monkeypatch.setattr(snapshots, "run_on_ranks", lambda *_, **__: ended)
    check = run_restarted("fsdp2", device="cpu", limit_s=1.0)[0]
    assert not check.passed
    assert check.detail.startswith("no memory; rank 1 ended with -9; no memory")
