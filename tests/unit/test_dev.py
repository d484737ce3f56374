"""`./dev` ends what it runs when it is told to end itself."""

from __future__ import annotations

import runpy
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


def test_pips_progress_is_told_from_its_output() -> None:
    progress = runpy.run_path(str(DEV))["pip_progress"]
    assert progress("") == "0 package(s) collected; starting"
    output = "Collecting numpy>=1.26 (from -r x)\n  Using cached numpy.whl\nCollecting ray\n"
    assert progress(output) == "2 package(s) collected; Collecting ray"
    output += "  Downloading ray-2.60.0.whl (73.4 MB)\n"
    assert progress(output).endswith("; Downloading ray-2.60.0.whl (73.4 MB)")
    output += "Installing collected packages: numpy, ray\n"
    assert progress(output) == "installing 2 package(s)"


def test_pip_says_what_it_does_and_why_it_failed(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    code = (
        "import runpy, sys; namespace = runpy.run_path(sys.argv[1]); "
        "namespace['pip_install'].__globals__['PIP_SAYS_EVERY_S'] = 0; "
        "namespace['pip_install'](sys.argv[2], ['--no-index', 'no-such-package-anywhere'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEV), str(environment / "bin" / "python")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "package(s) collected; " in done.stdout
    assert "No matching distribution found for no-such-package-anywhere" in done.stderr
    assert "pip could not install" in done.stderr
