"""Megatron-core on 4 gloo ranks: the proofs of `nereus selftest`, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nereus_plugins.selftest import run, run_killed
from nereus_plugins.selftest.cases import Case, cases
from nereus_plugins.selftest.proofs import pairs_bit_exact
from nereus_plugins.selftest.ranks import Bench
from nereus_plugins.spec import Layout

from . import selftest_checks

pytest.importorskip("megatron.core", reason="needs the megatron extra")


def test_moves_round_trips_and_checkpoints_are_bit_exact() -> None:
    checks = run("bit_exact", "megatron", 4, False, device="cpu")
    selftest_checks.all_passed(checks)
    pairs = cases("megatron", 4)
    assert len(pairs) >= 8
    assert selftest_checks.count(checks, "moved bit-exact") == len(pairs)
    assert selftest_checks.count(checks, "there and back") == len(pairs)
    assert selftest_checks.count(checks, "equal to a checkpoint") >= 8


@pytest.mark.full
def test_pairs_of_eight_ranks() -> None:
    checks = run("bit_exact", "megatron", 8, False, 8, device="cpu")
    selftest_checks.all_passed(checks)
    assert selftest_checks.count(checks, "moved bit-exact") == 2


def test_sequence_parallel_layouts_are_bit_exact() -> None:
    """Not among the selftest's pairs: on GPUs Megatron's local norm does not do it."""
    checks = run("sequence_parallel", "megatron", 4, device="cpu", module=__name__)
    selftest_checks.all_passed(checks)
    assert selftest_checks.count(checks, "equal to a checkpoint") == 2


def sequence_parallel(bench: Bench, backend: str) -> list[dict[str, Any]]:
    split = Layout(tp=2, dp=2, sequence_parallel=True, sharding="zero1")
    staged = Layout(tp=2, pp=2, sequence_parallel=True, sharding="zero1")
    pairs = [
        Case(backend, {"bf16": True}, split, Layout(pp=2, dp=2, sharding="zero1")),
        Case(backend, {"bf16": True, "tied": True}, staged, split),
    ]
    return [*pairs_bit_exact(bench, pairs), _trains_as_without(bench, staged)]


def _trains_as_without(bench: Bench, layout: Layout) -> dict[str, Any]:
    """Sequence parallelism as it runs on CPU is right: the losses are those without it."""
    from nereus_plugins.selftest.megatron_job import MegatronJob, MegatronModel

    losses = []
    for which in (layout, dataclasses.replace(layout, sequence_parallel=False)):
        job = MegatronJob("model", MegatronModel(), which, seed=1, device=bench.device)
        losses.append([job.train_step(step) for step in range(6)])
        job.close()
    # fp32, of which sums are taken in another order.
    alike = losses[0] == pytest.approx(losses[1], rel=1e-5)
    return {"proof": "trains as without", "subject": str(layout), "passed": alike} | {
        "seconds": 0.0,
        "detail": f"{losses}",
    }


def test_a_failure_in_any_phase_leaves_the_old_layout_training() -> None:
    selftest_checks.all_passed(run("failures", "megatron", 2, device="cpu"))


@pytest.mark.parametrize("phase", ["move", "commit"])
def test_a_killed_rank_is_named_and_nobody_hangs(phase: str) -> None:
    checks = run_killed("megatron", phase, device="cpu")
    selftest_checks.all_passed(checks)
    assert checks[0].seconds < 60
    assert "rank(s) 1" in checks[0].detail


def test_state_that_is_no_box_is_refused_by_name() -> None:
    checks = run("refusals", "megatron", 1, device="cpu", module=__name__)
    selftest_checks.all_passed(checks)
    assert len(checks) == 4


def refusals(bench: Bench, backend: str) -> list[dict[str, Any]]:
    """On a rank: each setting, what describing says."""
    from nereus_plugins.emu.described import UnsupportedState
    from nereus_plugins.emu.described.megatron_private import UntestedVersion
    from nereus_plugins.emu.described.megatron_private import megatron_core as core
    from nereus_plugins.selftest.megatron_job import MegatronJob, MegatronModel
    from nereus_plugins.spec import Layout

    layout = Layout(sharding="zero1")
    job = MegatronJob("model", MegatronModel(bf16=True), layout, seed=1, device=bench.device)
    out = []

    def expect(target: Any, name: str, value: Any, error: type[Exception], said: str) -> None:
        before = getattr(target, name)
        setattr(target, name, value)
        try:
            job.described()
            found = f"{name} was not refused"
        except error as raised:
            found = "" if said in str(raised) else f"says {raised}"
        finally:
            setattr(target, name, before)
        out.append(
            {"proof": "refused", "subject": name, "passed": not found, "seconds": 0.0}
            | {"detail": found}
        )

    part = job.current.optimizer.chained_optimizers[0]
    expect(
        part.config,
        "optimizer_cpu_offload",
        True,
        UnsupportedState,
        "set optimizer_cpu_offload=False",
    )
    expect(
        job.current.chunk.ddp_config,
        "overlap_param_gather",
        True,
        UnsupportedState,
        "set overlap_param_gather=False",
    )
    expect(
        part.config,
        "use_precision_aware_optimizer",
        True,
        UnsupportedState,
        "set use_precision_aware_optimizer=False",
    )
    expect(core, "__version__", "0.99", UntestedVersion, "megatron-core==0.16.1")
    job.close()
    return out
