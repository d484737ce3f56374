"""State that is not a box: encoding, checks after loading, derived seeds; and joined reports."""

from __future__ import annotations

import pytest

from nereus_plugins.gtg.report import UnitReport, merge_unit_reports
from nereus_plugins.gtg.scalars import (
    ScalarError,
    check_loaded,
    coordinate,
    derived_seed,
    encode,
)
from nereus_plugins.spec import Layout


def test_encode_is_canonical_and_refuses_objects() -> None:
    assert encode({"b": 1, "a": [1.5, None]}) == encode({"a": [1.5, None], "b": 1})
    with pytest.raises(ScalarError, match="not JSON-able"):
        encode({"a": object()})


def test_what_a_target_loaded_is_compared_but_for_generators_and_what_it_lacks() -> None:
    want = {"steps": {"a": 3, "b": 3}, "groups": {"0": {"betas": [0.9, 0.95]}}, "rng": {"0,0,0": 1}}
    have = {"steps": {"a": 3}, "groups": {"0": {"betas": (0.9, 0.95)}}, "rng": {"0,0,0": 2}}
    assert check_loaded(want, have) == 2
    with pytest.raises(ScalarError, match=r"'steps\.a' is 4"):
        check_loaded(want, {"steps": {"a": 4}})


def test_coordinates_and_seeds() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    names = [coordinate(layout, rank) for rank in range(8)]
    assert names[:3] == ["0,0,0", "1,0,0", "0,0,1"]
    assert len(set(names)) == 8
    seeds = {derived_seed(seed, step, name) for seed in (1, 2) for step in (5, 6) for name in names}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_unit_reports_join_over_ranks() -> None:
    a = UnitReport("TP2", "TP1", bytes_sent=3, bytes_received=1, seconds={"move": 1.0})
    b = UnitReport("TP2", "TP1", bytes_sent=1, bytes_received=3, seconds={"move": 2.0, "park": 1.0})
    a.verified, b.verified = {"bytes": 1}, {"bytes": 3}
    pair = {"src": 0, "dst": 1, "predicted_bytes": 2, "described_bytes": 3}
    a.prediction, b.prediction = [pair], [dict(pair)]
    joined = merge_unit_reports([a.to_dict(), b.to_dict()])
    assert joined["bytes_wire"] == joined["bytes_sent"] == 4
    assert joined["seconds"] == {"move": 2.0, "park": 1.0}
    assert joined["verified"] == {"bytes": 4}
    assert joined["prediction"] == [pair]
