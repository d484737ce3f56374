"""The demo, told to end, takes its job and Ray with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from nereus_verl.demo.launch import processes_of


@pytest.mark.full
def test_sigterm_ends_the_demo_and_its_ray(tmp_path: Path) -> None:
    # A short path: Ray's sockets lie deep below it.
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as short:
        demo = subprocess.Popen(
            [sys.executable, "-m", "nereus_verl.demo", "--ranks", "2", "--dir", str(tmp_path)],
            env={**os.environ, "TMPDIR": short, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert demo.stdout is not None
        try:
            for line in demo.stdout:
                if "Ray is up" in line:
                    break
            assert len(processes_of(Path(short))) > 3
            demo.send_signal(signal.SIGTERM)
            said, _ = demo.communicate(timeout=60)
        finally:
            demo.kill()
        assert demo.returncode == 143
        assert "terminated: the job and its Ray cluster were ended" in said
        assert processes_of(Path(short)) == []
        assert list(Path(short).glob("nereus-ray-*")) == []
