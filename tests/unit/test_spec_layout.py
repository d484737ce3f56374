"""Layouts: rules, ranks, and their words."""

import dataclasses

import pytest

from nereus_plugins.spec import Layout, ModelSpec, MoESpec, SpecError

MODEL = ModelSpec(
    name="m",
    num_layers=6,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_kv_heads=4,
    vocab_size=128,
)
MOE = dataclasses.replace(
    MODEL, moe=MoESpec(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24)
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, r"Layout\.tp must be an integer of at least 1, got 0"),
        ({"dp": True}, r"Layout\.dp must be an integer"),
        ({"pp": 1.0}, r"Layout\.pp must be an integer"),
        ({"sharding": "zero4"}, r"Layout\.sharding must be one of none, zero1"),
        ({"sequence_parallel": True}, "needs tp > 1"),
        ({"vpp": 2}, "needs pp > 1"),
        ({"tp": 2, "ep": 4}, r"ep\*etp = 4 must divide tp\*cp\*dp = 2"),
        ({"sharding": "hsdp", "dp": 4}, "needs shard_size"),
        ({"sharding": "hsdp", "dp": 4, "shard_size": 3}, r"must divide dp\*ulysses = 4"),
        ({"dp": 4, "shard_size": 2}, "for sharding=hsdp only"),
    ],
)
def test_a_broken_rule_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Layout(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "layout", "world_size", "message"),
    [
        (
            MODEL,
            Layout(tp=3),
            None,
            "heads = 8 .* divisible by tp = 3; tp may be 1, 2 or 4$",
        ),
        (MODEL, Layout(tp=8), None, "key-value heads = 4 .* divisible by tp = 8"),
        (MODEL, Layout(pp=4), None, r"layers = 6 .* divisible by pp\*vpp = 4; .* 1, 2, 3 or 6$"),
        (MODEL, Layout(pp=2, vpp=2), None, r"layers = 6 .* divisible by pp\*vpp = 4"),
        (dataclasses.replace(MODEL, vocab_size=127), Layout(tp=2), None, "vocabulary size = 127"),
        (dataclasses.replace(MODEL, ffn_hidden_size=95), Layout(tp=2), None, "MLP width"),
        (MODEL, Layout(ulysses=3), None, "divisible by ulysses = 3"),
        (MODEL, Layout(dp=2, ep=2), None, "set ep and etp to 1"),
        (MOE, Layout(dp=3, ep=3), None, "experts = 4 .* divisible by ep = 3"),
        (MOE, Layout(dp=16, etp=16), None, "expert width = 24 .* divisible by etp = 16"),
        (MODEL, Layout(tp=2, dp=2), 8, "takes .* = 4 ranks, the job has 8"),
    ],
)
def test_check_names_the_rule(
    model: ModelSpec, layout: Layout, world_size: int | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        layout.check(model, world_size)


def test_a_layout_that_fits() -> None:
    Layout(tp=4, pp=3, dp=2, sequence_parallel=True).check(MODEL, 24)
    Layout(dp=4, ep=4, etp=1).check(MOE, 4)


def test_rank_order_is_megatrons() -> None:
    layout = Layout(tp=2, cp=3, dp=2, pp=2)
    assert layout.coord(0) == (0, 0, 0, 0, 0)
    assert layout.coord(1).tp == 1
    assert layout.coord(2).cp == 1
    assert layout.coord(6).dp == 1
    assert layout.coord(12).pp == 1
    with pytest.raises(SpecError, match="rank 24 is not in layout TP2 PP2 DP2 CP3"):
        layout.coord(24)
    with pytest.raises(SpecError, match="dp=2 is outside"):
        layout.rank_of(dp=2)


def test_experts_redivide_the_ranks_of_a_stage() -> None:
    layout = Layout(tp=2, dp=4, pp=2, ep=2, etp=1)
    assert layout.expert_dp == 4
    assert [layout.expert_coord(r).ep for r in range(4)] == [0, 1, 0, 1]
    assert layout.expert_coord(9) == (0, 1, 0, 1)


def test_words() -> None:
    assert str(Layout(tp=2, pp=2)) == "TP2 PP2 DP1"
    assert str(Layout(tp=2, dp=4, cp=2, sequence_parallel=True)) == "TP2 PP1 DP4 CP2 SP"
    assert str(Layout(dp=4, sharding="fsdp")) == "TP1 PP1 DP4 FSDP"
    assert str(Layout(dp=2, ulysses=2, sharding="hsdp", shard_size=2)) == (
        "TP1 PP1 DP2 ULYSSES2 HSDP2"
    )


def test_immutable_and_hashable() -> None:
    layout = Layout(tp=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tp = 4  # type: ignore[misc]
    assert {layout: 1}[Layout(tp=2)] == 1
