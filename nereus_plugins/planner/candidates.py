"""What each unit could run under on so many GPUs: layouts and knobs, costed, dominated ones out.

A candidate is dominated when another is at most as slow, peaks at most as high and rests at most as
large: it can be left out of any plan without loss, since plans only add seconds and bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from nereus_plugins.cost.case import uneven_stages
from nereus_plugins.cost.estimate import (
    Calibration,
    Placed,
    UnitCost,
    away_knobs,
    check_layout,
    rollout_cost,
    sequence_moments,
    unit_cost,
    unit_costs,
)
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.models import as_shape
from nereus_plugins.cost.rollout import engine_weight_bytes
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    ModelSpec,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

# Sequences are cut over ranks only where they are longer.
SPLIT_TOKENS = 8192
ROLLOUT_FRACTIONS = (0.3, 0.45, 0.6, 0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout and knobs of a unit, and what they cost."""

    layout: Layout
    knobs: Knobs
    cost: UnitCost


# A layout, and which of `knob_choices` goes with it; `_IN_FORCE`: those of the plan in force.
Choice = tuple[Layout, int]
_IN_FORCE = -1


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def layouts(
    job: JobSpec,
    model: ModelSpec,
    gpus: int,
    gpus_per_node: int,
    longest: float,
    *,
    uneven: bool = True,
) -> Iterator[Layout]:
    """Layouts of a training-engine unit on all of `gpus` ranks that divide the model.

    Tensor parallelism stays inside a node. Sequences are cut over ranks (cp, ulysses) only where
    they are longer than `SPLIT_TOKENS`. `uneven`: also pipeline stages of unequal size.
    """
    splits = list(_powers(8)) if longest > SPLIT_TOKENS else [1]
    if job.backend != "megatron":
        for ulysses in splits:
            if gpus % ulysses:
                continue
            dp = gpus // ulysses
            if job.backend == "deepspeed":
                # Ring attention; it needs packed samples.
                if ulysses > 1 and not job.packed:
                    continue
                made = [Layout(dp=dp, cp=ulysses, sharding=s) for s in ("zero2", "zero3")]
            else:
                made = [Layout(dp=dp, ulysses=ulysses, sharding="fsdp")]
                made += [
                    Layout(dp=dp, ulysses=ulysses, sharding="hsdp", shard_size=size)
                    for size in (gpus_per_node, 4 * gpus_per_node)
                    if size < gpus and gpus % size == 0
                ]
            yield from made
        return
    for tp in _powers(min(gpus, gpus_per_node)):
        for pp in range(1, min(gpus // tp, model.num_layers, 16) + 1):
            for cp in splits:
                if gpus % (tp * pp * cp):
                    continue
                whole = model.num_layers % pp == 0
                if not whole and not (uneven and uneven_stages(model.num_layers, pp)):
                    continue
                dp = gpus // (tp * pp * cp)
                experts = [1]
                if model.moe is not None:
                    experts = [e for e in _powers(64) if (tp * cp * dp) % e == 0]
                for ep in experts:
                    for vpp in (1, 2) if pp > 1 else (1,):
                        if vpp == 1 or model.num_layers % (pp * vpp) == 0:
                            yield Layout(
                                tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp,
                                sequence_parallel=tp > 1, sharding="zero1",
                            )  # fmt: skip


def zero_layouts(now: Layout, gpus: int, *, trains: bool) -> list[Layout]:
    """Layouts of a model that DeepSpeed runs as `now`: on all of `gpus` ranks, under its ZeRO stage
    and those that the planner knows. A model that only reads is whole, or sharded by ZeRO-3."""
    each = now.world_size // now.dp
    if gpus % each:
        return []
    stages = dict.fromkeys((now.sharding, "zero2" if trains else "none", "zero3"))
    return [dataclasses.replace(now, dp=gpus // each, sharding=stage) for stage in stages]


def knob_choices(
    workload: WorkloadSpec, *, trains: bool, ranks: int = 1, least_budget: int = 0
) -> Iterator[Knobs]:
    """Token budgets from the longest sequence up, and recompute; offload comes with the costs.

    ranks: over which a sequence is cut (`ranks_of_sequence`): they fill their budgets together, so
        that a part of the longest sequence is a budget too.
    least_budget: tokens that a budget has at least, where the framework says so; then a budget of
        no more, and its doublings, are choices too: where memory is tight, one may spare recompute.
    """
    _, _, longest = sequence_moments(workload)
    least = max(round(longest), least_budget)
    base = max(4096, -(-least // 1024) * 1024)
    part = max(4096, -(-max(-(-least // ranks), least_budget) // 1024) * 1024)
    recomputes = ("none", "full") if trains else ("none",)
    tighter = [part] if part < base else []
    tight = -(-least // 256) * 256
    while least_budget and tight < base:
        tighter.append(tight)
        tight *= 2
    for budget in (base, 3 * base, *tighter):
        for recompute in recomputes:
            yield Knobs(token_budget_tokens=budget, recompute=recompute)


def ranks_of_sequence(layout: Layout) -> int:
    """How many ranks one sequence is cut over, and with it their token budgets."""
    return layout.cp * layout.ulysses


def fewest_ranks(plan: GlobalPlan) -> int:
    """The least `ranks_of_sequence` among its models: budgets that suffice there do for all."""
    return min(
        ranks_of_sequence(assignment.layout)
        for stage, assignment in plan.assignments.items()
        if stage is not ModelStage.ACTOR_GENERATE
    )


def with_knobs(plan: GlobalPlan, trained: Knobs, away: bool) -> GlobalPlan:
    """The plan with these knobs for the units that train; the others take their token budget.

    away: whether parameters, and the optimizer, lie on the host between their stages.
    """
    made = {}
    for stage, before in plan.assignments.items():
        knobs = before.knobs
        if stage is not ModelStage.ACTOR_GENERATE:
            trains = stage.model in ("actor", "critic")
            knobs = dataclasses.replace(
                trained if trains else Knobs(),
                token_budget_tokens=trained.token_budget_tokens,
                offload_params=away,
                offload_optimizer=away and trains,
            )
        made[stage] = Assignment(before.layout, knobs, before.devices)
    return GlobalPlan(made, name=plan.name)


def with_most_replicas(
    layout: Layout, gpus: int, model: ModelSpec | None, divides: int | None = None
) -> Layout | None:
    """The layout with the largest dp that so many GPUs hold; None where not one replica fits.

    model: whose rules it has to keep; None for a rollout, which has none.
    divides: what dp has to divide, if anything.
    """
    each = layout.world_size // layout.dp
    for dp in range(gpus // each, 0, -1):
        if divides is not None and divides % dp:
            continue
        try:
            made = dataclasses.replace(layout, dp=dp)
            if model is not None:
                check_layout(made, model)
        except SpecError:
            continue
        return made
    return None


def pareto(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other dominates, fastest first; of equals the first."""
    kept: list[Candidate] = []
    order = sorted(
        candidates, key=lambda c: (c.cost.seconds, c.cost.peak_bytes, c.cost.resting_bytes)
    )
    for one in order:
        if not any(
            k.cost.peak_bytes <= one.cost.peak_bytes
            and k.cost.resting_bytes <= one.cost.resting_bytes
            for k in kept
        ):
            kept.append(one)
    return kept


def unit_candidates(
    job: JobSpec,
    stages: tuple[ModelStage, ...],
    gpus: int,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None,
    allowed: Callable[[Layout, Knobs], bool],
    reject: Callable[[str, str, float], None],
    capacity_bytes: float,
    *,
    in_force: Assignment | None = None,
    running: bool = False,
    uneven: bool = True,
    only: frozenset[Choice] | None = None,
    each_layout: bool = False,
    least_budget: int = 0,
) -> tuple[list[Candidate], frozenset[Choice]]:
    """Costed candidates of a unit of the training engine; what cannot be goes to `reject`.

    Returns them, and the choices worth costing again when the workload's lengths move.

    Args:
        uneven: whether pipeline stages may differ in size. No running job can be taken there, since
            a transition has no layout that says so: only plans to launch may.
        in_force: its layout and knobs are choices as well.
        running: the job has been launched, so that models of DeepSpeed have settings of their own.
        only: cost just these, as an earlier call returned them.
        least_budget: see `knob_choices`.
        each_layout: keep the best of every layout, for units that must share one; of DeepSpeed
            all, since one command sets layout and knobs of all its models.
    """
    model = job.model_of(stages[-1])
    trains = stages[-1] in (ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN)
    _, _, longest = sequence_moments(workload)
    made: list[Candidate] = []
    choice_of: list[Choice] = []
    if only is not None:
        known = sorted({layout for layout, _ in only}, key=str)
    elif running and in_force is not None and job.backend == "deepspeed":
        known = zero_layouts(in_force.layout, gpus, trains=trains)
    else:
        known = list(layouts(job, model, gpus, cluster.gpus_per_node, longest, uneven=uneven))
        if in_force is not None and in_force.layout.world_size == gpus:
            known.append(in_force.layout)

    def add(layout: Layout, index: int, knobs: Knobs, cost: UnitCost) -> None:
        over = cost.peak_bytes - capacity_bytes
        if over > 0:
            reject("memory", f"{stages[-1]} {layout}", over)
        else:
            made.append(Candidate(layout, knobs, cost))
            choice_of.append((layout, index))

    for layout in dict.fromkeys(known):
        try:
            check_layout(layout, model)
        except SpecError as error:
            reject("divisibility", str(error), 0.0)
            continue
        possible = False
        ranks = ranks_of_sequence(layout)
        sizes = knob_choices(workload, trains=trains, ranks=ranks, least_budget=least_budget)
        for index, knobs in enumerate(sizes):
            if only is not None and (layout, index) not in only:
                continue
            away = away_knobs(job, stages, knobs)
            stay_allowed, away_allowed = allowed(layout, knobs), allowed(layout, away)
            if job.backend == "deepspeed":
                # Models that only read lie on the host under ZeRO-3 only; a CPU optimizer always.
                away_allowed &= not job.cpu_adam if trains else layout.sharding == "zero3"
            if not (stay_allowed or away_allowed):
                continue
            possible = True
            placed = Placed(layout, knobs)
            stays, leaves = unit_costs(job, stages, placed, cluster, workload, calibration)
            if stay_allowed:
                add(layout, index, knobs, stays)
            if away_allowed:
                add(layout, index, away, leaves)
        if in_force is not None and allowed(layout, in_force.knobs):
            possible = True
            placed = Placed(layout, in_force.knobs)
            cost = unit_cost(job, stages, placed, cluster, workload, calibration)
            add(layout, _IN_FORCE, in_force.knobs, cost)
        if not possible:
            reject("capability", f"{stages[-1]} {layout}: the adapter cannot change to it", 0.0)
    near = only or _near(made, choice_of)
    if not each_layout:
        return pareto(made), near
    if job.backend == "deepspeed":
        return made, frozenset(choice_of)
    by_layout: dict[Layout, list[Candidate]] = {}
    for one in made:
        by_layout.setdefault(one.layout, []).append(one)
    return [one for group in by_layout.values() for one in pareto(group)], frozenset(choice_of)


# A candidate this much slower than one that dominates it is not costed again when lengths move.
NEAR = 1.05


def _near(made: list[Candidate], choice_of: list[Choice]) -> frozenset[Choice]:
    """Choices that are not dominated, or would not be if they were a little faster."""
    front = pareto(made)
    return frozenset(
        choice
        for one, choice in zip(made, choice_of, strict=True)
        if not any(
            NEAR * k.cost.seconds < one.cost.seconds
            and k.cost.peak_bytes <= one.cost.peak_bytes
            and k.cost.resting_bytes <= one.cost.resting_bytes
            for k in front
        )
    )


def rollout_candidates(
    job: JobSpec,
    gpus: int,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None,
    allowed: Callable[[Layout, Knobs], bool],
    in_force: Assignment | None = None,
) -> list[Candidate]:
    """Engine replicas of tp ranks inside a node or two, more where weights need it, and their share
    of memory."""
    made = []
    heads = job.actor.num_attention_heads

    def cost(layout: Layout, knobs: Knobs) -> UnitCost | None:
        if not allowed(layout, knobs):
            return None
        found = rollout_cost(job, Placed(layout, knobs), cluster, workload, calibration)
        if found is not None:
            made.append(Candidate(layout, knobs, found))
        return found

    # What is in force may be the only share that the adapter allows, also on other GPUs.
    now = () if in_force is None else (in_force.knobs.rollout_memory_fraction,)
    fractions: tuple[float | None, ...] = tuple(dict.fromkeys((*ROLLOUT_FRACTIONS, *now)))
    widest = 2 * cluster.gpus_per_node
    weights = engine_weight_bytes(as_shape(job.actor), Layout())
    while weights / widest > max(ROLLOUT_FRACTIONS) * cluster.gpu.memory_bytes:
        widest *= 2
    for tp in _powers(min(gpus, widest)):
        if gpus % tp or heads % tp:
            continue
        for fraction in fractions:
            found = cost(Layout(tp=tp, dp=gpus // tp), Knobs(rollout_memory_fraction=fraction))
            if found is not None and not found.bounded:
                break  # more cache would change nothing
    if in_force is not None and in_force.layout.world_size == gpus:
        cost(in_force.layout, in_force.knobs)
    return pareto(made)
