"""How a model's state is cut over ranks: `Layout`, and a rank's place in it.

Ranks are those of the unit, 0 .. world_size-1, in Megatron-core's default order tp-cp-ep-dp-pp:

    rank = tp + TP * (ulysses + ULYSSES * (cp + CP * (dp + DP * pp)))

Expert parallelism does not add ranks: it re-divides the tp x cp x dp ranks of a pipeline stage,
etp fastest, then ep, then the expert data-parallel axis.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from .record import (
    Record,
    SpecError,
    divisors_text,
    require,
    require_bool,
    require_choice,
    require_int,
)

if TYPE_CHECKING:
    from .model import ModelSpec

# What of a model a layout divides, in words.
_SIZES = {
    "heads": "attention heads",
    "kv_heads": "key-value heads",
    "vocab": "vocabulary size",
    "ffn": "MLP width (ffn_hidden_size)",
    "layers": "layers",
    "experts": "experts",
    "expert_ffn": "expert width",
}
MOST_RANKS = 1 << 17  # of one layout; more is a mistake, and would cost memory to look at
SHARDINGS = ("none", "zero1", "zero2", "zero3", "fsdp", "hsdp")


class Coord(NamedTuple):
    """A rank's place on the mesh axes of a layout."""

    tp: int
    ulysses: int
    cp: int
    dp: int
    pp: int


class ExpertCoord(NamedTuple):
    """A rank's place on the axes that expert weights are cut over; `edp` replicates them."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclasses.dataclass(frozen=True)
class Layout(Record):
    """The parallel layout of one unit.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks.
        cp: context-parallel ranks (each holds a part of the sequence, all of the weights).
        ep: expert-parallel ranks, out of the tp*cp*dp ranks of a stage.
        etp: tensor-parallel ranks inside one expert.
        vpp: model chunks per pipeline stage (interleaved schedule).
        ulysses: Ulysses sequence-parallel ranks; with FSDP they join dp in the shard mesh.
        sequence_parallel: Megatron's sequence parallelism (activations cut over tp).
        sharding: what the data-parallel ranks share out: "none"; "zero1" optimizer state
            (Megatron's distributed optimizer is this one); "zero2" and gradients; "zero3" and
            parameters, flat; "fsdp" parameters, gradients and optimizer state, per parameter;
            "hsdp" the same inside groups of `shard_size` ranks, replicated between groups.
        shard_size: ranks of one HSDP shard group; for "hsdp" only.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    ulysses: int = 1
    sequence_parallel: bool = False
    sharding: str = "none"
    shard_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "ulysses"):
            require_int("Layout", name, getattr(self, name))
        require_bool("Layout", "sequence_parallel", self.sequence_parallel)
        require_choice("Layout", "sharding", self.sharding, SHARDINGS)
        require(
            not self.sequence_parallel or self.tp > 1,
            "sequence_parallel cuts activations over tp ranks: it needs tp > 1",
        )
        require(
            self.vpp == 1 or self.pp > 1,
            f"vpp={self.vpp} interleaves the chunks of pipeline stages: it needs pp > 1",
        )
        require(
            self.world_size <= MOST_RANKS,
            f"a layout has at most {MOST_RANKS} ranks (tp*pp*dp*cp*ulysses): lower one of them",
        )
        stage_ranks = self.tp * self.cp * self.dp
        require(
            stage_ranks % (self.ep * self.etp) == 0,
            f"ep*etp = {self.ep * self.etp} must divide tp*cp*dp = {stage_ranks}: experts are "
            "spread over the ranks of one pipeline stage",
        )
        if self.sharding == "hsdp":
            if self.shard_size is None:
                raise SpecError("sharding=hsdp needs shard_size, the ranks of one shard group")
            require_int("Layout", "shard_size", self.shard_size)
            require(
                self.shard_mesh_size % self.shard_size == 0,
                f"shard_size={self.shard_size} must divide dp*ulysses = {self.shard_mesh_size}",
            )
        else:
            require(
                self.shard_size is None,
                f"shard_size is for sharding=hsdp only; sharding={self.sharding} shards over all "
                "data-parallel ranks",
            )

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        for name in ("cp", "ep", "etp", "vpp", "ulysses"):
            if getattr(self, name) != 1:
                parts.append(f"{name.upper()}{getattr(self, name)}")
        if self.sequence_parallel:
            parts.append("SP")
        if self.sharding == "hsdp":
            parts.append(f"HSDP{self.shard_size}")
        elif self.sharding != "none":
            parts.append(self.sharding.upper())
        return " ".join(parts)

    @property
    def world_size(self) -> int:
        """Ranks the layout takes: tp * pp * dp * cp * ulysses."""
        return self.tp * self.pp * self.dp * self.cp * self.ulysses

    @property
    def shard_mesh_size(self) -> int:
        """Ranks that FSDP shards or replicates over: dp * ulysses."""
        return self.dp * self.ulysses

    @property
    def expert_dp(self) -> int:
        """Ranks of a pipeline stage that hold copies of the same expert weights."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def coord(self, rank: int) -> Coord:
        """The place of `rank` (0 .. world_size-1) on the axes; `SpecError` if there is none."""
        if not 0 <= rank < self.world_size:
            raise SpecError(f"rank {rank} is not in layout {self} of {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, ulysses = divmod(rest, self.ulysses)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coord(tp=tp, ulysses=ulysses, cp=cp, dp=dp, pp=pp)

    def rank_of(
        self, *, tp: int = 0, pp: int = 0, dp: int = 0, cp: int = 0, ulysses: int = 0
    ) -> int:
        """The rank at this place; the inverse of `coord`."""
        for name, value in (("tp", tp), ("pp", pp), ("dp", dp), ("cp", cp), ("ulysses", ulysses)):
            if not 0 <= value < getattr(self, name):
                raise SpecError(f"{name}={value} is outside layout {self}")
        return tp + self.tp * (ulysses + self.ulysses * (cp + self.cp * (dp + self.dp * pp)))

    def expert_coord(self, rank: int) -> ExpertCoord:
        """The place of `rank` on the axes that cut expert weights (`ulysses` must be 1)."""
        require(self.ulysses == 1, "expert parallelism with ulysses > 1 has no defined rank order")
        self.coord(rank)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        pp, edp = divmod(rest, self.expert_dp)
        return ExpertCoord(etp=etp, ep=ep, edp=edp, pp=pp)

    def check(self, model: ModelSpec, world_size: int | None = None) -> None:
        """Raise `SpecError` naming the first rule that `model` or `world_size` breaks."""

        def divides(name: str, by: int, **sizes: int) -> None:
            for what, value in sizes.items():
                if value % by:
                    fit = divisors_text(math.gcd(*sizes.values()), world_size)
                    raise SpecError(
                        f"layout {self}: {_SIZES[what]} = {value} of model {model.name} must be "
                        f"divisible by {name} = {by}; {name} may be {fit}"
                    )

        if world_size is not None:
            require(
                self.world_size == world_size,
                f"layout {self} takes tp*pp*dp*cp*ulysses = {self.world_size} ranks, the job has "
                f"{world_size}",
            )
        divides(
            "tp",
            self.tp,
            heads=model.num_attention_heads,
            kv_heads=model.num_kv_heads,
            vocab=model.vocab_size,
            ffn=model.ffn_hidden_size,
        )
        divides("ulysses", self.ulysses, heads=model.num_attention_heads)
        divides("pp*vpp", self.pp * self.vpp, layers=model.num_layers)
        if model.moe is None:
            require(
                self.ep == 1 and self.etp == 1,
                f"layout {self}: ep and etp spread experts, and model {model.name} has none; "
                "set ep and etp to 1",
            )
        else:
            divides("ep", self.ep, experts=model.moe.num_experts)
            divides("etp", self.etp, expert_ffn=model.moe.expert_ffn_hidden_size)
