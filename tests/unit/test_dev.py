"""`./dev` ends what it runs when it is told to end itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEV = Path(__file__).resolve().parents[2] / "dev"
CHILD = """
import time
try:
    print("runs", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_and_waited_for(number: signal.Signals, status: int) -> None:
    # As ./dev runs it, but for the environment that it would make first.
    code = (
        "import runpy, sys; namespace = runpy.run_path(sys.argv[1]); "
        "namespace['guarded'](lambda: namespace['run']([sys.executable, '-c', sys.argv[2]]))"
    )
    dev = subprocess.Popen(
        [sys.executable, "-c", code, str(DEV), CHILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dev.stdout is not None
    try:
        while dev.stdout.readline() != "runs\n":
            pass
        dev.send_signal(number)
        said, _ = dev.communicate(timeout=60)
    finally:
        dev.kill()
    assert dev.returncode == status
    assert "cleaned up" in said
