"""Training steps and their memory: the physics, and the traps that estimates fall into."""

import dataclasses

import pytest

from nereus_plugins.cost.case import Batch, Case
from nereus_plugins.cost.communication import Group, collective_s
from nereus_plugins.cost.hardware import Network, find_gpu
from nereus_plugins.cost.memory import memory
from nereus_plugins.cost.models import find_model
from nereus_plugins.cost.software import MEGATRON, Software
from nereus_plugins.cost.step import stage_params, step
from nereus_plugins.spec import Knobs, Layout

FSDP = Software(
    name="test", backend="fsdp", elementwise="eager", loss="eager", wgrad_accumulates=False
)


def case(model: str = "llama3-8b", **changes: object) -> Case:
    base = Case(
        shape=find_model(model),
        layout=Layout(tp=2, pp=2, dp=2, sharding="zero1", sequence_parallel=True),
        batch=Batch.uniform(8, 1, 4096),
        gpu=find_gpu("h100"),
        network=Network(),
        software=MEGATRON,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_parts_add_up_and_explain_themselves() -> None:
    one = step(case())
    assert one.seconds == pytest.approx(sum(p.value for p in one.parts))
    assert all(p.formula and p.value > 0 for p in one.parts)
    peak = memory(case())
    assert peak.allocated_bytes == pytest.approx(sum(p.value for p in peak.parts))
    assert peak.reserved_bytes > peak.allocated_bytes


def test_rate_stays_below_the_peak() -> None:
    one = case(layout=Layout(dp=8, sharding="fsdp"), software=FSDP)
    flops = 6 * one.shape.num_parameters() * one.batch.tokens * one.batch.micro_batches
    assert 0.2 < flops / step(one).seconds / one.gpu.bf16_flops < 0.75


def test_bubble_shrinks_with_micro_batches_and_interleaving() -> None:
    def bubble(**changes: object) -> float:
        one = step(case(**changes))
        return one.part("bubble") / one.seconds

    layout = Layout(tp=2, pp=4, dp=1, sharding="zero1", sequence_parallel=True)
    few = bubble(layout=layout, batch=Batch.uniform(4, 1, 4096))
    many = bubble(layout=layout, batch=Batch.uniform(64, 1, 4096))
    chunks = bubble(layout=dataclasses.replace(layout, vpp=2), batch=Batch.uniform(4, 1, 4096))
    assert few > 0.35
    assert many < 0.06
    assert chunks < 0.65 * few


def test_full_recompute_trades_memory_for_time() -> None:
    plain, again = case(), case(knobs=Knobs(recompute="full"))
    assert step(again).seconds > 1.15 * step(plain).seconds
    assert memory(again).part("activations") < 0.3 * memory(plain).part("activations")


def test_gathered_context_parallelism_pays_for_the_network_and_repeated_heads() -> None:
    """torch's gathers as many heads as queries have, and passes fp32 gradients on."""
    layout = Layout(tp=8, cp=4, dp=1, sequence_parallel=True, sharding="fsdp")
    gathered = dataclasses.replace(FSDP, context_parallel="gathered")

    def both(**changes: object) -> tuple[float, float]:
        ring, whole = (
            step(case(layout=layout, batch=Batch.uniform(1, 1, 32768), software=s, **changes))
            for s in (FSDP, gathered)
        )
        return ring.part("cp_comm"), whole.part("cp_comm")

    across, inside = both(), both(network=Network(gpus_per_node=32))
    assert across[1] > 10 * across[0]
    assert inside[1] < 0.5 * across[1]


def test_fsdp_in_a_pipeline_keeps_what_it_received_and_reduces_beside_nothing() -> None:
    layout = Layout(pp=4, dp=8, sharding="fsdp")
    one = case(layout=layout, software=FSDP, knobs=Knobs(recompute="full"))
    rows = 2.0 * one.shape.model.hidden_size * 4096
    kept = [memory(one, stage).part("pipeline") for stage in range(4)]
    # The first stage receives no activations, the last no gradients, and keeps logits instead.
    assert kept == [2 * 8 * rows, 3 * 8 * rows, 3 * 8 * rows, 8 * rows]
    # Whole fp32 gradients of the largest stage go over the network once, after the last backward.
    params = max(sum(stage_params(one, stage)) for stage in range(4))
    group = one.group("shard")
    alone = collective_s(one.gpu, one.network, "reduce_scatter", group, 4.0 * params)
    assert step(one).part("dp_comm") > 0.8 * alone


def test_first_stages_hold_more_micro_batches() -> None:
    layout = Layout(tp=1, pp=4, dp=2, sharding="zero1")
    one = case(layout=layout)
    assert [one.in_flight(s) for s in range(4)] == [4, 3, 2, 1]
    interleaved = case(layout=dataclasses.replace(layout, vpp=2))
    assert interleaved.in_flight(0) > one.in_flight(0)


def test_tied_embeddings_and_uneven_stages_change_the_heaviest_stage() -> None:
    layout = Layout(tp=1, pp=2, dp=4, sharding="zero1")
    tied = case("qwen2.5-1.5b", layout=layout)
    first, last = (sum(stage_params(tied, s)) for s in (0, 1))
    # The tied output layer is a second copy on the last stage.
    assert last == pytest.approx(first, rel=1e-3)
    untied = case("qwen2.5-7b", layout=layout)
    assert stage_params(untied, 0)[0] == pytest.approx(stage_params(untied, 1)[0], rel=1e-3)
    uneven = dataclasses.replace(untied, first_stage_layers=10)
    assert uneven.stage_layers() == ((10, 0), (18, 0))
    assert step(uneven).seconds > 1.1 * step(untied).seconds
    assert memory(untied).stage == 0
    assert memory(uneven).stage == 1


def test_logits_dominate_at_large_vocabularies() -> None:
    one = case(
        "qwen2.5-0.5b",
        layout=Layout(dp=8, sharding="fsdp"),
        batch=Batch.uniform(2, 8, 2048),
        software=dataclasses.replace(FSDP, loss="rl_entropy"),
        knobs=Knobs(recompute="full"),
    )
    peak = memory(one)
    assert peak.moment == "loss"
    assert peak.part("logits") > 0.7 * peak.allocated_bytes


def test_zero3_gathers_whole_layers() -> None:
    shards = [
        memory(case("llama3-70b", layout=Layout(dp=n, sharding="fsdp"), software=FSDP))
        for n in (64, 512)
    ]
    gathered = [peak.part("communication") for peak in shards]
    assert gathered[0] == gathered[1]
    assert gathered[0] > 2 * find_model("llama3-70b").dense_layer_params()


def test_sharding_divides_what_it_names() -> None:
    def parts(sharding: str, backend: str) -> tuple[float, float, float]:
        software = dataclasses.replace(MEGATRON, backend=backend)
        one = case(
            layout=Layout(dp=8, sharding=sharding),
            software=software,
            batch=Batch.uniform(2, 1, 64),
        )
        peak = memory(one)
        return peak.part("weights"), peak.part("gradients"), peak.part("optimizer")

    params = find_model("llama3-8b").num_parameters()
    assert parts("none", "megatron") == pytest.approx((2 * params, 4 * params, 12 * params))
    assert parts("zero1", "megatron") == pytest.approx((2 * params, 4 * params, 12 * params / 8))
    assert parts("zero2", "deepspeed") == pytest.approx(
        (2 * params, 4 * params / 8, 12 * params / 8)
    )
    assert parts("fsdp", "fsdp") == pytest.approx((4 * params / 8, 4 * params / 8, 8 * params / 8))


def test_experts_are_spread_over_expert_parallel_ranks() -> None:
    def weights(ep: int) -> float:
        layout = Layout(dp=8, ep=ep, sharding="zero1")
        return memory(case("qwen3-30b-a3b", layout=layout)).part("weights")

    shape = find_model("qwen3-30b-a3b")
    experts = 2 * shape.num_moe_layers * 128 * shape.expert_params()
    assert weights(1) - weights(8) == pytest.approx(experts * 7 / 8)
    spread = step(case("qwen3-30b-a3b", layout=Layout(dp=8, ep=8, sharding="zero1")))
    assert spread.part("ep_comm") > 0


def test_smaller_micro_batches_expose_gathers() -> None:
    def share(sequences: int) -> float:
        one = step(
            case(
                "llama3-70b",
                layout=Layout(dp=64, sharding="fsdp"),
                batch=Batch.uniform(4, sequences, 1024),
                software=FSDP,
            )
        )
        return one.part("dp_comm") / one.seconds

    assert share(1) > 3 * share(16)


def test_offloaded_adam_costs_time_and_frees_memory() -> None:
    layout = Layout(dp=8, sharding="zero2")
    software = dataclasses.replace(MEGATRON, backend="deepspeed")
    here = case(layout=layout, software=software)
    away = dataclasses.replace(here, software=dataclasses.replace(software, cpu_adam=True))
    assert memory(away).part("optimizer") == 0
    assert step(away).part("optimizer") > 10 * step(here).part("optimizer")


def test_groups_span_nodes_as_ranks_are_ordered() -> None:
    assert Group.of(8, 1, 8) == Group(8, 1)
    assert Group.of(16, 1, 8) == Group(16, 2)
    assert Group.of(8, 8, 8) == Group(8, 8)
    assert Group.of(4, 4, 8) == Group(4, 2)
    gpu, network = find_gpu("h100"), Network()
    inside = collective_s(gpu, network, "all_gather", Group(8, 1), 2.0**30)
    across = collective_s(gpu, network, "all_gather", Group(8, 8), 2.0**30)
    assert across > 4 * inside
