"""The controller of a live job, as its driver sees it: a process, and what it takes and is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus_plugins.control.beside import Beside, Launch
from nereus_plugins.control.driver import SUBMITTED, say
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.job import Lease
from nereus_plugins.spec import GlobalPlan, SpecError


class JobController:
    """What there is of it where the settings have none: it says so.

    Args:
        config: None: the settings have none.
        run_dir: the job's.
        leases: which GPUs the job may use (`nereus_plugins.job.JobPort.leases`).
        adapt: its plan as this job can run it, as plans are written; raises SpecError.
    """

    def __init__(
        self,
        config: ControllerConfig | None,
        run_dir: Path,
        leases: Callable[[], tuple[Lease, ...]],
        adapt: Callable[[GlobalPlan], Mapping[str, Any]],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._leases = leases
        self._adapt = adapt
        self._beside: Beside | None = None
        self._global_plan: dict[str, Any] = {}  # in force
        self._spent_s = 0.0  # by the driver, since it was asked last

    @property
    def wanted(self) -> bool:
        """Whether the settings have one."""
        return self._config is not None

    def begin(self, setting: Callable[[], JobSetting], plan: GlobalPlan, epoch: int) -> None:
        """Start its process; where that cannot be, the job runs without it.

        Args:
            setting: says what it is told of the job; raises SpecError. plan, epoch: in force.
        """
        assert self._config is not None
        try:
            Launch(setting(), self._config, plan, epoch).write(self._run_dir)
        except (OSError, SpecError) as error:
            say(f"no controller: {error}")
            return
        self._beside = Beside(self._run_dir, say)
        self._beside.start()
        say(f"controller in mode {self._config.mode}: nereus decisions {self._run_dir}")

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def adapted(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its plan as this job can run it. Raises: SpecError."""
        return self._adapt(GlobalPlan.from_dict(plan, where=SUBMITTED))

    def about(self) -> dict[str, Any]:
        """For the status, asked in a thread of the server."""
        config, beside = self._config, self._beside
        if config is None or beside is None:
            return {}
        state = {"mode": config.mode, "running": beside.running, "restarts": beside.restarts}
        return {
            "controller": state,
            "leases": [lease.to_dict() for lease in self._leases()],
            "global_plan": self._global_plan,
        }

    def no_gpus(self, ranks_may_change: bool) -> str:
        """Why nobody can say which GPUs the job may use, "" if they can."""
        if not self.wanted:
            return "this job has no controller (nereus.controller.mode=off)"
        if not ranks_may_change:
            return "the set of ranks of this job cannot change"
        return ""

    def look_at(self, describe: Callable[[], GlobalPlan]) -> None:
        """Keep the plan in force, which it asks for. Args: describe: gives it."""
        if not self.wanted:
            return
        with self.spending():
            plan = describe()
            if plan.name != self._global_plan.get("name"):  # of another epoch
                self._global_plan = plan.to_dict()

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What the driver does meanwhile is for the controller; not where it fails."""
        begin_s = time.perf_counter()
        yield
        self._spent_s += time.perf_counter() - begin_s

    def spent_ms(self) -> float | None:
        """What the driver spent on it since it was asked last; None: there is none."""
        if self._beside is None:
            return None
        spent_s, self._spent_s = self._spent_s, 0.0
        return 1000.0 * spent_s
