"""Snapshots of verl's own engines: taken by what runs in its workers, restored in jobs of other
layouts and numbers of ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.errors import DamagedSnapshot, OtherModel
from nereus_plugins.spec import Layout
from tests.dist.spawn import run_ranks

# Not imported here: a rank imports this module before it says which platform verl is to use.
pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl")

DATA = {"yielded": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nereus_cpu.task import make_task

    return make_task(tmp_path_factory.mktemp("verl")).model_dir


def _worker(kind: str, model: Path, layout: Layout, offload: bool) -> tuple[Any, Any]:
    """What verl's worker process is to `snapshot_worker`, and its engines."""
    from nereus_verl.worker import STATE

    from tests.dist import verl_engines as ve

    engines = {
        role: ve.build(kind, model, role, layout, offload=offload) for role in ("actor", "critic")
    }
    units = ve.make_units(kind, engines)
    process = getattr(units["actor"], "_process", None)
    state = SimpleNamespace(units=units, megatron=process, snapshots=None)
    return SimpleNamespace(**{STATE: state}), engines


def _draw() -> list[float]:
    """What the process's default generators draw next."""
    import random

    import numpy as np
    import torch

    return [random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))]


def takes(
    rank: int, world: int, kind: str, model: Path, layout: Layout, place: Path, offload: bool
) -> Any:
    """Takes a snapshot after the second step, and trains on beside it."""
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_verl import rng, snapshot_worker

    worker, engines = _worker(kind, model, layout, offload)
    rng.seed(100 + rank)
    options = {"folder": str(place), "keep": 2}
    snapshot_worker.begin(worker, options, snapshot_worker.named(worker), ve.TIMEOUT_S)
    for step in (1, 2, 3):
        for role in ("actor", "critic"):
            ve.train(engines[role], step)
        if step == 2:
            kept = ve.whole({name: worker._nereus_rank.units[name] for name in ("actor", "critic")})
            for unit in worker._nereus_rank.units.values():
                unit.settle()
            assert snapshot_worker.take(worker, step, 5, {"a": 1}, DATA)["not_begun"] == ""
            drawn = _draw()
    last = snapshot_worker.end(worker, None)["last"]
    assert last is not None
    assert (last["step"], last["error"]) == (2, "")
    return kept, drawn


def restores(
    rank: int, world: int, kind: str, model: Path, layout: Layout, place: Path, offload: bool
) -> Any:
    """Has trained nothing when it restores the newest; then trains on."""
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_verl import snapshot_worker

    worker, engines = _worker(kind, model, layout, offload)
    snapshot = folder.latest(place)
    named = snapshot_worker.named(worker)
    read = snapshot_worker.restore(worker, str(snapshot.path), 2, named, ve.TIMEOUT_S)
    assert read > 0
    drawn = _draw()
    units = worker._nereus_rank.units
    found = ve.whole({name: units[name] for name in ("actor", "critic")})
    for unit in units.values():
        unit.settle()
    for role in ("actor", "critic"):
        assert engines[role].lr_scheduler is not None
        ve.train(engines[role], 3)
    if world == 1:
        _refuses(worker, snapshot)
    return found, drawn


def _refuses(worker: Any, snapshot: folder.Snapshot) -> None:
    """What is damaged, or of another model. Local."""
    from nereus_verl import snapshot_worker

    from tests.dist import verl_engines as ve

    (file, *_) = sorted(snapshot.path.glob("actor/*"))
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    args = (worker, str(snapshot.path), 2, snapshot_worker.named(worker), ve.TIMEOUT_S)
    with pytest.raises(DamagedSnapshot, match=file.name):
        snapshot_worker.restore(*args)
    units = worker._nereus_rank.units
    units["actor"], units["critic"] = units["critic"], units["actor"]
    with pytest.raises(OtherModel, match=r"unit actor: .*it is of another model"):
        snapshot_worker.restore(*args)


FSDP2 = Layout(dp=2, sharding="fsdp")
HSDP4 = Layout(dp=2, ulysses=2, sharding="hsdp", shard_size=2)


@pytest.mark.parametrize(
    ("kind", "taken_in", "restored_in", "offload"),
    [
        ("fsdp2", FSDP2, Layout(dp=1, sharding="fsdp"), False),
        pytest.param("fsdp2", FSDP2, HSDP4, True, marks=pytest.mark.full),
        pytest.param("fsdp2", HSDP4, FSDP2, False, marks=pytest.mark.full),
        pytest.param("megatron", Layout(tp=2), Layout(pp=2, dp=2), False, marks=pytest.mark.full),
        pytest.param("megatron", Layout(tp=2, dp=2), Layout(pp=2), False, marks=pytest.mark.full),
    ],
)
def test_a_job_in_another_layout_goes_on_from_the_same_bits(
    tmp_path: Path, model: Path, kind: str, taken_in: Layout, restored_in: Layout, offload: bool
) -> None:
    args = (kind, model, taken_in, tmp_path, offload)
    before = run_ranks(takes, taken_in.world_size, *args)
    snapshot = folder.latest(tmp_path)
    assert (snapshot.index.step, snapshot.index.epoch) == (2, 5)
    assert sorted(snapshot.index.units) == ["actor", "critic", "trainer"]
    assert snapshot.index.units["trainer"].scalars["data"] == DATA
    args = (kind, model, restored_in, tmp_path, offload)
    after = run_ranks(restores, restored_in.world_size, *args)
    assert len(before[0][0]["actor"]) > 30  # tensors, with moments
    for digests, _ in after:
        assert digests == before[0][0]
    # Ranks that were there go on with their generators; others have their own.
    draws = [drawn for _, drawn in after]
    both = min(len(before), len(after))
    assert draws[:both] == [drawn for _, drawn in before[:both]]
    assert len({tuple(drawn) for drawn in draws}) == len(draws)
