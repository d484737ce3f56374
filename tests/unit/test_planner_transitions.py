"""Plans that leave another: what the adapter allows, what is coupled, what the transition takes."""

import dataclasses

import pytest

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.estimate import estimate
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.gtg.estimate import StepCosts
from nereus_plugins.gtg.graph import Step
from nereus_plugins.gtg.planned import planned_units, transition_seconds
from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.planner import plan
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    WorkloadSpec,
)

S = ModelStage
WORK = WorkloadSpec(
    64, LengthDistribution.fixed(512), LengthDistribution.lognormal(800, 0.5, max_tokens=2048), 4
)
FIELDS = frozenset({"tp", "pp", "dp", "sequence_parallel"})
JOB = JobSpec(
    read_model("qwen2.5-7b"),
    algorithm="ppo",
    critic=read_model("qwen2.5-7b", value_head=True),
    backend="megatron",
)
CLUSTER = cluster_of("h100", 16)
TRAINED = (S.ACTOR_TRAIN, S.CRITIC_VALUES, S.CRITIC_TRAIN, S.REF_LOGPROB)
# As of a Megatron job whose models share one parallel state.
VERL_MEGATRON = Capabilities(
    framework="verl",
    framework_version="0",
    stages={stage: StageCapability(FIELDS) for stage in TRAINED},
    coupled=(frozenset(TRAINED),),
    devices_fixed=True,
    refused=(),
)


def in_force() -> GlobalPlan:
    layout = Layout(tp=4, pp=4, dp=1, sequence_parallel=True, sharding="zero1")
    knobs = Knobs(token_budget_tokens=7000, recompute="full", offload_params=True,
                  offload_optimizer=True)  # fmt: skip
    frozen = Knobs(token_budget_tokens=7000, offload_params=True)
    assignments = {stage: Assignment(layout, knobs) for stage in TRAINED}
    assignments[S.REF_LOGPROB] = Assignment(layout, frozen)
    assignments[S.ACTOR_GENERATE] = Assignment(
        Layout(tp=4, dp=4), Knobs(rollout_memory_fraction=0.5)
    )
    return GlobalPlan(assignments, name="in force")


def test_coupled_stages_share_a_layout_and_knobs_that_cannot_change_stay() -> None:
    current = in_force()
    found = plan(JOB, CLUSTER, WORK, capabilities=VERL_MEGATRON, current=current)
    now = found.plan.assignments
    assert len({now[stage].layout for stage in TRAINED}) == 1
    assert now[S.ACTOR_TRAIN].layout != current.assignments[S.ACTOR_TRAIN].layout
    for stage, before in current.assignments.items():
        assert now[stage].knobs == before.knobs
        assert now[stage].devices == before.devices
    assert now[S.ACTOR_GENERATE] == current.assignments[S.ACTOR_GENERATE]
    before_s = estimate(JOB, current, CLUSTER, WORK).iteration_s
    assert found.estimate.iteration_s < before_s


def test_the_coupled_choice_is_the_best_of_all_shared_layouts() -> None:
    """Against estimating every layout that all four stages could share."""
    current = in_force()
    found = plan(
        JOB, CLUSTER, WORK, capabilities=VERL_MEGATRON, current=current, horizon_steps=10**9
    )
    best = float("inf")
    for tp in (1, 2, 4):
        for pp in (1, 2, 4, 7, 14):
            if 16 % (tp * pp):
                continue
            layout = Layout(
                tp=tp, pp=pp, dp=16 // (tp * pp), sequence_parallel=tp > 1, sharding="zero1"
            )
            assignments = {
                stage: dataclasses.replace(a, layout=layout) if stage in TRAINED else a
                for stage, a in current.assignments.items()
            }
            result = estimate(JOB, GlobalPlan(assignments), CLUSTER, WORK)
            if result.fits:
                best = min(best, result.iteration_s)
    assert found.estimate.iteration_s == pytest.approx(best)


def test_without_coupling_stages_may_differ() -> None:
    free = dataclasses.replace(VERL_MEGATRON, coupled=())
    found = plan(JOB, CLUSTER, WORK, capabilities=free, current=in_force())
    together = plan(JOB, CLUSTER, WORK, capabilities=VERL_MEGATRON, current=in_force())
    assert found.estimate.iteration_s <= together.estimate.iteration_s


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        ("megatron", Layout(tp=2, dp=4, sharding="zero1"), Layout(dp=8, sharding="zero1")),
        ("fsdp", Layout(dp=8, sharding="hsdp", shard_size=4), Layout(dp=8, sharding="fsdp")),
        ("deepspeed", Layout(dp=8, sharding="zero2"), Layout(dp=8, sharding="zero3")),
        ("deepspeed", Layout(tp=2, dp=4, sharding="zero1"), Layout(dp=8, sharding="zero3")),
    ],
)
def test_transition_seconds_come_from_the_graph(
    backend: str, before: Layout, after: Layout
) -> None:
    small = JobSpec(read_model("qwen2.5-0.5b"), backend=backend, reference=False)
    cluster = cluster_of("h100", 8)
    seconds = transition_seconds(small, cluster, StepCosts(constant_s={Step.BUILD: 7.0}))
    assert [unit.name for unit in planned_units(small)] == ["actor"]

    def with_layout(layout: Layout) -> GlobalPlan:
        return GlobalPlan({S.ACTOR_TRAIN: Assignment(layout)})

    old = with_layout(before)
    assert seconds(old, old) == 0.0
    assert seconds(old, with_layout(after)) > 7.0


def test_a_slow_transition_keeps_the_plan_in_force() -> None:
    """Every other plan gains less over the horizon than the transition's graph says it costs."""
    current = in_force()
    asked = []

    def forever(old: GlobalPlan, new: GlobalPlan) -> float:
        asked.append(new)
        same = all(new.assignments[s].layout == a.layout for s, a in old.assignments.items())
        return 0.0 if same else 1e9

    found = plan(
        JOB, CLUSTER, WORK, capabilities=VERL_MEGATRON, current=current, transition_s=forever
    )
    assert asked
    assert found.plan.assignments == current.assignments
