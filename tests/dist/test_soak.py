"""Many transitions in one set of processes: time, files, threads, memory and groups stay flat."""

from __future__ import annotations

import pytest

from nereus_plugins.selftest import run

from . import selftest_checks

BACKENDS = ["megatron", "fsdp2", "deepspeed"]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    package = {"megatron": "megatron.core", "deepspeed": "deepspeed"}.get(request.param)
    if package:
        pytest.importorskip(package, reason=f"this environment has no {request.param}")
    return str(request.param)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_few_transitions(backend: str) -> None:
    selftest_checks.all_passed(run("soak", backend, 4, 14, device="cpu"))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_fifty_transitions(backend: str) -> None:
    selftest_checks.all_passed(run("soak", backend, 4, 50, device="cpu"))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_long_run(backend: str) -> None:
    """A thousand steps, with two hundred transitions between them."""
    selftest_checks.all_passed(run("soak", backend, 4, 200, 5, device="cpu", limit_s=3600.0))
