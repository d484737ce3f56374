"""A small DeepSpeed training job (ZeRO 0 to 3, AutoTP) whose layout can change between steps.

A Hugging Face Qwen2 (grouped-query attention, biases, SwiGLU) whose sizes leave padding in the
partitions, with two parameter groups, gradient accumulation, clipping and an LR scheduler, as RL
frameworks set DeepSpeed up. Each layout has a world of its own: DeepSpeed takes the default process
group for all ranks that train.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described import deepspeed_private as private
from nereus_plugins.emu.described.deepspeed import (
    describe_deepspeed,
    ensure_optimizer_state,
    free_gradients,
    load_scalars,
    release,
)
from nereus_plugins.spec import Layout
from nereus_plugins.transport.groups import GroupSet
from nereus_plugins.transport.torch_private import (
    clone_default_store,
    form_world,
    groups_named,
    in_world,
    name_groups_from,
)

SEQUENCE, SAMPLES = 10, 12  # tokens, samples of a global batch; a micro-batch has one
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_FORM_TIMEOUT_S = 60.0
_GROUPS_OF_A_LAYOUT = 64  # more than DeepSpeed forms; ranks that it leaves out count them too


@dataclass(frozen=True)
class DeepSpeedModel:
    """What of the job does not depend on the layout.

    Attributes:
        bf16: parameters and gradients in bf16, masters in fp32.
        fp32_grads: with bf16, gradients accumulated in fp32 (another optimizer under ZeRO-1).
        tied: output weights are the embedding's.
        round_robin: ZeRO-1 and 2 deal parameters out to ranks in turn.
        fused: DeepSpeed's own Adam, compiled at first use, instead of torch's.
    """

    bf16: bool = False
    fp32_grads: bool = False
    tied: bool = False
    round_robin: bool = False
    fused: bool = False
    layers: int = 2
    hidden: int = 32
    ffn: int = 44
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 51


class DeepSpeedBuilt:
    """One layout of the job on this rank; a rank outside the layout holds nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups = GroupSet()
        self.world: dist.ProcessGroup | None = None
        self.globals = private.Globals.fresh()
        self.engine: Any = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, its world is torch's default group, and DeepSpeed's globals are its own."""
        assert self.world is not None
        with in_world(self.world), self.globals.loaded():
            yield

    def described(self) -> DescribedUnit:
        if self.engine is None:
            return DescribedUnit()
        with self.in_force():
            return describe_deepspeed(self.engine)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        if self.engine is not None:
            with self.in_force():
                load_scalars(scalars, self.engine)


class DeepSpeedJob:
    """An `ElasticUnit` that can train; arguments as in `MegatronJob`."""

    def __init__(
        self, name: str, model: DeepSpeedModel, layout: Layout, *, seed: int, device: torch.device
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self._seed = seed
        self._version = 0
        private.check_version()
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # from where DeepSpeed takes its device
        self.current = self.build(layout)

    def layout(self) -> Layout:
        return self.current.layout

    def described(self) -> DescribedUnit:
        return self.current.described()

    def version(self) -> int:
        return self._version

    def free_gradients(self) -> None:
        if self.current.engine is not None:
            free_gradients(self.current.engine)

    def build(self, layout: Layout) -> DeepSpeedBuilt:
        built = DeepSpeedBuilt(layout)
        named = groups_named()
        try:
            with built.groups.collect(_FORM_TIMEOUT_S):
                if dist.get_rank() < layout.world_size:
                    self._build_engine(built, f"deepspeed-{self.name}-{named}")
        except BaseException:
            self.release(built)
            raise
        finally:
            name_groups_from(named + _GROUPS_OF_A_LAYOUT)
        self._seed += 1
        return built

    def switch(self, built: DeepSpeedBuilt) -> DeepSpeedBuilt:
        old, self.current = self.current, built
        return old

    def release(self, built: DeepSpeedBuilt) -> None:
        if built.engine is not None:
            release(built.engine)
        built.engine = built.world = None
        built.globals = private.Globals.fresh()
        gc.collect()
        built.groups.destroy()

    def settle(self) -> None:
        """Nothing to do: this job keeps its state on the device."""

    def close(self) -> None:
        """Free everything."""
        self.release(self.current)

    def _build_engine(self, built: DeepSpeedBuilt, key: str) -> None:
        layout = built.layout
        store = dist.PrefixStore(key, clone_default_store())
        built.world = form_world(
            store, dist.get_rank(), layout.world_size, timeout_s=_FORM_TIMEOUT_S / 2
        )
        with built.in_force(), redirect_stdout(io.StringIO()):  # it prints as it builds
            torch.manual_seed(self._seed)
            module = Qwen2ForCausalLM(_config(self.model)).to(self.device)
            decayed = [p for p in module.parameters() if p.dim() > 1]
            others = [p for p in module.parameters() if p.dim() <= 1]
            built.engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=[
                    {"params": decayed, "weight_decay": 0.01},
                    {"params": others, "weight_decay": 0.0},
                ],
                lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_schedule),
                config=deepspeed_config(self.model, layout),
                dist_init_required=False,
            )
            ensure_optimizer_state(built.engine)

    def train_step(self, step: int) -> float | None:
        """One optimizer step on global batch `step`; the loss, or None outside the layout."""
        built = self.current
        if built.engine is None:
            return None
        self._version += 1
        layout, engine = built.layout, built.engine
        place = layout.coord(dist.get_rank()).dp
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, self.model.vocab, (SAMPLES, SEQUENCE), generator=generator)
        mine = tokens.chunk(layout.dp)[place].to(self.device)
        with built.in_force():
            total = torch.zeros((), device=self.device)
            for micro_batch in mine.split(1):
                loss = engine(input_ids=micro_batch, labels=micro_batch, use_cache=False).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(mine)
            dist.all_reduce(total)
        return float(total) / layout.world_size


def deepspeed_config(model: DeepSpeedModel, layout: Layout) -> dict[str, Any]:
    """The configuration of a layout; the global batch is the same in all."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SAMPLES // layout.dp,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": model.bf16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": not model.fused},
        },
        "zero_optimization": {
            "stage": STAGES[layout.sharding],
            "round_robin_gradients": model.round_robin,
            # Small, as the model is: some parameters stay gathered, buckets are filled.
            "stage3_param_persistence_threshold": 40,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
        },
        "tensor_parallel": {"autotp_size": layout.tp},
    }
    # Of the stages, 0 takes none other than the weights', and 1 another optimizer for it.
    if model.fp32_grads and layout.sharding != "none":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _config(model: DeepSpeedModel) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=model.tied,
        attn_implementation="eager",
    )


def _schedule(step: int) -> float:
    return min(1.0, (step + 1) / 3) * 0.97**step
