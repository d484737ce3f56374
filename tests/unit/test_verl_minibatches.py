"""Mini-batches hold the same samples whatever the number of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from nereus_verl.minibatches import compose, members, order


def in_turn(positions: Sequence[int], parts: int) -> list[list[int]]:
    return [list(positions[part::parts]) for part in range(parts)]


@pytest.mark.parametrize(("rows", "mini"), [(32, 8), (24, 8), (16, 16), (64, 16)])
@pytest.mark.parametrize("old_dp", [1, 2, 4, 8])
@pytest.mark.parametrize("new_dp", [1, 2, 4, 8])
def test_every_step_sees_the_same_samples(rows: int, mini: int, old_dp: int, new_dp: int) -> None:
    samples = [f"sample {i}" for i in range(rows)]
    moved = [samples[i] for i in order(rows, mini, old_dp, new_dp, in_turn)]
    before = [{samples[i] for i in step} for step in members(rows, mini, old_dp)]
    after = [{moved[i] for i in step} for step in members(rows, mini, new_dp)]
    assert before == after
    assert sorted(moved) == sorted(samples)


def test_one_order_from_another() -> None:
    first, second = order(32, 8, 4, 2, in_turn), order(32, 16, 4, 1, in_turn)
    step = compose(first, second)
    assert [first[i] for i in step] == second
    back = compose(second, first)
    assert [step[i] for i in back] == list(range(32))
