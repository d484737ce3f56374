"""The planner: exact joint choice, plans that fit, and reasons for what was not taken."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from nereus_plugins.cost.case import uneven_stages
from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.estimate import UnitCost, estimate
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.pools import Pools
from nereus_plugins.job import Capabilities, StageCapability
from nereus_plugins.planner import plan
from nereus_plugins.planner.candidates import Candidate, knob_choices, layouts, pareto
from nereus_plugins.planner.cli import limits_of, main
from nereus_plugins.planner.flags import launch_flags, openrlhf_flags
from nereus_plugins.planner.search import choose, usable_sizes
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
    WorkloadSpec,
)
from nereus_plugins.trace.conditions import load, shipped_folder

S = ModelStage
WORK = WorkloadSpec(
    128, LengthDistribution.fixed(512), LengthDistribution.lognormal(800, 0.5, max_tokens=2048), 4
)


def random_choices(rng: np.random.Generator) -> list[list[Candidate]]:
    units = int(rng.integers(1, 5))
    return [
        [
            Candidate(
                Layout(dp=int(rng.integers(1, 9))),
                Knobs(),
                UnitCost(*(float(v) for v in rng.uniform((1, 10, 0), (10, 80, 40)))),
            )
            for _ in range(int(rng.integers(1, 7)))
        ]
        for _ in range(units)
    ]


def brute_force(choices: list[list[Candidate]], capacity: float) -> float:
    best = float("inf")
    for taken in itertools.product(*choices):
        resting = sum(c.cost.resting_bytes for c in taken)
        if all(c.cost.peak_bytes + resting - c.cost.resting_bytes <= capacity for c in taken):
            best = min(best, sum(c.cost.seconds for c in taken))
    return best


def test_the_joint_choice_is_exact_on_hundreds_of_random_instances() -> None:
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(400):
        choices = random_choices(rng)
        expected = brute_force(choices, 100.0)
        found = choose(choices, 100.0)
        pruned = choose([pareto(c) for c in choices], 100.0)
        if expected == float("inf"):
            assert found == []
            assert pruned == []
        else:
            solved += 1
            assert found[0][0] == pytest.approx(expected)
            # Leaving dominated candidates out loses nothing.
            assert pruned[0][0] == pytest.approx(expected)
            times = [seconds for seconds, _ in found]
            assert times == sorted(times)
    assert solved > 200


def test_a_plan_fits_and_beats_its_alternatives() -> None:
    job = JobSpec(read_model("qwen2.5-7b"))
    found = plan(job, cluster_of("h100", 8), WORK)
    assert found.estimate.fits
    assert set(found.plan.assignments) == set(job.stages())
    for _, other in found.alternatives:
        assert other.iteration_s >= found.estimate.iteration_s or not other.fits
    assert found.gap < 0.2


def test_as_many_alternatives_are_named_as_asked_for() -> None:
    """Each with another layout, those of a shorter list among them, and the best plan the same."""
    job = JobSpec(read_model("llama3-8b"), backend="megatron")
    few, many = (
        plan(job, cluster_of("h100", 16), WORK, capabilities=limits_of(job), alternatives=n)
        for n in (3, 8)
    )
    assert (len(few.alternatives), len(many.alternatives)) == (3, 8)
    assert few.plan == many.plan
    shapes = [
        tuple((a.layout, a.devices) for a in one.assignments.values())
        for one in (many.plan, *(other for other, _ in many.alternatives))
    ]
    assert len(set(shapes)) == 9
    slowest = max(e.iteration_s for _, e in few.alternatives)
    assert sum(e.iteration_s <= slowest for _, e in many.alternatives if e.fits) >= 3


def test_megatron_plans_keep_tensor_parallelism_in_a_node() -> None:
    job = JobSpec(read_model("llama3-8b"), backend="megatron")
    found = plan(job, cluster_of("h100", 16), WORK)
    assert found.estimate.fits
    assert found.plan.assignments[S.ACTOR_TRAIN].layout.tp <= 8
    kinds = {r.kind for r in found.rejections}
    assert "slower" in kinds


def test_memory_rejections_say_by_how_much() -> None:
    job = JobSpec(read_model("qwen2.5-14b"))
    found = plan(job, cluster_of("h100", 8), WORK)
    (memory,) = [r for r in found.rejections if r.kind == "memory"]
    assert memory.least > 0
    assert memory.count > 0


def test_nothing_fits_says_what_came_nearest() -> None:
    job = JobSpec(read_model("llama3-70b"))
    with pytest.raises(SpecError, match=r"nearest is .* GiB a GPU too much"):
        plan(job, cluster_of("rtx4090", 8), WORK)


def test_odd_numbers_of_gpus_are_used() -> None:
    job = JobSpec(read_model("qwen2.5-1.5b"))
    found = plan(job, cluster_of("h100", 8), WORK, gpus=7)
    used = {d for a in found.plan.assignments.values() for d in a.devices}
    assert 4 <= len(used) <= 7
    assert max(used) < 7


def test_only_what_the_adapter_can_change_is_proposed() -> None:
    job = JobSpec(read_model("llama3-8b"), backend="megatron")
    cluster = cluster_of("h100", 8)
    first = plan(job, cluster, WORK).plan
    pinned = Capabilities(
        framework="test",
        framework_version="0",
        stages={S.REF_LOGPROB: StageCapability(frozenset({"tp", "dp", "sequence_parallel"}))},
        coupled=(),
        devices_fixed=True,
        refused=(),
    )
    found = plan(job, cluster, WORK, capabilities=pinned, current=first)
    now = found.plan.assignments
    assert now[S.ACTOR_TRAIN].layout == first.assignments[S.ACTOR_TRAIN].layout
    assert now[S.ACTOR_TRAIN].knobs == first.assignments[S.ACTOR_TRAIN].knobs
    assert now[S.ACTOR_GENERATE].layout == first.assignments[S.ACTOR_GENERATE].layout
    assert any(r.kind == "capability" for r in found.rejections)


def test_leaving_the_current_plan_costs() -> None:
    """Over one step a small gain does not pay for moving the state; over many it does."""
    job = JobSpec(read_model("llama3-8b"), backend="megatron", reference=False)
    slow_network = cluster_of("h100", 8, inter_node_bytes_s=1e8)
    best = plan(job, slow_network, WORK)
    layout = Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="zero1")
    train = Assignment(layout, best.plan.assignments[S.ACTOR_TRAIN].knobs)
    current = GlobalPlan({**best.plan.assignments, S.ACTOR_TRAIN: train}, name="current")
    assert best.plan.assignments[S.ACTOR_TRAIN].layout != layout
    soon = plan(job, slow_network, WORK, current=current, horizon_steps=1)
    later = plan(job, slow_network, WORK, current=current, horizon_steps=10**6)
    assert later.plan.assignments[S.ACTOR_TRAIN] == best.plan.assignments[S.ACTOR_TRAIN]
    assert soon.estimate.iteration_s >= later.estimate.iteration_s


COMMAND = ["--model", "qwen2.5-1.5b", "--gpu", "h100", "--gpus", "8", "--prompts", "64"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    assert "verl overrides" in text
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size" in text
    assert main([*COMMAND, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["estimate"]["fits"]
    assert main(["--model", "llama3-70b", "--gpu", "rtx4090", "--gpus", "8"]) == 1
    assert "too much" in capsys.readouterr().err


def test_the_curve_rises(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, "--curve", "--json", "--gpus-per-node", "2"]
    assert main(command) == 0
    rates = [p["sequences_per_s"] for p in json.loads(capsys.readouterr().out)]
    assert len(rates) == 3
    assert rates == sorted(rates)


def test_replanning_on_the_shortlist_finds_what_a_full_search_does() -> None:
    job = JobSpec(read_model("llama3-8b"), backend="megatron")
    cluster = cluster_of("h100", 16)
    first = plan(job, cluster, WORK)
    for factor in (0.8, 1.1, 1.3):
        lengths = LengthDistribution.lognormal(800 * factor, 0.5, max_tokens=2048)
        moved = dataclasses.replace(WORK, response_tokens=lengths)
        again, full = plan(job, cluster, moved, after=first), plan(job, cluster, moved)
        assert again.estimate.iteration_s == pytest.approx(full.estimate.iteration_s)
        assert again.considered < full.considered
        assert again.shortlist is first.shortlist


def test_a_shortlist_is_dropped_when_lengths_move_far() -> None:
    job = JobSpec(read_model("llama3-8b"), backend="megatron", reference=False)
    cluster = cluster_of("h100", 8)
    first = plan(job, cluster, WORK)
    long = LengthDistribution.lognormal(9000, 0.3, max_tokens=16384)
    moved = dataclasses.replace(WORK, response_tokens=long)
    again = plan(job, cluster, moved, after=first)
    assert again.shortlist is not first.shortlist
    assert again.estimate == plan(job, cluster, moved).estimate


def test_gpus_of_two_kinds_are_used_together() -> None:
    job = JobSpec(read_model("qwen2.5-7b"))
    fast, old = cluster_of("h100", 8), cluster_of("a100", 8)
    alone = plan(job, fast, WORK)
    both = plan(job, Pools((fast, old)), WORK)
    assert both.estimate.fits
    assert both.estimate.iteration_s <= alone.estimate.iteration_s
    for stage, assignment in both.plan.assignments.items():
        kinds = {device < 8 for device in assignment.devices}
        assert len(kinds) == 1, stage
    # The order in which pools are named changes nothing.
    again = plan(job, Pools((old, fast)), WORK)
    assert again.estimate.iteration_s == pytest.approx(both.estimate.iteration_s)


def test_deepspeed_plans_on_two_kinds_are_openrlhf_commands() -> None:
    value = read_model("qwen2.5-7b", value_head=True)
    job = JobSpec(
        read_model("qwen2.5-7b"), algorithm="ppo", critic=value, reward=value, backend="deepspeed"
    )
    found = plan(job, Pools((cluster_of("h100", 8), cluster_of("a100", 8))), WORK)
    for one in (found.plan, *(other for other, _ in found.alternatives)):
        assert any(flag.startswith("--vllm.num_engines") for flag in openrlhf_flags(one, job))


def test_each_stage_is_held_to_its_own_gpus_memory() -> None:
    job = JobSpec(read_model("qwen2.5-7b"))
    pools = Pools((cluster_of("h100", 8), cluster_of("l40s", 8)))
    found = plan(job, pools, WORK)
    assert found.estimate.fits
    for stage in found.estimate.stages.values():
        large = stage.assignment.devices[0] < 8
        assert stage.capacity_bytes == pools.clusters[0 if large else 1].gpu.memory_bytes
        assert stage.reserved_bytes <= stage.capacity_bytes


def test_a_stage_across_two_kinds_is_refused() -> None:
    job = JobSpec(read_model("qwen2.5-7b"), algorithm="sft", reference=False)
    pools = Pools((cluster_of("h100", 8), cluster_of("a100", 8)))
    spread = Assignment(Layout(dp=16, sharding="fsdp"), Knobs(token_budget_tokens=8192))
    with pytest.raises(SpecError, match="GPUs of two kinds"):
        estimate(job, GlobalPlan({S.ACTOR_TRAIN: spread}), pools, WORK)


def test_the_command_takes_gpus_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--also", "a100:8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["fits"]
    assert main([*COMMAND, "--also", "a100"]) == 2
    assert "NAME:COUNT" in capsys.readouterr().err


def test_deepseek_v3_is_planned_with_uneven_stages_before_launch_only() -> None:
    job = JobSpec(read_model("deepseek-v3"), backend="megatron", reference=False)
    cluster = cluster_of("h200", 256)
    found = plan(job, cluster, WORK, capabilities=limits_of(job))
    layout = found.plan.assignments[S.ACTOR_TRAIN].layout
    assert layout.pp > 1
    # 61 layers are prime: every pipeline is uneven, and verl has to be told.
    first, last = uneven_stages(61, layout.pp) or (0, 0)
    assert (61 - first - last) % max(1, layout.pp - 2) == 0
    text = "\n".join(launch_flags(found.plan, job))
    assert f"num_layers_in_first_pipeline_stage={first}" in text
    assert f"num_layers_in_last_pipeline_stage={last}" in text

    # A transition has no layout that says how uneven stages are cut.
    small = JobSpec(read_model("qwen2.5-1.5b"), backend="megatron", reference=False)
    six = cluster_of("h100", 6)
    launched = {layout.pp for layout in layouts(small, small.actor, 6, 8, 0.0)}
    running = {layout.pp for layout in layouts(small, small.actor, 6, 8, 0.0, uneven=False)}
    assert 3 in launched - running
    current = plan(small, six, WORK).plan
    again = plan(small, six, WORK, current=GlobalPlan(
        {**current.assignments, S.ACTOR_TRAIN: Assignment(
            Layout(dp=6, sharding="zero1"), current.assignments[S.ACTOR_TRAIN].knobs)}
    ), horizon_steps=10**6)  # fmt: skip
    assert again.plan.assignments[S.ACTOR_TRAIN].layout.pp != 3


def test_verls_megatron_models_share_a_layout_unless_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "16", "--prompts", "128",
               "--backend", "megatron", "--json"]  # fmt: skip
    layouts, seconds = [], []
    for more in ([], ["--uncoupled"]):
        assert main([*command, *more]) == 0
        stages = json.loads(capsys.readouterr().out)["estimate"]
        seconds.append(stages["iteration_s"])
        layouts.append({stages["stages"][s]["layout"] for s in ("ref-logprob", "actor-train")})
    assert len(layouts[0]) == 1
    assert len(layouts[1]) == 2
    assert seconds[1] < seconds[0]


def test_a_framework_that_keeps_all_stages_together_is_offered_nothing_else() -> None:
    """Of two machines with slow links between them, a job with its rollout apart may be faster."""
    job = JobSpec(read_model("llama3-8b"), reference=False)
    together = Capabilities("test", "0", {}, (), False, (), colocated=True)
    found = plan(job, cluster_of("h100", 16), WORK, capabilities=together)
    plans = [found.plan, *(other for other, _ in found.alternatives)]
    for one in plans:
        assert len({a.devices for a in one.assignments.values()}) == 1


def test_batches_are_cut_as_the_framework_can() -> None:
    job = JobSpec(read_model("qwen2.5-1.5b"))
    limits = Capabilities("test", "0", {}, (), False, (), dp_divides=12, least_budget_tokens=10000)
    found = plan(job, cluster_of("h100", 8), WORK, capabilities=limits)
    for stage, a in found.plan.assignments.items():
        if stage is not S.ACTOR_GENERATE:
            assert 12 % a.layout.dp == 0
            assert a.knobs.token_budget_tokens is not None
            assert a.knobs.token_budget_tokens >= 10000
    assert any(r.kind == "capability" for r in found.rejections)
    free = plan(job, cluster_of("h100", 8), WORK)
    assert any(12 % a.layout.dp for a in free.plan.assignments.values())


def test_ranks_that_cut_a_sequence_fill_their_budgets_together() -> None:
    workload = WorkloadSpec(8, LengthDistribution.fixed(1024), LengthDistribution.fixed(16384))
    budgets = {
        ranks: {k.token_budget_tokens for k in knob_choices(workload, trains=True, ranks=ranks)}
        for ranks in (1, 2, 8)
    }
    assert budgets == {1: {17408, 52224}, 2: {9216, 17408, 52224}, 8: {4096, 17408, 52224}}


def test_where_memory_is_tight_budgets_double_from_the_least() -> None:
    workload = WorkloadSpec(8, LengthDistribution.fixed(64), LengthDistribution.fixed(256))
    budgets = {
        least: [
            k.token_budget_tokens for k in knob_choices(workload, trains=False, least_budget=least)
        ]
        for least in (0, 320, 3000)
    }
    assert budgets == {
        0: [4096, 12288],
        320: [4096, 12288, 512, 1024, 2048],
        3000: [4096, 12288, 3072],
    }


def test_an_odd_number_of_nodes_need_not_all_be_used() -> None:
    assert usable_sizes(216, 8) == [216, 208, 128]
    assert usable_sizes(208, 8) == [208, 128]
    assert usable_sizes(13, 8) == [13, 8]
    assert usable_sizes(7, 8) == [7, 4]
    # Where responses are cut over two ranks, the 29th node makes no replica.
    trace = load(shipped_folder() / "growth.json")
    setting = trace.setting
    long = setting.workload(trace.conditions(600, 0.0).response_tokens)
    found = {g: plan(setting.job, setting.cluster, long, gpus=g) for g in (224, 232)}
    assert found[232].estimate.iteration_s == found[224].estimate.iteration_s
    assert max(max(a.devices) for a in found[232].plan.assignments.values()) < 224
