"""verl's engines as elastic units: state, gradients, exported weights and groups over transitions.

All in fp32, so that two layouts differ by the order of sums only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nereus_plugins.gtg.execute import TransitionAborted
from nereus_plugins.gtg.scalars import RNG, coordinate
from nereus_plugins.spec import Layout
from tests.dist.spawn import run_ranks

# Not imported here: a rank imports this module before it says which platform verl is to use.
pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl")

FSDP = Layout(dp=4, sharding="fsdp")
PATHS = {
    "fsdp2": [
        FSDP,
        Layout(dp=4, sharding="hsdp", shard_size=2),
        Layout(dp=2, ulysses=2, sharding="fsdp"),
        Layout(dp=2, ulysses=2, sharding="hsdp", shard_size=1),
    ],
    "megatron": [
        Layout(tp=2, pp=2, sharding="zero1"),
        Layout(pp=2, dp=2, sharding="zero1"),
        Layout(dp=4, sharding="zero1"),
        Layout(tp=2, dp=2, sharding="zero1"),
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nereus_cpu.task import make_task

    return make_task(tmp_path_factory.mktemp("verl")).model_dir


def _over_layouts(rank: int, world: int, kind: str, model: Path, path: list[Layout]) -> Any:
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_plugins.transport.groups import live_group_count

    engines = {role: ve.build(kind, model, role, path[0]) for role in ("actor", "critic", "ref")}
    units = ve.make_units(kind, engines)
    transition = ve.make_transition(units)
    trained = ("actor", "critic")
    for seed in range(2):
        for role in trained:
            ve.train(engines[role], seed)
    start = ve.take(units)
    weights = {role: ve.exported(engines[role]) for role in engines}
    groups = live_group_count()

    for role in trained:
        ve.train(engines[role], 9)
    never_moved = ve.take(units)

    out: dict[str, Any] = {"gradients": {}, "groups": [groups]}
    for layout in path[1:]:
        ve.restore(units, start)
        before = _generators(units)
        ve.move(transition, layout)
        _check_generators(before, _generators(units), layout, units)
        assert [unit.layout() for unit in units.values()] == [layout] * 3
        for role in engines:
            assert engines[role] is units[role].engine
            moved = ve.exported(engines[role])
            assert moved.keys() == weights[role].keys()
            assert all(moved[key].equal(weights[role][key]) for key in moved), role
        out["groups"].append(live_group_count())
        # There and back without a step: bitwise what never moved.
        ve.move(transition, path[0])
        for role in trained:
            ve.train(engines[role], 9)
        ve.assert_same(ve.take(units), never_moved)
        # A step in the new layout: the same gradient up to the order of sums.
        ve.restore(units, start)
        ve.move(transition, layout)
        for role in trained:
            ve.train(engines[role], 9)
        ve.move(transition, path[0])
        for role in trained:
            out["gradients"][f"{role} {layout}"] = _gradient_error(
                ve.take(units)[role], never_moved[role], start[role]
            )
    out["groups"].append(live_group_count())
    return out


def _generators(units: Any) -> dict[str, dict[str, str]]:
    """States of the tensor-parallel generators, of all ranks: coordinate -> name -> state."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, units["actor"].described().scalars.get(RNG, {}))
    return {coordinate: states for one in gathered for coordinate, states in one.items()}


def _check_generators(
    before: dict[str, Any], after: dict[str, Any], layout: Layout, units: Any
) -> None:
    """Those of coordinates that were there before go on; the others are seeded anew."""
    if not hasattr(units["actor"], "_process"):
        assert before == after == {}  # FSDP2 has none
        return
    from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name

    assert set(after) == {coordinate(layout, rank) for rank in range(layout.world_size)}
    old = [state for states in before.values() for state in states.values()]
    for place, states in after.items():
        for name, state in states.items():
            tp0 = ",".join(["0", *place.split(",")[1:]])
            home = tp0 if name == get_data_parallel_rng_tracker_name() else place
            if home in before:
                assert state == before[home][name], (place, name)
            else:
                assert state not in old, (place, name)


def _staged(rank: int, world: int, kind: str, model: Path, path: list[Layout]) -> Any:
    """Through host memory, of units that verl offloads between stages: aborted, then there."""
    import torch
    import torch.distributed as dist

    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_verl import capabilities, worker

    trained, roles = ("actor", "critic"), ("actor", "critic", "ref")
    engines = {role: ve.build(kind, model, role, path[0], offload=True) for role in roles}
    units = ve.make_units(kind, engines)
    transition = ve.make_transition(units)
    for role in trained:
        ve.train(engines[role], 0)
    start = ve.take(units)
    for role in trained:
        ve.train(engines[role], 1)
    never_moved = ve.take(units)
    ve.restore(units, start)
    hf_config = json.loads((model / "config.json").read_text())
    models = {role: capabilities.check_model(role, hf_config) for role in roles}
    weights = {role: ve.exported(engines[role]) for role in roles}
    held = sum(int(unit.described().table(rank).nbytes_per_row().sum()) for unit in units.values())
    largest = torch.tensor(held)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    plain = transition.options
    transition.options = dataclasses.replace(
        plain, memory_budget_bytes=int(largest) * 3 // 2, staging_bytes=1 << 16
    )
    targets = dict.fromkeys(roles, path[1])
    predicted = {role: worker.predict(engines[role], models[role], path[1]) for role in roles}

    moved_to = ve.watch_offloading(engines)
    seat = SimpleNamespace()
    state = worker.RankState(
        units=units,
        megatron=getattr(units["actor"], "_process", None),
        engines=engines,
        seats={},
        models=models if rank == 0 else {},
        options=plain,
        transition=transition,
    )
    setattr(seat, worker.STATE, state)
    budgeted, wanted = transition.options, {name: t.to_dict() for name, t in targets.items()}
    budget = budgeted.memory_budget_bytes
    answer = worker.prepare(seat, wanted, 1, 5, (0,) * world, budget)
    assert answer["aborted"]["rank"] == 1
    assert answer["aborted"]["reason"] == "KeyError: 'actor'"
    _assert_settled(moved_to)

    transition.options = budgeted
    with ve.without_memory_on(1, engines["critic"]), pytest.raises(TransitionAborted) as aborted:
        transition.prepare(targets, 1, predicted)
    assert aborted.value.phase == "build"
    _assert_settled(moved_to)
    for role in trained:
        ve.train(engines[role], 1)
    ve.assert_same(ve.take(units), never_moved)

    ve.restore(units, start)
    moved_to.clear()
    report = transition.prepare(targets, 2, predicted)
    transition.commit()
    transition.release()
    _assert_settled(moved_to)
    for role in roles:
        moved = ve.exported(engines[role])
        assert all(moved[key].equal(weights[role][key]) for key in weights[role]), role
    transition.options = plain
    transition.prepare(dict.fromkeys(roles, path[0]), 3)
    transition.commit()
    transition.release()
    ve.assert_same(ve.take(units), start)
    for role in trained:
        ve.train(engines[role], 1)
    ve.assert_same(ve.take(units), never_moved)
    parked = sum(unit.bytes_parked for unit in report.units.values())
    return report.mode, parked, [unit.prediction for unit in report.units.values()]


def _assert_settled(moved_to: list[tuple[str, bool]]) -> None:
    """Offloaded last, when all memory was back."""
    assert moved_to
    assert moved_to[-1][0] == "cpu"
    assert all(all_there for _, all_there in moved_to), moved_to


def _failing_build(rank: int, world: int, kind: str, model: Path, path: list[Layout]) -> Any:
    """Rank 1 has no memory left for the actor's new optimizer."""
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_plugins.transport.groups import live_group_count

    roles = ("actor", "critic")
    engines = {role: ve.build(kind, model, role, path[0]) for role in roles}
    units = ve.make_units(kind, engines)
    transition = ve.make_transition(units)
    for role in roles:
        ve.train(engines[role], 0)
    start, groups = ve.take(units), live_group_count()
    for role in roles:
        ve.train(engines[role], 9)
    never_moved = ve.take(units)
    ve.restore(units, start)

    begin = time.monotonic()
    with ve.without_memory_on(1, engines["actor"]), pytest.raises(TransitionAborted) as aborted:
        transition.prepare(dict.fromkeys(roles, path[1]), 1)
    spent_s = time.monotonic() - begin
    assert live_group_count() == groups
    for role in roles:
        ve.train(engines[role], 9)
    ve.assert_same(ve.take(units), never_moved)
    # The next attempt finds nothing in its way.
    transition.epoch = 1
    ve.move(transition, path[1])
    return aborted.value.rank, aborted.value.phase, aborted.value.reason, spent_s


def _gradient_error(found: Any, wanted: Any, before: Any) -> float:
    """Largest difference of the gradient, relative to its largest element.

    Adam's first moment is m' = b m + (1 - b) g, from equal m: its change is the gradient's.
    """
    worst = largest = 0.0
    for x, y, z in zip(found.shards, wanted.shards, before.shards, strict=True):
        if x.name.startswith("exp_avg/"):
            worst = max(worst, float((x.view - y.view).abs().max()))
            largest = max(largest, float((y.view - 0.9 * z.view).abs().max()))
    return worst / largest


@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_units_over_layouts(kind: str, model: Path) -> None:
    results = run_ranks(_over_layouts, 4, kind, model, PATHS[kind], timeout_s=400)
    for result in results:
        # fp32 sums in another order: a few hundred terms at 6e-8 each.
        assert max(result["gradients"].values()) < 1e-4, result["gradients"]
        assert result["groups"][0] == result["groups"][-1], result["groups"]


PAIRS = [
    ("fsdp2", [Layout(dp=2, sharding="fsdp"), Layout(dp=1, ulysses=2, sharding="fsdp")]),
    ("megatron", [Layout(tp=2, sharding="zero1"), Layout(pp=2, sharding="zero1")]),
]


@pytest.mark.parametrize(("kind", "path"), PAIRS)
def test_a_rank_that_cannot_build_leaves_its_peers_free(
    kind: str, path: list[Layout], model: Path
) -> None:
    for rank, phase, reason, spent_s in run_ranks(
        _failing_build, 2, kind, model, path, timeout_s=300
    ):
        assert (rank, phase) == (1, "build")
        assert reason == "MemoryError: none left"
        assert spent_s < 60.0


@pytest.mark.parametrize(("kind", "path"), PAIRS)
def test_staged_through_host_memory(kind: str, path: list[Layout], model: Path) -> None:
    """Old and new do not fit together; what was predicted of verl's models is what was built."""
    for mode, parked, predictions in run_ranks(_staged, 2, kind, model, path, timeout_s=300):
        assert mode == "staged"
        assert parked > 0
        assert predictions == [[], [], []]


# -- prepared, then trained after all -------------------------------------------------------------


def _trained_since(rank: int, world: int, kind: str, model: Path, path: list[Layout]) -> None:
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    engines = {role: ve.build(kind, model, role, path[0]) for role in ("actor", "critic", "ref")}
    units = ve.make_units(kind, engines)
    transition = ve.make_transition(units)
    for role in ("actor", "critic"):
        ve.train(engines[role], 0)
    transition.prepare(dict.fromkeys(units, path[1]), 1)
    assert transition.stale() == ()
    ve.train(engines["critic"], 1)  # gradient memory had been given up
    assert transition.stale() == ("critic",)
    with pytest.raises(TransitionAborted, match="StaleState: critic was trained"):
        transition.commit()
    trained = ve.take(units)
    transition.epoch = 1
    ve.move(transition, path[1])
    ve.move(transition, path[0])
    ve.assert_same(ve.take(units), trained)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "path"), PAIRS)
def test_what_was_trained_since_is_not_committed(
    kind: str, path: list[Layout], model: Path
) -> None:
    run_ranks(_trained_since, 2, kind, model, path, timeout_s=200)
