"""verl's synchronous PPO trainer with layout changes between iterations.

Takes the place of `PPOTrainerSync` in verl's registry. Without `nereus.enable` it is that trainer
and nothing else; importing this module is what the plugin does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from nereus_plugins.spec import Layout
from nereus_plugins.spec.plan import RECOMPUTE
from nereus_plugins.trace.record import (
    SNAPSHOT_TIMER,
    TRANSITION_TIMER,
    StepRecord,
    TransitionRecord,
    now_s,
)
from nereus_verl import jobconfig, knobs, minibatches, preflight, verl_private
from nereus_verl.job import VerlJob, setup
from nereus_verl.ranks import Ranks
from nereus_verl.rollout_backends import backend_of
from nereus_verl.step_limit import StepLimit
from nereus_verl.transitions import RolloutFailed

RECORDED_METRICS = (
    "actor/", "critic/", "training/", "response_length/", "prompt_length/", "nereus/controller_ms",
    "nereus/snapshot_ms", "nereus/snapshots_missed",
)  # fmt: skip


class NereusTrainer(PPOTrainerSync):
    """`PPOTrainerSync` that runs scheduled and submitted transitions and records every step."""

    def __init__(self, config: DictConfig) -> None:
        self._checked = _check(config)
        self._job: VerlJob | None = None
        self._limit: StepLimit | None = None
        self._transitions: list[TransitionRecord] = []  # since the last step was recorded
        self._critic_order: list[int] | None = None
        self._prepared_after: int | None = None  # the step whose transition waits for the batch
        self._data_position: Any = None  # at the end of that step
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self._checked is not None:  # how long an epoch is, is known only now
            last = self.steps_per_epoch * self.config.trainer.total_epochs
            preflight.check_reached(self._checked.targets, last, "trainer.total_epochs")

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self._checked is None:
            return
        if self._checked.ranks_change():
            verl_private.one_bundle_a_group(self)
        backend = backend_of(self._checked.config)
        if backend is not None:
            backend.install()

    def _setup(self) -> None:
        with verl_private.workers_know() if self._checked is not None else nullcontext():
            super()._setup()

    def on_init_end(self) -> None:
        if self._checked is not None:
            groups = [self.actor_rollout_wg]
            if self.use_critic:
                groups.append(self.critic_wg)
            if self.use_reference_policy:
                groups.append(self.ref_policy_wg)
            self._job = VerlJob(self._checked, Ranks(self, groups, setup(self._checked)))
            self._job.start()
            self._limit = StepLimit(
                self._checked.nereus.step_timeout_s, self._job.snapshots.last_words
            )
            # Checkpoint and snapshot are of before their step's transition: it is due first.
            if self._job.is_due(self.global_steps):
                self._run_due(self._job, self.global_steps)
                if self._job.rollout_is_synced:
                    return
        super().on_init_end()

    def _load_checkpoint(self) -> None:
        if self._checked is None or self._checked.resume is None:
            super()._load_checkpoint()
            return
        # The rest is restored once the workers' engines are units: `VerlJob.start`.
        self.global_steps = self._checked.resume.step
        self.train_dataloader.load_state_dict(self._checked.resume.data)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().fit(*args, **kwargs)
            self._end_window()
            if self._limit is not None:
                self._limit.close()
            if self._job is not None:
                self._job.snapshots.finish()
            return result
        except BaseException:
            if self._job is not None:
                self._job.snapshots.last_words()
            raise
        finally:
            if self._job is not None:
                self._job.close()

    def on_step_begin(self) -> None:
        if self._limit is not None:
            self._limit.begin(self.global_steps)
        super().on_step_begin()

    def on_step_end(self) -> None:
        # Updates are done, the checkpoint is saved in the layout it was trained in, and the rollout
        # sleeps: the boundary. The weights go to the rollout from the new layout.
        job, step = self._job, self.global_steps
        # verl calls the training ranks as a step that is profiled begins: it would wait for them.
        background = (
            job is not None and job.checked.nereus.background and not self.curr_step_profile
        )
        if job is not None:
            self._ran_in = _InForce(job)
            if job.snapshots.on:
                with marked_timer(SNAPSHOT_TIMER, self.timing_raw):
                    job.take_snapshot(step, self.train_dataloader.state_dict)
            if job.is_due(step) and not background:
                with marked_timer(TRANSITION_TIMER, self.timing_raw):
                    self._run_due(job, step)
                if job.rollout_is_synced:  # and awake, which verl would do next
                    return
        super().on_step_end()
        # In the background the boundary is where the next batch is there: until then no training
        # rank has anything to do.
        if job is not None and background:
            if job.is_due(step):
                self._prepared_after = step
                self._data_position = self.train_dataloader.state_dict()
            job.begin_window(step)

    def _end_window(self) -> None:
        """The batch is there: run the transition that was prepared since the end of the last step,
        if one was."""
        step, self._prepared_after = self._prepared_after, None
        if self._job is not None:
            self._job.end_window()
        if self._job is not None and step is not None:
            with marked_timer(TRANSITION_TIMER, self.timing_raw):
                self._run_due(self._job, step)
                if self._job.rollout_is_synced:  # and awake, before the ranks train
                    self.checkpoint_manager.sleep_replicas()
            self._data_position = None

    def _run_due(self, job: VerlJob, step: int) -> None:
        """Run the transition that is due at the end of `step`, the last that was trained."""
        try:
            record = job.at_boundary(step)
        except RolloutFailed as error:
            self.global_steps = step  # may be on the way to the next, whose batch is drawn
            if self._data_position is not None:
                self.train_dataloader.load_state_dict(self._data_position)
            self._save_checkpoint()
            folder = Path(self.config.trainer.default_local_dir).absolute()
            raise RolloutFailed(
                f"{error}. The job ends here; its state is saved in "
                f"{folder / f'global_step_{step}'}"
            ) from error
        if record is not None:
            self._transitions.append(record)
        self._follow(job)

    def _compute_reward_colocate(self, *args: Any, **kwargs: Any) -> Any:
        self._end_window()  # the reward model wakes up where the rollout slept
        return super()._compute_reward_colocate(*args, **kwargs)

    def _follow(self, job: VerlJob) -> None:
        """Write the layouts and knobs in force into the driver's configuration, for later readers.
        (Those of the rollout are there: its servers were launched by them.)"""
        for name, unit in job.checked.units.items():
            settings = jobconfig.layout_settings(unit, job.layout(name))
            settings |= knobs.knob_settings(job.checked.config, unit, job.unit_knobs(name))
            verl_private.set_settings(self.config, settings)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """verl's balancing, such that every optimizer step still sees the same samples."""
        self._end_window()
        job = self._job
        self._critic_order = None
        if job is None or not job.data_parallelism_changed():
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        start = job.checked.layouts["actor"].dp
        with verl_private.dispatched_over(self.actor_rollout_wg, "actor", start):
            batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        # While only the critic warms up, a batch need not divide into the actor's mini-batches.
        updated = ["actor"] if self.config.trainer.critic_warmup <= self.global_steps else []
        updated += ["critic"] if "critic" in job.checked.units else []
        orders = {unit: _order(job, unit, batch) for unit in updated}
        if not orders:
            return batch
        first = orders[updated[0]]
        if orders.get("critic", first) != first:
            self._critic_order = minibatches.compose(first, orders["critic"])
        batch.reorder(first)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """verl's, such that the batch also divides over the ranks of every layout in force."""
        multiple: int = super()._get_required_batch_multiple(dp_size)
        if self._job is None:
            return multiple
        return math.lcm(multiple, *(self._job.layout(name).dp for name in self._job.checked.units))

    def _get_n_gpus_for_throughput(self) -> int:
        gpus: int = super()._get_n_gpus_for_throughput()
        if self._job is None:
            return gpus
        # A step is measured after the transition at its end.
        return gpus - self._job.world_size() + self._ran_in.world_size

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        order = self._critic_order
        if order is None:
            return super()._update_critic(batch, metrics)
        batch.reorder(order)
        try:
            return super()._update_critic(batch, metrics)
        finally:
            batch.reorder(minibatches.compose(order, range(len(order))))

    def _save_checkpoint(self) -> None:
        # The stamp comes first: verl names a checkpoint its newest once all in it is written.
        if self._job is not None:
            folder = Path(self.config.trainer.default_local_dir).absolute()
            self._job.save_stamp(folder / f"global_step_{self.global_steps}")
        super()._save_checkpoint()

    def _compute_metrics(
        self,
        batch: Any,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._job is None:
            return
        transitions, self._transitions = self._transitions, []
        spent_ms = self._job.controller_ms()
        if spent_ms is not None:
            metrics["nereus/controller_ms"] = spent_ms
        waited_ms = self._job.snapshots.waited_ms()
        if waited_ms is not None:
            metrics["nereus/snapshot_ms"] = waited_ms
            metrics["nereus/snapshots_missed"] = self._job.snapshots.missed()
        record = _step_record(
            self._ran_in, self._job.memory(), batch, metrics, timing_raw, global_steps
        )
        self._job.write_step(record)
        metrics["nereus/world_size"] = self._ran_in.world_size
        metrics.update({f"nereus/{name}": size for name, size in self._ran_in.knobs.items()})
        metrics.update(_metrics(record, transitions))


class _InForce:
    """The layouts that a step ran in; by the time it is recorded they may have changed."""

    def __init__(self, job: VerlJob) -> None:
        self.epoch = job.epoch()
        self.layouts = job.layouts()
        self.knobs: dict[str, float] = {
            f"{stage.value}/{name}": _number(value)
            for unit in job.checked.units
            for stage in knobs.STAGES[unit]
            for name, value in job.unit_knobs(unit).knobs(stage).items()
        }
        self.world_size = job.world_size()
        rollout = job.rollout()
        self.knobs |= {
            "actor-generate/tp": rollout.tp,
            "actor-generate/replicas": rollout.replicas(self.world_size),
        }
        if rollout.memory_fraction is not None:
            self.knobs["actor-generate/rollout_memory_fraction"] = rollout.memory_fraction


def _number(knob: int | bool | str) -> int:
    """A knob as verl's loggers take it: of recompute its place in RECOMPUTE."""
    return RECOMPUTE.index(knob) if isinstance(knob, str) else int(knob)


def _check(config: DictConfig) -> preflight.Preflight | None:
    """What `nereus` asks for, checked; None if it is off.

    Raises: as `preflight.run`, before a worker exists.
    """
    settings = config.get("nereus")
    if settings is None or not settings.get("enable", False):
        return None
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return preflight.run(plain)


def _order(job: VerlJob, unit: str, batch: Any) -> list[int]:
    """The order of the balanced batch in which `unit` makes the mini-batches of the job's start."""
    config = job.checked.config
    mini = int(jobconfig.select(config, f"{job.checked.units[unit].section}.ppo_mini_batch_size"))
    mini *= int(jobconfig.select(config, "actor_rollout_ref.rollout.n", 1))
    lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
    workload = calculate_workload(lengths)

    def balance(positions: Sequence[int], parts: int) -> list[list[int]]:
        loads = workload[torch.tensor(positions)]
        split = get_seqlen_balanced_partitions(loads, k_partitions=parts, equal_size=True)
        return [[positions[i] for i in part] for part in split]

    old, new = job.checked.layouts[unit].dp, job.layout(unit).dp
    return minibatches.order(len(lengths), mini, old, new, balance)


def _step_record(
    ran_in: _InForce,
    memory_bytes: Mapping[str, int],
    batch: Any,
    metrics: Mapping[str, Any],
    timing_raw: Mapping[str, float],
    step: int,
) -> StepRecord:
    """The record of a finished step.

    Stage times are verl's own timers: "step" holds all others of the step but "testing".
    """
    real = [tag for tag in batch.tags if not tag.get("is_padding", False)]
    total = sum(int(tag["seq_len"]) for tag in real)
    response = round(float(metrics["response_length/mean"]) * len(real))
    return StepRecord(
        step=step,
        epoch=ran_in.epoch,
        time_unix_s=now_s(),
        step_s=float(timing_raw["step"]),
        stages_s={name: float(value) for name, value in timing_raw.items()},
        tokens={"prompt": total - response, "response": response, "total": total},
        samples=len(real),
        memory_bytes=memory_bytes,
        metrics={
            name: float(value)
            for name, value in metrics.items()
            if name.startswith(RECORDED_METRICS) and isinstance(value, (int, float, np.number))
        },
        plan=ran_in.layouts,
    )


def _metrics(record: StepRecord, transitions: Sequence[TransitionRecord]) -> dict[str, float]:
    """What verl's own logger gets of this, under `nereus/`."""
    out: dict[str, float] = {
        "nereus/epoch": record.epoch,
        "nereus/host_rss_gib": record.memory_bytes["host_rss"] / 2**30,
        "nereus/process_groups": record.memory_bytes["process_groups"],
    }
    for name, fields in record.plan.items():
        layout = Layout.from_dict(fields)
        for field in ("tp", "pp", "dp", "ulysses"):
            out[f"nereus/{name}/{field}"] = getattr(layout, field)
    if transitions:  # two where one was prepared in the background and the next was not
        out["nereus/transition/committed"] = sum(t.outcome == "committed" for t in transitions)
        out["nereus/transition/seconds"] = sum(t.stall_s for t in transitions)
        out["nereus/transition/wire_bytes"] = sum(
            unit.get("bytes_wire", 0) for t in transitions for unit in t.units.values()
        )
        out["nereus/transition/hidden_seconds"] = sum(
            t.background.get("hidden_s", 0.0) for t in transitions
        )
    return out


def _refusing(trainer: type) -> type:
    """`trainer`, except that it does not start a job that asks for Nereus."""

    class WithoutNereus(trainer):
        def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
            _check(config)
            super().__init__(config, *args, **kwargs)

    WithoutNereus.__name__ = WithoutNereus.__qualname__ = trainer.__name__
    return WithoutNereus


for _mode, _trainer in list(trainer_base.TRAINER_REGISTRY.items()):
    trainer_base.TRAINER_REGISTRY[_mode] = NereusTrainer if _mode == "sync" else _refusing(_trainer)
