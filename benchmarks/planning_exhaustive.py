"""The planner against brute force: every plan of small random jobs estimated whole.

    python benchmarks/planning_exhaustive.py [--cases 200] [--json]

A case is a random job (GRPO, PPO or fine-tuning; FSDP, Megatron or DeepSpeed; dense or experts),
cluster of 1 to 8 GPUs with memory so small that it often decides, and workload. Brute force takes
each unit's every layout and knobs, all combinations of them, on every placement: all together, and
rollout on the first k GPUs with the rest on the others, for every k, not only the quarters that the
planner tries. Each whole plan goes through `estimate`; nothing is pruned or bounded.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.estimate import away_knobs, check_layout, estimate, sequence_moments
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.planner import plan
from nereus_plugins.planner.candidates import (
    ROLLOUT_FRACTIONS,
    knob_choices,
    layouts,
    ranks_of_sequence,
)
from nereus_plugins.planner.cli import limits_of
from nereus_plugins.planner.search import MARGIN, units_of
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

S = ModelStage
# Cases with more plans than this are drawn again.
MOST_PLANS = 2000
Placement = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A random instance; `coupled` holds Megatron's models to one layout, as verl needs."""

    job: JobSpec
    cluster: ClusterSpec
    workload: WorkloadSpec
    coupled: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What brute force and the planner found: seconds of an iteration, None where nothing fits.

    Attributes:
        plans: estimated by brute force.
        bound_s: what the planner says no plan of its space is faster than.
    """

    plans: int
    best_s: float | None
    together_s: float | None
    found_s: float | None
    bound_s: float | None

    @property
    def gap(self) -> float | None:
        """Planner over brute force - 1; infinite where it found nothing and brute force did."""
        if self.best_s is None:
            return None
        return math.inf if self.found_s is None else self.found_s / self.best_s - 1.0


def random_case(seed: int) -> Case:
    """The case of this seed, few enough plans for brute force."""
    rng = np.random.default_rng(seed)
    while True:
        case = _draw(rng)
        count = sum(math.prod(map(len, options.values())) for _, options in _options(case))
        if 0 < count <= MOST_PLANS:
            return case


def _draw(rng: np.random.Generator) -> Case:
    backend = str(rng.choice(["fsdp", "megatron", "deepspeed"]))
    algorithm = str(rng.choice(["grpo", "grpo", "ppo", "sft"]))
    model = str(rng.choice(["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"]))
    if backend == "megatron" and algorithm == "sft" and rng.random() < 0.3:
        model = "qwen3-30b-a3b"
    value = read_model(model, value_head=True) if algorithm == "ppo" else None
    job = JobSpec(
        read_model(model),
        algorithm=algorithm,
        critic=value,
        reward=value if value is not None and rng.random() < 0.3 else None,
        reference=algorithm != "sft" and bool(rng.random() < 0.5),
        backend=backend,
        cpu_adam=backend == "deepspeed" and bool(rng.random() < 0.3),
    )
    gpus = int(rng.choice([1, 2, 3, 4, 6, 8]))
    cluster = cluster_of(str(rng.choice(["h100", "a100_80gb", "l40s"])), gpus)
    longest = int(rng.choice([512, 2048, 4096, 12288]))
    # From too little to more than enough: state over all GPUs, an engine, the logits of a batch.
    models = 1 + (job.critic is not None)
    need = models * job.actor.num_parameters() * float(rng.uniform(12.0, 24.0)) / gpus
    need += 14.0 * max(4096, longest + 256) * job.actor.vocab_size * float(rng.uniform(0.8, 2.5))
    memory = int(need + 8e9)
    cluster = dataclasses.replace(
        cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=memory)
    )
    workload = WorkloadSpec(
        int(rng.choice([32, 128])),
        LengthDistribution.fixed(256),
        LengthDistribution.lognormal(longest / 3, 0.6, max_tokens=longest),
        int(rng.choice([1, 4])),
    )
    return Case(job, cluster, workload, backend == "megatron" and bool(rng.random() < 0.5))


def placements(case: Case) -> Iterator[Placement]:
    """Together, and rollout apart at every cut. DeepSpeed: as OpenRLHF can place them."""
    everything = tuple(range(case.cluster.world_size))
    names = list(units_of(case.job))
    rolls = S.ACTOR_GENERATE in case.job.stages()
    yield dict.fromkeys([*names, "rollout"] if rolls else names, everything)
    if not rolls:
        return
    scored = [n for n in names if n in ("critic", "reward")]
    for cut in range(1, len(everything)):
        first, rest = everything[:cut], everything[cut:]
        if case.job.backend != "deepspeed" or not scored:
            yield {**dict.fromkeys(names, rest), "rollout": first}
        else:
            for split in range(1, len(rest)):
                home = {n: rest[:split] if n in scored else rest[split:] for n in names}
                yield {**home, "rollout": first}


def _choices(case: Case, name: str, place: tuple[int, ...]) -> list[Assignment]:
    job, cluster, work = case.job, case.cluster, case.workload
    gpus = len(place)
    if name == "rollout":
        return [
            Assignment(Layout(tp=tp, dp=gpus // tp), Knobs(rollout_memory_fraction=part), place)
            for tp in (1, 2, 4, 8)
            if gpus % tp == 0 and job.actor.num_attention_heads % tp == 0
            for part in ROLLOUT_FRACTIONS
        ]
    stages = units_of(job)[name]
    trains = stages[-1] in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
    model = job.model_of(stages[-1])
    _, _, longest = sequence_moments(work)
    made = []
    for layout in layouts(job, model, gpus, cluster.gpus_per_node, longest):
        try:
            check_layout(layout, model)
        except SpecError:
            continue
        for knobs in knob_choices(work, trains=trains, ranks=ranks_of_sequence(layout)):
            made.append(Assignment(layout, knobs, place))
            away = away_knobs(job, stages, knobs)
            if job.backend == "deepspeed" and (
                job.cpu_adam if trains else layout.sharding != "zero3"
            ):
                continue
            made.append(Assignment(layout, away, place))
    return made


def _goes_with(case: Case, actor: Assignment, name: str, other: Assignment) -> bool:
    """Whether one job can run both: OpenRLHF sets them by one command, verl's Megatron workers have
    one layout."""
    if name == "rollout":
        return True
    if case.coupled:
        return other.layout == actor.layout
    if case.job.backend != "deepspeed":
        return True
    if (other.layout.sharding, other.layout.cp) != (actor.layout.sharding, actor.layout.cp):
        return False
    if name != "critic":
        return True
    alternate = other.devices == actor.devices
    return other.knobs == actor.knobs and (
        case.job.cpu_adam or actor.knobs.offload_optimizer == alternate
    )


def _options(case: Case) -> Iterator[tuple[bool, Mapping[str, list[Assignment]]]]:
    """For every placement and choice of the actor: (whether all are together, units' choices)."""
    for placement in placements(case):
        together = len(set(placement.values())) == 1
        every = {name: _choices(case, name, place) for name, place in placement.items()}
        for actor in every["actor"]:
            yield (
                together,
                {
                    name: [actor]
                    if name == "actor"
                    else [one for one in made if _goes_with(case, actor, name, one)]
                    for name, made in every.items()
                },
            )


def all_plans(case: Case) -> Iterator[tuple[bool, GlobalPlan]]:
    """(whether all units are together, plan)."""
    units = units_of(case.job)
    for together, options in _options(case):
        for chosen in itertools.product(*options.values()):
            assignments = {
                stage: one
                for name, one in zip(options, chosen, strict=True)
                for stage in units.get(name, (S.ACTOR_GENERATE,))
            }
            yield together, GlobalPlan(assignments)


def solve(case: Case) -> Outcome:
    """Brute force and the planner on one case."""
    count = 0
    best: dict[bool, float] = {}
    for together, one in all_plans(case):
        count += 1
        result = estimate(case.job, one, case.cluster, case.workload)
        room = all(
            s.fits and s.reserved_bytes <= (1.0 - MARGIN) * s.capacity_bytes
            for s in result.stages.values()
        )
        if room and result.iteration_s < best.get(together, math.inf):
            best[together] = result.iteration_s
    limits = limits_of(case.job) if case.coupled else None
    try:
        found = plan(case.job, case.cluster, case.workload, capabilities=limits)
        found_s: float | None = found.estimate.iteration_s
        bound_s: float | None = (1.0 - found.gap) * found.estimate.iteration_s
    except SpecError:
        found_s = bound_s = None
    return Outcome(count, min(best.values(), default=None), best.get(True), found_s, bound_s)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Distribution of the planner's gap to brute force."""
    gaps = np.array([o.gap for o in outcomes if o.gap is not None])
    finite = np.sort(np.maximum(gaps[np.isfinite(gaps)], 0.0))
    return {
        "cases": len(outcomes),
        "plans": sum(o.plans for o in outcomes),
        "nothing_fits": sum(o.best_s is None for o in outcomes),
        "missed": int(np.isinf(gaps).sum()),
        "solved": len(finite),
        "exact": int((finite < 1e-9).sum()),
        "within_1_percent": int((finite <= 0.01).sum()),
        "gap_p90": round(float(np.quantile(finite, 0.9)), 6) if len(finite) else None,
        "gap_p99": round(float(np.quantile(finite, 0.99)), 6) if len(finite) else None,
        "gap_largest": round(float(finite[-1]), 6) if len(finite) else None,
        "planner_faster": int((gaps < -1e-9).sum()),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    outcomes = []
    for seed in range(args.cases):
        case = random_case(seed)
        outcomes.append(solve(case))
        gap = outcomes[-1].gap
        if gap is not None and gap > 0.01 and not args.json:
            print(f"seed {seed}: {100 * gap:.1f} %, {case}", file=sys.stderr)
    result = summary(outcomes)
    print(json.dumps(result) if args.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
