"""An exchange that leaves time to others."""

from __future__ import annotations

import pytest

from nereus_plugins.transport.pace import Pace


def test_work_takes_its_share() -> None:
    naps: list[float] = []
    pace = Pace(0.25, sleep=naps.append)
    pace.worked(2.0)
    assert sum(naps) == pytest.approx(6.0)
    assert pace.paused_s == pytest.approx(6.0)


def test_full_speed_has_no_pauses() -> None:
    pace = Pace(1.0, sleep=lambda seconds: pytest.fail("paused"))
    assert not pace.on
    pace.worked(1.0)
    pace.moved(100, 1.0)


def test_waiting_for_peers_is_not_work() -> None:
    naps: list[float] = []
    pace = Pace(0.5, sleep=naps.append)
    pace.moved(1000, 0.5)
    pace.moved(1000, 9.0)  # a peer paused
    assert sum(naps) == pytest.approx(1.0)
    pace.moved(0, 9.0)
    assert sum(naps) == pytest.approx(1.0)


def test_pauses_end_when_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = Pace(0.01, hurry=lambda: now[0] > 1.0, sleep=sleep)
    pace.worked(1.0)  # 99 s of pauses
    assert 1.0 < now[0] < 1.2
    assert not pace.on


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(ValueError, match="share="):
        Pace(share)
