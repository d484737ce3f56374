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
  nereus check --gpu h100 -- openrlhf.cli.train_ppo_ray \\
      --actor.model_name_or_path meta-llama/Meta-Llama-3-8B ...
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


# What a setting makes of a launch.
_Apply = Callable[[Launch], Launch]


def _single_changes(launch: Launch) -> Iterator[tuple[str, str, _Apply]]:
    """Single settings that lower some peak: what they set, in the framework's words, and do."""
    train = launch.plan.assignments[S.ACTOR_TRAIN].knobs
    name = launch.settings
    verl = launch.framework == "verl"

    def trained(**changed: object) -> _Apply:
        def apply(one: Launch) -> Launch:
            return _with(
                one,
                {
                    stage: dataclasses.replace(
                        a,
                        knobs=dataclasses.replace(a.knobs, **changed),  # type: ignore[arg-type]
                    )
                    for stage, a in one.plan.assignments.items()
                    if stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
                    or (verl and stage is S.CRITIC_VALUES)
                },
            )

        return apply

    def of_job(**changed: object) -> _Apply:
        return lambda one: dataclasses.replace(
            one,
            job=dataclasses.replace(one.job, **changed),  # type: ignore[arg-type]
        )

    def on(key: str, value: str = "True") -> tuple[str, str]:
        return key, " ".join(f"{one}={value}" if verl else one for one in name[key])

    def to(key: str, value: object) -> tuple[str, str]:
        return key, " ".join(f"{one}{'=' if verl else ' '}{value}" for one in name[key])

    if train.recompute != "full":
        megatron = launch.job.backend == "megatron"
        yield *on("recompute", "full" if megatron else "True"), trained(recompute="full")
    if verl:
        for field in ("offload_optimizer", "offload_params"):
            if not getattr(train, field):
                yield *on(field), trained(**{field: True})
    else:
        # Asleep, optimizer state leaves the GPU, unless it never was there, and models update one
        # after the other.
        if not train.offload_optimizer:
            asleep, apart = trained(offload_optimizer=True), of_job(updates_together=False)
            yield *on("offload_optimizer"), lambda one: apart(asleep(one))
        if not launch.job.cpu_adam:
            yield *on("cpu_adam"), of_job(cpu_adam=True)
        if launch.plan.assignments[S.ACTOR_TRAIN].layout.sharding == "zero2":
            yield *to("zero_stage", 3), _zero3
        if not launch.job.engine_sleeps:
            yield *on("engine_sleeps"), of_job(engine_sleeps=True)
    if train.token_budget_tokens is not None:
        for part in (2, 4):
            budget = train.token_budget_tokens // part
            if budget >= launch.prompt_tokens + launch.response_tokens:
                yield *to("token_budget_tokens", budget), trained(token_budget_tokens=budget)
    elif (train.micro_batch or 1) > 1:
        micro = max(1, (train.micro_batch or 1) // 2)
        for size in dict.fromkeys((micro, 1)):
            yield *to("micro_batch", size), trained(micro_batch=size)
    engine = launch.plan.assignments.get(S.ACTOR_GENERATE)
    if engine is not None:

        def engine_with(layout: Layout | None, fraction: float | None) -> _Apply:
            def apply(one: Launch) -> Launch:
                now = one.plan.assignments[S.ACTOR_GENERATE]
                knobs = now.knobs
                if fraction is not None:
                    knobs = dataclasses.replace(knobs, rollout_memory_fraction=fraction)
                return _with(
                    one, {S.ACTOR_GENERATE: Assignment(layout or now.layout, knobs, now.devices)}
                )

            return apply

        now = engine.knobs.rollout_memory_fraction or 0.6
        for fraction in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
            if abs(fraction - now) > 0.01:
                yield *to("rollout_memory_fraction", fraction), engine_with(None, fraction)
        tp = 2 * engine.layout.tp
        world = engine.layout.world_size
        if tp <= launch.gpus_per_node and world % tp == 0:
            yield *to("rollout_tp", tp), engine_with(Layout(tp=tp, dp=world // tp), None)


def _zero3(launch: Launch) -> Launch:
    return _with(
        launch,
        {
            stage: dataclasses.replace(a, layout=dataclasses.replace(a.layout, sharding="zero3"))
            for stage, a in launch.plan.assignments.items()
            if stage is not S.ACTOR_GENERATE
        },
    )


def _with(launch: Launch, changed: dict[ModelStage, Assignment]) -> Launch:
    plan = launch.plan
    return dataclasses.replace(
        launch, plan=GlobalPlan({**plan.assignments, **changed}, name=plan.name)
    )


def what_to_change(
    launch: Launch, cluster: ClusterSpec, median: float, sigma: float, keep: int = 3
) -> list[Change]:
    """The fewest settings that make the launch fit, fastest first; none where three do not."""
    workload = launch.workload(launch.response_tokens, median, sigma)
    single = list(_single_changes(launch))
    for count in (1, 2, 3):
        found = []
        for chosen in itertools.combinations(single, count):
            if len({key for key, _, _ in chosen}) < count:
                continue
            changed = launch
            for _, _, apply in chosen:
                changed = apply(changed)
            result = estimate(changed.job, changed.plan, cluster, workload)
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
    p.add_argument("--prompt-tokens", type=int, metavar="N",
                   help="longest prompt, for OpenRLHF commands that limit only prompt and response "
                   "together (default: half of the limit)")  # fmt: skip
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
    if longest >= LONGEST_TOKENS:
        lines.append(f"fits at every response length up to {LONGEST_TOKENS} tokens")
    elif longest == 0:
        lines.append("does not fit at any response length")
    else:
        lines.append(
            f"runs out of memory when responses grow beyond about {longest} tokens "
            f"({launch.response_setting} is {launch.response_tokens})"
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
        launch = read_launch(words, args.model, args.critic, args.prompt_tokens)
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
