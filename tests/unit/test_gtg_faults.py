"""Faults fire where they are told to, and nowhere else."""

from __future__ import annotations

import time

import pytest

from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE, PHASES, Fault, InjectedFault, inject


def test_unset_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert not any(inject(step, 0, 1) for step in PHASES)


def test_raise_at_one_step_rank_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "step=move,rank=2,kind=raise,epoch=3")
    assert not inject("move", 1, 3)
    assert not inject("build", 2, 3)
    assert not inject("move", 2, 4)
    with pytest.raises(InjectedFault, match="at move on rank 2"):
        inject("move", 2, 3)


def test_corrupt_and_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "step=verify,rank=0,kind=corrupt;step=build,rank=0,kind=hang,seconds=0.05"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, both)
    assert inject("verify", 0, 1)
    begin = time.monotonic()
    assert not inject("build", 0, 1)
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=move,rank=1", "lacks kind"),
        ("step=mvoe,rank=1,kind=raise", "step must be one of"),
        ("step=move,rank=1,kind=explode", "kind must be one of"),
        ("step=move,rank=1,kind=raise,color=red", "'color=red' is not one of"),
        ("step=move,rank=1,kind=corrupt", "set step=verify"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault.parse(text)
