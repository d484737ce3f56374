"""Predicted shards of a Hugging Face model under FSDP2 (`fully_shard`).

Every parameter is a DTensor cut along dim 0 as `torch.chunk` cuts it: ceil(n / ranks) rows each,
the last ones fewer or none. Adam's moments have the parameter's own dtype and cut, and there is no
separate master copy. HSDP cuts inside groups of `shard_size` consecutive ranks.

Names are those of transformers 5, which stacks the experts of a layer in one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus_plugins.emu.predict_table import TableBuilder
from nereus_plugins.emu.table import DTYPE_BYTES, ShardTable, TensorInfo
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec, SpecError

Param = tuple[str, tuple[int, ...]]


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
    if layout.sharding not in ("none", "fsdp", "hsdp"):
        raise SpecError(f"backend fsdp2 has sharding fsdp, hsdp or none, not {layout.sharding}")
    for axis in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(layout, axis) != 1:
            raise SpecError(
                f"layout {layout}: a prediction for backend fsdp2 needs {axis}=1; use dp and "
                "ulysses, or backend megatron"
            )
    params = hf_parameters(model)
    kinds = ("weight", "exp_avg", "exp_avg_sq") if optimizer is not None else ("weight",)
    builder = TableBuilder(
        [
            TensorInfo(f"{kind}/{name}", shape, param_dtype)
            for kind in kinds
            for name, shape in params
        ],
        device,
    )
    whole = np.ones((len(params), builder.dims), np.int64)
    for i, (_, shape) in enumerate(params):
        whole[i, : len(shape)] = shape
    group = {"fsdp": layout.shard_mesh_size, "none": 1}.get(layout.sharding, layout.shard_size or 1)
    place = np.asarray(units, np.int64) % group
    owner = np.asarray(ranks, np.int64)[np.asarray(units, np.int64)]

    rows = whole[:, 0]
    chunk = -(-rows // group)
    low = np.minimum(place[:, None] * chunk, rows)  # [rank, param]
    high = np.minimum(low + chunk, rows)
    at, param = np.nonzero(high > low)
    offset = np.zeros((len(at), builder.dims), np.int64)
    offset[:, 0] = low[at, param]
    boxes = whole[param]
    boxes[:, 0] = (high - low)[at, param]
    for i in range(len(kinds)):
        number = param + i * len(params)
        builder.add_rows(number, owner[at], number, offset, boxes, own_storage=i > 0)
    # FSDP2 pads each parameter's own memory to the same number of rows on all ranks.
    padded = chunk * whole[:, 1:].prod(axis=1) * DTYPE_BYTES[param_dtype]
    builder.add_storages(owner[at], param, padded[param])
    return builder.build()


def hf_parameters(model: ModelSpec) -> list[Param]:
    """Name and shape of every parameter of the Hugging Face model, in its order."""
    h = model.hidden_size
    params: list[Param] = [("model.embed_tokens.weight", (model.vocab_size, h))]
    for i in range(model.num_layers):
        prefix = f"model.layers.{i}."
        params += [(prefix + name, shape) for name, shape in _layer(model, i)]
    params += _norm(model, "model.norm", h)
    if model.value_head:
        params += [("score.weight", (1, h)), ("score.bias", (1,))]
    elif not model.tied_embeddings:
        params.append(("lm_head.weight", (model.vocab_size, h)))
    return params


def _layer(model: ModelSpec, index: int) -> list[Param]:
    h, moe = model.hidden_size, model.moe
    params: list[Param] = []
    for name, width in (("q", model.query_size), ("k", model.kv_size), ("v", model.kv_size)):
        params += _linear(f"self_attn.{name}_proj", width, h, model.qkv_bias)
    params += _linear("self_attn.o_proj", h, model.query_size, model.linear_bias)
    if model.qk_norm:
        params += _norm(model, "self_attn.q_norm", model.head_dim or 0)
        params += _norm(model, "self_attn.k_norm", model.head_dim or 0)
    if moe is None or index < moe.num_dense_layers:
        params += _mlp(model, "mlp", model.ffn_hidden_size)
    else:
        experts, width = moe.num_experts, moe.expert_ffn_hidden_size
        up = "gate_up_proj" if model.gated_mlp else "up_proj"
        params += [
            ("mlp.gate.weight", (experts, h)),
            (f"mlp.experts.{up}", (experts, width * (2 if model.gated_mlp else 1), h)),
            ("mlp.experts.down_proj", (experts, h, width)),
        ]
        if moe.shared_ffn_hidden_size:
            params += _mlp(model, "mlp.shared_expert", moe.shared_ffn_hidden_size)
        if moe.shared_gate:
            params.append(("mlp.shared_expert_gate.weight", (1, h)))
    params += _norm(model, "input_layernorm", h)
    params += _norm(model, "post_attention_layernorm", h)
    return params


def _mlp(model: ModelSpec, prefix: str, width: int) -> list[Param]:
    h, bias = model.hidden_size, model.linear_bias
    gate = _linear(f"{prefix}.gate_proj", width, h, bias) if model.gated_mlp else []
    up = _linear(f"{prefix}.up_proj", width, h, bias)
    return gate + up + _linear(f"{prefix}.down_proj", h, width, bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> list[Param]:
    weight: list[Param] = [(f"{name}.weight", (rows, columns))]
    return [*weight, (f"{name}.bias", (rows,))] if bias else weight


def _norm(model: ModelSpec, name: str, size: int) -> list[Param]:
    weight: list[Param] = [(f"{name}.weight", (size,))]
    return [*weight, (f"{name}.bias", (size,))] if model.norm == "layernorm" else weight
