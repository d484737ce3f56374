"""Predicted units: shapes, cuts, buffers, sizes, speed; and whether they fit."""

import math
import time

import numpy as np
import pytest

from nereus_plugins.cost.models import find_model
from nereus_plugins.emu.feasibility import (
    DoesNotFit,
    bytes_by_rank,
    check_fit,
    check_transition,
    gradient_bytes_by_rank,
)
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.emu.predict_fsdp2 import hf_parameters
from nereus_plugins.emu.predict_megatron import lay_out_buffer, stage_chunks
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable
from nereus_plugins.emu.tiling import check_tiling
from nereus_plugins.spec import Layout, ModelSpec, MoESpec, OptimizerSpec, SpecError

ADAM = OptimizerSpec()
SMALL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_kv_heads=2,
    vocab_size=128,
    qkv_bias=True,
)
TIED = ModelSpec.from_dict({**SMALL.to_dict(), "tied_embeddings": True})
CRITIC = ModelSpec.from_dict({**SMALL.to_dict(), "value_head": True})
LAYERNORM = ModelSpec.from_dict(
    {**SMALL.to_dict(), "norm": "layernorm", "linear_bias": True, "gated_mlp": False}
)
MOE = ModelSpec.from_dict(
    {
        **SMALL.to_dict(),
        "qk_norm": True,
        "moe": MoESpec(
            num_experts=4,
            experts_per_token=2,
            expert_ffn_hidden_size=32,
            shared_ffn_hidden_size=48,
            shared_gate=True,
        ).to_dict(),
    }
)
DENSE_FIRST = ModelSpec.from_dict(
    {**MOE.to_dict(), "moe": {**MOE.moe.to_dict(), "num_dense_layers": 1}}  # type: ignore[union-attr]
)
MODELS = [SMALL, TIED, CRITIC, LAYERNORM, MOE, DENSE_FIRST]
LLAMA_8B = find_model("llama3-8b").model


def kinds(table: ShardTable) -> set[str]:
    return {t.kind for t in table.tensors}


def rows(table: ShardTable, name: str) -> list[tuple[list[int], list[int]]]:
    """(offset, shape) of each shard of a tensor, in the tensor's own dims."""
    index = [t.name for t in table.tensors].index(name)
    ndim = len(table.tensors[index].shape)
    keep = table.tensor == index
    pairs = zip(table.offset[keep].tolist(), table.shape[keep].tolist(), strict=True)
    return [(offset[:ndim], shape[:ndim]) for offset, shape in pairs]


@pytest.mark.parametrize(
    "model", MODELS, ids=["plain", "tied", "critic", "layernorm", "moe", "mix"]
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, pp=2, dp=2, sharding="zero1"),
        Layout(tp=2, pp=2, dp=2),
        Layout(pp=4, dp=3, sharding="zero1"),
        Layout(pp=2, vpp=2, dp=2, cp=2, sharding="zero1"),
    ],
    ids=str,
)
def test_megatron_units_tile_and_count(model: ModelSpec, layout: Layout) -> None:
    table = predict_unit(model, layout, backend="megatron", optimizer=ADAM)
    check_tiling(table)
    weights = [t for t in table.tensors if t.kind == "weight"]
    assert sum(t.numel for t in weights) == model.num_parameters()
    assert kinds(table) == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for rank in range(layout.world_size):
        one = predict_unit(model, layout, backend="megatron", optimizer=ADAM, rank=rank)
        assert one.equals(table.of_rank(rank))


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2, sharding="zero1"), Layout(dp=4, ep=4, tp=2)])
def test_experts_are_cut_over_expert_ranks(layout: Layout) -> None:
    table = predict_unit(MOE, layout, backend="megatron", optimizer=ADAM)
    check_tiling(table)
    fc1 = "weight/decoder.layers.mlp.experts.experts.linear_fc1.weight"
    local = 4 // layout.ep
    assert len(rows(table.of_rank(0), fc1)) == 4 * local * 2
    assert rows(table.of_rank(layout.etp), fc1)[0][0] == [0, local, 0, 0]


def test_names_and_boxes_are_those_megatron_reports() -> None:
    """As `sharded_state_dict()` of megatron-core 0.16.1 reports them on rank 3 of TP2 PP2."""
    table = predict_unit(SMALL, Layout(tp=2, pp=2), backend="megatron").of_rank(3)
    layers = "weight/decoder.layers."
    assert rows(table, "weight/output_layer.weight") == [([64, 0], [64, 64])]
    assert rows(table, "weight/decoder.final_layernorm.weight") == [([0], [64])]
    assert rows(table, "weight/embedding.word_embeddings.weight") == []
    assert rows(table, layers + "self_attention.linear_qkv.weight") == [
        ([2, 64, 0], [1, 64, 64]),
        ([3, 64, 0], [1, 64, 64]),
    ]
    assert rows(table, layers + "self_attention.linear_qkv.bias")[0] == ([2, 64], [1, 64])
    assert rows(table, layers + "self_attention.linear_proj.weight")[0] == (
        [2, 0, 32],
        [1, 64, 32],
    )
    assert rows(table, layers + "mlp.linear_fc1.weight")[:2] == [
        ([2, 128, 0], [1, 128, 64]),
        ([2, 384, 0], [1, 128, 64]),
    ]
    assert rows(table, layers + "mlp.linear_fc2.weight")[0] == ([2, 0, 128], [1, 64, 128])
    assert rows(table, layers + "mlp.linear_fc1.layer_norm_weight")[1] == ([3, 0], [1, 64])


def test_interleaved_stages_hold_alternate_layers() -> None:
    table = predict_unit(SMALL, Layout(pp=2, vpp=2), backend="megatron")
    proj = "weight/decoder.layers.self_attention.linear_proj.weight"
    assert [offset[0] for offset, _ in rows(table.of_rank(0), proj)] == [0, 2]
    assert [offset[0] for offset, _ in rows(table.of_rank(1), proj)] == [1, 3]


def test_buffers_are_laid_out_as_megatron_lays_them() -> None:
    """Figures read from `_ParamAndGradBuffer` of megatron-core 0.16.1."""
    (first,) = stage_chunks(SMALL, Layout(tp=2, pp=2), 0)
    buffer = lay_out_buffer(first, 1)
    assert buffer.buckets == ((0, 65920),)
    starts = {p.key.rsplit(".", 2)[-2]: s for p, s in zip(first, buffer.start, strict=True)}
    assert starts["word_embeddings"] == 61824
    assert int(buffer.start[-1]) == 0  # the last layer's fc2
    # The embedding that first and last stage share has a bucket of its own on both.
    tied = ModelSpec.from_dict({**TIED.to_dict(), "qkv_bias": False})
    layout = Layout(pp=2, dp=2)
    (first,), (last,) = stage_chunks(tied, layout, 0), stage_chunks(tied, layout, 1)
    assert lay_out_buffer(last, 2).buckets[0] == (0, 8192)
    assert lay_out_buffer(first, 2).buckets[-1][1] - lay_out_buffer(first, 2).buckets[-1][0] == 8192
    assert len(lay_out_buffer(first, 2).buckets) == 2


def test_optimizer_state_is_shared_out_evenly() -> None:
    layout = Layout(tp=2, dp=4, sharding="zero1")
    table = predict_unit(SMALL, layout, backend="megatron", optimizer=ADAM)
    per_rank = []
    for rank in range(layout.world_size):
        one = table.of_rank(rank)
        master = np.array([t.kind == "master" for t in one.tensors])[one.tensor]
        per_rank.append(int(one.numel_per_row()[master].sum()))
    assert max(per_rank) - min(per_rank) < 512  # padding only
    whole = predict_unit(SMALL, Layout(tp=2, dp=4), backend="megatron", optimizer=ADAM)
    assert bytes_by_rank(whole)[0] > 2 * bytes_by_rank(table)[0]


def test_parameters_of_the_masters_dtype_have_no_copy() -> None:
    for layout in (Layout(dp=2), Layout(dp=2, sharding="zero1")):
        table = predict_unit(
            SMALL, layout, backend="megatron", optimizer=ADAM, param_dtype="float32"
        )
        assert kinds(table) == {"weight", "exp_avg", "exp_avg_sq"}
    assert kinds(predict_unit(SMALL, Layout(), backend="fsdp2", optimizer=None)) == {"weight"}


def test_weights_share_a_buffer_with_the_distributed_optimizer() -> None:
    layout = Layout(dp=2, sharding="zero1")
    table = predict_unit(SMALL, layout, backend="megatron", optimizer=ADAM).of_rank(0)
    weight = np.array([t.kind == "weight" for t in table.tensors])[table.tensor]
    (key,) = set(table.storage[weight].tolist())
    (nbytes,) = table.storages.nbytes[table.storages.key == key].tolist()
    assert 0 <= nbytes - SMALL.num_parameters() * 2 < 2 * 64 * 100


def test_fsdp2_cuts_rows_as_torch_chunk_does() -> None:
    layout = Layout(dp=6, sharding="fsdp")
    table = predict_unit(SMALL, layout, backend="fsdp2", optimizer=ADAM, param_dtype="float32")
    check_tiling(table)
    # 32 rows (2 heads of 16) over 6 ranks: ceil is 6, so 6, 6, 6, 6, 6, 2.
    name = "exp_avg/model.layers.0.self_attn.k_proj.weight"
    assert rows(table, name) == [([6 * i, 0], [6 if i < 5 else 2, 64]) for i in range(6)]
    critic = predict_unit(CRITIC, layout, backend="fsdp2")
    assert rows(critic, "weight/score.weight") == [([0, 0], [1, 64])]
    assert rows(critic.of_rank(1), "weight/score.weight") == []
    assert sum(t.numel for t in critic.tensors) == CRITIC.num_parameters() + 1  # score.bias


def test_hsdp_replicates_between_shard_groups() -> None:
    layout = Layout(dp=4, ulysses=2, sharding="hsdp", shard_size=4)
    table = predict_unit(SMALL, layout, backend="fsdp2", optimizer=ADAM)
    check_tiling(table)
    name = "weight/model.embed_tokens.weight"
    assert rows(table.of_rank(1), name) == rows(table.of_rank(5), name) == [([32, 0], [32, 64])]


@pytest.mark.parametrize("model", MODELS)
def test_hugging_face_parameters_count(model: ModelSpec) -> None:
    count = sum(math.prod(shape) for _, shape in hf_parameters(model))
    assert count == model.num_parameters() + (1 if model.value_head else 0)


def test_ranks_place_the_unit_in_a_larger_job() -> None:
    layout = Layout(tp=2, sharding="none")
    placed = predict_unit(SMALL, layout, backend="megatron", ranks=(5, 3))
    assert placed.ranks == (3, 5)
    embedding = "weight/embedding.word_embeddings.weight"
    assert rows(placed.of_rank(5), embedding) == [([0, 0], [64, 64])]
    absent = predict_unit(SMALL, layout, backend="megatron", ranks=(5, 3), rank=0)
    assert len(absent) == 0
    assert absent.tensors == placed.tensors


@pytest.mark.parametrize(
    ("backend", "layout", "message"),
    [
        ("fsdp1", Layout(), "backend must be one of megatron, fsdp2"),
        ("fsdp2", Layout(tp=2), "needs tp=1"),
        ("fsdp2", Layout(dp=2, sharding="zero3"), "has sharding fsdp, hsdp or none"),
        ("megatron", Layout(dp=2, sharding="fsdp"), "set sharding to zero1"),
        ("megatron", Layout(ulysses=2), "set ulysses=1"),
        ("megatron", Layout(tp=8), "attention heads = 4"),
    ],
)
def test_layouts_that_a_backend_has_not(backend: str, layout: Layout, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        predict_unit(SMALL, layout, backend=backend, optimizer=ADAM)


def test_ranks_must_match_the_layout() -> None:
    with pytest.raises(SpecError, match="must be 2 different ranks"):
        predict_unit(SMALL, Layout(tp=2), backend="megatron", ranks=(1, 1))


def test_an_8b_model_on_1024_ranks_is_quick() -> None:
    layout = Layout(tp=8, pp=4, dp=32, sharding="zero1")

    def best_of(n: int, rank: int | None) -> float:
        times = []
        for _ in range(n):
            start = time.perf_counter()
            predict_unit(LLAMA_8B, layout, backend="megatron", optimizer=ADAM, rank=rank)
            times.append(time.perf_counter() - start)
        return min(times)

    # Typically 0.08 s and 0.005 s; the limits leave room for a busy machine.
    assert best_of(3, None) < 1.0
    assert best_of(5, 777) < 0.05


def test_moves_between_predicted_layouts() -> None:
    source = predict_unit(
        SMALL, Layout(tp=2, pp=2, sharding="zero1"), backend="megatron", optimizer=ADAM
    )
    target = predict_unit(SMALL, Layout(pp=4, sharding="zero1"), backend="megatron", optimizer=ADAM)
    moves = plan_moves(source, target)
    assert int(moves.nbytes.sum()) == int(target.nbytes_per_row().sum())


def test_bytes_by_rank_count_storages() -> None:
    layout = Layout(dp=4, sharding="fsdp")
    table = predict_unit(SMALL, layout, backend="fsdp2", optimizer=ADAM, param_dtype="float32")
    state = sum(bytes_by_rank(table).values())
    assert state == pytest.approx(SMALL.num_parameters() * 12, rel=0.01)
    assert bytes_by_rank(table, host=True) == {}
    on_cpu = predict_unit(SMALL, layout, backend="fsdp2", device="cpu")
    assert bytes_by_rank(on_cpu) == {}
    assert sum(bytes_by_rank(on_cpu, host=True).values()) > 0
    gradients = gradient_bytes_by_rank(table)
    assert sum(gradients.values()) == SMALL.num_parameters() * 4


def test_fit_names_the_worst_rank_and_the_remedy() -> None:
    table = predict_unit(SMALL, Layout(pp=2), backend="megatron", optimizer=ADAM)
    need = bytes_by_rank(table)
    assert need[1] > need[0]  # the final norm
    fit = check_fit([table], need[1])
    assert (fit.fits, fit.worst_rank, fit.missing_bytes) == (True, 1, 0)
    fit.require()
    fit = check_fit([table], {0: need[0] - 5, 1: need[1]}, what="the actor")
    assert (fit.fits, fit.worst_rank, fit.missing_bytes) == (False, 0, 5)
    with pytest.raises(
        DoesNotFit, match=r"the actor needs .* on rank 0, .* 5 bytes too much; raise tp"
    ):
        fit.require()
    assert not check_fit([table], need[1], extra_bytes={1: 1}).fits
    assert str(check_fit([], 10)) == "the state: nothing to hold"


def test_a_transition_is_intact_staged_or_refused() -> None:
    source = predict_unit(SMALL, Layout(tp=2), backend="megatron", optimizer=ADAM)
    target = predict_unit(SMALL, Layout(pp=2), backend="megatron", optimizer=ADAM)
    both = max(
        a + b
        for a, b in zip(bytes_by_rank(source).values(), bytes_by_rank(target).values(), strict=True)
    )
    assert check_transition(source, target, both).require() == "intact"
    staged = check_transition(source, target, both - 1)
    assert staged.require() == "staged"
    assert "allow staging through host memory" in str(staged.both)
    small = check_transition(source, target, 1000, unit="actor")
    assert small.mode is None
    with pytest.raises(DoesNotFit, match="actor in its target layout needs"):
        small.require()
