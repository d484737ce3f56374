"""Predicted units of random models in random layouts: tiled, complete, and the same by rank."""

import math

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.emu.tiling import check_tiling
from nereus_plugins.spec import Layout, ModelSpec, MoESpec, OptimizerSpec, SpecError

small = st.sampled_from([1, 2, 3, 4])


@st.composite
def models(draw: st.DrawFn, unit: int) -> ModelSpec:
    """Sizes that are multiples of `unit` where a layout must divide them, odd elsewhere."""
    kv_heads = unit * draw(st.integers(1, 2))
    norm = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    linear_bias = draw(st.booleans())
    moe = None
    if draw(st.booleans()):
        moe = MoESpec(
            num_experts=unit * draw(st.integers(1, 2)),
            experts_per_token=1,
            expert_ffn_hidden_size=unit * draw(st.integers(1, 3)),
            shared_ffn_hidden_size=unit * draw(st.integers(0, 2)),
        )
    return ModelSpec(
        name="random",
        num_layers=12,
        hidden_size=draw(st.integers(3, 17)),
        ffn_hidden_size=unit * draw(st.integers(1, 5)),
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        vocab_size=unit * draw(st.integers(1, 9)),
        tied_embeddings=draw(st.booleans()),
        gated_mlp=draw(st.booleans()),
        norm=norm,
        qkv_bias=linear_bias or draw(st.booleans()),
        linear_bias=linear_bias,
        qk_norm=draw(st.booleans()),
        moe=moe,
    )


@st.composite
def megatron_units(draw: st.DrawFn) -> tuple[ModelSpec, Layout, str]:
    tp, pp, dp, cp = draw(small), draw(small), draw(small), draw(st.sampled_from([1, 2]))
    stage = tp * cp * dp
    model = draw(models(math.lcm(tp, stage if draw(st.booleans()) else 1)))
    ep = 1
    if model.moe is not None:
        ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        vpp=draw(st.sampled_from([1, 3])) if pp > 1 and 12 % (pp * 3) == 0 else 1,
        sharding=draw(st.sampled_from(["none", "zero1"])),
    )
    return model, layout, draw(st.sampled_from(["bfloat16", "float32"]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(megatron_units(), st.data())
def test_megatron(unit: tuple[ModelSpec, Layout, str], data: st.DataObject) -> None:
    model, layout, dtype = unit
    try:
        layout.check(model)
    except SpecError:
        assume(False)
    table = predict_unit(
        model, layout, backend="megatron", optimizer=OptimizerSpec(), param_dtype=dtype
    )
    check_tiling(table)
    weights = [t.numel for t in table.tensors if t.kind == "weight"]
    assert sum(weights) == model.num_parameters()
    rank = data.draw(st.integers(0, layout.world_size - 1))
    one = predict_unit(
        model, layout, backend="megatron", optimizer=OptimizerSpec(), param_dtype=dtype, rank=rank
    )
    assert one.equals(table.of_rank(rank))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(1), small, small, st.sampled_from(["none", "fsdp", "hsdp"]), st.data())
def test_fsdp2(model: ModelSpec, dp: int, ulysses: int, sharding: str, data: st.DataObject) -> None:
    assume(model.num_attention_heads % ulysses == 0)
    size = None
    if sharding == "hsdp":
        mesh = dp * ulysses
        size = data.draw(st.sampled_from([n for n in range(1, mesh + 1) if mesh % n == 0]))
    layout = Layout(dp=dp, ulysses=ulysses, sharding=sharding, shard_size=size)
    table = predict_unit(model, layout, backend="fsdp2", optimizer=OptimizerSpec())
    check_tiling(table)
    rank = data.draw(st.integers(0, layout.world_size - 1))
    one = predict_unit(model, layout, backend="fsdp2", optimizer=OptimizerSpec(), rank=rank)
    assert one.equals(table.of_rank(rank))


STAGES = st.sampled_from(["none", "zero1", "zero2", "zero3"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    small,
    small,
    st.sampled_from([1, 2]),
    STAGES,
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
    st.data(),
)
def test_deepspeed(
    tp: int, dp: int, cp: int, sharding: str, dtype: str, trained: bool, data: st.DataObject
) -> None:
    model = data.draw(models(tp).filter(lambda m: tp == 1 or m.moe is None))
    layout = Layout(tp=tp, dp=dp, cp=cp, sharding=sharding)
    optimizer = OptimizerSpec() if trained else None
    table = predict_unit(model, layout, backend="deepspeed", optimizer=optimizer, param_dtype=dtype)
    check_tiling(table)
    if model.moe is None:  # the names of experts have no biases
        weights = [t.numel for t in table.tensors if t.kind == "weight"]
        assert sum(weights) == model.num_parameters()
    rank = data.draw(st.integers(0, layout.world_size - 1))
    one = predict_unit(
        model, layout, backend="deepspeed", optimizer=optimizer, param_dtype=dtype, rank=rank
    )
    assert one.equals(table.of_rank(rank))


def elements(table: ShardTable, rank: int, kind: str) -> list[tuple[str, int]]:
    """(tensor, flat index) of everything that a rank has of a kind, in order of its shards."""
    found = []
    for row in range(len(table)):
        info, box = table.tensors[table.tensor[row]], table.box(row)
        if table.rank[row] == rank and info.kind == kind:
            at = np.arange(info.numel).reshape(info.shape)[box.slices_in(Box.whole(info.shape))]
            found += [(info.name.partition("/")[2], i) for i in at.reshape(-1).tolist()]
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(1), st.integers(1, 7), st.sampled_from(["zero1", "zero2", "zero3"]))
def test_deepspeed_gives_each_rank_its_part_of_the_padded_elements(
    model: ModelSpec, dp: int, sharding: str
) -> None:
    """Against DeepSpeed's rule, element by element: a group's parameters one after another and
    padded to a multiple of 2 * dp, or each parameter by itself to a multiple of dp."""
    layout = Layout(dp=dp, sharding=sharding)
    table = predict_unit(model, layout, backend="deepspeed", optimizer=OptimizerSpec())
    infos = [t for t in table.tensors if t.kind == "exp_avg"]
    expected: list[list[tuple[str, int]]] = [[] for _ in range(dp)]
    if sharding == "zero3":
        wholes = [[info] for info in infos]
        multiple = dp
    else:
        wholes = [[t for t in infos if (len(t.shape) > 1) == decayed] for decayed in (True, False)]
        multiple = 2 * dp
    held = np.zeros(dp, np.int64)
    for whole in wholes:
        flat = [(t.name.partition("/")[2], i) for t in whole for i in range(t.numel)]
        part = -(-len(flat) // multiple) * multiple // dp
        for rank in range(dp):
            mine = flat[rank * part : (rank + 1) * part]
            expected[rank] += mine
            if mine or sharding == "zero3":
                held[rank] += part
    for rank in range(dp):
        assert sorted(elements(table, rank, "exp_avg")) == sorted(expected[rank])
        assert elements(table, rank, "master") == elements(table, rank, "exp_avg")
    # Storages have the padding too; the weights' are whole or cut like the rest.
    for rank in range(dp):
        nbytes = int(table.storages.nbytes[table.storages.rank == rank].sum())
        weights = (
            held[rank]
            if sharding == "zero3"
            else sum(-(-sum(t.numel for t in w) // multiple) * multiple for w in wholes)
        )
        if sharding != "zero3" or expected[rank]:
            assert nbytes <= 12 * held[rank] + 2 * weights
            assert nbytes >= 12 * len(expected[rank])
