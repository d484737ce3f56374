"""`nereus check`: whether a launch command fits, until which length, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nereus_plugins.cost.estimate import Estimate, estimate
from nereus_plugins.cost.explain import GIB, cluster_of, explanation, table, to_dict
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    ModelStage,
    SpecError,
)

from .launch import Launch, read_launch, words_of_script

S = ModelStage
# Lengths are searched up to here.
LONGEST_TOKENS = 131_072

EPILOG = """examples:
  nereus check --gpu h100 -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
      actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct data.max_response_length=8192 ...
  nereus check --gpu h100 -- openrlhf.cli.train_ppo_ray --pretrain meta-llama/Meta-Llama-3-8B ...
  nereus check --gpu h20 --script run_qwen32b.sh

The command is read, not run. Settings that it does not name have their framework's defaults."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A way to make a launch fit: what to set, and the iteration it gives."""

    settings: tuple[str, ...]
    iteration_s: float


def longest_response(
    launch: Launch, plan: GlobalPlan, cluster: ClusterSpec, median: float, sigma: float
) -> int:
    """The longest response limit, in tokens, at which the plan fits; 0 if it fits at none.

    The limit moves and the median with it; peaks only grow with it.
    """

    def fits(limit: int) -> bool:
        return estimate(launch.job, plan, cluster, launch.workload(limit, median, sigma)).fits

    low, high = 0, LONGEST_TOKENS
    if fits(high):
        return high
    while high - low > max(16, low // 100):
        middle = (low + high) // 2
        if fits(max(1, middle)):
            low = middle
        else:
            high = middle
    return low


def _knob_changes(launch: Launch) -> Iterator[tuple[str, str, Callable[[GlobalPlan], GlobalPlan]]]:
    """Single settings that lower some peak, in the words of the launch's framework."""
    train = launch.plan.assignments[S.ACTOR_TRAIN].knobs
    name = launch.settings
    verl = launch.framework == "verl"

    def trained(change: Callable[[Knobs], Knobs]) -> Callable[[GlobalPlan], GlobalPlan]:
        def apply(plan: GlobalPlan) -> GlobalPlan:
            return _with(
                plan,
                {
                    stage: dataclasses.replace(a, knobs=change(a.knobs))
                    for stage, a in plan.assignments.items()
                    if stage.model in ("actor", "critic") and stage is not S.ACTOR_GENERATE
                },
            )

        return apply

    def on(key: str, value: str = "True") -> tuple[str, str]:
        return key, " ".join(f"{one}={value}" if verl else one for one in name[key])

    def to(key: str, value: object) -> tuple[str, str]:
        return key, " ".join(f"{one}{'=' if verl else ' '}{value}" for one in name[key])

    if train.recompute != "full":
        megatron = launch.job.backend == "megatron"
        yield (
            *on("recompute", "full" if megatron else "True"),
            trained(lambda k: dataclasses.replace(k, recompute="full")),
        )
    for field in ("offload_optimizer", "offload_params"):
        if not getattr(train, field):
            yield *on(field), trained(lambda k, f=field: dataclasses.replace(k, **{f: True}))  # type: ignore[misc]
    if train.token_budget_tokens is not None:
        for part in (2, 4):
            budget = train.token_budget_tokens // part
            if budget >= launch.prompt_tokens + launch.response_tokens:
                yield (
                    *to("token_budget_tokens", budget),
                    trained(lambda k, b=budget: dataclasses.replace(k, token_budget_tokens=b)),  # type: ignore[misc]
                )
    elif (train.micro_batch or 1) > 1:
        micro = max(1, (train.micro_batch or 1) // 2)
        for size in dict.fromkeys((micro, 1)):
            yield (
                *to("micro_batch", size),
                trained(lambda k, m=size: dataclasses.replace(k, micro_batch=m)),  # type: ignore[misc]
            )
    engine = launch.plan.assignments.get(S.ACTOR_GENERATE)
    if engine is not None:
        now = engine.knobs.rollout_memory_fraction or 0.6
        for fraction in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
            if abs(fraction - now) > 0.01:
                knobs = dataclasses.replace(engine.knobs, rollout_memory_fraction=fraction)
                yield (
                    *to("rollout_memory_fraction", fraction),
                    lambda p, k=knobs: _with(  # type: ignore[misc]
                        p,
                        {S.ACTOR_GENERATE: dataclasses.replace(
                            p.assignments[S.ACTOR_GENERATE], knobs=k)},
                    ),
                )  # fmt: skip
        tp = 2 * engine.layout.tp
        world = engine.layout.world_size
        if tp <= launch.gpus_per_node and world % tp == 0:
            layout = Layout(tp=tp, dp=world // tp)
            yield (
                *to("rollout_tp", tp),
                lambda p: _with(
                    p,
                    {S.ACTOR_GENERATE: Assignment(
                        layout, p.assignments[S.ACTOR_GENERATE].knobs, engine.devices)},
                ),
            )  # fmt: skip


def _with(plan: GlobalPlan, changed: dict[ModelStage, Assignment]) -> GlobalPlan:
    return GlobalPlan({**plan.assignments, **changed}, name=plan.name)


def what_to_change(
    launch: Launch, cluster: ClusterSpec, median: float, sigma: float, keep: int = 3
) -> list[Change]:
    """The fewest settings that make the launch fit, fastest first; none where three do not."""
    workload = launch.workload(launch.response_tokens, median, sigma)
    single = list(_knob_changes(launch))
    for count in (1, 2, 3):
        found = []
        for chosen in itertools.combinations(single, count):
            if len({key for key, _, _ in chosen}) < count:
                continue
            plan = launch.plan
            for _, _, apply in chosen:
                plan = apply(plan)
            result = estimate(launch.job, plan, cluster, workload)
            if result.fits:
                found.append(Change(tuple(text for _, text, _ in chosen), result.iteration_s))
        if found:
            return sorted(found, key=lambda c: c.iteration_s)[:keep]
    return []


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus check",
        description=__doc__.splitlines()[0].split(": ", 1)[1] if __doc__ else None,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--gpu", required=True, help="h100, a100_40gb, h20, b200, ...")
    p.add_argument("--model", help="shape of the actor, where the command's path is not known here")
    p.add_argument("--critic", help="shape of critic and reward model, likewise")
    p.add_argument("--script", type=Path, metavar="FILE", help="shell script with the command")
    p.add_argument("--median-response", type=float, default=0.5, metavar="PART",
                   help="median response as a part of the longest (default 0.5)")  # fmt: skip
    p.add_argument("--response-sigma", type=float, default=0.6, help="of the log of lengths")
    p.add_argument("--explain", action="store_true", help="every part and its formula")
    p.add_argument("--json", action="store_true")
    p.add_argument("words", nargs="*", metavar="WORD", help="the launch command, after --")
    return p


def _text(launch: Launch, result: Estimate, longest: int, changes: Sequence[Change] | None) -> str:
    peak = result.peak
    lines = [table(result), ""]
    named = "data.max_response_length" if launch.framework == "verl" else "--generate_max_len"
    if longest >= LONGEST_TOKENS:
        lines.append(f"fits at every response length up to {LONGEST_TOKENS} tokens")
    elif longest == 0:
        lines.append("does not fit at any response length")
    else:
        lines.append(
            f"runs out of memory when responses grow beyond about {longest} tokens "
            f"({named} is {launch.response_tokens})"
        )
    if changes is not None:
        held = {p.name: p.value for p in peak.memory}
        held |= {f"{unit} resting beside": value for unit, value in peak.resting.items()}
        worst = max(held, key=lambda name: held[name])
        over = (peak.reserved_bytes - result.capacity_bytes) / GIB
        lines.append(
            f"largest part of the peak, in {peak.stage}: {worst}, {held[worst] / GIB:.1f} GiB"
            + (f"; {over:.1f} GiB too much in all" if over > 0 else "")
        )
        if changes:
            lines.append("to make it fit, fastest first:")
            lines += [
                f"  {'  '.join(c.settings)}   (iteration {c.iteration_s:.1f} s)" for c in changes
            ]
        else:
            lines.append(
                "no three settings that keep the layout make it fit: ask `nereus plan` for another "
                "layout, or use more GPUs"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 fits, 1 does not fit, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    shape = (args.median_response, args.response_sigma)
    try:
        words = words_of_script(args.script) if args.script else args.words
        if not words:
            raise SpecError("give the launch command after --, or --script FILE")
        launch = read_launch(words, args.model, args.critic)
        cluster = cluster_of(args.gpu, launch.gpus, launch.gpus_per_node)
        workload = launch.workload(launch.response_tokens, *shape)
        result = estimate(launch.job, launch.plan, cluster, workload)
        longest = longest_response(launch, launch.plan, cluster, *shape)
        changes = None if result.fits else what_to_change(launch, cluster, *shape)
    except (SpecError, OSError) as error:
        print(f"nereus check: {error}", file=sys.stderr)
        return 2
    if args.json:
        out = {
            "framework": launch.framework,
            "fits": result.fits,
            "peak_stage": str(result.peak.stage),
            "peak_bytes": result.peak.reserved_bytes,
            "longest_response_tokens": longest,
            "max_response_tokens": launch.response_tokens,
            "changes": [dataclasses.asdict(c) for c in changes or []],
            "plan": launch.plan.to_dict(),
            "estimate": to_dict(result),
        }
        print(json.dumps(out))
    else:
        print(_text(launch, result, longest, changes))
        if args.explain:
            print()
            print(explanation(result))
    return 0 if result.fits else 1
