"""The controller's process beside a live job, as the job's driver sees it.

    driver --- controller.json, records.jsonl --->  python -m nereus_plugins.control.live <run-dir>
       ^                                                            |
       '---- commands over the loopback (submit, status) -----------'

The process never touches a worker, and the job never waits for it. Where it dies it is started
again and takes up its journal; where it dies again and again, the job trains on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nereus_plugins.control import offered
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.spec import GlobalPlan, Record
from nereus_plugins.spec.files import owners_only
from nereus_plugins.trace import files

FILE = "controller.json"
LOG_FILE = "controller.log"
RESTARTS = 5
BACK_OFF_S = 1.0  # before the first restart; twice as long before each further one
RAN_WELL_S = 60.0  # whose end, after so long, is the first again
END_WITHIN_S = 5.0


@dataclasses.dataclass(frozen=True)
class Launch(Record):
    """What the process is told: `<run-dir>/controller.json`.

    plan, epoch: in force when the job, or this part of it, began.
    """

    setting: JobSetting
    config: ControllerConfig
    plan: GlobalPlan
    epoch: int

    def write(self, run_dir: Path) -> None:
        """And take away what was proposed to an earlier run in this directory. Raises: OSError."""
        (run_dir / offered.FILE).unlink(missing_ok=True)
        files.replace(run_dir / FILE, [self.to_json()], private=True)

    @classmethod
    def read(cls, run_dir: Path) -> Launch:
        """Raises: OSError; SpecError."""
        return cls.load(run_dir / FILE)


class Beside:
    """The process, from `start` to `close`.

    Args:
        run_dir: the job's. say: takes one line for the job's console.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True, name="nereus-controller")
        self.restarts = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the process, and wait for it."""
        self._ended.set()
        process = self._process
        if process is not None:
            _end(process)
        if self._thread.ident is not None:
            self._thread.join(END_WITHIN_S)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _keep(self) -> None:
        """In a thread of its own: run the process, again where it dies."""
        ended = 0  # one soon after the other
        while True:
            begin_s = time.monotonic()
            try:
                code = self._run()
            except OSError as error:
                self._say(f"the controller could not be started: {error}")
                return
            if self._ended.is_set():
                return
            ended = 1 if time.monotonic() - begin_s >= RAN_WELL_S else ended + 1
            if ended > RESTARTS:
                break
            wait_s = BACK_OFF_S * 2 ** (ended - 1)
            self._say(
                f"the controller ended ({code}; see {self._run_dir / LOG_FILE}); started again in "
                f"{wait_s:g} s ({ended} of {RESTARTS})"
            )
            if self._ended.wait(wait_s):
                return
            self.restarts += 1
        self._say(
            f"the controller ended {ended} times, one soon after the other; the job trains on "
            f"without it, in the plan that it has. See {self._run_dir / LOG_FILE}"
        )

    def _run(self) -> int:
        descriptor = os.open(
            self._run_dir / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        owners_only(descriptor)
        command = [sys.executable, "-m", "nereus_plugins.control.live", str(self._run_dir)]
        # One thread: what it computes is not worth a core of the job's.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=environment,
                start_new_session=True,  # the driver's Ctrl-C is not for it
            )
        finally:
            os.close(descriptor)
        self._process = process
        if self._ended.is_set():  # meanwhile
            _end(process)
        return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
