"""Described units without a framework: shards, scalars, state of Adam, parking."""

from __future__ import annotations

import json
import math

import pytest
import torch

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.described.base import (
    DescribedUnit,
    LocalShard,
    ScalarMismatch,
    UnsupportedState,
    ensure_adam_state,
    group_scalars,
    load_group_scalars,
    merge_scalars,
    scalar_value,
    set_step,
)
from nereus_plugins.emu.storage import park
from nereus_plugins.emu.table import TableError


def _cut_rows(name: str, whole: torch.Tensor, sizes: list[int]) -> list[DescribedUnit]:
    """One unit per rank, `sizes` rows each."""
    units, row = [], 0
    for size in sizes:
        view = whole[row : row + size].clone()
        box = Box((row, 0), (size, whole.shape[1]))
        units.append(DescribedUnit([LocalShard(name, box, tuple(whole.shape), view)]))
        row += size
    return units


def test_a_shard_must_fit_its_view_and_its_tensor() -> None:
    with pytest.raises(ValueError, match="view of shape"):
        LocalShard("weight/w", Box((0,), (3,)), (4,), torch.zeros(4))
    with pytest.raises(ValueError, match="leaves the tensor"):
        LocalShard("weight/w", Box((2,), (3,)), (4,), torch.zeros(3))


def test_table_has_one_row_a_shard_and_one_storage_an_allocation() -> None:
    buffer = torch.arange(12.0)
    shards = [
        LocalShard("weight/a", Box((4, 0), (2, 3)), (8, 3), buffer[:6].view(2, 3)),
        LocalShard("exp_avg/b", Box((), ()), (), buffer[6]),
        LocalShard("weight/c", Box((1,), (5,)), (6,), torch.zeros(5, dtype=torch.bfloat16)),
    ]
    unit = DescribedUnit(shards)
    table = unit.table(rank=3)
    assert table.local.tolist() == [0, 1, 2]
    assert table.rank.tolist() == [3, 3, 3]
    assert [table.box(i) for i in range(3)] == [s.box for s in shards]
    assert table.nbytes_per_row().tolist() == [s.nbytes for s in shards]
    assert table.storage.tolist() == [0, 0, 1]
    assert table.storages.nbytes.tolist() == [48, 10]
    assert [s.nbytes() for s in unit.storages()] == [48, 10]


def test_shards_that_disagree_about_a_tensor_are_refused() -> None:
    shards = [
        LocalShard("weight/a", Box((0,), (2,)), (4,), torch.zeros(2)),
        LocalShard("weight/a", Box((2,), (2,)), (5,), torch.zeros(2)),
    ]
    with pytest.raises(TableError, match="weight/a"):
        DescribedUnit(shards).table(0)


def test_merge_takes_the_union_and_names_what_differs() -> None:
    first = {"steps": {"a": 3.0}, "groups": {"0": {"lr": 0.1, "betas": (0.9, 0.99)}}}
    second = {"steps": {"b": 4.0}, "groups": {"0": {"lr": 0.1, "betas": [0.9, 0.99]}}}
    merged = merge_scalars([first, {}, second])
    assert merged["steps"] == {"a": 3.0, "b": 4.0}
    assert first["steps"] == {"a": 3.0}
    second["groups"]["0"]["lr"] = 0.2
    with pytest.raises(ScalarMismatch, match="groups/0/lr"):
        merge_scalars([first, second])
    assert math.isnan(merge_scalars([{"x": math.nan}, {"x": math.nan}])["x"])


def test_hyperparameters_survive_json_bit_for_bit_and_keep_their_types() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    source = torch.optim.AdamW([p], lr=0.1 + 1e-17 / 3, betas=(0.87, 0.991)).param_groups[0]
    target = torch.optim.AdamW([p], lr=torch.tensor(1.0), capturable=True).param_groups[0]
    held = target["lr"]
    values = json.loads(json.dumps(group_scalars(source)))
    values.pop("capturable")
    load_group_scalars(target, values)
    assert target["betas"] == (0.87, 0.991)
    assert isinstance(target["betas"], tuple)
    assert target["lr"] is held
    assert held.item() == pytest.approx(source["lr"])
    assert target["params"] == [p]
    with pytest.raises(UnsupportedState, match="shape"):
        scalar_value(torch.zeros(2))


def _adam(seed: int, ensured: bool) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)
    if ensured:
        ensure_adam_state(optimizer)
    for step in range(3):
        for p in params:
            p.grad = torch.sin(p.detach() * (step + 1))
        optimizer.step()
    return params, optimizer


def test_allocating_adams_state_early_changes_no_number() -> None:
    (early, a), (late, b) = _adam(1, True), _adam(1, False)
    for p, q in zip(early, late, strict=True):
        assert torch.equal(p, q)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(a.state[p][key], b.state[q][key])
            assert a.state[p][key].dtype == b.state[q][key].dtype


def test_each_parameter_gets_a_step_counter_of_its_own() -> None:
    shared = torch.tensor(7.0)
    states = [{"step": shared}, {"step": shared}]
    for state, value in zip(states, (3.0, 4.0), strict=True):
        set_step(state, value)
    assert [float(s["step"]) for s in states] == [3.0, 4.0]
    assert float(shared) == 7.0


def test_other_optimizers_and_third_moments_are_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedState, match="set the optimizer to adam"):
        ensure_adam_state(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(UnsupportedState, match="amsgrad=False"):
        ensure_adam_state(torch.optim.AdamW([p], amsgrad=True))


def test_parking_frees_memory_and_fetching_brings_every_view_back() -> None:
    flat = torch.arange(24.0)
    view = flat[6:18].view(3, 4)
    parameter = torch.nn.Parameter(flat[18:])
    other = torch.arange(5)
    unit = DescribedUnit(
        [
            LocalShard("weight/a", Box((0, 0), (3, 4)), (3, 4), view),
            LocalShard("weight/b", Box((0,), (6,)), (6,), parameter.detach()),
            LocalShard("buffer/c", Box((0,), (5,)), (5,), other),
        ]
    )
    before = [flat.clone(), other.clone()]
    parked = park(unit.storages())
    assert parked.nbytes == 24 * 4 + 5 * 8
    assert [s.nbytes() for s in unit.storages()] == [0, 0]
    assert torch.equal(parked.view_of(view), before[0][6:18].view(3, 4))
    assert parked.holds(other)
    parked.fetch()
    assert torch.equal(flat, before[0])
    assert torch.equal(view, before[0][6:18].view(3, 4))
    assert torch.equal(parameter.detach(), before[0][18:])
    assert torch.equal(other, before[1])
    parked.fetch()  # nothing left to do
    assert not parked.holds(other)
    with pytest.raises(ValueError, match="no parked storage"):
        parked.view_of(other)


def test_dropping_what_is_parked_leaves_the_memory_free() -> None:
    data = torch.ones(4)
    parked = park([data.untyped_storage()])
    parked.drop()
    assert parked.nbytes == 0
    assert data.untyped_storage().nbytes() == 0
