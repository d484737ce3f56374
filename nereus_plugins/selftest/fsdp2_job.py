"""A small FSDP2 training job (1-D, HSDP, or with tensor parallelism) whose layout can change.

A transformer whose sizes no rank count divides, so that rows are cut unevenly, with torch's AdamW
and LR scheduler.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described import torch_private as private
from nereus_plugins.emu.described.fsdp2 import (
    describe_fsdp2,
    ensure_optimizer_state,
    load_scalars,
)
from nereus_plugins.selftest.groups import LayoutGroups, along
from nereus_plugins.spec import Layout

SEQUENCE, SAMPLES = 12, 12  # tokens, samples of a global batch


@dataclass(frozen=True)
class Fsdp2Model:
    """What of the job does not depend on the layout.

    Attributes:
        bf16: parameters (and Adam's moments) in bf16, gradients reduced in fp32.
        mixed: fp32 parameters, computed in bf16.
        tied: output weights are the embedding's.
    """

    bf16: bool = False
    mixed: bool = False
    tied: bool = False
    layers: int = 2
    hidden: int = 30
    ffn: int = 90
    heads: int = 3
    vocab: int = 50


class _Block(nn.Module):
    def __init__(self, model: Fsdp2Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.attention_norm = nn.RMSNorm(model.hidden)
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(model.hidden)
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(samples, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, tokens, hidden))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class _Transformer(nn.Module):
    def __init__(self, model: Fsdp2Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(_Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.tokens_seen: torch.Tensor
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Fsdp2Built:
    """One layout of the job on this rank; a rank outside the layout holds nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.active = dist.get_rank() < layout.world_size
        self.groups = LayoutGroups(timeout_s=60)
        self.everyone: dist.ProcessGroup | None = None
        self.data_group: dist.ProcessGroup | None = None
        self.mesh: DeviceMesh | None = None
        self.module: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None

    def described(self) -> DescribedUnit:
        if self.module is None:
            return DescribedUnit()
        return describe_fsdp2(self.module, self.optimizer, lr_scheduler=self.scheduler)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        if self.module is not None:
            load_scalars(scalars, self.module, self.optimizer, lr_scheduler=self.scheduler)


class Fsdp2Job:
    """An `ElasticUnit` that can train; arguments as in `MegatronJob`."""

    def __init__(
        self, name: str, model: Fsdp2Model, layout: Layout, *, seed: int, device: torch.device
    ) -> None:
        self.name = name
        self.model = model
        self.device = device
        self._seed = seed
        self._version = 0
        self.current = self.build(layout)

    def layout(self) -> Layout:
        return self.current.layout

    def described(self) -> DescribedUnit:
        return self.current.described()

    def version(self) -> int:
        return self._version

    def free_gradients(self) -> None:
        if self.current.optimizer is not None:
            self.current.optimizer.zero_grad(set_to_none=True)

    def build(self, layout: Layout) -> Fsdp2Built:
        built = Fsdp2Built(layout)
        try:
            self._form_meshes(built)
            if built.active:
                self._build_model(built)
        except BaseException:
            self.release(built)
            raise
        self._seed += 1
        return built

    def switch(self, built: Fsdp2Built) -> Fsdp2Built:
        old, self.current = self.current, built
        private.clear_sharding_cache()
        return old

    def release(self, built: Fsdp2Built) -> None:
        built.module = built.optimizer = built.scheduler = built.mesh = None
        built.everyone = built.data_group = None
        private.clear_sharding_cache()  # its keys hold the old meshes
        gc.collect()
        built.groups.destroy()

    def settle(self) -> None:
        """Nothing to do: this job keeps its state on the device."""

    def close(self) -> None:
        """Free everything."""
        self.release(self.current)

    def _form_meshes(self, built: Fsdp2Built) -> None:
        """Groups are formed by all ranks of the job, meshes over them by the layout's own."""
        layout = built.layout
        built.everyone = built.groups.form([range(layout.world_size)])
        built.data_group = built.groups.form(along(layout, "dp"))
        if layout.sharding == "hsdp":
            # Shard groups are neighbours, replicas are apart: rank = replica * shard_size + shard.
            size = layout.shard_size or 1
            ranks = torch.arange(layout.world_size).view(-1, size)
            groups = [built.groups.form(ranks.t().tolist()), built.groups.form(ranks.tolist())]
            names: tuple[str, ...] = ("replicate", "shard")
        elif layout.tp > 1:
            ranks = torch.arange(layout.world_size).view(layout.dp, layout.tp)
            groups = [built.data_group, built.groups.form(along(layout, "tp"))]
            names = ("shard", "tp")
        else:
            ranks = torch.arange(layout.world_size)
            groups = [built.data_group]
            names = ("shard",)
        if built.active:
            kind, mine = self.device.type, [g for g in groups if g is not None]
            if len(mine) == 1:
                built.mesh = DeviceMesh.from_group(mine[0], kind, mesh_dim_names=names)
            else:
                built.mesh = DeviceMesh.from_group(mine, kind, mesh=ranks, mesh_dim_names=names)

    def _build_model(self, built: Fsdp2Built) -> None:
        layout, mesh = built.layout, built.mesh
        assert mesh is not None
        torch.manual_seed(self._seed)
        module = _Transformer(self.model)
        if self.model.bf16:
            module.to(torch.bfloat16)
        module.to(self.device)
        if layout.tp > 1:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            for layer in module.layers:
                parallelize_module(layer, mesh["tp"], plan)
        data_mesh = mesh if layout.sharding == "hsdp" else mesh["shard"]
        policy = MixedPrecisionPolicy()
        if self.model.bf16 or self.model.mixed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in module.layers:
            fully_shard(layer, mesh=data_mesh, mp_policy=policy)
        fully_shard(module, mesh=data_mesh, mp_policy=policy)
        built.module = module
        # One parameter at a time: with tensor parallelism parameters lie on different meshes.
        built.optimizer = torch.optim.AdamW(
            module.parameters(), lr=1e-2, weight_decay=0.01, foreach=False
        )
        built.scheduler = torch.optim.lr_scheduler.LambdaLR(
            built.optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.97**step
        )
        ensure_optimizer_state(built.optimizer)

    def train_step(self, step: int) -> float | None:
        """One optimizer step on global batch `step`; the loss, or None outside the layout."""
        built = self.current
        if built.module is None:
            return None
        self._version += 1
        layout = built.layout
        place = layout.coord(dist.get_rank())
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (SAMPLES, SEQUENCE + 1)
        batch = torch.randint(0, self.model.vocab, shape, generator=generator)
        tokens = batch.chunk(layout.dp)[place.dp].to(self.device)
        built.optimizer.zero_grad(set_to_none=True)
        logits = built.module(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        built.optimizer.step()
        built.scheduler.step()
        built.module.tokens_seen += batch[:, 1:].numel()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=built.data_group)
        return float(mean) / layout.dp
