"""A unit's shards as the spec predicts them, for planning and estimates at any scale.

Nothing is built and torch is not imported. What is executed is always described by the built model
itself; the prediction only has to be near (see tests/dist/test_predicted_vs_described.py), and its
names and shapes are those of the described unit so that the two can be compared:

- megatron: as megatron-core 0.16.1's `sharded_state_dict()` names them, optimizer state cut by the
  flat ranges of the distributed optimizer (`predict_megatron.py`);
- fsdp2: Hugging Face parameter names, each parameter cut along dim 0 (`predict_fsdp2.py`);
- deepspeed: the same names, cut by AutoTP and by DeepSpeed 0.19.6's ZeRO (`predict_deepspeed.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus_plugins.emu import predict_deepspeed, predict_fsdp2, predict_megatron
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec, SpecError

BACKENDS = {
    "megatron": predict_megatron.predict,
    "fsdp2": predict_fsdp2.predict,
    "deepspeed": predict_deepspeed.predict,
}


def predict_unit(
    model: ModelSpec,
    layout: Layout,
    *,
    backend: str,
    optimizer: OptimizerSpec | None = None,
    param_dtype: str = "bfloat16",
    ranks: Sequence[int] | None = None,
    rank: int | None = None,
    device: str = "cuda",
) -> ShardTable:
    """The shard table of a model in a layout.

    Args:
        model: what is built.
        layout: how it is cut; `layout.check(model)` must hold.
        backend: "megatron", "fsdp2" or "deepspeed".
        optimizer: adds masters and moments; None for a model that is not trained.
        param_dtype: dtype of the weights ("bfloat16", "float32", ...).
        ranks: global rank of each of the layout's ranks; None means 0 .. layout.world_size-1.
        rank: only the shards of this global rank (none, if it is not in the unit). The tensors are
            those of the whole unit, so that tables of different ranks fit together.
        device: where the storages lie.

    Raises:
        SpecError: the layout does not fit the model or the backend.
    """
    if backend not in BACKENDS:
        raise SpecError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    layout.check(model)
    placed = tuple(range(layout.world_size)) if ranks is None else tuple(ranks)
    if len(placed) != layout.world_size or len(set(placed)) != len(placed):
        raise SpecError(
            f"ranks must be {layout.world_size} different ranks for layout {layout}, got {placed}"
        )
    if rank is None:
        units = list(range(layout.world_size))
    else:
        units = [placed.index(rank)] if rank in placed else []
    return BACKENDS[backend](
        model, layout, optimizer, param_dtype, units=units, ranks=placed, device=device
    )
