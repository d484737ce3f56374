"""The joint choice: one candidate for each unit, on shared or separate GPUs, so that all fits.

On shared GPUs stages run one after the other, so an iteration is the sum of the units' seconds, and
memory couples them: while one runs, what the others leave resting lies beside it. Branch and bound
over the units finds the exact best of the candidates: units in the order of their spread, the bound
being the fastest of what is left. Separate placements are the same search on each part of the
cluster. Finalists are estimated whole (weight sync, order of stages) before one is chosen.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from nereus_plugins.cost.estimate import (
    Calibration,
    Estimate,
    estimate,
    resolve_gpu,
    sequence_moments,
    weight_sync_floor_s,
)
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.models import as_shape
from nereus_plugins.cost.pools import Pool, Pools, pool_of, pools_of
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

from .candidates import (
    SPLIT_TOKENS,
    Candidate,
    Choice,
    pareto,
    rollout_candidates,
    unit_candidates,
)

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

    @property
    def coupled(self) -> tuple[frozenset[ModelStage], ...]: ...

    @property
    def devices_fixed(self) -> bool: ...

    @property
    def colocated(self) -> bool: ...

    @property
    def sharing_fixed(self) -> bool: ...

    @property
    def dp_divides(self) -> int | None: ...

    @property
    def least_budget_tokens(self) -> int: ...


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
# Placements that even at best were this much slower than the best one are not tried again then.
CLOSE_PLACEMENT = 1.2
# The devices of a unit.
Place = tuple[int, ...]
# What a unit's candidates depend on: its name, number of GPUs and the first device of their pool.
Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Shortlist:
    """The candidates that were close when all were costed, and what for.

    Re-planning on it finds what a full search would unless a candidate overtakes that was more than
    `candidates.NEAR` slower than another no larger: a search far from its start is made anew.
    """

    question: tuple[object, ...]
    mean_tokens: float
    splits_sequences: bool
    choices: Mapping[Key, frozenset[Choice]]
    placements: Sequence[Mapping[str, Place]]

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
        gap: how much faster than `plan` any plan of the space could be at most, relative: of the
            candidates costed, on the placements tried, one unit at a time on a GPU.
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


def _placements(job: JobSpec, gpus: int, per_node: int) -> list[dict[str, Place]]:
    """Where units may lie, aligned to nodes where there are several.

    All together; rollout apart; the models that only read (reference, reward) apart. Under
    DeepSpeed what OpenRLHF can place: all together, or rollout, actor with reference, and critic
    with reward model apart from each other.
    """
    names = [*units_of(job)]
    rolls = S.ACTOR_GENERATE in job.stages()
    everywhere = tuple(range(gpus))
    everything = dict.fromkeys(names, everywhere)
    if rolls:
        everything["rollout"] = everywhere
    out = [everything]
    step = per_node if gpus > per_node else 1
    readers = [n for n in names if n in ("ref", "reward")]
    scored = [n for n in names if n in ("critic", "reward")]
    # Many GPUs: one split only, since each part size is costed anew.
    for quarter in (1, 2, 3) if gpus <= 64 else (2,):
        part = gpus * quarter // 4 // step * step
        if not 0 < part < gpus:
            continue
        first, rest = everywhere[:part], everywhere[part:]
        if job.backend == "deepspeed":
            half = len(rest) // 2 // step * step if scored else 0
            if rolls and (half or not scored):
                apart = {name: rest[:half] if name in scored else rest[half:] for name in names}
                out.append({**apart, "rollout": first})
            continue
        if rolls:
            out.append({**dict.fromkeys(names, rest), "rollout": first})
        if readers and quarter < 3:
            apart = {name: first if name in readers else rest for name in names}
            out.append({**apart, "rollout": rest} if rolls else apart)
    unique: list[dict[str, Place]] = []
    for placement in out:
        if placement not in unique:
            unique.append(placement)
    return unique


def _pool_placements(job: JobSpec, pools: Sequence[Pool]) -> list[dict[str, Place]]:
    """All inside one pool, and every way to give each unit one pool."""
    names = [*units_of(job)]
    if S.ACTOR_GENERATE in job.stages():
        names.append("rollout")
    out = [
        {name: tuple(d + pool.first for d in place) for name, place in placement.items()}
        for pool in pools
        for size in usable_sizes(pool.cluster.world_size, pool.cluster.gpus_per_node)
        for placement in _placements(job, size, pool.cluster.gpus_per_node)
    ]
    for chosen in itertools.product(pools, repeat=len(names)):
        placement = {n: tuple(pool.devices) for n, pool in zip(names, chosen, strict=True)}
        if placement not in out and (job.backend != "deepspeed" or _openrlhf_places(placement)):
            out.append(placement)
    return out


def _openrlhf_places(placement: Mapping[str, Place]) -> bool:
    """Whether OpenRLHF can: all models together, or only actor with ref and critic with reward."""
    apart = dict(placement)
    for name, other in (("ref", "actor"), ("reward", "critic")):
        if name in apart and apart[name] == placement.get(other):
            del apart[name]
    return len({*placement.values()}) == 1 or len({*apart.values()}) == len(apart)


def _placement_of(
    current: GlobalPlan, units: Mapping[str, tuple[ModelStage, ...]]
) -> dict[str, Place]:
    """Where a plan has its units."""
    out = {name: current.assignments[stages[-1]].devices for name, stages in units.items()}
    if S.ACTOR_GENERATE in current.assignments:
        out["rollout"] = current.assignments[S.ACTOR_GENERATE].devices
    return out


def _regrouped(
    current: GlobalPlan,
    units: Mapping[str, tuple[ModelStage, ...]],
    gpus: int,
    divides: int | None,
) -> list[Mapping[str, Place]]:
    """Placements in which the units share GPUs as they do now: as it is, and with each group on
    every number of GPUs that its dp may take, the rollout on what is left. Groups lie one after the
    other, in their order.

    Those that can be reached: models that grow need GPUs while those that shrink, and the rollout,
    still have theirs.

    Args: divides: what dp has to divide, if anything.
    """
    now = _placement_of(current, units)
    groups: dict[Place, list[str]] = {}
    for name in sorted(now, key=lambda one: min(now[one])):
        groups.setdefault(now[name], []).append(name)

    def each(name: str) -> int:
        layout = current.assignments[units[name][-1] if name in units else S.ACTOR_GENERATE].layout
        return layout.world_size // layout.dp

    most = gpus if divides is None else divides
    replicas = [dp for dp in range(1, most + 1) if divides is None or divides % dp == 0]
    sizes = []
    for names in groups.values():
        if names == ["rollout"]:
            sizes.append([0])  # what the others leave
        else:
            step = math.lcm(*(each(name) for name in names))
            sizes.append([step * dp for dp in replicas if step * dp < gpus])
    while math.prod(map(len, sizes)) > _MOST_PLACEMENTS:
        widest = max(range(len(sizes)), key=lambda i: len(sizes[i]))
        sizes[widest] = sizes[widest][::2]
    meanwhile = max(gpus, len(current.devices))
    out: list[Mapping[str, Place]] = [now] if max(current.devices) < gpus else []
    for chosen in itertools.product(*sizes):
        held = (max(size, len(place)) for size, place in zip(chosen, groups, strict=True))
        if sum(held) > meanwhile:
            continue
        left = gpus - sum(chosen)
        placement: dict[str, Place] = {}
        first = 0
        for names, size in zip(groups.values(), chosen, strict=True):
            taken = size or left // each("rollout") * each("rollout")
            placement |= dict.fromkeys(names, tuple(range(first, first + taken)))
            first += taken
        if first <= gpus and all(placement.values()) and placement not in out:
            out.append(placement)
    return out


# Of these a search tries no more; sizes are then thinned, the widest range first.
_MOST_PLACEMENTS = 2000


def _coupled_units(capabilities: Changes | None, names: Iterable[str]) -> list[frozenset[str]]:
    """Sets of two units or more that must share one layout."""
    groups = []
    for stages in capabilities.coupled if capabilities is not None else ():
        wanted = {"rollout" if s is S.ACTOR_GENERATE else s.model for s in stages}
        shared = frozenset(wanted & set(names))
        if len(shared) > 1:
            groups.append(shared)
    return groups


def _choose_coupled(
    choices: Mapping[str, list[Candidate]],
    groups: Sequence[frozenset[str]],
    capacity_bytes: float,
    keep: int,
) -> list[tuple[float, tuple[Candidate, ...]]]:
    """`choose`, every group of units on one layout; of plans that differ in knobs alone the
    fastest."""
    common = [
        sorted(set.intersection(*({c.layout for c in choices[name]} for name in group)), key=str)
        for group in groups
    ]
    found: list[tuple[float, tuple[Candidate, ...]]] = []
    for shared in itertools.product(*common):
        layout_of = {
            name: layout for group, layout in zip(groups, shared, strict=True) for name in group
        }
        found += choose(
            [
                [c for c in made if layout_of.get(name, c.layout) == c.layout]
                for name, made in choices.items()
            ],
            capacity_bytes,
        )
    distinct: dict[tuple[Layout, ...], tuple[float, tuple[Candidate, ...]]] = {}
    for one in sorted(found, key=lambda f: f[0]):
        distinct.setdefault(tuple(c.layout for c in one[1]), one)
    return list(distinct.values())[:keep]


class _Command(NamedTuple):
    """What an OpenRLHF command sets: ZeRO stage and ring of all models, more of trained ones."""

    sharding: str
    ring: int
    budget: int | None
    recompute: str
    sleeps: bool

    @classmethod
    def of(cls, one: Candidate) -> _Command:
        lay, knobs = one.layout, one.knobs
        return cls(
            lay.sharding,
            lay.cp,
            knobs.token_budget_tokens,
            knobs.recompute,
            knobs.offload_optimizer,
        )

    def gives(self, name: str, one: Candidate) -> bool:
        if name == "rollout":
            return True
        if name in ("actor", "critic"):
            return _Command.of(one) == self
        return (one.layout.sharding, one.layout.cp) == (self.sharding, self.ring)


def _commands(
    job: JobSpec, placement: Mapping[str, Place], actors: Iterable[Candidate], running: bool
) -> Sequence[_Command | None]:
    """The settings among which a DeepSpeed plan has to choose one; [None] for other engines, and
    for a job that is running, whose models have settings of their own."""
    if job.backend != "deepspeed" or running:
        return [None]
    found = dict.fromkeys(_Command.of(one) for one in actors)
    if "critic" not in placement or job.cpu_adam:
        return list(found)
    # Awake on the same GPUs, actor and critic would update at the same time; asleep on their own,
    # one after the other.
    alternate = placement["critic"] == placement["actor"]
    return [command for command in found if command.sleeps == alternate]


def usable_sizes(gpus: int, per_node: int) -> list[int]:
    """Numbers of GPUs to try: all, whole nodes, an even number of nodes, a power of two. 27 nodes
    can be cut in fewer ways than 26: what one node would bring, recompute may cost."""
    sizes = {gpus, 1 << (gpus.bit_length() - 1)}
    for step in (per_node, 2 * per_node):
        if gpus > step:
            sizes.add(gpus // step * step)
    return sorted(sizes, reverse=True)


def plan(
    job: JobSpec,
    cluster: ClusterSpec | Pools,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
    *,
    gpus: int | None = None,
    capabilities: Changes | None = None,
    current: GlobalPlan | None = None,
    horizon_steps: int = 100,
    transition_s: Callable[[GlobalPlan, GlobalPlan], float] | None = None,
    after: Planned | None = None,
    alternatives: int = 3,
) -> Planned:
    """The fastest plan that fits, of all layouts, knobs and placements considered.

    Args:
        cluster: GPUs available; `Pools` where they are of several kinds.
        gpus: use the first so many of the cluster's GPUs; default all.
        capabilities: what the adapter can change of `current`; other changes are not proposed.
        current: the plan in force. The cost of leaving it, spread over `horizon_steps`, is part of
            the objective: state that a rank must receive over its network port, as a bound.
        transition_s: seconds from one plan to another by the transition graph
            (`nereus_plugins.gtg.planned.transition_seconds`), asked of the finalists that could
            still be best by the bound.
        after: an earlier answer to the same question but for lengths and calibration. What was far
            from best then is not costed again (see `Shortlist`), unless lengths moved too far.

    Raises:
        SpecError: nothing fits; the message says what came nearest and by how much it does not.
    """
    total = gpus or cluster.world_size
    if not 0 < total <= cluster.world_size:
        raise SpecError(f"gpus={total} is not between 1 and the cluster's {cluster.world_size}")
    pools = pools_of(cluster)

    def capacity(pool: Pool) -> float:
        gpu = resolve_gpu(pool.cluster)
        return gpu.memory_bytes * (1.0 - MARGIN) - gpu.context_bytes

    rejected = _Rejected()
    keep = max(_FINALISTS, 1 + alternatives)
    units = units_of(job)
    cache: dict[Key, list[Candidate]] = {}
    question = (
        job, cluster, total, capabilities, current,
        workload.prompts_per_step, workload.samples_per_prompt, workload.mini_batch_prompts,
    )  # fmt: skip
    held = None
    if after is not None and after.shortlist.holds(question, workload):
        held = after.shortlist
    near: dict[Key, frozenset[Choice]] = {}

    regroups = capabilities is not None and capabilities.sharing_fixed and current is not None
    groups = _coupled_units(capabilities, [*units, "rollout"])
    coupled = frozenset[str]().union(*groups)

    def candidates(name: str, place: Place) -> list[Candidate]:
        pool, count = pool_of(pools, place, name), len(place)
        key = (name, count, pool.first)
        if key not in cache:
            stage = units[name][-1] if name in units else S.ACTOR_GENERATE
            in_force = current.assignments.get(stage) if current is not None else None

            def allowed(layout: Layout, knobs: Knobs) -> bool:
                return _possible(capabilities, stage, layout, knobs) and _allowed(
                    capabilities, current, stage, layout, knobs
                )

            if name == "rollout":
                made = rollout_candidates(
                    job, count, pool.cluster, workload, calibration, allowed, in_force
                )
            else:
                made, near[key] = unit_candidates(
                    job, units[name], count, pool.cluster, workload, calibration, allowed,
                    rejected, capacity(pool), in_force=in_force, running=regroups,
                    each_layout=name in coupled or job.backend == "deepspeed",
                    only=held.choices.get(key) if held else None, uneven=current is None,
                    least_budget=capabilities.least_budget_tokens if capabilities else 0,
                )  # fmt: skip
            cache[key] = made
        return cache[key]

    placements: Sequence[Mapping[str, Place]]
    if held is not None:
        placements = held.placements
    elif capabilities is not None and capabilities.devices_fixed and current is not None:
        placements = [_placement_of(current, units)]
    elif regroups:
        assert capabilities is not None
        assert current is not None
        placements = _regrouped(current, units, total, capabilities.dp_divides)
    elif isinstance(cluster, Pools):
        placements = _pool_placements(job, pools)
    else:
        placements = [
            placement
            for size in usable_sizes(total, cluster.gpus_per_node)
            for placement in _placements(job, size, cluster.gpus_per_node)
        ]
    if capabilities is not None and capabilities.colocated:
        placements = [one for one in placements if len({*one.values()}) == 1]

    def fastest_rollout_s(placement: Mapping[str, Place]) -> float:
        if "rollout" not in placement:
            return 0.0
        made = candidates("rollout", placement["rollout"])
        return min((c.cost.seconds for c in made), default=0.0)

    finalists: list[tuple[float, GlobalPlan]] = []
    bounds: list[tuple[float, Mapping[str, Place]]] = []
    for placement in placements:
        parts: dict[Place, list[str]] = {}
        for name, place in placement.items():
            parts.setdefault(place, []).append(name)
        if any(len({placement[name] for name in group}) > 1 for group in groups):
            rejected("capability", "units that must share a layout on different GPUs", 0.0)
            continue
        actors = candidates("actor", placement["actor"])
        for command in _commands(job, placement, actors, regroups):
            options = []
            for place, names in parts.items():
                choices = {name: candidates(name, place) for name in names}
                if command is not None:
                    choices = {
                        name: pareto(one for one in made if command.gives(name, one))
                        for name, made in choices.items()
                    }
                inside = [group for group in groups if group <= set(names)]
                most = capacity(pool_of(pools, place, ", ".join(names)))
                options.append(
                    _choose_coupled(choices, inside, most, keep)
                    if inside
                    else choose(list(choices.values()), most, keep)
                )
            if not all(options):
                continue
            part_s = [found[0][0] for found in options]
            bounds.append((_least_s(parts, part_s, fastest_rollout_s(placement)), placement))
            finalists += _combined(parts, options, units)
    if not finalists:
        raise SpecError(_nothing_fits(rejected, job, total))
    finalists.sort(key=lambda f: f[0])
    judged: list[tuple[float, GlobalPlan, Estimate]] = []

    def judge(finalist: GlobalPlan) -> None:
        result = estimate(job, finalist, cluster, workload, calibration)
        cost = result.iteration_s + _leaving_s(current, finalist, result, pools) / horizon_steps
        judged.append((cost, finalist, result))

    seen: set[tuple[tuple[ModelStage, str, tuple[int, ...]], ...]] = set()
    for _, finalist in finalists:
        shape = tuple((s, str(a.layout), a.devices) for s, a in finalist.assignments.items())
        if shape not in seen and len(judged) < 3 * keep:
            seen.add(shape)
            judge(finalist)
    # Staying is always a choice, if its devices are still there.
    if current is not None and set(current.assignments) == set(job.stages()):
        known = any(finalist.assignments == current.assignments for _, finalist, _ in judged)
        if not known and max(current.devices) < total:
            judge(current)
    judged.sort(key=lambda j: (not j[2].fits, j[0]))
    if current is not None and transition_s is not None:
        judged = _with_exact_transitions(judged, current, transition_s, horizon_steps)
    best = judged[0]
    for cost, other, _ in judged[1:]:
        rejected("slower", other.name, cost / best[0] - 1.0)
    bound = min(least for least, _ in bounds)
    close = [placement for least, placement in bounds if least <= CLOSE_PLACEMENT * bound]
    if S.ACTOR_GENERATE in best[1].assignments:
        bound += weight_sync_floor_s(as_shape(job.actor))
    gap = max(0.0, 1.0 - bound / best[2].iteration_s)
    return Planned(
        best[1],
        best[2],
        tuple((p, e) for _, p, e in judged[1 : 1 + alternatives]),
        rejected.listed(),
        gap,
        sum(len(c) for c in cache.values()) + sum(rejected.count.values()),
        held or _shortlist(question, workload, near, close),
    )


def _combined(
    parts: Mapping[Place, Sequence[str]],
    options: Sequence[Sequence[tuple[float, tuple[Candidate, ...]]]],
    units: Mapping[str, tuple[ModelStage, ...]],
) -> Iterator[tuple[float, GlobalPlan]]:
    """The best of every part together, the second best, ...: least seconds, and the plan."""
    for rank in range(max(len(o) for o in options)):
        taken = [o[min(rank, len(o) - 1)] for o in options]
        assignments: dict[ModelStage, Assignment] = {}
        rollout_s = 0.0
        for (place, names), (_, chosen) in zip(parts.items(), taken, strict=True):
            for name, one in zip(names, chosen, strict=True):
                moved = Assignment(one.layout, one.knobs, place)
                for stage in units.get(name, (S.ACTOR_GENERATE,)):
                    assignments[stage] = moved
                if name == "rollout":
                    rollout_s += one.cost.seconds
        label = "colocated" if len(parts) == 1 else f"{len(parts)} parts"
        size = len({d for place in parts for d in place})
        least = _least_s(parts, [seconds for seconds, _ in taken], rollout_s)
        yield least, GlobalPlan(assignments, name=f"{label} {size}")


def _least_s(
    parts: Mapping[Place, Sequence[str]], part_s: Sequence[float], rollout_s: float
) -> float:
    """A bound from below on the iteration: parts run one unit after the other, all others wait for
    generation. Exact where all units share devices, but for the weight sync."""
    return max(
        seconds + (0.0 if "rollout" in names else rollout_s)
        for names, seconds in zip(parts.values(), part_s, strict=True)
    )


def _with_exact_transitions(
    judged: Sequence[tuple[float, GlobalPlan, Estimate]],
    current: GlobalPlan,
    transition_s: Callable[[GlobalPlan, GlobalPlan], float],
    horizon_steps: int,
) -> list[tuple[float, GlobalPlan, Estimate]]:
    """Finalists in the order of their objective with the transition as its graph has it.

    Those given are in the order of a bound below it: once a bound is no better than an exact
    figure, what follows cannot be best and keeps its bound.
    """
    out: list[tuple[float, GlobalPlan, Estimate]] = []
    lowest = math.inf
    for bound, finalist, result in judged:
        cost = bound
        if result.fits and bound < lowest:
            leaving = transition_s(current, finalist)
            cost = max(bound, result.iteration_s + leaving / horizon_steps)
            lowest = min(lowest, cost)
        out.append((cost, finalist, result))
    return sorted(out, key=lambda j: (not j[2].fits, j[0]))


def _shortlist(
    question: tuple[object, ...],
    workload: WorkloadSpec,
    near: Mapping[Key, frozenset[Choice]],
    close: Sequence[Mapping[str, Place]],
) -> Shortlist:
    mean, _, longest = sequence_moments(workload)
    return Shortlist(question, mean, longest > SPLIT_TOKENS, near, close)


def _nothing_fits(rejected: _Rejected, job: JobSpec, gpus: int) -> str:
    text = f"no plan for {job.actor.name} fits {gpus} GPUs"
    if "memory" in rejected.best:
        over, example = rejected.best["memory"]
        text += f"; nearest is {example}, {over / 2**30:.1f} GiB a GPU too much"
    return text + "; use more GPUs, shorter sequences, or another backend"


def _possible(
    capabilities: Changes | None, stage: ModelStage, layout: Layout, knobs: Knobs
) -> bool:
    """Whether the job's batch can be cut so, by what its framework asks for."""
    if capabilities is None or stage is S.ACTOR_GENERATE:
        return True
    dp, budget = capabilities.dp_divides, knobs.token_budget_tokens
    if dp is not None and dp % layout.dp:
        return False
    held = None if budget is None else budget * layout.cp * layout.ulysses
    return held is None or held >= capabilities.least_budget_tokens


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
    current: GlobalPlan | None, target: GlobalPlan, result: Estimate, pools: Sequence[Pool]
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
    return moved / min(p.cluster.inter_node.bandwidth_bytes_per_s for p in pools)
