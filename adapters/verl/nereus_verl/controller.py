"""The controller of a verl job, as its driver sees it: a process, and what it takes and is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nereus_plugins.control.beside import Beside, Launch
from nereus_plugins.control.driver import SUBMITTED, say
from nereus_plugins.control.live import gpus_to
from nereus_plugins.job import Capabilities, Gpus
from nereus_plugins.spec import GlobalPlan, SpecError
from nereus_verl import setting, worker
from nereus_verl.planned import executable
from nereus_verl.preflight import Preflight
from nereus_verl.ranks import Ranks


class JobController:
    """What there is of it where the settings have none: it says so.

    Args: checked: the job's settings. ranks: its ranks. gpus: those that it may use.
    """

    def __init__(self, checked: Preflight, ranks: Ranks, gpus: Callable[[], Gpus]) -> None:
        self._checked = checked
        self._ranks = ranks
        self._gpus = gpus
        self._beside: Beside | None = None
        self._global_plan: dict[str, Any] = {}  # in force
        self._spent_s = 0.0  # by the driver, since it was asked last

    @property
    def wanted(self) -> bool:
        """Whether the settings have one."""
        return self._checked.nereus.controller is not None

    def begin(
        self, device: dict[str, Any], can: Capabilities, plan: GlobalPlan, epoch: int
    ) -> None:
        """Start its process; where that cannot be, the job runs without it.

        Args:
            device: of one rank (`worker.device`). can: of the job. plan, epoch: in force.
        """
        checked, ranks = self._checked, self._ranks
        assert checked.nereus.controller is not None
        if not device["memory_bytes"]:  # of a CPU without a budget: the host's, shared
            device["memory_bytes"] = worker.host_bytes() // len(ranks)
        try:
            launch = Launch(
                setting.job_setting(
                    checked,
                    can,
                    device,
                    max(ranks.in_cluster(), checked.most_ranks()),
                    int(ranks.trainer.total_training_steps),
                ),
                checked.nereus.controller,
                plan,
                epoch,
            )
            launch.write(checked.run_dir)
        except (OSError, SpecError) as error:
            say(f"no controller: {error}")
            return
        self._beside = Beside(checked.run_dir, say)
        self._beside.start()
        say(f"controller in mode {launch.config.mode}: nereus decisions {checked.run_dir}")

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def adapted(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its plan as this job can run it. Raises: SpecError."""
        found = GlobalPlan.from_dict(plan, where=SUBMITTED)
        return executable(found, self._checked.config).to_dict()

    def about(self) -> dict[str, Any]:
        """For the status, asked in a thread of the server."""
        config, beside = self._checked.nereus.controller, self._beside
        if config is None or beside is None:
            return {}
        state = {"mode": config.mode, "running": beside.running, "restarts": beside.restarts}
        return {
            "controller": state,
            "gpus": gpus_to(self._gpus()),
            "global_plan": self._global_plan,
        }

    def no_gpus(self) -> str:
        """Why nobody can say which GPUs the job may use, "" if they can."""
        if not self.wanted:
            return "this job has no controller (nereus.controller.mode=off)"
        if not self._checked.ranks_may_change():
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
