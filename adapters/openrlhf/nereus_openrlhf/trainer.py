"""OpenRLHF's synchronous PPO trainer with layout changes between iterations.

Importing this imports OpenRLHF. The class takes the place of `PPOTrainer` in the launcher.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.job import OpenRlhfJob
from nereus_openrlhf.preflight import Preflight
from nereus_plugins.trace.record import (
    SAME_TIMER,
    TRANSITION_TIMER,
    StepRecord,
    TransitionRecord,
    now_s,
)

_Base: Any = openrlhf_private.trainer_class()
TIMER = "timing/"  # before the names of OpenRLHF's timers


class NereusPPOTrainer(_Base):
    """Runs scheduled and submitted transitions, and records every step.

    Args:
        nereus: what was checked before the job started.
        engine_groups: as of `OpenRlhfJob`; the others are OpenRLHF's.
    """

    def __init__(
        self, *args: Any, nereus: Preflight, engine_groups: Sequence[Any], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._job = OpenRlhfJob(nereus, self, engine_groups)
        self._transition: TransitionRecord | None = None  # at the end of the last step
        self._tokens: dict[str, int] = {}
        self._samples = 0

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """OpenRLHF's; by now all models are built."""
        self._job.start()
        try:
            super().fit(*args, **kwargs)
        finally:
            self._job.close()

    def train_step(self, rollout_samples: Any, global_step: int) -> Any:
        """OpenRLHF's; counts what is in the batch."""
        total = sum(int(sample.total_length.sum()) for sample in rollout_samples)
        response = sum(int(sample.response_length.sum()) for sample in rollout_samples)
        self._samples = sum(len(sample.sequences) for sample in rollout_samples)
        self._tokens = {"prompt": total - response, "response": response, "total": total}
        return super().train_step(rollout_samples, global_step)

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        """OpenRLHF's, with what Nereus adds to the logs; then the boundary: the update is done, the
        replay buffers are empty, the checkpoint is saved in the layout that it was trained in."""
        logs = dict(logs_dict or {})
        spent_ms = self._job.controller_ms()
        if spent_ms is not None:
            logs["nereus/controller_ms"] = spent_ms
        record = self._step_record(logs, global_step)
        logs |= self._metrics(record)
        self._transition = None
        super().save_logs_and_checkpoints(global_step, logs, client_states)
        if self._job.is_due(global_step):
            begin_s = time.perf_counter()
            self._transition = self._job.at_boundary(global_step)
            spent_s = time.perf_counter() - begin_s
            record = dataclasses.replace(
                record,
                step_s=record.step_s + spent_s,
                stages_s={**record.stages_s, TRANSITION_TIMER: spent_s},
            )
        self._job.write_step(record)

    def _step_record(self, logs: Mapping[str, Any], step: int) -> StepRecord:
        """The record of a finished step, in the layouts that it ran in."""
        timers = {
            name.removeprefix(TIMER): float(value)
            for name, value in logs.items()
            if name.startswith(TIMER)
        }
        stages = {SAME_TIMER.get(name, name): value for name, value in timers.items()}
        step_s = stages.pop("step", 0.0)
        stages |= self._job.stage_seconds()
        return StepRecord(
            step=step,
            epoch=self._job.epoch(),
            time_unix_s=now_s(),
            step_s=step_s,
            stages_s=stages,
            tokens=self._tokens,
            samples=self._samples,
            memory_bytes=self._job.memory(),
            metrics={
                name: float(value)
                for name, value in logs.items()
                if isinstance(value, (int, float, np.number)) and not name.startswith(TIMER)
            }
            | {"nereus/world_size": float(self._job.world_size())},
            plan=self._job.layouts(),
        )

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        """What OpenRLHF's own loggers get of this, under `nereus/`; of a transition at the boundary
        before the step."""
        out: dict[str, float] = {
            "nereus/epoch": record.epoch,
            "nereus/world_size": self._job.world_size(),
            "nereus/vllm_engines": self._job.replicas(),
            "nereus/host_rss_gib": record.memory_bytes["host_rss"] / 2**30,
            "nereus/process_groups": record.memory_bytes["process_groups"],
        }
        for name, fields in record.plan.items():
            out[f"nereus/{name}/dp"] = fields.get("dp", 1)
        if self._transition is not None:
            out["nereus/transition/committed"] = self._transition.outcome == "committed"
            out["nereus/transition/seconds"] = self._transition.stall_s
            out["nereus/transition/wire_bytes"] = sum(
                unit.get("bytes_wire", 0) for unit in self._transition.units.values()
            )
        return out


class _Launched:
    """What the launcher takes for OpenRLHF's trainer actor."""

    def __init__(self, checked: Preflight, engine_groups: Sequence[Any]) -> None:
        self._checked = checked
        self._engine_groups = engine_groups

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return ray.remote(NereusPPOTrainer).remote(
            *args, nereus=self._checked, engine_groups=self._engine_groups, **kwargs
        )


def launched(checked: Preflight, engine_groups: Sequence[Any]) -> Any:
    """For `openrlhf_private.use_trainer`."""
    return _Launched(checked, engine_groups)
