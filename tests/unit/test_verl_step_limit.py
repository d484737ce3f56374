"""A job of which a step never ends: its driver ends, in a process of its own here."""

from __future__ import annotations

import subprocess
import sys
import time

STEPS = """
import time
from nereus_verl.step_limit import StepLimit

def last_words():
    print("last words", flush=True)
    time.sleep({words_s})

limit = StepLimit({limit_s}, last_words)
for step in (1, 2, 3):
    limit.begin(step)
    time.sleep({hangs_s} if step == 3 else 0.9)
limit.close()
time.sleep(2.0)
print("done")
"""


def _run(limit_s: float, hangs_s: float, words_s: float = 0.0) -> tuple[int, list[str]]:
    code = STEPS.format(limit_s=limit_s, hangs_s=hangs_s, words_s=words_s)
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return ended.returncode, ended.stdout.splitlines()


def test_a_step_that_never_ends_ends_the_job() -> None:
    begin = time.monotonic()
    # Words that never come, as from a disk that hangs, hold nothing.
    status, (first, second) = _run(limit_s=2.5, hangs_s=3600.0, words_s=3600.0)
    assert time.monotonic() - begin < 100
    assert status == 1
    assert "step 3 has not ended within 2.5 s (nereus.step_timeout_s)" in first
    assert second == "last words"


def test_steps_that_end_in_time_are_not_ended() -> None:
    # Together they take longer than one may.
    assert _run(limit_s=2.5, hangs_s=0.9) == (0, ["done"])
