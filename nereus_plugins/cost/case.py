"""One model trained, or read forward, under one layout: what the formulas are evaluated on."""

from __future__ import annotations

import dataclasses
import functools
import math

from nereus_plugins.spec import Knobs, Layout

from .communication import Group
from .hardware import GPU, Network
from .shape import Shape
from .software import Software


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one data-parallel rank works through between two optimizer steps.

    Attributes:
        micro_batches: number of micro-batches.
        tokens: tokens of a mean micro-batch.
        attended: mean of length^2 over mean length: what attention sees as sequence length.
        longest_tokens: tokens of the largest micro-batch; it decides peak memory.
        loss_tokens: tokens of the largest micro-batch that logits are computed for.
    """

    micro_batches: int
    tokens: float
    attended: float
    longest_tokens: float
    loss_tokens: float

    @classmethod
    def uniform(cls, micro_batches: int, sequences: int, length: float) -> Batch:
        """Micro-batches of `sequences` equal sequences."""
        tokens = sequences * length
        return cls(micro_batches, tokens, length, tokens, tokens)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its layout and batch on a GPU.

    Attributes:
        first_stage_layers, last_stage_layers: layers of the first and last pipeline stage where
            stages are uneven; None divides evenly.
        trains: False for a forward pass only (log-probabilities, values).
    """

    shape: Shape
    layout: Layout
    batch: Batch
    gpu: GPU
    network: Network
    software: Software
    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    trains: bool = True

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO or FSDP shares out state."""
        layout = self.layout
        if layout.sharding == "none":
            return 1
        if layout.sharding == "hsdp":
            return layout.shard_size or 1
        return layout.dp * layout.ulysses * layout.cp

    def group(self, name: str) -> Group:
        """The communication group of a rank, in Megatron's rank order tp-cp-dp-pp."""
        lay, node = self.layout, self.network.gpus_per_node
        tp, cp = lay.tp, lay.cp * lay.ulysses
        if name == "tp":
            return Group.of(tp, 1, node)
        if name == "cp":
            return Group.of(cp, tp, node)
        if name == "dp":
            return Group.of(lay.dp * cp, tp, node)
        if name == "shard":
            return Group.of(self.shard_ranks, tp, node)
        if name == "replicas":
            return Group.of(lay.dp * cp // self.shard_ranks, tp * self.shard_ranks, node)
        if name == "ep":
            return Group.of(lay.ep, lay.etp, node)
        if name == "edp":
            return Group.of(lay.expert_dp, lay.ep * lay.etp, node)
        raise KeyError(name)

    def stage_layers(self) -> tuple[tuple[int, int], ...]:
        """(dense, mixture-of-experts) layers of each pipeline stage."""
        return _stage_layers(
            self.layout.pp,
            self.shape.model.num_layers,
            self.shape.num_dense_layers,
            self.first_stage_layers,
            self.last_stage_layers,
        )

    @property
    def same_node_stages(self) -> bool:
        return self.layout.world_size <= self.network.gpus_per_node

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at its peak, in whole-stage units.

        1F1B: pp - stage. Interleaved: its warm-up holds (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
        chunks of 1/vpp of the stage (Megatron-LM, arXiv:2104.04473, section 2.2).
        """
        pp, vpp = self.layout.pp, self.layout.vpp
        if not self.trains:
            return 1.0
        if vpp == 1:
            return float(min(pp - stage, self.batch.micro_batches))
        chunks = (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
        return min(chunks, self.batch.micro_batches * vpp) / vpp

    @property
    def heads_per_rank(self) -> float:
        return max(1.0, self.shape.model.num_attention_heads / self.layout.tp / self.layout.ulysses)

    def tokens_here(self, tokens: float) -> float:
        """Tokens of a micro-batch that one rank holds outside attention."""
        return tokens / (self.layout.cp * self.layout.ulysses)

    @property
    def sequences(self) -> float:
        return self.batch.tokens / self.batch.attended


@functools.lru_cache(maxsize=4096)
def _stage_layers(
    pp: int, total: int, dense_layers: int, first: int | None, last: int | None
) -> tuple[tuple[int, int], ...]:
    if pp == 1:
        counts = [total]
    else:
        inner = pp - (first is not None) - (last is not None)
        rest = total - (first or 0) - (last or 0)
        each, more = divmod(rest, inner) if inner else (0, 0)
        # What does not divide goes to the middle: the first stage has the embedding, the last
        # the output layer.
        counts = [each] * inner
        for i in sorted(range(inner), key=lambda i: abs(2 * i - inner + 1))[:more]:
            counts[i] += 1
        counts = ([] if first is None else [first]) + counts
        counts += [] if last is None else [last]
    left, out = dense_layers, []
    for count in counts:
        dense = min(left, count)
        left -= dense
        out.append((dense, count - dense))
    return tuple(out)


@functools.lru_cache(maxsize=4096)
def uneven_stages(layers: int, pp: int) -> tuple[int, int] | None:
    """Layers of the first and last stage where `pp` does not divide `layers`; None if it does.

    As Megatron can be told (`num_layers_in_first_pipeline_stage`, `..._last_...`): the stages
    between are equal. They take the rounded-up share; the last, which has the output layer, the
    fewest. None too where that leaves one of the two empty.
    """
    if layers % pp == 0:
        return None
    inner = -(-layers // pp)
    rest = layers - inner * (pp - 2)
    return (rest - rest // 2, rest // 2) if rest >= 2 else None


def ceil_div(a: float, b: float) -> int:
    return math.ceil(a / b - 1e-9)
