"""FSDP2 on 4 gloo ranks: the proofs of `nereus selftest`."""

from __future__ import annotations

import pytest

from nereus_plugins.selftest import run, run_killed
from nereus_plugins.selftest.cases import cases

from . import selftest_checks


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
