"""The simulated job: what costs what, what is hidden, what is recovered; the policies on it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_plugins.cli import main
from nereus_plugins.cost.calibration import Calibration
from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.estimate import estimate
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.gtg.planned import transition_seconds
from nereus_plugins.job import JobPort, Proposal, StaleProposal
from nereus_plugins.sim import run as running
from nereus_plugins.sim.constants import BASIS, KINDS, Constants
from nereus_plugins.sim.hindsight import hindsight_plan
from nereus_plugins.sim.job import Failure, SimulatedJob
from nereus_plugins.sim.planning import Known, Planning, with_longest
from nereus_plugins.sim.policies import DPScaling, Missed, Static, scaled
from nereus_plugins.sim.truth import NO_SURPRISE, Chance, StepTruth, Truth, TruthSpec
from nereus_plugins.sim.world import World
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
)
from nereus_plugins.trace.conditions import Setting, Trace
from nereus_plugins.trace.record import RunRecord, StepRecord, TransitionRecord, read_records
from nereus_plugins.trace.steps import read_run

S = ModelStage
SETTING = Setting(
    JobSpec(read_model("qwen2.5-1.5b"), algorithm="grpo", backend="megatron"),
    cluster_of("a100_40gb", 16),
    LengthDistribution.fixed(256),
    prompts_per_step=32,
    samples_per_prompt=8,
)
TAIL = ((0.0, 0.1), (0.5, 0.8), (0.9, 1.8), (1.0, 4.0))


def trace(
    gpus: tuple[tuple[float, int], ...] = ((0.0, 16),), steps: int = 50, **changed: Any
) -> Trace:
    means = tuple(400.0 + 20.0 * step for step in range(steps))
    made = Trace(
        name="test", sources=(), assumptions=(), setting=SETTING, mean_response_tokens=means,
        gpus=gpus, tail=TAIL, max_response_tokens=4096, seed=1,
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def known(one: Trace) -> Known:
    first = one.conditions(0, 0.0)
    return Known(one.setting, first.gpus, first.response_tokens, one.max_response_tokens)


def simple_plan(gpus: int, tp: int = 1) -> GlobalPlan:
    found = Planning(known(trace())).sized(gpus)
    assert found is not None
    layout = Layout(tp=tp, dp=gpus // tp, sequence_parallel=tp > 1, sharding="zero1")
    return GlobalPlan(
        {
            stage: dataclasses.replace(a, layout=layout, devices=tuple(range(gpus)))
            if stage is not S.ACTOR_GENERATE
            else Assignment(Layout(tp=1, dp=gpus), a.knobs)
            for stage, a in found.assignments.items()
        },
        name=f"TP{tp} on {gpus}",
    )


def test_without_surprise_a_step_takes_what_the_cost_model_says() -> None:
    world = World(trace(), truth=NO_SURPRISE)
    job = SimulatedJob(world, simple_plan(16))
    record = job.advance()
    assert isinstance(record, StepRecord)
    workload = SETTING.workload(world.trace.conditions(0, 0.0).response_tokens)
    said = estimate(SETTING.job, job.describe(), SETTING.cluster, workload)
    assert record.step_s == pytest.approx(said.iteration_s)
    assert record.stages_s["gen"] == pytest.approx(said.stages[S.ACTOR_GENERATE].seconds)
    train = record.stages_s["update_actor"] + record.stages_s["old_log_prob"]
    assert train == pytest.approx(said.stages[S.ACTOR_TRAIN].seconds)
    assert job.elapsed_s == record.step_s == job.records[-1].time_unix_s  # type: ignore[attr-defined]


def test_chance_on_top_of_the_truth_is_what_estimating_with_both_says() -> None:
    world = World(trace(), seed=4)
    plan = simple_plan(16)
    for step in range(5):
        workload = SETTING.workload(world.trace.conditions(step, 0.0).response_tokens)
        quick = world.step_estimate(plan, workload, step)
        both = StepTruth(world.truth, world.chance, step)
        whole = estimate(SETTING.job, plan, SETTING.cluster, workload, both)
        assert quick.iteration_s == pytest.approx(whole.iteration_s)
        for stage, one in whole.stages.items():
            same = quick.stages[stage]
            assert same.seconds == pytest.approx(one.seconds)
            assert same.reserved_bytes == pytest.approx(one.reserved_bytes)
            assert same.allocated_bytes == pytest.approx(one.allocated_bytes)
            assert same.starts_s == pytest.approx(one.starts_s)
            assert same.fits == one.fits


def test_the_job_port() -> None:
    job: JobPort = SimulatedJob(World(trace()), simple_plan(16))
    assert job.observe() is None
    assert {unit.name: unit.trainable for unit in job.units()} == {"actor": True, "ref": False}
    assert job.capabilities().stages.keys() == set(SETTING.job.stages())
    target = simple_plan(16, tp=2)
    with pytest.raises(StaleProposal):
        job.execute(Proposal(3, target))
    with pytest.raises(SpecError, match="16 GPUs are there"):
        job.execute(Proposal(0, GlobalPlan({S.ACTOR_TRAIN: Assignment(Layout(), devices=(16,))})))
    assert job.execute(Proposal(0, target)).outcome == "committed"
    assert (job.epoch(), job.describe()) == (1, target)


def test_a_transition_costs_what_its_graph_says_and_engines() -> None:
    free = Constants(
        groups_s=0.0, groups_rank_s=0.0, build_s=0.0, describe_s=0.0, vote_s=0.0, engine_start_s=7.0
    )
    world = World(trace(), constants=free, truth=NO_SURPRISE)
    job = SimulatedJob(world, simple_plan(16))
    target = simple_plan(16, tp=2)
    record = job.execute(Proposal(0, target))
    graph_s = transition_seconds(
        SETTING.job, SETTING.cluster, free.step_costs(SETTING.cluster, 16)
    )(simple_plan(16), target)
    assert graph_s > 0
    assert sum(record.seconds.values()) == pytest.approx(graph_s) == pytest.approx(job.elapsed_s)
    assert record.units["actor"]["bytes_wire"] > 0
    assert 0 < record.units["actor"]["seconds"]["move"] <= record.seconds["move"]
    assert len(record.digest) == 64
    cost = world.transitions.cost(simple_plan(16), target)
    assert 0 < cost.bound_s <= cost.stall_s
    other = GlobalPlan(
        {**target.assignments,
         S.ACTOR_GENERATE: dataclasses.replace(target.assignments[S.ACTOR_GENERATE],
                                               layout=Layout(tp=2, dp=8))}
    )  # fmt: skip
    record = job.execute(Proposal(1, other))
    assert record.seconds == {"rollout": 7.0}


def test_constants_add_to_a_transition_and_have_a_source() -> None:
    job = SimulatedJob(World(trace(), constants=Constants(build_s=5.0)), simple_plan(16))
    record = job.execute(Proposal(0, simple_plan(16, tp=2)))
    assert record.seconds["build"] >= 2 * 5.0  # actor and reference, one after the other
    assert record.seconds["form_groups"] > 16 * 0.0025
    names = {f.name for f in dataclasses.fields(Constants)}
    assert BASIS.keys() == names
    assert all(basis.kind in KINDS and basis.source for basis in BASIS.values())


def test_more_ranks_join_and_leave() -> None:
    job = SimulatedJob(World(trace(((0.0, 16),))), simple_plan(8))
    record = job.execute(Proposal(0, simple_plan(16)))
    assert (record.ranks["from"], record.ranks["to"], len(record.ranks["joined"])) == (8, 16, 8)
    record = job.execute(Proposal(1, simple_plan(8)))
    assert len(record.ranks["left"]) == 8


def test_the_truth_stays_and_differs_by_stage_layout_and_seed() -> None:
    one = Assignment(Layout(tp=2, dp=2))
    other = Assignment(Layout(tp=4))

    def factor(seed: int, stage: ModelStage, assignment: Assignment) -> float:
        return Truth(dataclasses.replace(TruthSpec(), fixed_s=0.0), seed).seconds(
            stage, assignment, 100.0
        )

    assert factor(1, S.ACTOR_TRAIN, one) == factor(1, S.ACTOR_TRAIN, one)
    values = {
        factor(1, S.ACTOR_TRAIN, one), factor(1, S.ACTOR_TRAIN, other),
        factor(1, S.REF_LOGPROB, one), factor(2, S.ACTOR_TRAIN, one), 100.0,
    }  # fmt: skip
    assert len(values) == 5
    many = [factor(seed, S.ACTOR_TRAIN, one) / 100.0 for seed in range(300)]
    assert np.std(np.log(many)) == pytest.approx(np.hypot(0.15, 0.04), rel=0.15)


def test_chance_is_the_steps_not_the_policys() -> None:
    spec = TruthSpec(slow_rank_starts=0.05, stall=0.01)
    a, b = Chance(spec, 3, 500, 64), Chance(spec, 3, 500, 64)
    assert (a.seconds == b.seconds).all()
    assert (a.seconds != Chance(spec, 4, 500, 64).seconds).any()
    assert 0.05 < (a.slow > 1.0).mean() < 0.8
    assert a.slow.max() > 2.0
    plain = Chance(NO_SURPRISE, 3, 500, 64)
    assert (plain.seconds == 1.0).all()
    assert (plain.bytes == 1.0).all()


def test_what_is_hidden_can_be_learned_from_the_records() -> None:
    """The simulator's records teach the calibration, whose predictions then hold."""
    world = World(trace(steps=60), seed=5, truth=TruthSpec(slow_rank_starts=0.0, stall=0.0))
    job = SimulatedJob(world, simple_plan(16))
    learned = Calibration()
    stage = S.ACTOR_TRAIN
    errors: list[tuple[float, float]] = []
    for step in range(60):
        record = job.advance()
        assert isinstance(record, StepRecord)
        workload = SETTING.workload(world.trace.conditions(step, 0.0).response_tokens)
        said = estimate(SETTING.job, job.describe(), SETTING.cluster, workload).stages
        predicted = {s: e.seconds for s, e in said.items()}
        measured = record.stages_s["update_actor"] + record.stages_s["old_log_prob"]
        expected = learned.seconds(stage, job.describe().assignments[stage], predicted[stage])
        errors.append((abs(predicted[stage] / measured - 1), abs(expected / measured - 1)))
        learned.observe(job.describe().assignments, predicted, {stage: measured})
    alone, calibrated = np.median(np.array(errors[20:]), axis=0)
    assert alone > 0.08
    assert calibrated < 0.04


class Blind(Static):
    """Does not look at the GPUs."""

    def decide(self, job: SimulatedJob) -> None:
        return None


def _run(world: World, policy: Any, monkeypatch: pytest.MonkeyPatch) -> running.Result:
    monkeypatch.setattr(running, "POLICIES", {"one": lambda _: policy})
    return running.run(world, "one")


def test_gpus_that_are_gone_cost_a_restart_from_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(trace(((0.0, 16), (30.0, 8))), constants=Constants(checkpoint_every_steps=20))
    monkeypatch.setattr(running, "POLICIES", {"blind": lambda _: Blind("blind")})
    result = running.run(world, "blind", tmp_path)
    assert (result.failures, result.oom, result.stopped) == (1, 0, "")
    records = list(read_records(tmp_path))
    failed = [r for r in records if isinstance(r, TransitionRecord)]
    assert [r.outcome for r in failed] == ["failed"]
    assert failed[0].seconds["relaunch"] == world.constants.relaunch_s
    steps = [r.step for r in records if isinstance(r, StepRecord)]
    assert steps == [*range(1, 31), *range(21, 51)]
    assert len([r for r in records if isinstance(r, RunRecord)]) == 2
    assert result.steps == 60
    # Steps that were run twice made their tokens once.
    tokens = {r.step: r.tokens["total"] for r in records if isinstance(r, StepRecord)}
    gpu_s = result.gpu_hours * 3600
    assert result.tokens_per_s_per_gpu == pytest.approx(sum(tokens.values()) / gpu_s)
    # It told the GPUs to a job that looked: no step is lost.
    looked = _run(world, Static(), monkeypatch)
    assert (looked.failures, looked.restarts, looked.steps) == (0, 1, 50)
    assert looked.run_s < result.run_s


def test_out_of_memory_costs_and_is_recovered_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose memory the cost model is wrong about by more than any plan's margin."""
    wrong = dataclasses.replace(NO_SURPRISE, memory_stage_spread=0.1)
    seed = next(
        s for s in range(1000)
        if Truth(wrong, s).bytes(S.ACTOR_TRAIN, Assignment(Layout()), 1.0) > 1.2
    )  # fmt: skip
    small = dataclasses.replace(
        SETTING, cluster=dataclasses.replace(
            SETTING.cluster, gpu=dataclasses.replace(SETTING.cluster.gpu, memory_bytes=15 * 2**30)
        )
    )  # fmt: skip
    tight = trace(setting=small)
    world = World(tight, seed=seed, truth=wrong)
    for policy in (Static(), DPScaling()):
        result = _run(world, policy, monkeypatch)
        assert result.stopped == ""
        assert result.oom >= 1
        assert {r for r in range(1, 51)} <= set(range(1, result.steps + 1))
        right = _run(World(tight, seed=seed, truth=NO_SURPRISE), policy, monkeypatch)
        assert right.oom == 0
        assert result.run_s > right.run_s + result.oom * world.constants.relaunch_s


def test_after_a_lack_of_memory_the_lengths_met_are_planned_for() -> None:
    """Of a job whose responses have become longer than they were at first."""
    world = World(trace(), truth=NO_SURPRISE)
    policy = Static()
    job = SimulatedJob(world, policy.start(known(world.trace)))
    while job.step < 25:
        assert isinstance(job.advance(), StepRecord)
    policy.recover(job, Failure(25, "the node is gone", "gpus", 0.0))
    assert (policy.memory, policy.mean_tokens) == (1.0, None)

    policy.recover(job, Failure(25, "out of memory", "memory", 0.0))
    last = job.observe()
    assert last is not None
    assert policy.memory < 1.0
    assert policy.mean_tokens == pytest.approx(1.1 * last.metrics["response_length/mean"])
    met = policy.planning.sized_lengths(mean_tokens=policy.mean_tokens)
    at_first = policy.planning.sized_lengths()
    assert met.mean_tokens() > 1.5 * at_first.mean_tokens()
    assert met.quantile(0.9999) == at_first.quantile(0.9999) == 4096


def test_a_plan_that_never_fits_stops_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(Blind):
        def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
            return job.describe()

    world = World(trace(), truth=dataclasses.replace(NO_SURPRISE, memory_stage_spread=9.0), seed=2)
    big = max(range(40), key=lambda s: Truth(world.truth.spec, s).bytes(
        S.ACTOR_TRAIN, Assignment(Layout()), 1.0))  # fmt: skip
    result = _run(World(trace(), truth=world.truth.spec, seed=big), Stubborn(), monkeypatch)
    assert "out of memory in" in result.stopped
    assert result.oom == running.MOST_FAILURES


def test_static_is_sized_for_the_longest_response() -> None:
    one = trace()
    planning = Planning(known(one))
    lengths = planning.sized_lengths()
    assert lengths.quantile(1.0 - 0.5 / 256) == 4096
    assert lengths.mean_tokens() == pytest.approx(known(one).response_tokens.mean_tokens(), rel=0.1)
    plan = Static().start(known(one))
    longest = SETTING.workload(lengths)
    assert estimate(SETTING.job, plan, SETTING.cluster, longest).fits
    # Where the longest fits on no plan, one is sized for as long ones as do.
    huge = Planning(known(one)._replace(max_response_tokens=1_000_000))
    assert huge.best(16, huge.sized_lengths()) is None
    most = huge.sized(16)
    assert most is not None
    assert estimate(SETTING.job, most, SETTING.cluster, SETTING.workload(lengths)).fits
    fixed = with_longest(LengthDistribution.lognormal(300, 0.5), 2000, 0.01)
    assert fixed.quantile(0.9999) == 2000


def test_dp_scaling_keeps_tp_and_pp() -> None:
    one = trace(((0.0, 16), (10.0, 8), (20.0, 16)))
    planning = Planning(known(one))
    own = planning.sized(16)
    assert own is not None
    less = scaled(own, 8, planning)
    assert less is not None
    for stage, before in own.assignments.items():
        after = less.assignments[stage].layout
        assert (after.tp, after.pp, after.cp) == (
            before.layout.tp, before.layout.pp, before.layout.cp,
        )  # fmt: skip
        assert after.world_size <= 8
    assert scaled(own, 16, planning) == dataclasses.replace(own, name="dp for 16")
    result = running.run(World(one), "dp_scaling")
    assert (result.transitions, result.restarts, result.failures) == (2, 0, 0)


def test_hindsight_is_never_worse_than_static() -> None:
    one = trace(((0.0, 16), (12.0, 8), (20.0, 16)), steps=40)
    world = World(one, seed=2)
    found = {name: running.run(world, name) for name in ("static", "static_hindsight")}
    assert found["static_hindsight"].stopped == ""
    assert found["static_hindsight"].run_s <= found["static"].run_s


def test_going_back_to_more_gpus_waits_until_it_pays() -> None:
    """Eight GPUs come back at step 5: a restart of 10 s pays at once, one of an hour never."""
    one = trace(((0.0, 16), (3.0, 8), (5.0, 16)), steps=40)
    restarts, steps_in_own = {}, {}
    for relaunch_s in (10.0, 3600.0):
        world = World(
            one,
            truth=NO_SURPRISE,
            constants=Constants(relaunch_s=relaunch_s, storage_node_bytes_per_s=1e13),
        )
        policy = Static()
        job = SimulatedJob(world, policy.start(known(one)))
        while job.step < one.steps:
            if (decision := policy.decide(job)) is not None:
                assert decision.restart
                job.restart(decision.plan)
            assert isinstance(job.advance(), StepRecord)
        moves = [r for r in job.records if isinstance(r, TransitionRecord)]
        restarts[relaunch_s] = len(moves)
        sizes = [r.metrics["nereus/world_size"] for r in job.records if isinstance(r, StepRecord)]
        steps_in_own[relaunch_s] = sizes.count(16)
    assert restarts == {10.0: 2, 3600.0: 1}
    assert 20 < steps_in_own[10.0] < 38
    assert steps_in_own[3600.0] == 3


def test_a_plan_for_hindsight_is_the_quickest_of_those_that_end() -> None:
    one = trace(steps=20)
    planning = Planning(known(one))
    world = World(one, truth=NO_SURPRISE)
    seen: list[GlobalPlan] = []

    def run_s(plan: GlobalPlan) -> float:
        seen.append(plan)
        return float("inf") if len(seen) == 1 else 100.0 - len(seen)

    assert hindsight_plan(world, planning, run_s) == seen[-1]
    assert len(seen) >= 2
    with pytest.raises(SpecError, match="no single plan"):
        hindsight_plan(world, planning, lambda plan: float("inf"))


def test_by_wall_clock_a_slower_job_meets_gpus_at_an_earlier_step() -> None:
    at_s = 300.0
    clock = trace(((0.0, 16), (at_s, 8)), indexed_by="wall_clock")

    def first_with_less(world: World) -> int:
        job = SimulatedJob(world, simple_plan(8))
        while job.available() == 16:
            assert isinstance(job.advance(), StepRecord)
        assert job.elapsed_s >= at_s
        return job.step

    quick = first_with_less(World(clock, truth=NO_SURPRISE))
    slow = first_with_less(World(clock, truth=dataclasses.replace(NO_SURPRISE, fixed_s=20.0)))
    assert 0 < slow < quick


def test_runs_repeat_exactly_and_records_are_those_of_a_live_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    trace(((0.0, 16), (20.0, 8)), steps=30).save(path)
    args = ["sim", str(path), "--policies", "static,dp_scaling", "--json"]
    assert main([*args, "--records", str(tmp_path / "a")]) == 0
    first = capsys.readouterr().out
    assert main(args) == 0
    assert capsys.readouterr().out == first
    data = json.loads(first)
    assert data["simulated"] is True
    wanted = {"step_s_mean", "step_s_p99", "tokens_per_s_per_gpu", "transitions",
              "transition_share", "oom", "run_s"}  # fmt: skip
    assert all(wanted <= set(figures) for figures in data["policies"].values())
    assert main(["sim", str(path), "--policies", "static", "--seed", "9", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["policies"]["static"]["run_s"] != data["policies"]["static"]["run_s"]
    run = tmp_path / "a" / "dp_scaling"
    assert main(["records", str(run)]) == 0
    said = capsys.readouterr().out
    assert "simulator on 16 ranks" in said
    assert "ranks: 16 -> 8, 0 joined, 8 left" in said
    assert len(list(read_run(run))) == 30
    replay = tmp_path / "replay.json"
    assert (
        main(["trace", "build", "--records", str(run), "--gpus-max", "16", "-o", str(replay)]) == 0
    )
    assert json.loads(replay.read_text())["gpus"] == [[0.0, 16], [20.0, 8]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "no trace 'nothing'"),
        (["churn", "--policies", "static,x"], "no policy 'x'"),
        (["churn", "--policies", ","], "no policy"),
        (["churn", "--seed", "-1"], "--seed"),
        (["churn", "--truth", "{bad}"], "unknown key 'noises'; did you mean 'noise'"),
        (["churn", "--constants", "{bad}"], "unknown key 'noises'"),
        (["churn", "--truth", "{many}"], "many.yaml: TruthSpec.noise must be a number at least 0"),
        (["churn", "--truth", "{bytes}"], "bytes.yaml: not text"),
        (["churn", "--records", "{bad}"], "bad.yaml is no directory that can be written to"),
        (["churn", "--records", "{dir}"], "static has records already: remove them, or give an"),
        (
            ["churn", "--policies", "nereus", "--records", "{dir}"],
            "nereus has records already: remove them, or give an",
        ),
    ],
)
def test_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("noises: 3\n")
    (tmp_path / "many.yaml").write_text("noise: 1000.0\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "records.jsonl").write_text("")
    (tmp_path / "nereus").mkdir()
    (tmp_path / "nereus" / "decisions.jsonl").write_text("")
    places = {f"{p.stem}": p for p in tmp_path.iterdir()} | {"dir": tmp_path}
    assert main(["sim", *(a.format(**places) for a in args)]) == 2
    assert message in capsys.readouterr().err


def test_a_deepspeed_job_restarts_and_has_transitions() -> None:
    other = dataclasses.replace(SETTING, job=dataclasses.replace(SETTING.job, backend="deepspeed"))
    world = World(trace(((0.0, 16), (20.0, 8)), steps=30, setting=other))
    result = running.through(world, Static(planning=world.planning()))
    assert (result.stopped, result.restarts) == ("", 1)
    plans = [world.planning().sized(gpus) for gpus in (16, 8)]
    assert plans[0] is not None
    assert plans[1] is not None
    # Weights, masters and moments once over all ranks, or whole weights on every node (ZeRO-2).
    parameters = SETTING.job.actor.num_parameters()
    assert 14 * parameters / 2 <= world.transitions.state_bytes_on_node(plans[0])
    assert world.transitions.state_bytes_on_node(plans[0]) <= 14 * parameters
    cost = world.transitions.cost(plans[0], plans[1])
    assert set(cost.units) == {unit.name for unit in world.transitions.units}
    assert cost.seconds["move"] > 0


def test_what_was_missed_counts_the_lengths_of_now() -> None:
    """A plan that is slower at the first lengths and quicker at those of now is worth going to."""
    one = trace(steps=40)
    planning = Planning(known(one))
    now = planning.lengths_of(1180.0)
    assert now.mean_tokens() == pytest.approx(1180.0, rel=0.06)
    assert planning.lengths_of(400.0).mean_tokens() == pytest.approx(400.0, rel=0.06)
    target, plan = simple_plan(16), simple_plan(8)
    world = World(one, truth=NO_SURPRISE)
    job = SimulatedJob(world, plan)
    missed = Missed()
    while job.step < 40:
        assert isinstance(job.advance(), StepRecord)
    assert not missed.pays(job, target, planning, 1e9)
    last = job.observe()
    assert last is not None
    ratio = planning.iteration_s(target, now) / planning.iteration_s(plan, now)
    assert missed.seconds == pytest.approx(last.step_s * (1 - ratio), rel=0.02)
    assert missed.pays(job, target, planning, 0.5 * missed.seconds)
    assert missed.seconds == 0.0
