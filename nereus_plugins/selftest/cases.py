"""Which pairs of layouts are proved, for which models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nereus_plugins.spec import Layout


@dataclass(frozen=True)
class Case:
    """A pair of layouts.

    Attributes:
        backend: "megatron", "fsdp2" or "deepspeed".
        model: keyword arguments of the job's model.
        source, target: the layouts.
        checkpoint: whether the framework's own checkpoint can go from source to target at all.
    """

    backend: str
    model: dict[str, Any]
    source: Layout
    target: Layout
    checkpoint: bool = True

    @property
    def ranks(self) -> int:
        return max(self.source.world_size, self.target.world_size)

    def __str__(self) -> str:
        model = " ".join(k for k, v in self.model.items() if v) or "fp32"
        return f"{self.backend} {model}: {self.source} -> {self.target}"


def _zero1(tp: int = 1, pp: int = 1, dp: int = 1) -> Layout:
    return Layout(tp=tp, pp=pp, dp=dp, sharding="zero1")


def _plain(tp: int = 1, pp: int = 1, dp: int = 1) -> Layout:
    return Layout(tp=tp, pp=pp, dp=dp)


def _fsdp(dp: int, tp: int = 1) -> Layout:
    return Layout(dp=dp, tp=tp, sharding="fsdp")


def _zero(stage: int, dp: int = 1, tp: int = 1) -> Layout:
    return Layout(tp=tp, dp=dp, sharding=f"zero{stage}" if stage else "none")


_HSDP = Layout(dp=4, sharding="hsdp", shard_size=2)
_FP32: dict[str, Any] = {}
_BF16 = {"bf16": True}
_TIED = {"tied": True}
_BOTH = {"bf16": True, "tied": True}

# All models have grouped-query attention, SwiGLU and RMSNorm; zero1 is the distributed optimizer.
MEGATRON = [
    Case("megatron", _FP32, _zero1(tp=2, pp=2), _zero1(pp=4)),
    Case("megatron", _BF16, _zero1(tp=2, pp=2), _zero1(pp=2, dp=2)),
    Case("megatron", _BOTH, _zero1(pp=4), _zero1(tp=2, dp=2)),
    Case("megatron", _TIED, _plain(tp=4), _plain(dp=4)),
    Case("megatron", _BF16, _zero1(dp=4), _zero1(tp=2, pp=2)),
    Case("megatron", _BOTH, _zero1(tp=2, pp=2), _zero1()),
    Case("megatron", _FP32, _zero1(pp=2), _zero1(tp=2, pp=2)),
    Case("megatron", _BOTH, _plain(tp=2, dp=2), _plain(pp=2, dp=2)),
    # Megatron's checkpoints do not change the kind of optimizer; a move does.
    Case("megatron", _BF16, _zero1(dp=2), _plain(dp=4), checkpoint=False),
    Case("megatron", _TIED, _plain(tp=2, pp=2), _zero1(tp=2), checkpoint=False),
    Case("megatron", _TIED, _plain(pp=2), _plain(tp=2)),
    Case("megatron", _BF16, _zero1(dp=2), _zero1(tp=2)),
    Case("megatron", _BOTH, _zero1(tp=2, pp=2, dp=2), _zero1(tp=4, pp=2)),
    Case("megatron", _FP32, _zero1(tp=2, pp=2, dp=2), _zero1(pp=4, dp=2)),
]
FSDP2 = [
    Case("fsdp2", _FP32, _fsdp(4), _fsdp(2)),
    Case("fsdp2", _FP32, _fsdp(4), _HSDP),
    Case("fsdp2", _FP32, _fsdp(4), _fsdp(2, tp=2)),
    Case("fsdp2", _BOTH, _fsdp(2), _fsdp(4)),
    Case("fsdp2", _BOTH, _fsdp(4), _fsdp(3)),
    Case("fsdp2", {"mixed": True}, _HSDP, _fsdp(2, tp=2)),
    Case("fsdp2", _FP32, _fsdp(2), _fsdp(1, tp=2)),
]
# Different numbers of ranks, stages and AutoTP; two parameter groups, gradient accumulation.
# DeepSpeed's universal checkpoints change the number of ranks, not the stage.
_ROUND = {"bf16": True, "round_robin": True}
DEEPSPEED = [
    Case("deepspeed", _BF16, _zero(2, 2), _zero(2, 1)),
    Case("deepspeed", _BF16, _zero(3, 2), _zero(3, 1)),
    Case("deepspeed", _BF16, _zero(2, 2), _zero(3, 4), checkpoint=False),
    Case("deepspeed", _BF16, _zero(3, 3), _zero(1, 2, tp=2), checkpoint=False),
    Case("deepspeed", _FP32, _zero(3, 4), _zero(2, 3), checkpoint=False),
    Case("deepspeed", _FP32, _zero(0, 2), _zero(3, 2), checkpoint=False),
    Case("deepspeed", _BF16, _zero(0, 2), _zero(2, 4), checkpoint=False),
    Case("deepspeed", _BF16, _zero(1, 4), _zero(0, 1, tp=2), checkpoint=False),
    Case("deepspeed", _BF16, _zero(2, 2, tp=2), _zero(3, 2, tp=2), checkpoint=False),
    Case("deepspeed", _BOTH, _zero(3, 4), _zero(2, 2), checkpoint=False),
    Case(
        "deepspeed", {"bf16": True, "fp32_grads": True}, _zero(1, 3), _zero(2, 4), checkpoint=False
    ),
    Case("deepspeed", _ROUND, _zero(2, 3), _zero(1, 4), checkpoint=False),
]
# For failures: source and target share no rank's state unchanged.
FAILURE = {
    "megatron": Case("megatron", _BF16, _zero1(tp=2), _zero1(dp=2)),
    "fsdp2": Case("fsdp2", _FP32, _fsdp(2), Layout(tp=2, sharding="fsdp")),
    "deepspeed": Case("deepspeed", _BF16, _zero(2, 2), _zero(3, tp=2)),
}
# Layouts gone through in turn, again and again.
SOAK = {
    "megatron": [
        _zero1(tp=2, pp=2), _zero1(pp=4), _zero1(pp=2, dp=2), _zero1(tp=2, dp=2), _zero1(dp=4),
        _zero1(tp=2), _zero1(dp=2),
    ],
    "fsdp2": [_fsdp(4), _fsdp(2), _HSDP, _fsdp(2, tp=2), _fsdp(3), _fsdp(1, tp=2)],
    "deepspeed": [
        _zero(2, 2), _zero(3, 4), _zero(1, 2, tp=2), _zero(3, 1, tp=2), _zero(0, 2), _zero(2, 3),
        _zero(3, 2),
    ],
}  # fmt: skip


def cases(backend: str, ranks: int, *, at_least: int = 1, quick: bool = False) -> list[Case]:
    """The pairs that fit on `ranks` ranks and take `at_least` so many; four of them if quick."""
    found = {"megatron": MEGATRON, "fsdp2": FSDP2, "deepspeed": DEEPSPEED}[backend]
    fitting = [c for c in found if at_least <= c.ranks <= ranks]
    return fitting[:4] if quick else fitting
