"""Predicted shards of a Hugging Face model under DeepSpeed: ZeRO 0 to 3, with AutoTP.

AutoTP cuts the projections of attention and MLP as the model's own plan says, the output layer
along the vocabulary where it is not tied to the embedding, and leaves the rest whole on each rank.
Of what a tensor-parallel rank has,

- ZeRO-0 keeps all on every data-parallel rank;
- ZeRO-1 and 2 lay the parameters of each optimizer group one after another, pad to a multiple of
  2 * dp elements, and give each rank an equal part of the masters and moments;
- ZeRO-3 pads each parameter to a multiple of dp and gives each rank its part of everything.

Here dp has the ranks of ring attention (cp) in it: DeepSpeed is not told of them.
Optimizer groups are those of RL frameworks: with weight decay (more than one dim) and without.
A model that is not trained is whole on every rank but for ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus_plugins.emu.boxes import Int64Array, flat_ranges_to_boxes
from nereus_plugins.emu.predict_fsdp2 import hf_parameters
from nereus_plugins.emu.predict_table import TableBuilder
from nereus_plugins.emu.table import DTYPE_BYTES, ShardTable, TensorInfo
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec, SpecError

_STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_ALIGNMENT = 2  # elements of a ZeRO-1 or 2 group, times the data-parallel size
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # cut along dim 0, with their bias
_COLUMNS = ("o_proj", "down_proj")  # the weight cut along dim 1


def predict(
    model: ModelSpec,
    layout: Layout,
    optimizer: OptimizerSpec | None,
    param_dtype: str,
    *,
    units: Sequence[int],
    ranks: Sequence[int],
    device: str,
) -> ShardTable:
    """See `predicted.predict_unit`; `units` are the layout's ranks to predict."""
    if layout.sharding not in _STAGES:
        raise SpecError(
            f"backend deepspeed has sharding {', '.join(_STAGES)}, not {layout.sharding}"
        )
    for axis in ("pp", "ep", "etp", "ulysses"):
        if getattr(layout, axis) != 1:
            raise SpecError(
                f"layout {layout}: a prediction for backend deepspeed needs {axis}=1; use dp, cp, "
                "tp and sharding"
            )
    if layout.tp > 1 and model.moe is not None:
        raise SpecError(f"layout {layout}: AutoTP cuts no experts of {model.name}; set tp=1")
    stage = _STAGES[layout.sharding]
    if optimizer is None and stage < 3:
        stage = 0
    params = hf_parameters(model)
    kinds = [("weight", param_dtype)]
    if optimizer is not None:
        kinds.append(("master", optimizer.master_dtype))
        kinds += [(kind, optimizer.moments_dtype) for kind in ("exp_avg", "exp_avg_sq")]
    # Weights of the master's dtype are updated in place, but for the copy that ZeRO-1 to 3 make.
    shared = optimizer is not None and optimizer.master_dtype == param_dtype and stage == 0
    builder = TableBuilder(
        [
            TensorInfo(f"{kind}/{name}", shape, dtype)
            for kind, dtype in kinds
            for name, shape in params
        ],
        device,
    )
    full = np.ones((len(params), builder.dims), np.int64)
    for i, (_, shape) in enumerate(params):
        full[i, : len(shape)] = shape
    dims = np.array([_cut_dim(name, model, layout.tp) for name, _ in params], np.int64)
    local, step = full.copy(), np.zeros_like(full)  # step: of the offset, per tensor-parallel rank
    cut = np.flatnonzero(dims >= 0)
    local[cut, dims[cut]] //= layout.tp
    step[cut, dims[cut]] = local[cut, dims[cut]]
    groups = np.array([len(shape) <= 1 for _, shape in params], np.int64)
    everyone = np.asarray(units, np.int64)
    unit = _Unit(
        builder, local, step, groups, layout.dp * layout.cp,
        tp=everyone % layout.tp,
        place=everyone // layout.tp,
        owner=np.asarray(ranks, np.int64)[everyone],
    )  # fmt: skip
    sizes = [DTYPE_BYTES[dtype] for _, dtype in kinds]
    if stage == 0:
        for kind in range(len(kinds)):
            unit.add_whole(kind, 0 if shared and kind == 1 else kind)
    elif stage == 3:
        ranges, numels = unit.each_cut()
        for kind, size in enumerate(sizes):
            unit.add_ranges(kind, ranges, numels * size)
    else:
        unit.add_flat_weights(sizes[0])
        ranges, numels = unit.flat_cut()
        for kind, size in enumerate(sizes[1:], start=1):
            unit.add_ranges(kind, ranges, numels * size)
    return builder.build()


def _cut_dim(name: str, model: ModelSpec, tp: int) -> int:
    """Along which AutoTP cuts a parameter, -1 for none."""
    layer, _, kind = name.rpartition(".")
    layer = layer.rpartition(".")[2]
    if tp == 1:
        return -1
    if layer in _ROWS or (layer == "lm_head" and not model.tied_embeddings):
        return 0
    return 1 if layer in _COLUMNS and kind == "weight" else -1


def aligned_partition(numels: Int64Array, dp: int) -> tuple[Int64Array, int]:
    """ZeRO-1 and 2: (first element of each parameter of a group, elements of a rank's part)."""
    start = np.cumsum(numels) - numels
    aligned = -(-int(numels.sum()) // (_ALIGNMENT * dp)) * _ALIGNMENT * dp
    return start, aligned // dp


@dataclass(frozen=True)
class _Ranges:
    """Boxes of every data-parallel part, sorted by part.

    Attributes:
        part, param: int64[n].
        offset, shape: int64[n, D], in the tensor-parallel shard.
    """

    part: Int64Array
    param: Int64Array
    offset: Int64Array
    shape: Int64Array


@dataclass(frozen=True)
class _Unit:
    """Adds shards of ranks to the table.

    Attributes:
        local: int64[param, D], shapes of tensor-parallel shards.
        step: int64[param, D], how far the next tensor-parallel rank's shard lies.
        groups: int64[param], optimizer group (0 or 1).
        dp: data-parallel size.
        tp, place, owner: int64[rank], coordinates and global rank.
    """

    builder: TableBuilder
    local: Int64Array
    step: Int64Array
    groups: Int64Array
    dp: int
    tp: Int64Array
    place: Int64Array
    owner: Int64Array

    def add_whole(self, kind: int, place: int) -> None:
        """ZeRO-0: whole tensor-parallel shards, each a storage of its own.

        Args:
            kind: whose tensors they are. place: whose storages; another kind's are there already.
        """
        key = np.arange(len(self.local)) + place * len(self.local)
        self._add_shards(kind, key, own_storage=place == kind)

    def add_flat_weights(self, itemsize: int) -> None:
        """ZeRO-1 and 2: whole tensor-parallel shards as views of one flat tensor a group."""
        self._add_shards(0, self._key(0, self.groups), own_storage=False)
        for group in np.unique(self.groups).tolist():
            _, part = aligned_partition(self._numels()[self.groups == group], self.dp)
            same = np.ones_like(self.owner)
            nbytes = same * part * self.dp * itemsize
            self.builder.add_storages(self.owner, same * self._key(0, group), nbytes)

    def each_cut(self) -> tuple[_Ranges, Int64Array]:
        """ZeRO-3: (the cut of each parameter by itself, elements of each rank by group)."""
        numels = self._numels()
        part = -(-numels // self.dp)
        places = np.unique(self.place)
        low = np.minimum(places[:, None] * part, numels)
        high = np.minimum(low + part, numels)
        sums = np.array([part[self.groups == group].sum() for group in (0, 1)], np.int64)
        return self._boxes(places, low, high), sums

    def flat_cut(self) -> tuple[_Ranges, Int64Array]:
        """ZeRO-1 and 2: (the cut of each group's flat tensor, elements of each rank by group)."""
        numels = self._numels()
        places = np.unique(self.place)
        low = np.zeros((len(places), len(numels)), np.int64)
        high = np.zeros_like(low)
        sums = np.zeros(2, np.int64)
        for group in (0, 1):
            mine = np.flatnonzero(self.groups == group)
            start, sums[group] = aligned_partition(numels[mine], self.dp)
            own = places[:, None] * sums[group]
            begin = np.maximum(start, own)
            end = np.minimum(start + numels[mine], own + sums[group])
            low[:, mine] = begin - start
            high[:, mine] = np.maximum(begin, end) - start
        return self._boxes(places, low, high), sums

    def add_ranges(self, kind: int, ranges: _Ranges, nbytes: Int64Array) -> None:
        """Add the boxes of each rank's part as views of one storage for each group.

        Args:
            kind: whose tensors and storages they are.
            nbytes: int64[group], of the storage.
        """
        first = np.searchsorted(ranges.part, self.place, side="left")
        counts = np.searchsorted(ranges.part, self.place, side="right") - first
        member = np.repeat(np.arange(len(self.owner)), counts)
        within = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
        take = first[member] + within
        param = ranges.param[take]
        group = self.groups[param]
        offset = ranges.offset[take] + self.step[param] * self.tp[member][:, None]
        self.builder.add_rows(
            param + kind * len(self.local),
            self.owner[member],
            self._key(kind, group),
            offset,
            ranges.shape[take],
            own_storage=False,
        )
        # A rank whose part is padding alone has nothing to show for it.
        held = np.unique(np.stack((self.owner[member], group), axis=1), axis=0)
        self.builder.add_storages(held[:, 0], self._key(kind, held[:, 1]), nbytes[held[:, 1]])

    def _add_shards(self, kind: int, key: Int64Array, *, own_storage: bool) -> None:
        n, count = len(self.local), len(self.owner)
        offset = self.step[None] * self.tp[:, None, None]
        self.builder.add_rows(
            np.tile(np.arange(n), count) + kind * n,
            np.repeat(self.owner, n),
            np.tile(key, count),
            offset.reshape(n * count, -1),
            np.tile(self.local, (count, 1)),
            own_storage=own_storage,
        )

    def _boxes(self, places: Int64Array, low: Int64Array, high: Int64Array) -> _Ranges:
        at, param = np.nonzero(high > low)
        cut = flat_ranges_to_boxes(self.local[param], low[at, param], high[at, param])
        at, param = at[cut.range_index], param[cut.range_index]
        return _Ranges(places[at], param, cut.offset, cut.shape)

    def _numels(self) -> Int64Array:
        return self.local.prod(axis=1)

    @staticmethod
    def _key(place: int, group: Int64Array | int) -> Int64Array:
        return np.asarray(2 * place + group, np.int64)
