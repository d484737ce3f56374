"""The joint choice: one candidate for each unit, on shared or separate GPUs, so that all fits.

On shared GPUs stages run one after the other, so an iteration is the sum of the units' seconds, and
memory couples them: while one runs, what the others leave resting lies beside it. Branch and bound
over the units finds the exact best of the candidates: units in the order of their spread, the bound
being the fastest of what is left. Separate placements are the same search on each part of the
cluster. Finalists are estimated whole (weight sync, order of stages) before one is chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from nereus_plugins.cost.estimate import (
    Calibration,
    Estimate,
    estimate,
    sequence_moments,
    weight_sync_floor_s,
)
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.memory import OUTSIDE_TORCH_BYTES
from nereus_plugins.cost.shape import as_shape
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

from .candidates import SPLIT_TOKENS, Candidate, Choice, rollout_candidates, unit_candidates

S = ModelStage
# Fraction of a GPU that a plan leaves free: the model's own error and the batch's chance.
MARGIN = 0.05
_FINALISTS = 6


class StageChanges(Protocol):
    """What of one stage an adapter can change (`nereus_plugins.job.StageCapability`)."""

    @property
    def layout_fields(self) -> frozenset[str]: ...

    @property
    def knob_fields(self) -> frozenset[str]: ...


class Changes(Protocol):
    """What an adapter can change (`nereus_plugins.job.Capabilities`)."""

    @property
    def stages(self) -> Mapping[ModelStage, StageChanges]: ...


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Why candidates were not taken: the kind, an example, how many, and by how much at least.

    `least` is bytes over the limit for "memory", relative for "slower".
    """

    kind: str
    example: str
    count: int
    least: float


# Lengths may move this much from those that a shortlist was made for before all is costed again.
SHORTLIST_HOLDS = 1.5


@dataclasses.dataclass(frozen=True)
class Shortlist:
    """The candidates that were close when all were costed, and what for.

    Re-planning on it finds what a full search would unless a candidate overtakes that was more than
    `candidates.NEAR` slower than another no larger: a search far from its start is made anew.
    """

    question: tuple[object, ...]
    mean_tokens: float
    splits_sequences: bool
    choices: Mapping[tuple[str, int], frozenset[Choice]]

    def holds(self, question: tuple[object, ...], workload: WorkloadSpec) -> bool:
        mean, _, longest = sequence_moments(workload)
        return (
            self.question == question
            and self.splits_sequences == (longest > SPLIT_TOKENS)
            and 1 / SHORTLIST_HOLDS < mean / self.mean_tokens < SHORTLIST_HOLDS
        )


@dataclasses.dataclass(frozen=True)
class Planned:
    """What the search found.

    Attributes:
        plan, estimate: the best plan and what it is expected to do.
        alternatives: the next best ones that differ in a layout or placement, best first.
        rejections: why others were not taken.
        gap: how much faster than `plan` any colocated plan of the space could be at most, relative.
        considered: candidates costed.
        shortlist: what re-planning costs again (`plan(after=...)`).
    """

    plan: GlobalPlan
    estimate: Estimate
    alternatives: tuple[tuple[GlobalPlan, Estimate], ...]
    rejections: tuple[Rejection, ...]
    gap: float
    considered: int
    shortlist: Shortlist = dataclasses.field(repr=False, compare=False)


class _Rejected:
    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.best: dict[str, tuple[float, str]] = {}

    def __call__(self, kind: str, example: str, amount: float) -> None:
        self.count[kind] += 1
        if kind not in self.best or amount < self.best[kind][0]:
            self.best[kind] = (amount, example)

    def listed(self) -> tuple[Rejection, ...]:
        return tuple(
            Rejection(kind, self.best[kind][1], self.count[kind], self.best[kind][0])
            for kind in sorted(self.count)
        )


def units_of(job: JobSpec) -> dict[str, tuple[ModelStage, ...]]:
    """Units of the training engine, with their stages; the last is where state rests."""
    out: dict[str, tuple[ModelStage, ...]] = {}
    for stage in job.stages():
        if stage is not S.ACTOR_GENERATE:
            out[stage.model] = (*out.get(stage.model, ()), stage)
    return out


def choose(
    choices: Sequence[Sequence[Candidate]], capacity_bytes: float, keep: int = _FINALISTS
) -> list[tuple[float, tuple[Candidate, ...]]]:
    """The `keep` fastest ways to take one candidate of each list so that every one of them, with
    what the others leave resting, stays within capacity. Exact; fastest first."""
    if not all(choices):
        return []
    # What cannot run even beside the least that the others leave is out of every plan.
    light = [min(c.cost.resting_bytes for c in options) for options in choices]
    usable = [
        sorted(
            (c for c in options if c.cost.peak_bytes + sum(light) - light[i] <= capacity_bytes),
            key=lambda c: c.cost.seconds,
        )
        for i, options in enumerate(choices)
    ]
    if not all(usable):
        return []
    # Units that gain most from their choice first: their bounds cut most.
    order = sorted(range(len(usable)), key=lambda i: usable[i][0].cost.seconds, reverse=True)
    fastest = [0.0] * (len(order) + 1)
    lightest = [0.0] * (len(order) + 1)
    for at in range(len(order) - 1, -1, -1):
        options = usable[order[at]]
        fastest[at] = fastest[at + 1] + options[0].cost.seconds
        lightest[at] = lightest[at + 1] + min(c.cost.resting_bytes for c in options)
    found: list[tuple[float, tuple[Candidate, ...]]] = []
    worst = math.inf

    def descend(
        at: int, taken: tuple[Candidate, ...], seconds: float, resting: float, highest: float
    ) -> None:
        """`highest`: the largest of peak - resting of those taken; resting: of all taken."""
        nonlocal worst
        if at == len(order):
            placed = dict(zip(order, taken, strict=True))
            found.append((seconds, tuple(placed[i] for i in range(len(order)))))
            found.sort(key=lambda f: f[0])
            del found[keep:]
            if len(found) >= keep:
                worst = found[-1][0]
            return
        rest, beside = fastest[at + 1], lightest[at + 1]
        for one in usable[order[at]]:
            cost = one.cost
            total = seconds + cost.seconds
            if total + rest >= worst:
                return  # sorted: those that follow are slower
            above = max(highest, cost.peak_bytes - cost.resting_bytes)
            under = resting + cost.resting_bytes
            if above + under + beside <= capacity_bytes:
                descend(at + 1, (*taken, one), total, under, above)

    descend(0, (), 0.0, 0.0, 0.0)
    return found


def _placements(job: JobSpec, gpus: int, per_node: int) -> list[dict[str, tuple[int, int]]]:
    """Where units may lie: (first GPU, number) of each, aligned to nodes where there are several.

    All together; rollout apart; the models that only read (reference, reward) apart.
    """
    names = [*units_of(job)]
    rolls = S.ACTOR_GENERATE in job.stages()
    everything = {name: (0, gpus) for name in names}
    if rolls:
        everything["rollout"] = (0, gpus)
    out = [everything]
    step = per_node if gpus > per_node else 1
    readers = [n for n in names if n in ("ref", "reward")]
    # Many GPUs: one split only, since each part size is costed anew.
    for quarter in (1, 2, 3) if gpus <= 64 else (2,):
        part = gpus * quarter // 4 // step * step
        if not 0 < part < gpus:
            continue
        rest = (part, gpus - part)
        if rolls:
            out.append({**{name: rest for name in names}, "rollout": (0, part)})
        if readers and quarter < 3:
            apart = {name: (0, part) if name in readers else rest for name in names}
            out.append({**apart, "rollout": rest} if rolls else apart)
    unique: list[dict[str, tuple[int, int]]] = []
    for placement in out:
        if placement not in unique:
            unique.append(placement)
    return unique


def usable_sizes(gpus: int, per_node: int) -> list[int]:
    """Numbers of GPUs to try: all, whole nodes, a power of two."""
    sizes = {gpus, 1 << (gpus.bit_length() - 1)}
    if gpus > per_node:
        sizes.add(gpus // per_node * per_node)
    return sorted(sizes, reverse=True)


def plan(
    job: JobSpec,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
    *,
    gpus: int | None = None,
    capabilities: Changes | None = None,
    current: GlobalPlan | None = None,
    horizon_steps: int = 100,
    after: Planned | None = None,
) -> Planned:
    """The fastest plan that fits, of all layouts, knobs and placements considered.

    Args:
        gpus: use the first so many of the cluster's GPUs; default all.
        capabilities: what the adapter can change of `current`; other changes are not proposed.
        current: the plan in force. The cost of leaving it, spread over `horizon_steps`, is part of
            the objective: state that a rank must receive over its network port, as a bound.
        after: an earlier answer to the same question but for lengths and calibration. What was far
            from best then is not costed again (see `Shortlist`), unless lengths moved too far.

    Raises:
        SpecError: nothing fits; the message says what came nearest and by how much it does not.
    """
    total = gpus or cluster.world_size
    if not 0 < total <= cluster.world_size:
        raise SpecError(f"gpus={total} is not between 1 and the cluster's {cluster.world_size}")
    capacity = cluster.gpu.memory_bytes * (1.0 - MARGIN) - OUTSIDE_TORCH_BYTES
    rejected = _Rejected()
    units = units_of(job)
    cache: dict[tuple[str, int], list[Candidate]] = {}
    question = (
        job, cluster, total, capabilities, current,
        workload.prompts_per_step, workload.samples_per_prompt, workload.mini_batch_prompts,
    )  # fmt: skip
    held = None
    if after is not None and after.shortlist.holds(question, workload):
        held = after.shortlist
    near: dict[tuple[str, int], frozenset[Choice]] = {}

    def candidates(name: str, count: int) -> list[Candidate]:
        if (name, count) not in cache:
            if name == "rollout":
                made = rollout_candidates(job, count, cluster, workload)
                fixed = _fixed(capabilities, current, S.ACTOR_GENERATE)
                if fixed is not None:
                    made = [c for c in made if c.layout == fixed.layout]
            else:
                stage = units[name][-1]

                def allowed(layout: Layout, knobs: Knobs) -> bool:
                    return _allowed(capabilities, current, stage, layout, knobs)

                made, near[name, count] = unit_candidates(
                    job, units[name], count, cluster, workload, allowed, rejected, capacity,
                    held.choices.get((name, count)) if held else None,
                )  # fmt: skip
            cache[name, count] = made
        return cache[name, count]

    finalists: list[tuple[float, GlobalPlan]] = []
    bound = math.inf
    for size in usable_sizes(total, cluster.gpus_per_node):
        for placement in _placements(job, size, cluster.gpus_per_node):
            parts: dict[tuple[int, int], list[str]] = {}
            for name, place in placement.items():
                parts.setdefault(place, []).append(name)
            options = [
                choose([candidates(n, place[1]) for n in names], capacity, _FINALISTS)
                for place, names in parts.items()
            ]
            if not all(options):
                continue
            if len(parts) == 1:
                bound = min(bound, options[0][0][0])
            for rank in range(max(len(o) for o in options)):
                taken = [o[min(rank, len(o) - 1)] for o in options]
                assignments: dict[ModelStage, Assignment] = {}
                for (place, names), (_, chosen) in zip(parts.items(), taken, strict=True):
                    devices = tuple(range(place[0], place[0] + place[1]))
                    for name, one in zip(names, chosen, strict=True):
                        moved = Assignment(one.layout, one.knobs, devices)
                        for stage in units.get(name, (S.ACTOR_GENERATE,)):
                            assignments[stage] = moved
                label = "colocated" if len(parts) == 1 else f"{len(parts)} parts"
                finalists.append(
                    (sum(t for t, _ in taken), GlobalPlan(assignments, name=f"{label} {size}"))
                )
    if not finalists:
        raise SpecError(_nothing_fits(rejected, job, total))
    finalists.sort(key=lambda f: f[0])
    judged: list[tuple[float, GlobalPlan, Estimate]] = []
    seen: set[tuple[tuple[ModelStage, str, tuple[int, ...]], ...]] = set()
    for _, finalist in finalists:
        shape = tuple((s, str(a.layout), a.devices) for s, a in finalist.assignments.items())
        if shape in seen or len(judged) >= 3 * _FINALISTS:
            continue
        seen.add(shape)
        result = estimate(job, finalist, cluster, workload, calibration)
        cost = result.iteration_s + _leaving_s(current, finalist, result, cluster) / horizon_steps
        judged.append((cost, finalist, result))
    judged.sort(key=lambda j: (not j[2].fits, j[0]))
    best = judged[0]
    for cost, other, _ in judged[1:]:
        rejected("slower", other.name, cost / best[0] - 1.0)
    if S.ACTOR_GENERATE in best[1].assignments:
        bound += weight_sync_floor_s(as_shape(job.actor))
    gap = max(0.0, 1.0 - bound / best[2].iteration_s) if math.isfinite(bound) else 1.0
    return Planned(
        best[1],
        best[2],
        tuple((p, e) for _, p, e in judged[1:4]),
        rejected.listed(),
        gap,
        sum(len(c) for c in cache.values()) + sum(rejected.count.values()),
        held or _shortlist(question, workload, near),
    )


def _shortlist(
    question: tuple[object, ...],
    workload: WorkloadSpec,
    near: Mapping[tuple[str, int], frozenset[Choice]],
) -> Shortlist:
    mean, _, longest = sequence_moments(workload)
    return Shortlist(question, mean, longest > SPLIT_TOKENS, near)


def _nothing_fits(rejected: _Rejected, job: JobSpec, gpus: int) -> str:
    text = f"no plan for {job.actor.name} fits {gpus} GPUs"
    if "memory" in rejected.best:
        over, example = rejected.best["memory"]
        text += f"; nearest is {example}, {over / 2**30:.1f} GiB a GPU too much"
    return text + "; use more GPUs, shorter sequences, or another backend"


def _fixed(
    capabilities: Changes | None, current: GlobalPlan | None, stage: ModelStage
) -> Assignment | None:
    """The assignment that a stage must keep, if its adapter cannot change it."""
    if capabilities is None or current is None or stage in capabilities.stages:
        return None
    return current.assignments.get(stage)


def _allowed(
    capabilities: Changes | None,
    current: GlobalPlan | None,
    stage: ModelStage,
    layout: Layout,
    knobs: Knobs,
) -> bool:
    if capabilities is None or current is None or stage not in current.assignments:
        return True
    now = current.assignments[stage]
    can = capabilities.stages.get(stage)
    layout_fields: frozenset[str] = can.layout_fields if can else frozenset()
    knob_fields: frozenset[str] = can.knob_fields if can else frozenset()

    def changed(a: Layout | Knobs, b: Layout | Knobs) -> set[str]:
        return {f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)}

    return changed(layout, now.layout) <= layout_fields and changed(knobs, now.knobs) <= knob_fields


def _leaving_s(
    current: GlobalPlan | None, target: GlobalPlan, result: Estimate, cluster: ClusterSpec
) -> float:
    """A bound on the transition: state whose layout or GPUs change, over a network port."""
    if current is None:
        return 0.0
    moved = 0.0
    for stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN):
        if stage not in target.assignments or stage not in current.assignments:
            continue
        now, then = current.assignments[stage], target.assignments[stage]
        if (now.layout, now.devices) != (then.layout, then.devices):
            memory: Mapping[str, float] = {p.name: p.value for p in result.stages[stage].memory}
            moved += memory.get("weights", 0.0) + memory.get("optimizer", 0.0)
    return moved / cluster.inter_node.bandwidth_bytes_per_s
