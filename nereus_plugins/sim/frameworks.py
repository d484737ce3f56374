"""What verl and OpenRLHF run without Nereus: their jobs, and the plans they can be launched in.

Tuned plans are the planner's best among what a framework can be launched in, chosen with the whole
trace known. verl's synchronous
trainer runs all models on the same GPUs under FSDP or Megatron (pipeline stages of unequal size
too). OpenRLHF runs DeepSpeed: one ZeRO stage, ring and micro-batch for all models, all of them
together or rollout, actor with reference, and critic with reward model apart, updates on the GPU
or on the host.

Untuned plans are those of the framework's own example for such a model (`SCRIPTS`). Where it does
not fit the longest response, what the framework's own guide advises is added, in its order, until
it does: nobody runs a job that ends in its first step.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nereus_plugins.cost.estimate import sequence_moments
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.models import as_shape
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
)

from .hindsight import promising
from .planning import Known, Planning, Rules
from .policies import Elsewhere, Policy, Static
from .world import World

S = ModelStage
VERL = Rules(colocated=True, uneven=True)
OPENRLHF = Rules(uneven=True)


def verl_jobs(job: JobSpec) -> tuple[JobSpec, ...]:
    """The job under each of verl's engines that a tuned launch may choose."""
    own = dataclasses.replace(job, cpu_adam=False, average=False, grad_bytes=None)
    return tuple(dataclasses.replace(own, backend=engine) for engine in ("megatron", "fsdp"))


def openrlhf_jobs(job: JobSpec) -> tuple[JobSpec, ...]:
    """The job under OpenRLHF, with updates on the GPU and on the host."""
    return tuple(
        dataclasses.replace(
            job, backend="deepspeed", packed=True, compiled=False, fp8=False, grad_bytes=None,
            cpu_adam=on_host, engine_sleeps=True, updates_together=False,
        )
        for on_host in (False, True)
    )  # fmt: skip


class Script(NamedTuple):
    """An example of the framework's own.

    parameters: of the largest actor that it is taken for. micro_batch: of a GPU, or `budget`
    tokens, with `critic_budget` for the critic.
    """

    parameters: float
    path: str
    rollout_tp: int
    fraction: float
    micro_batch: int | None = None
    budget: int | None = None
    critic_budget: int | None = None
    offload: bool = False
    sharding: str = "fsdp"


SCRIPTS: dict[str, tuple[Script, ...]] = {
    # volcengine/verl @ b178a3c, examples/. All FSDP, all recompute the actor's activations.
    "verl": (
        Script(5e9, "ppo_trainer/run_qwen2.5-3b_rm_legacy.sh", 1, 0.6, micro_batch=16),
        Script(
            1.1e10, "ppo_trainer/run_qwen2-7b_seq_balance.sh", 2, 0.5, budget=24000,
            critic_budget=98304,
        ),
        Script(2e10, "tuning/14b/qwen2_14b_grpo_4_h800_fsdp_vllm.sh", 4, 0.5, 16, offload=True),
        Script(5e10, "ppo_trainer/run_qwen2.5-32b.sh", 4, 0.5, micro_batch=8),
        Script(
            1e15, "tuning/70b/qwen2-70b_grpo_32_h800_fsdp_vllm.sh", 16, 0.6, budget=24000,
            offload=True,
        ),
    ),
    # OpenRLHF/OpenRLHF @ 3c3be62, its example of PPO on colocated GPUs, which is of 8B. Larger
    # actors take engines so wide that a GPU holds no more of their weights.
    "openrlhf": tuple(
        Script(
            parameters, "examples/scripts/train_ppo_ray_hybrid_engine.sh", rollout_tp, 0.5,
            budget=16384, offload=True, sharding="zero3",
        )
        for parameters, rollout_tp in ((1.1e10, 2), (2e10, 4), (1e15, 8))
    ),
}  # fmt: skip


class ScriptPlanning(Planning):
    """Plans of a framework's example in place of the planner's.

    What may be added to the script, as few as possible, in this order: token budgets in place of
    micro-batches (as large as twice the longest sequence, or once), sequences cut over 2, 4, 8
    ranks, offload while idle, an engine on twice the GPUs, more memory for it. verl's guide:
    docs/perf/perf_tuning.rst and best_practices.rst; OpenRLHF's: README.md, Performance Tuning
    Guide.
    """

    def __init__(self, known: Known, framework: str) -> None:
        super().__init__(known)
        size = as_shape(known.setting.job.actor).num_parameters()
        self.script = next(one for one in SCRIPTS[framework] if size <= one.parameters)

    def best(
        self, gpus: int, response_tokens: LengthDistribution, memory: float = 1.0
    ) -> GlobalPlan | None:
        key = (gpus, response_tokens, memory)
        if key not in self._best:
            # Micro-batches by count hold as many of the longest responses.
            longest = response_tokens.max_tokens or self.known.max_response_tokens
            all_long = LengthDistribution.fixed(longest)
            fits = (
                plan
                for plan in self._with_more_and_more(gpus, response_tokens)
                if self.seconds(plan, response_tokens, memory) is not None
                and self.seconds(plan, all_long, memory) is not None
            )
            self._best[key] = next(fits, None)
        return self._best[key]

    def _with_more_and_more(
        self, gpus: int, response_tokens: LengthDistribution
    ) -> Iterator[GlobalPlan]:
        """The script's plan, then with one thing added, with two, ..."""
        script = self.script
        workload = self.known.setting.workload(response_tokens)
        longest = round(sequence_moments(workload)[2])
        sizes: list[int | None] = [2 * longest, longest]
        if script.micro_batch is not None:
            sizes.insert(0, None)
        else:
            # A budget below the longest sequence is refused by verl; OpenRLHF exceeds it.
            written = max(script.budget or 0, longest)
            sizes = [written] if written == longest else [written, longest]
        aways = [True] if script.offload else [False, True]
        tps = [tp for tp in (script.rollout_tp << k for k in range(4)) if gpus % tp == 0]
        tps = tps or [max(t for t in (1, 2, 4, 8, 16) if gpus % t == 0)]
        fractions = [script.fraction, *(f for f in (0.6, 0.7, 0.8, 0.9) if f > script.fraction)]
        cuts = [c for c in (1, 2, 4, 8) if gpus % c == 0]
        choices: tuple[Sequence[Any], ...] = (sizes, cuts, aways, tps, fractions)
        ways = itertools.product(*(enumerate(one) for one in choices))
        for way in sorted(ways, key=_added):
            yield self._plan(gpus, *(value for _, value in way))

    def _plan(
        self, gpus: int, budget: int | None, cut: int, offload: bool, tp: int, fraction: float
    ) -> GlobalPlan:
        script, job = self.script, self.known.setting.job
        deepspeed = job.backend == "deepspeed"
        layout = Layout(
            dp=gpus // cut,
            cp=cut if deepspeed else 1,
            ulysses=1 if deepspeed else cut,
            sharding=script.sharding,
        )
        devices = tuple(range(gpus))
        # A budget is of one GPU; ranks that cut sequences fill theirs together.
        each = None if budget is None else -(-budget // cut)
        assignments: dict[ModelStage, Assignment] = {}
        for stage in job.stages():
            if stage is S.ACTOR_GENERATE:
                engine = Layout(tp=tp, dp=gpus // tp)
                knobs = Knobs(rollout_memory_fraction=fraction)
                assignments[stage] = Assignment(engine, knobs, devices)
                continue
            trains = stage.model in ("actor", "critic")
            own = each
            if budget == script.budget and stage.model == "critic" and script.critic_budget:
                own = script.critic_budget // cut
            micro = None
            if each is None:
                micro = (script.micro_batch or 1) * (1 if trains else 2)
            assignments[stage] = Assignment(
                layout,
                Knobs(
                    micro_batch=micro,
                    token_budget_tokens=own,
                    recompute="full" if trains else "none",
                    # verl keeps an FSDP model that only reads on the host, whatever is set.
                    # DeepSpeed's sleep leaves a trained model's weights where they are.
                    offload_params=(offload and not deepspeed) if trains else not deepspeed,
                    offload_optimizer=offload and trains,
                ),
                devices,
            )
        return GlobalPlan(assignments, name=script.path.rsplit("/", 1)[-1])


def _added(way: Sequence[tuple[int, object]]) -> tuple[int, int, list[int]]:
    """How many things are added to a script, and how much of each."""
    ranks = [at for at, _ in way]
    return sum(at > 0 for at in ranks), sum(ranks), ranks


# Seconds that a policy takes for the whole trace; infinite where it does not reach the end.
RunS = Callable[[World, Policy], float]
# How many of the most promising plans are run before one is chosen.
_TRIED = 4


def untuned(world: World, name: str, framework: str) -> Elsewhere:
    """`static` on the plans of the framework's own example."""
    jobs = verl_jobs(world.setting.job) if framework == "verl" else openrlhf_jobs(world.setting.job)
    job = next(one for one in jobs if one.backend != "megatron")
    own = world.of_job(job)
    return Elsewhere(own, Static(name, planning=ScriptPlanning(own.known, framework)))


class Choice(NamedTuple):
    """A plan to hold, the planning that restarts follow, and the world of its job."""

    world: World
    plan: GlobalPlan | None
    planning: Planning

    def policy(self, name: str) -> Static:
        return Static(name, self.plan, self.planning)


def tuned_choice(world: World, framework: str, run_s: RunS) -> Choice:
    """The plan that takes least time on the whole trace: of the planner's best that the framework
    can be launched in, for the lengths and GPUs that the trace has, and of the framework's own
    example. Chosen with hindsight, so that no tuning does better. Kept in the world."""
    key = ("tuned", framework)
    if key not in world.memo:
        verl = framework == "verl"
        rules = VERL if verl else OPENRLHF
        typical = statistics.fmean(world.trace.mean_response_tokens)
        found: list[tuple[float, Choice]] = []
        for job in verl_jobs(world.setting.job) if verl else openrlhf_jobs(world.setting.job):
            own = world.of_job(job)
            lengths = own.trace.response_tokens(typical)
            known = own.known._replace(response_tokens=lengths)
            planning = Planning(known, rules, own.truth)
            for seconds, plan in promising(own, planning)[:_TRIED]:
                found.append((seconds, Choice(own, plan, planning)))
        found.sort(key=lambda f: f[0])
        tried = [one for _, one in found[:_TRIED]]
        example = untuned(world, "example", framework)
        tried.append(Choice(example.world, None, ScriptPlanning(example.world.known, framework)))
        taken = [run_s(one.world, one.policy("tried")) for one in tried]
        world.memo[key] = tried[taken.index(min(taken))]
    chosen: Choice = world.memo[key]
    return chosen


def tuned(world: World, name: str, framework: str, run_s: RunS) -> Elsewhere:
    """`static` in the plan of `tuned_choice`."""
    chosen = tuned_choice(world, framework, run_s)
    return Elsewhere(chosen.world, chosen.policy(name))
