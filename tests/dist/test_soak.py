"""Many transitions in one set of processes: time, files, threads, memory and groups stay flat."""

from __future__ import annotations

import pytest

from nereus_plugins.selftest import run

from . import selftest_checks


@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_a_few_transitions(backend: str) -> None:
    selftest_checks.all_passed(run("soak", backend, 4, 14, device="cpu"))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_fifty_transitions(backend: str) -> None:
    selftest_checks.all_passed(run("soak", backend, 4, 50, device="cpu"))
