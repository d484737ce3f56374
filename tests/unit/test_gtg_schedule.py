"""Schedules of small transitions, by example."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.moves import plan_moves
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo, concat
from nereus_plugins.gtg.build import PlannedUnit, UnitChange, build_graph, changes_between
from nereus_plugins.gtg.compile import InfeasibleTransition, compile_graph
from nereus_plugins.gtg.estimate import StepCosts, byte_bound_s, estimate
from nereus_plugins.gtg.graph import GraphError, Step
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    GPUSpec,
    Layout,
    LinkSpec,
    ModelSpec,
    ModelStage,
    OptimizerSpec,
)

TENSOR = TensorInfo("weight/w", (8, 100), "float32")  # 3200 bytes


def halves(ranks: list[int]) -> ShardTable:
    """The tensor cut in as many parts as there are ranks, two storages a rank."""
    parts = []
    rows = 8 // len(ranks)
    for i, rank in enumerate(ranks):
        first = Box((i * rows, 0), (rows, 50))
        second = Box((i * rows, 50), (rows, 50))
        storages = [StorageInfo(rank, key, rows * 200, "cuda:0") for key in (0, 1)]
        parts.append(
            ShardTable.from_shards(rank, [(TENSOR, first, 0), (TENSOR, second, 1)], storages)
        )
    return concat(parts)


def change(name: str = "actor") -> UnitChange:
    source, target = halves([0, 1]), halves([0, 1, 2, 3])
    return UnitChange(name, Layout(tp=2), Layout(tp=4), source, target)


def steps(schedule) -> list[str]:
    return [round_.step.value for round_ in schedule.rounds]


def test_intact_order_is_the_executors_prologue_and_then_one_build_at_a_time() -> None:
    schedule = compile_graph(build_graph([change("actor"), change("critic")], world=4))
    assert schedule.mode == "intact"
    assert steps(schedule) == [
        *("free_gradients", "form_groups", "describe", "plan", "agree"),
        *("build", "build", "describe", "plan", "agree"),
        *("move", "move", "verify", "commit", "release", "drop_groups"),
    ]
    assert schedule.peak_bytes.tolist() == [2 * (1600 + 800)] * 2 + [2 * 800] * 2


def test_too_small_a_budget_parks_as_few_storages_as_needed() -> None:
    schedule = compile_graph(build_graph([change()], world=4, memory_budget_bytes=1700))
    assert schedule.mode == "staged"
    index = steps(schedule).index("park")
    assert schedule.parked(index, 0, 0) == [0]
    assert schedule.parked(index, 0, 2) == []
    assert schedule.peak_bytes.max() <= 1700
    assert schedule.peak_host_bytes.tolist() == [800, 800, 0, 0]


def test_a_target_that_cannot_fit_names_rank_bytes_and_remedy() -> None:
    graph = build_graph([change(), change("critic")], world=4, memory_budget_bytes=3300)
    compile_graph(graph)  # both parked fits: 2 * 800 and staging of nothing
    big = dataclasses.replace(change(), build_bytes=np.array([0, 3000, 0, 0]))
    with pytest.raises(
        InfeasibleTransition, match="rank 1 needs 3800 bytes for build of actor"
    ) as e:
        compile_graph(build_graph([big], world=4, memory_budget_bytes=3300))
    assert (e.value.rank, e.value.needed_bytes, e.value.available_bytes) == (1, 3800, 3300)
    assert "memory_budget_bytes" in str(e.value)


def test_a_budget_needs_a_target() -> None:
    unknown = dataclasses.replace(change(), target=None)
    compile_graph(build_graph([unknown], world=4))
    with pytest.raises(GraphError, match="predicted table"):
        build_graph([unknown], world=4, memory_budget_bytes=1)


def test_digest_sees_memory_and_order_but_not_traffic() -> None:
    one = change()
    plain = compile_graph(build_graph([one], world=4))
    moves = {"actor": plan_moves(one.source, one.target)}
    assert plain.digest == compile_graph(build_graph([one], world=4, moves=moves)).digest
    others = [
        build_graph([one], world=4, memory_budget_bytes=10_000),
        build_graph([one], world=4, rollout=True),
        build_graph([change("critic")], world=4),
        build_graph([dataclasses.replace(one, target=halves([0, 1]))], world=4),
    ]
    digests = {plain.digest, *(compile_graph(graph).digest for graph in others)}
    assert len(digests) == 5


def test_estimate_of_a_known_exchange() -> None:
    one = change()
    moves = {"actor": plan_moves(one.source, one.target, node_of=np.arange(4, dtype=np.int32) // 2)}
    graph = build_graph([one], world=4, moves=moves, rollout=True)
    schedule = compile_graph(graph)
    cluster = ClusterSpec(
        nodes=2,
        gpus_per_node=2,
        gpu=GPUSpec(
            name="g", memory_bytes=1 << 30, peak_flops=1.0, memory_bandwidth_bytes_per_s=1.0
        ),
        intra_node=LinkSpec(bandwidth_bytes_per_s=1000.0),
        inter_node=LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=1.0),
    )
    cost = estimate(schedule, cluster, StepCosts(constant_s={Step.BUILD: 5.0}, vote_s=0.5))
    # Rank 1 holds rows 4..8: ranks 2 and 3, on the other node, each need 800 bytes of it.
    assert cost.bytes_sent.tolist() == [800, 1600, 0, 0]
    assert cost.bytes_received.tolist() == [0, 800, 800, 800]
    assert byte_bound_s(schedule.graph.traffic, 4, cluster) == 16.0
    assert cost.seconds_by_step["move"] == 16.0 + 1.0 + 0.5
    assert cost.critical_path_s == pytest.approx(5.0 + 17.0 + 0.5 * len(schedule.rounds))
    assert cost.recovery_s == 0.0


def test_two_global_plans_are_estimated_from_the_spec_alone() -> None:
    model = ModelSpec(
        name="small",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_kv_heads=2,
        vocab_size=128,
    )
    units = [
        PlannedUnit("actor", ModelStage.ACTOR_TRAIN, model, "megatron", OptimizerSpec()),
        PlannedUnit("ref", ModelStage.REF_LOGPROB, model, "megatron"),
    ]
    small, large = Assignment(Layout(tp=2, pp=2)), Assignment(Layout(tp=1, pp=4, dp=2))
    moved = Assignment(Layout(tp=2, pp=2), devices=(4, 5, 6, 7))
    old = GlobalPlan({ModelStage.ACTOR_TRAIN: small, ModelStage.REF_LOGPROB: small})
    new = GlobalPlan({ModelStage.ACTOR_TRAIN: large, ModelStage.REF_LOGPROB: moved})
    assert changes_between(old, old, units) == []
    changes = changes_between(old, new, units)
    assert [c.name for c in changes] == ["actor", "ref"]
    assert changes[1].target.ranks == (4, 5, 6, 7)
    moves = {c.name: plan_moves(c.source, c.target) for c in changes}
    schedule = compile_graph(build_graph(changes, world=8, moves=moves))
    cluster = ClusterSpec(
        nodes=1,
        gpus_per_node=8,
        gpu=GPUSpec(
            name="g", memory_bytes=1 << 30, peak_flops=1.0, memory_bandwidth_bytes_per_s=1.0
        ),
        intra_node=LinkSpec(bandwidth_bytes_per_s=1e9),
        inter_node=LinkSpec(bandwidth_bytes_per_s=1e9),
    )
    cost = estimate(schedule, cluster, StepCosts())
    weights = 2 * model.num_parameters()
    assert cost.bytes_sent.sum() >= weights  # the reference moves whole to other devices
    assert 0 < byte_bound_s(schedule.graph.traffic, 8, cluster) <= cost.critical_path_s
