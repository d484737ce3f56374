"""Predicted shards of a Megatron-core GPT model.

Names, global shapes and cuts are what `sharded_state_dict()` of megatron-core 0.16.1 reports for
its local (not TransformerEngine) layers: equal layers are one tensor with a leading layer dim, the
experts of a layer one with a further expert dim, and SwiGLU's fc1 is two boxes of one tensor.

The distributed optimizer cuts a flat buffer, not tensors: parameters lie in the buffer last to
first, each start padded to 64 elements, a bucket's end to a multiple of lcm(ranks, 128); every
data-parallel rank owns an equal part (megatron/core/distributed/param_and_grad_buffer.py). One
bucket to a buffer, as without `overlap_grad_reduce`; an embedding that first and last stage share
has a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nereus_plugins.emu.boxes import Int64Array, flat_ranges_to_boxes
from nereus_plugins.emu.predict_table import TableBuilder
from nereus_plugins.emu.table import DTYPE_BYTES, ShardTable, TensorInfo
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec, SpecError

# Coordinates of a rank that move a piece, in this order.
_TP, _ETP, _EP = 0, 1, 2
_COORDS = 3
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Param:
    """A parameter as one rank holds it.

    Attributes:
        key: name of the global tensor.
        full: its global shape.
        shape: the box of one piece; a parameter is `len(starts)` pieces of this shape, one after
            the other in memory.
        starts: offset of each piece on the rank where all coordinates are 0.
        steps: offset added for each unit of a coordinate, by coordinate.
        expert_buffer: lies in the buffer that expert-data-parallel ranks share.
        own_bucket: an embedding shared between stages.
    """

    key: str
    full: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expert_buffer: bool = False
    own_bucket: bool = False

    @property
    def numel(self) -> int:
        return len(self.starts) * math.prod(self.shape)

    def inside(self, index: int, size: int, step: tuple[int, int] | None = None) -> _Param:
        """One entry of a stacked tensor: a further leading dim of `size`, this one at `index`.

        `step` = (coordinate, entries) moves the index with that coordinate.
        """
        steps = {coord: (0, *by) for coord, by in self.steps.items()}
        if step is not None:
            steps[step[0]] = (step[1],) + (0,) * len(self.shape)
        return replace(
            self,
            full=(size, *self.full),
            shape=(1, *self.shape),
            starts=tuple((index, *start) for start in self.starts),
            steps=steps,
        )


def _cut(
    key: str, full: tuple[int, ...], dim: int, parts: int, coord: int, pieces: int = 1
) -> _Param:
    """A tensor cut along `dim` into `parts`; with 2 pieces, each half (gate, up) is cut so."""
    zero = (0,) * len(full)
    part = full[dim] // (parts * pieces)

    def at(offset: int) -> tuple[int, ...]:
        return (*zero[:dim], offset, *zero[dim + 1 :])

    return _Param(
        key=key,
        full=full,
        shape=(*full[:dim], part, *full[dim + 1 :]),
        starts=tuple(at(i * (full[dim] // pieces)) for i in range(pieces)),
        steps={coord: at(part)},
    )


def _same(key: str, *full: int) -> _Param:
    """A tensor that every rank of the stage holds whole."""
    return _Param(key=key, full=full, shape=full, starts=((0,) * len(full),))


# -- which parameters a stage has ----------------------------------------------------------------


def stage_chunks(model: ModelSpec, layout: Layout, stage: int) -> list[list[_Param]]:
    """Parameters of each model chunk of a pipeline stage, in the module's own order."""
    chunks = []
    per_chunk = model.num_layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        first_layer = (chunk * layout.pp + stage) * per_chunk
        params: list[_Param] = []
        if first_layer == 0:
            params.append(_embedding(model, layout))
        for i in range(first_layer, first_layer + per_chunk):
            params += _layer(model, layout, i)
        if first_layer + per_chunk == model.num_layers:
            params += _norm(model, "decoder.final_layernorm.", model.hidden_size)
            params += _output(model, layout)
        chunks.append(params)
    return chunks


def _embedding(model: ModelSpec, layout: Layout) -> _Param:
    full = (model.vocab_size, model.hidden_size)
    shared = model.tied_embeddings and layout.pp > 1
    return replace(_cut(_EMBEDDING, full, 0, layout.tp, _TP), own_bucket=shared)


def _output(model: ModelSpec, layout: Layout) -> list[_Param]:
    if model.value_head:
        return [_same("output_layer.weight", 1, model.hidden_size)]
    if not model.tied_embeddings:
        full = (model.vocab_size, model.hidden_size)
        return [_cut("output_layer.weight", full, 0, layout.tp, _TP)]
    # With pipeline stages the last one holds a copy, under the embedding's name.
    return [_embedding(model, layout)] if layout.pp > 1 else []


def _layer(model: ModelSpec, layout: Layout, index: int) -> list[_Param]:
    h, tp, moe = model.hidden_size, layout.tp, model.moe
    qkv = model.query_size + 2 * model.kv_size
    params = _norm(model, "self_attention.linear_qkv.layer_norm_", h)
    params.append(_cut("self_attention.linear_proj.weight", (h, model.query_size), 1, tp, _TP))
    if model.linear_bias:
        params.append(_same("self_attention.linear_proj.bias", h))
    params.append(_cut("self_attention.linear_qkv.weight", (qkv, h), 0, tp, _TP))
    if model.qkv_bias:
        params.append(_cut("self_attention.linear_qkv.bias", (qkv,), 0, tp, _TP))
    if model.qk_norm:
        params += _norm(model, "self_attention.q_layernorm.", model.head_dim or 0)
        params += _norm(model, "self_attention.k_layernorm.", model.head_dim or 0)
    params += _norm(model, "mlp.linear_fc1.layer_norm_", h)
    if moe is None or index < moe.num_dense_layers:
        params += _mlp(model, "mlp.", model.ffn_hidden_size, tp, _TP)
    else:
        params += _experts(model, layout)
    if moe is not None and moe.num_dense_layers:  # unequal layers are not stacked
        return [replace(p, key=f"decoder.layers.{index}.{p.key}") for p in params]
    return [
        replace(p, key=f"decoder.layers.{p.key}").inside(index, model.num_layers) for p in params
    ]


def _experts(model: ModelSpec, layout: Layout) -> list[_Param]:
    moe = model.moe
    assert moe is not None
    params = [_same("mlp.router.weight", moe.num_experts, model.hidden_size)]
    local = moe.num_experts // layout.ep
    one = _mlp(model, "mlp.experts.experts.", moe.expert_ffn_hidden_size, layout.etp, _ETP)
    one = [replace(p, expert_buffer=layout.ep > 1) for p in one]
    for i in range(local):
        params += [p.inside(i, moe.num_experts, step=(_EP, local)) for p in one]
    if moe.shared_gate:
        params.append(_same("mlp.shared_experts.gate_weight", 1, model.hidden_size))
    if moe.shared_ffn_hidden_size:
        width = moe.shared_ffn_hidden_size
        if width % layout.tp:
            raise SpecError(
                f"layout {layout}: width of the shared experts = {width} must be divisible by "
                f"tp = {layout.tp}"
            )
        params += _mlp(model, "mlp.shared_experts.", width, layout.tp, _TP)
    return params


def _mlp(model: ModelSpec, prefix: str, width: int, parts: int, coord: int) -> list[_Param]:
    h, pieces = model.hidden_size, 2 if model.gated_mlp else 1
    up = width * pieces
    params = [_cut(f"{prefix}linear_fc1.weight", (up, h), 0, parts, coord, pieces)]
    if model.linear_bias:
        params.append(_cut(f"{prefix}linear_fc1.bias", (up,), 0, parts, coord, pieces))
    params.append(_cut(f"{prefix}linear_fc2.weight", (h, width), 1, parts, coord))
    if model.linear_bias:
        params.append(_same(f"{prefix}linear_fc2.bias", h))
    return params


def _norm(model: ModelSpec, prefix: str, size: int) -> list[_Param]:
    names = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return [_same(f"{prefix}{name}", size) for name in names]


# -- the distributed optimizer's buffers ---------------------------------------------------------


@dataclass(frozen=True)
class _Buffer:
    """A flat buffer: where each parameter starts in it, and its buckets, in elements."""

    start: Int64Array  # [param]
    buckets: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1][1]


def lay_out_buffer(params: Sequence[_Param], dp: int) -> _Buffer:
    """Where `_ParamAndGradBuffer` puts the parameters of a distributed optimizer of `dp` ranks."""
    start = np.zeros(len(params), np.int64)
    buckets: list[tuple[int, int]] = []
    bucket_start = end = 0

    def pad(value: int, to: int) -> int:
        return -(-value // to) * to

    def close() -> int:
        buckets.append((bucket_start, pad(end, math.lcm(dp, 128))))
        return buckets[-1][1]

    for i in reversed(range(len(params))):
        begin = pad(end, 64)
        if params[i].own_bucket and end > bucket_start:
            begin = end = bucket_start = close()
        start[i], end = begin, begin + params[i].numel
        if params[i].own_bucket:
            end = bucket_start = close()
    if end > bucket_start:
        close()
    return _Buffer(start, tuple(buckets))


# -- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pieces:
    """The pieces of some parameters in columns, on the rank where all coordinates are 0."""

    tensor: Int64Array  # [piece]
    param: Int64Array  # [piece], number of the parameter in the stage
    index: Int64Array  # [piece], index in the list of parameters
    first: Int64Array  # [piece], flat element of the parameter where it begins
    offset: Int64Array  # [piece, D]
    shape: Int64Array  # [piece, D]
    steps: Int64Array  # [piece, coordinate, D]


def _columns(
    params: Sequence[_Param], numbers: Sequence[int], index: dict[str, int], dims: int
) -> _Pieces:
    n = sum(len(p.starts) for p in params)
    columns = [np.zeros(n, np.int64) for _ in range(4)]
    offset, shape = np.zeros((n, dims), np.int64), np.ones((n, dims), np.int64)
    steps = np.zeros((n, _COORDS, dims), np.int64)
    row = 0
    for i, param in enumerate(params):
        size, ndim = math.prod(param.shape), len(param.shape)
        for piece, at in enumerate(param.starts):
            for column, value in zip(
                columns, (index[param.key], numbers[i], i, piece * size), strict=True
            ):
                column[row] = value
            offset[row, :ndim], shape[row, :ndim] = at, param.shape
            for coord, by in param.steps.items():
                steps[row, coord, :ndim] = by
            row += 1
    tensor, number, place, first = columns
    return _Pieces(tensor, number, place, first, offset, shape, steps)


def _optimizer_kinds(optimizer: OptimizerSpec | None, param_dtype: str) -> list[tuple[str, str]]:
    """(kind, dtype) of what the optimizer keeps."""
    if optimizer is None:
        return []
    # Parameters that already have the master's dtype are updated in place.
    kinds = [] if optimizer.master_dtype == param_dtype else [("master", optimizer.master_dtype)]
    return kinds + [(kind, optimizer.moments_dtype) for kind in ("exp_avg", "exp_avg_sq")]


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
    if layout.sharding not in ("none", "zero1"):
        raise SpecError(
            f"layout {layout}: backend megatron shards optimizer state only; set sharding to zero1 "
            "(its distributed optimizer) or none"
        )
    if layout.ulysses != 1:
        raise SpecError(f"layout {layout}: backend megatron has cp, not ulysses; set ulysses=1")
    if layout.etp > layout.tp and layout.ep == 1:
        raise SpecError(
            f"layout {layout}: without expert parallelism Megatron reduces expert gradients over "
            "data-parallel ranks, which etp > tp would give different parts; lower etp or set ep"
        )
    # A DDP without distributed optimizer keeps weights apart; so does a model that is not trained.
    distributed = optimizer is not None and layout.sharding == "zero1"
    stages = [stage_chunks(model, layout, stage) for stage in range(layout.pp)]
    names: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    for param in (p for chunks in stages for chunk in chunks for p in chunk):
        if names.setdefault(param.key, len(names)) == len(shapes):
            shapes.append(param.full)
    kinds = [("weight", param_dtype), *_optimizer_kinds(optimizer, param_dtype)]
    builder = TableBuilder(
        [
            TensorInfo(f"{kind}/{name}", shapes[i], dtype)
            for kind, dtype in kinds
            for name, i in names.items()
        ],
        device,
    )
    everyone = np.asarray(units, np.int64)
    stage_of = everyone // (layout.tp * layout.cp * layout.dp)
    owner = np.asarray(ranks, np.int64)[everyone]
    for stage in sorted(set(stage_of.tolist())):
        here = stage_of == stage
        _Stage(layout, builder, names, len(kinds) - 1, distributed, param_dtype).add(
            stages[stage], everyone[here], owner[here]
        )
    return builder.build()


@dataclass(frozen=True)
class _Stage:
    """Adds the shards of one pipeline stage to the table.

    Storage keys in a rank: weight buffers first, then one for each (kind, parameter).
    """

    layout: Layout
    builder: TableBuilder
    names: dict[str, int]
    optimizer_kinds: int
    distributed: bool
    param_dtype: str

    def add(self, chunks: Sequence[Sequence[_Param]], units: Int64Array, owner: Int64Array) -> None:
        total = sum(len(chunk) for chunk in chunks)
        number = 0
        for c, chunk in enumerate(chunks):
            numbered = list(enumerate(chunk, number))
            number += len(chunk)
            for expert in (False, True):
                mine = [(n, p) for n, p in numbered if p.expert_buffer == expert]
                if mine:
                    numbers, params = [n for n, _ in mine], [p for _, p in mine]
                    pieces = _columns(params, numbers, self.names, self.builder.dims)
                    place, size = self._data_parallel(units, expert)
                    keys = (2 * c + expert, 2 * len(chunks), total)
                    coords = self._coords(units)
                    if self.distributed:
                        buffer = lay_out_buffer(params, size)
                        nbytes = buffer.numel * DTYPE_BYTES[self.param_dtype]
                        same = np.ones_like(owner)
                        self.builder.add_storages(owner, same * keys[0], same * nbytes)
                        self._whole(pieces, coords, owner, keys, kinds=())
                        self._ranges(pieces, buffer, place, size, coords, owner, keys)
                    else:
                        self._whole(pieces, coords, owner, keys, range(self.optimizer_kinds + 1))

    def _coords(self, units: Int64Array) -> Int64Array:
        """int64[rank, coordinate]: tp, etp and ep of the layout's ranks `units`."""
        etp, ep = self.layout.etp, self.layout.ep
        in_stage = units % (self.layout.tp * self.layout.cp * self.layout.dp)
        return np.stack((in_stage % self.layout.tp, in_stage % etp, in_stage // etp % ep), axis=1)

    def _data_parallel(self, units: Int64Array, expert: bool) -> tuple[Int64Array, int]:
        """Place of each rank in the group that shares out a buffer, and the group's size."""
        in_stage = units % (self.layout.tp * self.layout.cp * self.layout.dp)
        if expert:
            return in_stage // (self.layout.etp * self.layout.ep), self.layout.expert_dp
        return in_stage // self.layout.tp, self.layout.cp * self.layout.dp

    def _whole(
        self,
        pieces: _Pieces,
        coords: Int64Array,
        owner: Int64Array,
        keys: tuple[int, int, int],
        kinds: Sequence[int],
    ) -> None:
        """Every rank holds its whole local parameter, for each of `kinds` (0 is the weight).

        No kinds: the weight only, as a view of the buffer numbered `keys[0]`.
        """
        n, count = len(pieces.tensor), len(owner)
        moved = np.einsum("rk,pkd->rpd", coords, pieces.steps)
        offset = (pieces.offset[None] + moved).reshape(n * count, -1)
        shape = np.tile(pieces.shape, (count, 1))
        tensor, rank = np.tile(pieces.tensor, count), np.repeat(owner, n)
        if not kinds:
            key = np.full(n * count, keys[0], np.int64)
            self.builder.add_rows(tensor, rank, key, offset, shape, own_storage=False)
        for kind in kinds:
            key = np.tile(keys[1] + kind * keys[2] + pieces.param, count)
            number = tensor + kind * len(self.names)
            self.builder.add_rows(number, rank, key, offset, shape, own_storage=True)

    def _ranges(
        self,
        pieces: _Pieces,
        buffer: _Buffer,
        place: Int64Array,
        size: int,
        coords: Int64Array,
        owner: Int64Array,
        keys: tuple[int, int, int],
    ) -> None:
        """Optimizer state: what lies in each rank's part of each bucket."""
        begin = buffer.start[pieces.index] + pieces.first  # [piece]
        end = begin + pieces.shape.prod(axis=1)
        parts = np.unique(place)
        found: list[tuple[Int64Array, ...]] = []
        for low, high in buffer.buckets:
            part = (high - low) // size
            own = low + parts[:, None] * part  # [part, 1]
            lo = np.maximum(begin[None], own)
            hi = np.minimum(end[None], own + part)
            p, piece = np.nonzero(hi > lo)
            found.append((p, piece, lo[p, piece] - begin[piece], hi[p, piece] - begin[piece]))
        p, piece, lo, hi = (np.concatenate(c) for c in zip(*found, strict=True))
        cut = flat_ranges_to_boxes(pieces.shape[piece], lo, hi)
        p, piece = p[cut.range_index], piece[cut.range_index]
        order = np.argsort(p, kind="stable")
        p, piece, offset, shape = p[order], piece[order], cut.offset[order], cut.shape[order]
        # Each rank takes the boxes of its part.
        first = np.searchsorted(p, np.arange(len(parts) + 1))
        mine = np.searchsorted(parts, place)  # [rank]
        counts = (first[1:] - first[:-1])[mine]
        member = np.repeat(np.arange(len(owner)), counts)
        within = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
        take = first[:-1][mine][member] + within
        piece, shape = piece[take], shape[take]
        moved = np.einsum("nk,nkd->nd", coords[member], pieces.steps[piece])
        offset = offset[take] + pieces.offset[piece] + moved
        for kind in range(1, self.optimizer_kinds + 1):
            self.builder.add_rows(
                pieces.tensor[piece] + kind * len(self.names),
                owner[member],
                keys[1] + kind * keys[2] + pieces.param[piece],
                offset,
                shape,
                own_storage=True,
            )
