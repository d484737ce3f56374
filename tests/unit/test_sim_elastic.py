"""Policies that change while a job runs, notice of GPUs that leave, and the oracle."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_plugins.cli import main
from nereus_plugins.job import Lease, Proposal
from nereus_plugins.sim import oracle as clairvoyant
from nereus_plugins.sim import run as running
from nereus_plugins.sim.constants import Constants
from nereus_plugins.sim.elastic import Threshold, VerlDynamic
from nereus_plugins.sim.job import SimulatedJob
from nereus_plugins.sim.nereus import RestartElastic
from nereus_plugins.sim.policies import Elsewhere, Static
from nereus_plugins.sim.truth import NO_SURPRISE
from nereus_plugins.sim.world import World
from nereus_plugins.spec import ModelStage, SpecError
from nereus_plugins.trace.conditions import Trace
from nereus_plugins.trace.record import StepRecord, TransitionRecord

from .test_sim import SETTING, TAIL

S = ModelStage
CHANGING = ((0.0, 16), (8.0, 8), (14.0, 16), (26.0, 4), (30.0, 16))


def trace(gpus: tuple[tuple[float, int], ...] = CHANGING, steps: int = 40, **changed: Any) -> Trace:
    made = Trace(
        name="test", sources=(), assumptions=(), setting=SETTING,
        mean_response_tokens=tuple(400.0 + 30.0 * step for step in range(steps)),
        gpus=gpus, tail=TAIL, max_response_tokens=8192, seed=1,
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def job_of(world: World, policy: Any) -> SimulatedJob:
    """The job run to its end under the policy."""
    job = SimulatedJob(world, policy.start(world.known))
    while job.step < world.trace.steps:
        decision = policy.decide(job)
        if decision is not None and decision.restart:
            job.restart(decision.plan)
        elif decision is not None:
            assert job.execute(Proposal(job.epoch(), decision.plan)).outcome == "committed"
        assert isinstance(job.advance(), StepRecord)
    return job


def test_every_policy_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert running.SUMMARIES.keys() == running.POLICIES.keys()
    with pytest.raises(SystemExit):
        main(["sim", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in running.POLICIES)


def test_elastic_policies_take_the_same_plans_and_pay_differently() -> None:
    world = World(trace(), truth=NO_SURPRISE)
    restarts = job_of(world, RestartElastic(world))
    moves = [r for r in restarts.records if isinstance(r, TransitionRecord)]
    assert moves
    assert all("relaunch" in r.seconds for r in moves)
    sizes = {r.metrics["nereus/world_size"] for r in restarts.records if isinstance(r, StepRecord)}
    assert {4, 8, 16} == sizes
    quick = job_of(world, Threshold(world.planning()))
    assert all(
        "relaunch" not in r.seconds for r in quick.records if isinstance(r, TransitionRecord)
    )
    assert quick.elapsed_s < restarts.elapsed_s
    # Cheap restarts are taken at once when more GPUs come, dear ones never.
    dear = World(trace(), truth=NO_SURPRISE, constants=Constants(relaunch_s=3600.0))
    least = job_of(dear, RestartElastic(dear))
    assert least.describe().devices[-1] == 3
    cheap = World(trace(), truth=NO_SURPRISE, constants=Constants(relaunch_s=0.0))
    assert job_of(cheap, RestartElastic(cheap)).describe().devices[-1] == 15


def test_elastic_plans_leave_before_memory_runs_out() -> None:
    """Responses grow to 10 times what the first plan was made for."""
    means = tuple(200.0 * 1.08**step for step in range(30))
    tight = dataclasses.replace(
        SETTING, cluster=dataclasses.replace(
            SETTING.cluster, gpu=dataclasses.replace(SETTING.cluster.gpu, memory_bytes=20 * 2**30)
        )
    )  # fmt: skip
    grows = trace(((0.0, 8),), mean_response_tokens=means, setting=tight, max_response_tokens=16384)
    world = World(grows, truth=NO_SURPRISE)
    first = world.planning().best(8, grows.response_tokens(means[0] * 1.15))
    assert first is not None
    assert not world.true_estimate(first, tight.workload(grows.response_tokens(means[-1]))).fits
    for policy in (RestartElastic(world), Threshold(world.planning())):
        assert job_of(world, policy).describe() != first


def test_a_threshold_waits_for_more_gpus_to_stay_and_is_quiet_where_nothing_changes() -> None:
    still = trace(((0.0, 16),), mean_response_tokens=(800.0,) * 60)
    world = World(still, seed=3)
    job = job_of(world, Threshold(world.planning()))
    assert not [r for r in job.records if isinstance(r, TransitionRecord)]
    come = trace(((0.0, 8), (20.0, 16)), mean_response_tokens=(800.0,) * 40)
    world = World(come, truth=NO_SURPRISE)
    job = job_of(world, Threshold(world.planning()))
    moves = [r for r in job.records if isinstance(r, TransitionRecord)]
    assert [r.step for r in moves] == [20 + Threshold.STEADY - 1]


def test_engines_join_and_leave_without_the_trained_state() -> None:
    world = World(trace(((0.0, 4), (5.0, 16), (30.0, 8)), setting=SETTING), truth=NO_SURPRISE)
    fixed = Static("fixed", planning=world.planning())
    job = job_of(world, VerlDynamic(fixed))
    moves = [r for r in job.records if isinstance(r, TransitionRecord)]
    assert [(r.ranks["from"], r.ranks["to"]) for r in moves] == [(4, 16), (16, 8)]
    assert [set(r.seconds) for r in moves] == [{"rollout"}, set()]
    assert all(not r.units for r in moves)
    plan = job.describe()
    assert plan.assignments[S.ACTOR_TRAIN] == fixed.own.assignments[S.ACTOR_TRAIN]
    held = job_of(world, Static("fixed", fixed.own, world.planning()))
    assert job.elapsed_s < held.elapsed_s


def test_verl_dynamic_is_verl_tuned_with_more_engines() -> None:
    world = World(trace(((0.0, 8), (5.0, 16)), steps=16))
    tuned, dynamic = (running.run(world, name) for name in ("verl_tuned", "verl_dynamic"))
    assert dynamic.run_s <= tuned.run_s
    assert dynamic.stopped == ""
    made = running.POLICIES["verl_dynamic"](world)
    assert isinstance(made, Elsewhere)
    assert made.world.setting.job.backend in ("fsdp", "megatron")


def test_notice_is_given_as_long_before_as_the_constants_say() -> None:
    def told(notice: int) -> list[tuple[Lease, ...]]:
        world = World(trace(), constants=Constants(notice_steps=notice), truth=NO_SURPRISE)
        small = world.planning().sized(4)
        assert small is not None
        job = SimulatedJob(world, small)
        out = []
        for _ in range(10):
            out.append(job.leases())
            assert isinstance(job.advance(), StepRecord)
        return out

    assert all(one.until_s is None for leases in told(1) for one in leases)
    longer = told(3)
    gpus = [[one.gpus for one in leases] for leases in longer]
    assert gpus[5:9] == [[16], [8, 8], [8, 8], [8]]
    first, second = longer[6][1].until_s, longer[7][1].until_s
    assert first is not None
    assert second is not None
    assert first > second > 0
    assert longer[5][0].until_s is None


def test_the_oracle_is_never_worse_than_a_policy_and_never_better_than_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("static", "dp_scaling", "restart_elastic", "threshold", "oracle")
    monkeypatch.setattr(running, "POLICIES", {name: running.POLICIES[name] for name in names})
    world = World(trace(steps=36), seed=2)
    best = running.run(world, "oracle")
    # What the others run in are its candidates, whether they were asked for or not.
    assert set(names) <= world.memo["ran"]
    assert (best.stopped, best.failures, best.steps) == ("", 0, 36)
    for name in names[:-1]:
        other = running.run(world, name)
        assert best.run_s <= other.run_s * (1.0 + clairvoyant.TOLERANCE), name
    assert best.about["free_s"] <= best.run_s
    assert best.about["candidates"] >= 5
    assert best.about["exact_to"] <= clairvoyant.TOLERANCE


def test_the_oracles_path_is_the_best_of_all_paths() -> None:
    """Against every sequence of three plans over six steps, run through the simulator."""
    world = World(trace(((0.0, 16), (2.0, 8), (4.0, 16)), steps=6), seed=5)
    plans = [p for g in (16, 8) if (p := world.hindsight().sized(g)) is not None]
    other = world.hindsight().best(8, world.trace.response_tokens(2000.0))
    assert other is not None
    plans.append(other)
    search = clairvoyant._Search(world, plans)
    path = search.best()
    costs = []
    for code in range(3**6):
        way = [code // 3**at % 3 for at in range(6)]
        if any(max(plans[at].devices) >= world.trace.conditions(step, 0.0).gpus
               for step, at in enumerate(way)):  # fmt: skip
            continue
        job = SimulatedJob(world, plans[way[0]])
        for at in way:
            if plans[at] != job.describe():
                if clairvoyant._change(world, job.describe(), plans[at])[1]:
                    job.restart(plans[at])
                else:
                    job.execute(Proposal(job.epoch(), plans[at]))
            if not isinstance(job.advance(), StepRecord):
                break
        else:
            costs.append(job.elapsed_s)
    assert search._path_s(path) == pytest.approx(min(costs))
    free = sum(
        min(
            world.step_estimate(p, SETTING.workload(world.trace.conditions(t, 0.0).response_tokens),
                                t).iteration_s
            for p in plans if max(p.devices) < world.trace.conditions(t, 0.0).gpus
        )
        for t in range(6)
    )  # fmt: skip
    assert clairvoyant._Search(world, plans).free_s() == pytest.approx(free)
    assert np.isinf(search.step_s[2, [max(p.devices) > 7 for p in plans]]).all()


def test_no_oracle_by_wall_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "clock.json"
    clock = trace(((0.0, 16),), steps=4, indexed_by="wall_clock")
    clock.save(path)
    assert main(["sim", str(path), "--policies", "oracle"]) == 2
    assert "leave the oracle out" in capsys.readouterr().err
    with pytest.raises(SpecError, match="wall clock"):
        running.run(World(clock), "oracle")


def test_a_policy_that_cannot_begin_does_not_end_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU, that FSDP fits and Megatron does not."""
    one = trace(
        ((0.0, 1),), steps=3, mean_response_tokens=(300.0,) * 3, max_response_tokens=1024
    )  # fmt: skip
    one.save(tmp_path / "one.json")
    args = ["sim", str(tmp_path / "one.json"), "--policies", "static,verl_static", "--json"]
    assert main(args) == 1
    found = json.loads(capsys.readouterr().out)["policies"]
    assert "no plan fits" in found["static"]["stopped"]
    assert found["verl_static"]["stopped"] == ""
    assert main([*args[:3], "static"]) == 2
