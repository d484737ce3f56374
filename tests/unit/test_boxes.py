"""Boxes and flat ranges: worked examples and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from nereus_plugins.emu.boxes import (
    Box,
    BoxError,
    flat_range_to_boxes,
    flat_ranges_to_boxes,
    intersect,
    subtract,
)


def test_a_flat_range_rises_and_falls() -> None:
    pieces = flat_range_to_boxes((4, 4, 5), 7, 63)
    assert [(str(p.box), p.lo, p.hi) for p in pieces] == [
        ("[0:1, 1:2, 2:5]", 7, 10),
        ("[0:1, 2:4, 0:5]", 10, 20),
        ("[1:3, 0:4, 0:5]", 20, 60),
        ("[3:4, 0:1, 0:3]", 60, 63),
    ]


def test_a_scalar_is_one_piece() -> None:
    assert flat_range_to_boxes((), 0, 1) == [(Box((), ()), 0, 1)]
    assert flat_range_to_boxes((), 0, 0) == []


def test_a_whole_tensor_is_one_piece() -> None:
    assert flat_range_to_boxes((3, 4), 0, 12) == [(Box.whole((3, 4)), 0, 12)]


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_of_its_tensor_is_refused(lo: int, hi: int) -> None:
    with pytest.raises(BoxError, match="not inside"):
        flat_range_to_boxes((2, 3), lo, hi)
    with pytest.raises(BoxError, match="not inside"):
        flat_ranges_to_boxes(np.array([[2, 3]]), np.array([lo]), np.array([hi]))


@pytest.mark.parametrize(
    ("offset", "shape"), [((0,), (1, 2)), ((-1, 0), (1, 1)), ((0, 0), (1, -1))]
)
def test_an_impossible_box_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(BoxError):
        Box(offset, shape)


def test_boxes_of_different_dims_do_not_intersect() -> None:
    with pytest.raises(BoxError, match="2 and 1 dims"):
        intersect(Box((0, 0), (1, 1)), Box((0,), (1,)))


def test_an_empty_box_meets_nothing() -> None:
    assert intersect(Box((1,), (0,)), Box((0,), (4,))) is None
    assert subtract(Box((1,), (0,)), Box((0,), (4,))) == []


def test_index_of_a_box_in_a_shard() -> None:
    shard = Box((2, 4), (3, 4))
    assert Box((3, 4), (2, 1)).slices_in(shard) == (slice(1, 3), slice(0, 1))
    with pytest.raises(BoxError, match="does not lie inside"):
        Box((1, 4), (2, 1)).slices_in(shard)


def test_a_shards_own_box_shifted_to_the_tensor() -> None:
    assert Box((0, 1), (2, 2)).shifted((4, 4)) == Box((4, 5), (2, 2))
