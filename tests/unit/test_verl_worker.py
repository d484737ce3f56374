"""What a rank does around a transition, without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nereus_verl import live_knobs, worker

from nereus_plugins.gtg.execute import ReleaseFailed
from nereus_plugins.gtg.report import ReleaseReport


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_knobs_are_set_once_the_old_layout_has_given_its_memory_back(
    leaves: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Transition:
        def release(self) -> ReleaseReport:
            done.append("release")
            if fails:
                raise ReleaseFailed(1, "no")
            return ReleaseReport(1, 0)

    state = SimpleNamespace(
        transition=Transition(),
        engines={"actor": "engine"},
        change=SimpleNamespace(target=None) if leaves else None,
        targets={},
    )
    monkeypatch.setattr(live_knobs, "apply", lambda *knobs: done.append(knobs))
    answer = worker.release(SimpleNamespace(**{worker.STATE: state}), {"actor": {"offload": {}}})
    assert bool(answer["failed"]) == fails
    assert done == ["release", *([] if leaves else [("engine", {"offload": {}})])]
