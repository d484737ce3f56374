"""Specs over random values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_plugins.spec import Layout, LengthDistribution, parse_schedule

small = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, ulysses = (draw(small) for _ in range(4))
    stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (ep * n) == 0]))
    pp = draw(small)
    sharding = draw(st.sampled_from(["none", "zero1", "zero2", "zero3", "fsdp", "hsdp"]))
    mesh = dp * ulysses
    sizes = [n for n in range(1, mesh + 1) if mesh % n == 0]
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=draw(small) if pp > 1 else 1,
        ulysses=ulysses,
        sequence_parallel=draw(st.booleans()) if tp > 1 else False,
        sharding=sharding,
        shard_size=draw(st.sampled_from(sizes)) if sharding == "hsdp" else None,
    )


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    coords = [layout.coord(rank) for rank in range(layout.world_size)]
    assert len(set(coords)) == layout.world_size
    assert [layout.rank_of(**c._asdict()) for c in coords] == list(range(layout.world_size))
    if layout.ulysses == 1:
        experts = [layout.expert_coord(rank) for rank in range(layout.world_size)]
        assert len(set(experts)) == layout.world_size
        assert [c.pp for c in experts] == [c.pp for c in coords]


@given(layouts())
def test_layouts_round_trip(layout: Layout) -> None:
    assert Layout.from_yaml(layout.to_yaml()) == layout
    assert Layout.from_json(layout.to_json()) == layout
    assert parse_schedule({"3": {"all": layout.to_dict()}}) == {3: {"all": layout}}


@st.composite
def lengths(draw: st.DrawFn) -> LengthDistribution:
    cap = draw(st.none() | st.integers(50, 5000))
    kind = draw(st.sampled_from(["fixed", "lognormal", "quantiles"]))
    if kind == "fixed":
        return LengthDistribution(kind, tokens=draw(st.integers(1, 4000)), max_tokens=cap)
    if kind == "lognormal":
        median, sigma = draw(st.floats(50, 2000)), draw(st.floats(0.05, 1.2))
        return LengthDistribution.lognormal(median, sigma, max_tokens=cap)
    inner = sorted(draw(st.sets(st.floats(0.01, 0.99), max_size=5)))
    tokens = sorted(draw(st.lists(st.floats(1, 4000), min_size=2, max_size=7)))
    probabilities = [0.0, *inner, 1.0]
    n = min(len(probabilities) - 1, len(tokens) - 1)
    points = [(p, t) for p, t in zip(probabilities[:n], tokens[:n], strict=True)]
    return LengthDistribution(kind, quantiles=(*points, (1.0, tokens[-1])), max_tokens=cap)


@settings(deadline=None)
@given(lengths(), st.integers(0, 2**32 - 1))
def test_samples_follow_the_distribution(dist: LengthDistribution, seed: int) -> None:
    sample = dist.sample(np.random.default_rng(seed), 20_000)
    assert sample.dtype == np.int64
    assert sample.min() >= 1
    if dist.max_tokens is not None:
        assert sample.max() <= dist.max_tokens
    spread = float(sample.std())
    # six standard errors, and what rounding to whole tokens moves
    assert abs(float(sample.mean()) - dist.mean_tokens()) <= 6 * spread / 20_000**0.5 + 0.51
    for p in (0.1, 0.5, 0.9):
        below = float((sample <= dist.quantile(p) + 0.51).mean())
        assert below >= p - 0.02


@settings(deadline=None)
@given(lengths())
def test_quantiles_do_not_fall(dist: LengthDistribution) -> None:
    values = [dist.quantile(p) for p in (0.05, 0.25, 0.5, 0.75, 0.95)]
    assert values == sorted(values)
    mean = dist.mean_tokens()
    assert mean == pytest.approx(
        np.mean([dist.quantile((i + 0.5) / 4000) for i in range(4000)]), rel=0.02
    )
