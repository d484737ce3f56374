"""Megatron engines of one process in layouts of their own, each as it would be alone.

All in fp32, on two ranks.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.gtg.execute import TransitionAborted
from nereus_plugins.gtg.scalars import RNG
from nereus_plugins.spec import Layout
from tests.dist.spawn import run_ranks

# Not imported here: a rank imports this module before it says which platform verl is to use.
pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl")

TP2, DP2, PP2 = (Layout(**{size: 2}, sharding="zero1") for size in ("tp", "dp", "pp"))
TRAINED = ("actor", "critic")
SEEDS = (5, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nereus_cpu.task import make_task

    return make_task(tmp_path_factory.mktemp("verl"), layers=2).model_dir


def _together(rank: int, world: int, model: Path, folder: Path) -> bool:
    """Actor, critic and reference in one process; the critic changes, the others stay."""
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from megatron.core import parallel_state
    from nereus_verl import engine_worlds

    from nereus_plugins.transport.groups import live_group_count

    start = {"actor": TP2, "critic": TP2, "ref": DP2}  # unequal from the start
    engines = {role: ve.build("megatron", model, role, start[role]) for role in start}
    units = ve.make_units("megatron", engines)
    assert {name: unit.layout() for name, unit in units.items()} == start

    def groups() -> tuple[int, int]:
        """Layouts of which there are groups, and groups that belong to none."""
        held = {
            id(world): len(world.groups) for world in map(engine_worlds.world_of, engines.values())
        }
        return len(held), live_group_count() - sum(held.values())

    worlds = {name: engine_worlds.world_of(engine) for name, engine in engines.items()}
    assert worlds["actor"] is worlds["critic"] is not worlds["ref"]
    # Between the engines' calls there is no parallel state that one could take for its own.
    assert not parallel_state.is_initialized()
    transition = ve.make_transition(units)
    layouts, others = groups()
    assert layouts == 2

    for role in TRAINED:
        ve.train(engines[role], 0)
    before, exported = ve.whole(units), ve.exported(engines["critic"])
    snapshot = ve.take(units)
    train(ve, engines)
    never_moved = ve.take(units)
    ve.restore(units, snapshot)

    # One that cannot be built leaves all as it was, also where another has its layout already.
    stay = {"actor": TP2, "ref": DP2}
    with ve.without_memory_on(1, engines["critic"]), pytest.raises(TransitionAborted):
        transition.prepare({**stay, "critic": DP2}, 1)
    transition.epoch = 1
    assert groups() == (2, others)
    train(ve, engines)
    ve.assert_same(ve.take(units), never_moved)
    ve.restore(units, snapshot)

    held = {name: ve.addresses(units[name]) for name in stay}
    ve.move(transition, {**stay, "critic": DP2})
    assert [unit.layout() for unit in units.values()] == [TP2, DP2, DP2]
    assert {name: ve.addresses(units[name]) for name in stay} == held
    assert all(engine_worlds.world_of(engines[name]) is worlds[name] for name in stay)
    assert ve.whole(units) == before
    assert groups() == (3, others)
    ve.save(ve.take(units), folder / f"start{rank}.pt")
    # The weight sync draws one tensor at a time, and other engines may be asked in between.
    lazily = {}
    for name, tensor in engines["actor"].get_per_tensor_param()[0]:
        lazily[name] = tensor.detach().clone()
        assert engines["critic"].get_data_parallel_size() == 2
    assert_equal(lazily, ve.exported(engines["actor"]))
    assert_equal(ve.exported(engines["critic"]), exported)
    train(ve, engines)
    ve.save(ve.take(units), folder / f"end{rank}.pt")

    # Back, without a step in between: bitwise what never moved. Then all into other layouts, and
    # actor and critic change places.
    ve.restore(units, ve.load(folder / f"start{rank}.pt"))
    ve.move(transition, start)
    assert ve.whole(units) == before
    assert groups() == (3, others)
    ve.move(transition, {"actor": PP2, "critic": DP2, "ref": TP2})
    ve.move(transition, {"actor": DP2, "critic": PP2, "ref": TP2})
    assert ve.whole(units) == before
    assert_equal(ve.exported(engines["actor"]), lazily)
    ve.move(transition, start)
    train(ve, engines)
    ve.assert_same(ve.take(units), never_moved)
    assert groups() == (2, others)
    return True


def _alone(rank: int, world: int, model: Path, folder: Path) -> Any:
    """verl's own: one engine in the process after the other, from the state that was moved."""
    from tests.dist import verl_engines as ve

    ve.on_cpu(nereus=False)
    from megatron.core import parallel_state

    for role, layout in (("actor", TP2), ("critic", DP2)):
        engine = ve.build("megatron", model, role, layout)
        assert not hasattr(type(engine).train_batch, "__wrapped__")
        ve.restore_alone(engine, ve.load(folder / f"start{rank}.pt")[role])
        train(ve, {role: engine})
        end = ve.load(folder / f"end{rank}.pt")
        ve.assert_same({role: ve.described_alone(engine)}, {role: end[role]})
        parallel_state.destroy_model_parallel()


def train(ve: Any, engines: dict[str, Any]) -> None:
    for seed in SEEDS:
        for role in TRAINED:
            if role in engines:
                ve.train(engines[role], seed)


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def test_unequal_layouts_are_as_separate_runs(model: Path, tmp_path: Path) -> None:
    assert run_ranks(_together, 2, model, tmp_path, timeout_s=300) == [True, True]
    run_ranks(_alone, 2, model, tmp_path, timeout_s=300)


def _generators(rank: int, world: int, model: Path) -> Any:
    """The tensor-parallel generators belong to a world, and go with who leaves it."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_verl import engine_worlds

    engines = {role: ve.build("megatron", model, role, TP2) for role in TRAINED}
    units = ve.make_units("megatron", engines)
    transition = ve.make_transition(units)

    def states(role: str) -> Any:
        return units[role].described().scalars[RNG]

    def draw(role: str) -> None:
        with (
            engine_worlds.worlds().using(engine_worlds.world_of(engines[role])),
            get_cuda_rng_tracker().fork(),
        ):
            torch.rand(3)

    draw("actor")
    first = states("actor")
    assert states("critic") == first
    ve.move(transition, {"actor": TP2, "critic": PP2})
    assert states("actor") == first  # building the critic seeded its own world's only
    draw("critic")
    alone = states("critic")
    draw("actor")
    assert states("actor") != first
    ve.move(transition, {"actor": TP2, "critic": DP2})
    assert alone.keys() & states("critic").keys() == ({"0,0,0"} if rank == 0 else set())
    if rank == 0:
        assert states("critic") == alone
    # Two into one: the first one's go on, in both.
    kept = states("actor")
    ve.move(transition, {"actor": PP2, "critic": PP2})
    assert states("actor") == states("critic")
    assert kept.keys() & states("actor").keys() == ({"0,0,0"} if rank == 0 else set())
    if rank == 0:
        assert states("actor") == kept
    return True


@pytest.mark.full
def test_generators_belong_to_a_world(model: Path) -> None:
    assert run_ranks(_generators, 2, model, timeout_s=300) == [True, True]
