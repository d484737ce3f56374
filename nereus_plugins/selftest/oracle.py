"""The frameworks' own checkpoints, saved in one layout and loaded in another: what a move equals.

Megatron-core's `dist_checkpointing` (fully reshardable optimizer format), torch's distributed
checkpoint and DeepSpeed's universal checkpoint. They reshard through files, by code that is not
ours.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereus_plugins.selftest.deepspeed_job import DeepSpeedJob
    from nereus_plugins.selftest.fsdp2_job import Fsdp2Job
    from nereus_plugins.selftest.megatron_job import MegatronJob


def save_megatron(job: MegatronJob, path: Path) -> None:
    """Save a Megatron job's model, optimizer and scheduler; collective over all ranks."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_megatron_state(job, loading=False), str(path))


def load_megatron(job: MegatronJob, path: Path) -> None:
    """Load what `save_megatron` wrote into a job of any layout; collective over all ranks."""
    from megatron.core import dist_checkpointing

    from nereus_plugins.emu.described import megatron_private as private
    from nereus_plugins.emu.described.megatron import unwrap

    state = dist_checkpointing.load(_megatron_state(job, loading=True), str(path))
    built = job.current
    if not built.active:
        return
    unwrap(built.chunk).load_state_dict(state["model"])
    built.optimizer.load_state_dict(state["optimizer"])
    built.scheduler.num_steps = 0  # load_state_dict adds to it
    built.scheduler.load_state_dict(state["scheduler"])
    for part in private.split_optimizers(built.optimizer):
        counters = [v for v in part.optimizer.state.values() if "step" in v]
        if not counters:
            continue
        # torch's Adam counts per parameter, FusedAdam per group. megatron-core 0.16.1 writes for
        # the latter: it leaves a number in the groups that torch does not read, and gives all
        # parameters one counter, which then counts once per parameter and step.
        for group in part.optimizer.param_groups:
            group.pop("step", None)
        for values in counters:
            values["step"] = values["step"].clone()


def _megatron_state(job: MegatronJob, *, loading: bool) -> dict[str, Any]:
    from nereus_plugins.emu.described import megatron_private as private
    from nereus_plugins.emu.described.megatron import unwrap

    built = job.current
    if not built.active:
        return {}
    group = built.collection.dp_cp
    metadata = {"dp_cp_group": group, "distrib_optim_sharding_type": "fully_reshardable"}
    core: Any = unwrap(built.chunk)
    with private.tied_weights_group(group):
        model = core.sharded_state_dict(metadata=metadata)
    optimizer = built.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if not loading:
        state["scheduler"] = built.scheduler.state_dict()
    return state


def save_fsdp2(job: Fsdp2Job, path: Path) -> None:
    """Save an FSDP2 job's model, optimizer and scheduler; collective over the layout's ranks."""
    import torch.distributed.checkpoint as checkpoint

    if job.current.module is not None:
        group = job.current.everyone
        checkpoint.save(_fsdp2_state(job), checkpoint_id=path, process_group=group)


def load_fsdp2(job: Fsdp2Job, path: Path) -> None:
    """Load what `save_fsdp2` wrote into a job of any layout; collective over the layout's ranks."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    built = job.current
    if built.module is None:
        return
    state = _fsdp2_state(job)
    checkpoint.load(state, checkpoint_id=path, process_group=built.everyone)
    set_state_dict(
        built.module,
        built.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    built.scheduler.load_state_dict(state["scheduler"])


def _fsdp2_state(job: Fsdp2Job) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    built = job.current
    model, optimizer = get_state_dict(built.module, built.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": built.scheduler.state_dict()}


def save_deepspeed(job: DeepSpeedJob, path: Path) -> None:
    """Save a DeepSpeed job and make DeepSpeed's universal checkpoint of it."""
    import argparse

    import torch.distributed as dist
    from deepspeed.checkpoint import ds_to_universal

    built = job.current
    if built.engine is not None:
        with built.in_force():
            built.engine.save_checkpoint(str(path), tag="saved")
    dist.barrier()
    if dist.get_rank() == 0:
        settings = argparse.Namespace(
            input_folder=str(path / "saved"),
            output_folder=str(path / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):  # it prints its progress
            ds_to_universal.main(settings)
    dist.barrier()


def load_deepspeed(job: DeepSpeedJob, path: Path) -> None:
    """Load what `save_deepspeed` wrote into a job with any number of ranks of the same stage."""
    from nereus_plugins.emu.described import deepspeed_private as private

    engine = job.current.engine
    if engine is None:
        return
    optimizer = private.adam(engine)
    assert optimizer is not None
    groups = optimizer.param_groups
    decays = [group["weight_decay"] for group in groups]
    with job.current.in_force():
        engine._config.load_universal_checkpoint = True
        engine.load_checkpoint(str(path), tag="universal")
    # DeepSpeed 0.19.6 gives all groups of ZeRO-3 the settings of the first, and one step counter,
    # which torch's Adam then counts once per group; it does not load counters of micro-batches.
    for group, decay in zip(groups, decays, strict=True):
        group["weight_decay"] = decay
    for values in optimizer.state.values():
        values["step"] = values["step"].clone()
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    engine.gas_boundary_ctr = engine.global_steps
