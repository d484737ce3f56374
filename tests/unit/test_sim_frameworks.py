"""What verl and OpenRLHF run without Nereus: plans they can be launched in."""

import dataclasses

import pytest

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.planner.flags import launch_flags
from nereus_plugins.sim import frameworks
from nereus_plugins.sim import run as running
from nereus_plugins.sim.frameworks import SCRIPTS, ScriptPlanning
from nereus_plugins.sim.policies import Elsewhere, Static
from nereus_plugins.sim.world import World
from nereus_plugins.spec import GlobalPlan, LengthDistribution, ModelStage
from nereus_plugins.trace.conditions import Setting, Trace

S = ModelStage
TAIL = ((0.0, 0.1), (0.5, 0.8), (0.9, 1.8), (1.0, 4.0))


def trace(model: str = "qwen2.5-1.5b", gpu: str = "a100_40gb", gpus: int = 8) -> Trace:
    setting = Setting(
        JobSpec(
            read_model(model),
            algorithm="ppo",
            critic=read_model(model, value_head=True),
            backend="megatron",
        ),
        cluster_of(gpu, gpus),
        LengthDistribution.fixed(256),
        prompts_per_step=32,
        samples_per_prompt=8,
    )
    return Trace(
        name="test", sources=(), assumptions=(), setting=setting,
        mean_response_tokens=tuple(300.0 + 200.0 * (step // 2) for step in range(12)),
        gpus=((0.0, gpus), (4.0, gpus // 2), (8.0, gpus)), tail=TAIL, max_response_tokens=8192,
    )  # fmt: skip


def started(made: Elsewhere) -> GlobalPlan:
    return made.policy.start(made.world.known)


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_tuned_is_never_slower_than_the_example_and_both_end(framework: str) -> None:
    names = {"verl": ("verl_static", "verl_tuned"),
             "openrlhf": ("openrlhf_default", "openrlhf_tuned")}[framework]  # fmt: skip
    world = World(trace(), seed=3)
    as_shipped, tuned = (running.run(world, name) for name in names)
    assert (as_shipped.policy, tuned.policy) == names
    assert (as_shipped.stopped, tuned.stopped) == ("", "")
    assert (as_shipped.oom, tuned.oom) == (0, 0)
    assert tuned.run_s <= as_shipped.run_s
    assert as_shipped.restarts >= 1  # the plan it had is gone with half of the GPUs
    assert as_shipped.transitions == tuned.transitions == 0
    # Its plan can be written as a launch command, which verl's limits leave on all GPUs at once.
    made = running.POLICIES[names[1]](world)
    assert isinstance(made, Elsewhere)
    plan, job = started(made), made.world.setting.job
    assert launch_flags(plan, job)
    if framework == "verl":
        assert len({a.devices for a in plan.assignments.values()}) == 1
        trained = [a for s, a in plan.assignments.items() if s is not S.ACTOR_GENERATE]
        assert job.backend != "megatron" or len({a.layout for a in trained}) == 1


def test_every_framework_meets_the_same_chance() -> None:
    world = World(trace(), seed=3)
    other = frameworks.untuned(world, "x", "openrlhf").world
    assert other is not world
    assert other.setting.job.backend == "deepspeed"
    assert (other.chance.seconds == world.chance.seconds).all()
    assert other.truth.seed == world.truth.seed
    assert world.of_job(other.setting.job) is other


@pytest.mark.parametrize(
    ("model", "script"),
    [("qwen2.5-1.5b", "run_qwen2.5-3b_rm_legacy.sh"), ("llama3-8b", "run_qwen2-7b_seq_balance.sh"),
     ("qwen2.5-32b", "run_qwen2.5-32b.sh")],
)  # fmt: skip
def test_an_example_is_that_of_the_models_size(model: str, script: str) -> None:
    world = World(trace(model, "h100", 64))
    made = frameworks.untuned(world, "verl_static", "verl")
    plan = started(made)
    assert plan.name == script
    chosen = next(one for one in SCRIPTS["verl"] if one.path.endswith(script))
    assert made.world.setting.job.backend == "fsdp"
    assert plan.assignments[S.ACTOR_GENERATE].layout.tp == chosen.rollout_tp
    assert plan.assignments[S.ACTOR_GENERATE].knobs.rollout_memory_fraction == chosen.fraction
    assert plan.assignments[S.ACTOR_TRAIN].knobs.recompute == "full"


def test_what_an_example_lacks_is_added_and_nothing_else() -> None:
    """Eight sequences of 1,024 tokens fit a GPU, as many of the longest do not."""
    known = World(trace()).of_job(
        dataclasses.replace(World(trace()).setting.job, backend="fsdp")
    ).known  # fmt: skip
    short = ScriptPlanning(known._replace(max_response_tokens=512), "verl")
    written = short.sized(8)
    assert written is not None
    assert written.assignments[S.ACTOR_TRAIN].knobs.micro_batch == 16
    assert written.assignments[S.REF_LOGPROB].knobs.micro_batch == 32
    changed = ScriptPlanning(known, "verl").sized(8)
    assert changed is not None
    knobs = changed.assignments[S.ACTOR_TRAIN].knobs
    assert knobs.micro_batch is None
    assert knobs.token_budget_tokens is not None
    assert not knobs.offload_optimizer
    assert (
        changed.assignments[S.ACTOR_GENERATE].layout == written.assignments[S.ACTOR_GENERATE].layout
    )


def test_an_example_on_gpus_that_its_engines_do_not_divide() -> None:
    known = World(trace("llama3-8b", "h100", 64)).known
    known = known._replace(
        setting=dataclasses.replace(
            known.setting, job=dataclasses.replace(known.setting.job, backend="fsdp")
        )
    )
    plan = ScriptPlanning(known, "verl").sized(9)
    assert plan is not None
    assert plan.assignments[S.ACTOR_GENERATE].layout.tp == 1
    assert Static("x", planning=ScriptPlanning(known, "verl")).start(known).devices == tuple(
        range(64)
    )
