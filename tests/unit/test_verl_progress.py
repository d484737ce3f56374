"""Long exchanges say how far they are, short ones nothing."""

from __future__ import annotations

import pytest
from nereus_verl.progress import MoveProgress

GIB = 1 << 30


def test_only_long_exchanges_speak(capsys: pytest.CaptureFixture[str]) -> None:
    times: list[float] = []
    progress = MoveProgress(7, clock=lambda: times[-1])
    # (time in s, GiB done of 8): a short exchange, a pause, then a long one
    calls = [(0, 2), (4, 8), (60, 1), (64, 2), (66, 3), (69, 5), (72, 8)]
    for now_s, done in calls:
        times.append(now_s)
        progress(done * GIB, 8 * GIB)
    assert capsys.readouterr().out.splitlines() == [
        "nereus: step 7: moving, 3.0 of 8.0 GiB of rank 0",
        "nereus: step 7: moving, 8.0 of 8.0 GiB of rank 0",
    ]
