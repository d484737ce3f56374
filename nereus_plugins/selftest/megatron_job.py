"""A small but genuine Megatron-core training job whose layout can change between steps.

GPT with grouped-query attention, SwiGLU and RMSNorm; Megatron's DDP, (distributed) optimizer, LR
scheduler and pipeline schedule. Groups are plain `new_group`s in a ProcessGroupCollection, so that
two layouts can be alive at once; `parallel_state` is never initialised.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described import megatron_private as private
from nereus_plugins.emu.described.base import FreedGradients
from nereus_plugins.emu.described.megatron import (
    describe_megatron,
    ensure_optimizer_state,
    free_gradients,
    load_scalars,
)
from nereus_plugins.selftest.groups import LayoutGroups, along
from nereus_plugins.spec import Layout

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 16, 2, 4  # tokens, samples, micro-batches of all dp ranks


@dataclass(frozen=True)
class MegatronModel:
    """What of the job does not depend on the layout."""

    bf16: bool = False
    tied: bool = False
    layers: int = 4
    hidden: int = 32
    ffn: int = 56
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 96


class MegatronBuilt:
    """One layout of the job on this rank; a rank outside the layout holds nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.active = False
        self.groups = LayoutGroups(timeout_s=60)
        self.collection = ProcessGroupCollection()
        self.everyone: dist.ProcessGroup | None = None
        self.chunk: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.config: Any = None
        self.freed: FreedGradients | None = None

    def described(self) -> DescribedUnit:
        if not self.active:
            return DescribedUnit()
        return describe_megatron(
            [self.chunk],
            self.optimizer,
            dp_cp_group=self.collection.dp_cp,
            lr_scheduler=self.scheduler,
        )

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        if self.active:
            load_scalars(
                scalars,
                [self.chunk],
                self.optimizer,
                dp_cp_group=self.collection.dp_cp,
                lr_scheduler=self.scheduler,
            )


class MegatronJob:
    """An `ElasticUnit` that can train.

    Args:
        name: unit name.
        model: the model.
        layout: layout to start in.
        seed: of the initial weights; a target layout is built with other weights on purpose, so
            that a box never written is seen.
        device: where the model lives.
    """

    def __init__(
        self, name: str, model: MegatronModel, layout: Layout, *, seed: int, device: torch.device
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self._seed = seed
        self._version = 0
        private.ensure_global_memory_buffer()
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)
        self.current = self.build(layout)

    def layout(self) -> Layout:
        return self.current.layout

    def described(self) -> DescribedUnit:
        return self.current.described()

    def version(self) -> int:
        return self._version

    def free_gradients(self) -> None:
        built = self.current
        if built.active and built.freed is None:
            built.freed = free_gradients([built.chunk], built.optimizer)

    def build(self, layout: Layout) -> MegatronBuilt:
        built = MegatronBuilt(layout)
        try:
            _form_groups(built)
            if built.active:
                self._build_model(built)
        except BaseException:
            self.release(built)
            raise
        self._seed += 1
        return built

    def switch(self, built: MegatronBuilt) -> MegatronBuilt:
        old, self.current = self.current, built
        return old

    def release(self, built: MegatronBuilt) -> None:
        if built.chunk is not None:
            private.drop_ddp_hooks(built.chunk)
            private.clear_rotary_caches()
        built.chunk = built.optimizer = built.scheduler = built.config = built.freed = None
        built.collection = ProcessGroupCollection()
        built.everyone = None
        built.active = False
        built.groups.destroy()
        gc.collect()

    def settle(self) -> None:
        """Nothing to do: this job keeps its state on the device."""

    def close(self) -> None:
        """Free everything."""
        self.release(self.current)

    def _build_model(self, built: MegatronBuilt) -> None:
        model, layout, groups = self.model, built.layout, built.collection
        dtype = torch.bfloat16 if model.bf16 else torch.float32
        config = TransformerConfig(
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=model.ffn,
            num_attention_heads=model.heads,
            num_query_groups=model.kv_heads,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            sequence_parallel=layout.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=model.bf16,
            use_cpu_initialization=self.device.type == "cpu",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            cross_entropy_loss_fusion=True,  # the other one asks parallel_state for its group
        )
        torch.manual_seed(self._seed)
        core: torch.nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=model.vocab,
            max_sequence_length=SEQUENCE,
            pre_process=groups.pp.rank() == 0,
            post_process=groups.pp.rank() == layout.pp - 1,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            parallel_output=True,
            pg_collection=groups,
        ).to(self.device)
        if model.bf16:
            core = Float16Module(config, core)
        sharded = layout.sharding == "zero1"
        built.chunk = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
            ),
            core,
            pg_collection=groups,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=model.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=sharded,
        )
        assert built.everyone is not None
        with private.optimizer_gathers_within(built.everyone):
            built.optimizer = get_megatron_optimizer(
                settings, [built.chunk], use_gloo_process_groups=False, pg_collection=groups
            )
        built.scheduler = OptimizerParamScheduler(
            built.optimizer,
            init_lr=1e-3,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=3,
            lr_decay_steps=100,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=100,
            wd_incr_style="linear",
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = built.optimizer.scale_loss
        built.config = config
        ensure_optimizer_state(built.optimizer)

    def train_step(self, step: int) -> float | None:
        """One optimizer step on global batch `step`; the loss, or None outside the layout."""
        built = self.current
        if not built.active:
            return None
        self._version += 1
        if built.freed is not None:
            built.freed.restore()
            built.freed = None
        groups, layout = built.collection, built.layout
        built.chunk.zero_grad_buffer()
        built.optimizer.zero_grad()
        batches = self._micro_batches(step, groups.dp.rank(), layout.dp)
        run = get_forward_backward_func(layout.pp, None)
        p2p = P2PCommunicator(groups.pp, built.config) if layout.pp > 1 else None
        outputs = run(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=[built.chunk],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
            pg_collection=groups,
            p2p_communicator=p2p,
        )
        built.optimizer.step()
        built.scheduler.step(increment=1)
        loss = torch.zeros(1, device=self.device)
        if groups.pp.rank() == layout.pp - 1 and groups.tp.rank() == 0:
            loss += torch.stack([o["loss"] for o in outputs]).mean() / layout.dp
        dist.all_reduce(loss, group=built.everyone)
        return float(loss)

    def _micro_batches(self, step: int, dp_rank: int, dp: int) -> list[torch.Tensor]:
        """This dp rank's part of a global batch that does not depend on the layout."""
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (MICRO_BATCHES, MICRO_BATCH, SEQUENCE + 1)
        tokens = torch.randint(0, self.model.vocab, shape, generator=generator)
        return [tokens[i].to(self.device) for i in range(dp_rank, MICRO_BATCHES, dp)]


def _form_groups(built: MegatronBuilt) -> None:
    """Megatron's groups for one layout, collective over the job; sets `active` and `everyone`."""
    layout, made, groups = built.layout, built.groups, built.collection
    tp = made.form(along(layout, "tp"))
    pp = made.form(along(layout, "pp"))
    dp = made.form(along(layout, "dp"))
    alone = made.form(along(layout))
    ends = made.form([[stages[0], stages[-1]] for stages in along(layout, "pp")])
    built.active = dist.get_rank() < layout.world_size
    groups.tp = groups.tp_cp = groups.tp_ep = groups.expt_tp = tp
    groups.pp = pp
    groups.dp = groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = groups.intra_expt_dp = dp
    groups.mp = groups.tp_ep_pp = made.form(along(layout, "tp", "pp"))
    groups.cp = groups.ep = groups.pos_embd = alone
    groups.tp_dp_cp = made.form(along(layout, "tp", "dp"))
    built.everyone = groups.intra_dist_opt = made.form([range(layout.world_size)])
    groups.inter_dist_opt = groups.hcp = None
    # Middle stages are in no group of first and last.
    at_end = built.active and pp is not None and pp.rank() in (0, layout.pp - 1)
    groups.embd = ends if at_end else None


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICRO_BATCH, -1)
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(inputs, positions, future[None, None], labels=labels)

    def loss_func(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = per_token.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_func
