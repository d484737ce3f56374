"""Running policies through a trace, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereus_plugins.controller.journal import FILE as DECISIONS_FILE
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.job import Proposal
from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import RecordWriter, StepRecord, TransitionRecord

from . import elastic, frameworks
from .hindsight import StaticHindsight
from .job import Failure, SimulatedJob
from .nereus import Nereus, RestartElastic
from .oracle import Oracle
from .policies import Decision, DPScaling, Elsewhere, Policy, Static
from .world import World

# What makes each policy. It runs in the world given, or in that of an `Elsewhere`.
POLICIES: Mapping[str, Callable[[World], Policy | Elsewhere]] = {
    "static": lambda world: Static(planning=world.planning()),
    "dp_scaling": lambda world: DPScaling(world.planning()),
    "static_hindsight": lambda world: StaticHindsight(
        world, lambda plan: _run_s(world, Static("held", plan, world.hindsight()))
    ),
    "verl_static": lambda world: frameworks.untuned(world, "verl_static", "verl"),
    "verl_tuned": lambda world: frameworks.tuned(world, "verl_tuned", "verl", _run_s),
    "verl_dynamic": lambda world: elastic.verl_dynamic(world, _run_s),
    "openrlhf_default": lambda world: frameworks.untuned(world, "openrlhf_default", "openrlhf"),
    "openrlhf_tuned": lambda world: frameworks.tuned(world, "openrlhf_tuned", "openrlhf", _run_s),
    "restart_elastic": lambda world: RestartElastic(world),
    "threshold": lambda world: elastic.Threshold(world.planning()),
    "nereus": Nereus,
    "oracle": lambda world: Oracle(world, lambda: _run_others(world)),
}
# One line of each, for whoever has to choose.
SUMMARIES: Mapping[str, str] = {
    "static": "the planner's best for the first conditions, held; restarted where GPUs are taken",
    "dp_scaling": "static's TP and PP, DP follows the GPUs (the paper's baseline)",
    "static_hindsight": "the one plan that does best on the whole trace, held",
    "verl_static": "verl's own example for such a model, held",
    "verl_tuned": "the best plan verl can be launched in, with hindsight, held",
    "verl_dynamic": "verl_tuned, with rollout replicas on GPUs that come and go",
    "openrlhf_default": "OpenRLHF's own example, held",
    "openrlhf_tuned": "the best plan OpenRLHF can be launched in, with hindsight, held",
    "restart_elastic": "nereus, where every change is a checkpoint and a restart",
    "threshold": "the same by transitions, when a rule says so",
    "nereus": "the controller of live jobs",
    "oracle": "the best sequence of plans, everything known; and the bound without transitions",
}
# A step that fails this often in a row ends the run.
MOST_FAILURES = 6


@dataclasses.dataclass(frozen=True)
class Result:
    """One policy on one trace under one seed; all figures simulated.

    Attributes:
        steps: how many were run to their end, those run again after a failure included.
        run_s: from the first to the last, all transitions and failures included.
        step_s_mean, step_s_p50, step_s_p99: of steps alone.
        tokens_per_s_per_gpu: tokens of the trace's steps (once each) over GPU seconds used.
        gpu_hours: of the GPUs that the plan in force used, over the whole run.
        transitions, restarts: that were committed. transition_share: of both, of run_s.
        stall_s: their seconds by phase.
        oom, failures: steps that ran out of memory, and that failed for any reason.
        stopped: why the run did not reach its end; empty if it did.
        about: what the policy says of itself: the oracle's candidates, and its bound.
    """

    policy: str
    steps: int
    run_s: float
    step_s_mean: float
    step_s_p50: float
    step_s_p99: float
    tokens_per_s_per_gpu: float
    gpu_hours: float
    transitions: int
    restarts: int
    transition_share: float
    stall_s: Mapping[str, float]
    oom: int
    failures: int
    stopped: str
    about: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        del out["policy"]
        return out


def run(world: World, name: str, records: Path | None = None) -> Result:
    """Run one policy to the trace's end.

    Args:
        name: one of `POLICIES`.
        records: a directory for the run's records, and the controller's journal.

    Raises: SpecError: no plan to start in; OSError.
    """
    if name not in POLICIES:
        raise SpecError(f"no policy {name!r}: choose from {', '.join(POLICIES)}")
    made = POLICIES[name](world)
    if isinstance(made, Elsewhere):
        world, made = made.world, made.policy
    if records is None or not isinstance(made, Nereus):
        return through(world, made, records)
    made.journal = DecisionJournal(records / DECISIONS_FILE)
    try:
        return through(world, made, records)
    finally:
        made.journal.close()


def not_begun(name: str, reason: str) -> Result:
    """Of a policy that finds no plan to start in."""
    return Result(
        name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, {}, 0, 0, f"the start: {reason}"
    )  # fmt: skip


def through(world: World, policy: Policy, records: Path | None = None) -> Result:
    """As `run`, of a policy of the caller's own."""
    trace = world.trace
    world.memo.setdefault("ran", set()).add(policy.name)
    plan = policy.start(world.known)
    writer = RecordWriter(records) if records is not None else None
    try:
        job = SimulatedJob(
            world,
            plan,
            name=f"{trace.name}/{policy.name}",
            on_record=writer.write if writer else None,
        )
        result = _result(policy.name, job, _to_the_end(job, policy))
        about = policy.about if isinstance(policy, Oracle) else {}
        return dataclasses.replace(result, about=about)
    finally:
        if writer is not None:
            writer.close()


def _run_others(world: World) -> None:
    """Run the policies of this world's engine that have not been run in it. Those of frameworks
    choose their engine, and are not run for the oracle's sake."""
    for name, make in POLICIES.items():
        of_framework = name.startswith(("verl_", "openrlhf_"))
        if name == "oracle" or of_framework or name in world.memo.get("ran", set()):
            continue
        policy = make(world)
        assert not isinstance(policy, Elsewhere)
        with contextlib.suppress(SpecError):  # it cannot begin
            through(world, policy)


def _run_s(world: World, policy: Policy) -> float:
    """Seconds of the trace; infinite if the policy does not reach its end, or cannot begin."""
    try:
        result = through(world, policy)
    except SpecError:
        return math.inf
    return math.inf if result.stopped else result.run_s


def _to_the_end(job: SimulatedJob, policy: Policy) -> tuple[float, str]:
    """(GPU seconds, why it stopped early)."""
    gpu_s = 0.0
    failing: list[Failure] = []
    while job.step < job.world.trace.steps:
        before_s, ranks = job.elapsed_s, 1 + max(job.describe().devices)
        try:
            _decide(job, policy)
            outcome = job.advance()
            if isinstance(outcome, Failure):
                failing.append(outcome)
                if len(failing) > MOST_FAILURES:
                    return gpu_s, f"step {outcome.step + 1}: {outcome.reason}"
                job.recover(policy.recover(job, outcome), outcome)
            elif failing and job.step > failing[-1].step:
                failing.clear()
        except SpecError as error:
            return gpu_s, f"step {job.step + 1}: {error}"
        gpu_s += (job.elapsed_s - before_s) * max(ranks, 1 + max(job.describe().devices))
    return gpu_s, ""


def _decide(job: SimulatedJob, policy: Policy) -> None:
    decision = policy.decide(job)
    if decision is not None and not _apply(job, decision):
        policy.refused(job, decision)
        again = policy.decide(job)
        if again is not None:
            _apply(job, again)


def _apply(job: SimulatedJob, decision: Decision) -> bool:
    if decision.restart:
        return job.restart(decision.plan, decision.predicted).outcome == "committed"
    proposal = Proposal(job.epoch(), decision.plan)
    return job.execute(proposal, decision.predicted).outcome == "committed"


def _result(name: str, job: SimulatedJob, ended: tuple[float, str]) -> Result:
    gpu_s, stopped = ended
    steps = [r for r in job.records if isinstance(r, StepRecord)]
    moves = [r for r in job.records if isinstance(r, TransitionRecord)]
    committed = [r for r in moves if r.outcome == "committed"]
    restarts = [r for r in committed if "relaunch" in r.seconds]
    failed = [r for r in moves if r.outcome == "failed"]
    stall: dict[str, float] = {}
    for record in committed:
        for phase, seconds in record.seconds.items():
            stall[phase] = stall.get(phase, 0.0) + seconds
    step_s = np.array([r.step_s for r in steps] or [0.0])
    # A step that was run again made its tokens once.
    tokens = {r.step: r.tokens["total"] for r in steps}
    return Result(
        policy=name,
        steps=len(steps),
        run_s=job.elapsed_s,
        step_s_mean=float(step_s.mean()),
        step_s_p50=float(np.quantile(step_s, 0.5)),
        step_s_p99=float(np.quantile(step_s, 0.99)),
        tokens_per_s_per_gpu=sum(tokens.values()) / gpu_s if gpu_s else 0.0,
        gpu_hours=gpu_s / 3600.0,
        transitions=len(committed) - len(restarts),
        restarts=len(restarts),
        transition_share=sum(stall.values()) / job.elapsed_s if job.elapsed_s else 0.0,
        stall_s=stall,
        oom=sum("out of memory" in r.reason for r in failed),
        failures=len(failed),
        stopped=stopped,
    )


def report(world: World, results: Sequence[Result]) -> dict[str, Any]:
    """Everything that a reader of the figures must know, JSON-able."""
    trace = world.trace
    return {
        "simulated": True,
        "trace": trace.name,
        "indexed_by": trace.indexed_by,
        "steps": trace.steps,
        "seed": world.seed,
        "note": trace.note,
        "assumptions": list(trace.assumptions),
        "constants": dataclasses.asdict(world.constants),
        "truth": dataclasses.asdict(world.truth.spec),
        "policies": {result.policy: result.to_dict() for result in results},
    }


def text(world: World, results: Sequence[Result]) -> str:
    """The report as a table."""
    trace = world.trace
    lines = [
        f"SIMULATED, not measured: trace {trace.name}, {trace.steps} steps by {trace.indexed_by}, "
        f"seed {world.seed}",
        trace.note,
        "",
        f"{'policy':18} {'step s':>9} {'p50':>9} {'p99':>9} {'tok/s/GPU':>10} {'run h':>8} "
        f"{'GPU h':>9} {'trans':>6} {'restarts':>8} {'share':>8} {'oom':>4}",
    ]
    for r in results:
        lines.append(
            f"{r.policy:18} {r.step_s_mean:9.2f} {r.step_s_p50:9.2f} {r.step_s_p99:9.2f} "
            f"{r.tokens_per_s_per_gpu:10.1f} {r.run_s / 3600:8.1f} {r.gpu_hours:9.0f} "
            f"{r.transitions:6d} {r.restarts:8d} {100 * r.transition_share:7.3f}% {r.oom:4d}"
            + (f"  STOPPED at {r.stopped}" if r.stopped else "")
        )
        if r.about:
            lines.append(
                f"{'  free':18} {r.about['free_step_s']:9.2f} {'':31}"
                f"{r.about['free_s'] / 3600:8.1f}  bound: the fastest of "
                f"{r.about['candidates']:.0f} candidates in every step, transitions free"
            )
    return "\n".join(lines)
