"""`nereus decisions`: why the controller did what it did, or did not; from its journal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.spec import GlobalPlan, ModelStage, SpecError
from nereus_plugins.spec.record import require, require_int, require_number, shown

from .decision import Decision, Numbers
from .journal import DecisionJournal, DecisionJournalError

EPILOG = """examples:
  nereus decisions outputs/run
  nereus decisions outputs/run --step 120 --alternatives
  nereus decisions outputs/run --json

A decision that only repeats the one before it is not in the journal: it held until the next."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus decisions",
        description="What the controller of a run decided, why, and what it brought.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", type=Path, help="a run directory, or its decisions.jsonl")
    p.add_argument("--proposals", action="store_true", help="only what was proposed")
    p.add_argument("--alternatives", action="store_true", help="with the plans not taken, and why")
    p.add_argument("--step", type=int, help="the decision that held after this step")
    p.add_argument("--json", action="store_true")
    return p


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 shown, 2 wrong usage, or no journal that can be read."""
    args = parser().parse_args(arguments)
    try:
        if not args.run.exists():
            raise SpecError(f"{args.run}: there is no such run: give its directory")
        entries = DecisionJournal(args.run).read()
        if not entries:
            raise SpecError(f"{args.run}: no controller has written decisions here")
        decisions = [
            Decision.from_dict(entry.get("decision", {}), where=f"{args.run}: decision")
            for entry in entries
            if entry["kind"] == "decision"
        ]
        proofs = [
            _checked(entry.get("proof"), f"{args.run}: proof")
            for entry in entries
            if entry["kind"] == "proof"
        ]
    except (SpecError, DecisionJournalError, OSError) as error:
        print(f"nereus decisions: {error}", file=sys.stderr)
        return 2
    if args.step is not None:
        decisions = [one for one in decisions if one.step <= args.step][-1:]
    if args.proposals:
        decisions = [one for one in decisions if one.kind == "propose"]
    if args.json:
        shown = [one.to_dict() for one in decisions]
        print(json.dumps({"decisions": shown, "proofs": proofs}))
        return 0
    for line in text(decisions, proofs, alternatives=args.alternatives):
        print(line)
    return 0


def _checked(proof: Any, where: str) -> Mapping[str, Any]:
    """Raises: SpecError where a field that is shown is not of its kind."""
    require(isinstance(proof, Mapping), f"{where} must be an object, got {shown(proof)}")
    require_int(where, "epoch", proof.get("epoch"), minimum=0)
    GlobalPlan.from_dict(proof.get("plan", {}), where=f"{where}.plan")
    for name in ("predicted_s", "predicted_spread_s", "predicted_stall_s", "stall_s"):
        require_number(where, name, proof.get(name))
    require_number(where, "predicted_of_s", proof.get("predicted_of_s"), above=0)
    measured = proof.get("measured")
    require(
        measured is None or (isinstance(measured, list) and len(measured) == 2),
        f"{where}.measured must be null, or a saving and its error, got {shown(measured)}",
    )
    for number in measured or ():
        require_number(where, "measured", number)
    return dict(proof)


def text(
    decisions: Sequence[Decision], proofs: Sequence[Mapping[str, Any]], *, alternatives: bool
) -> Iterator[str]:
    """The table. A proof stands beside the last decision that proposed its plan in its epoch."""
    proved = {}
    for proof in proofs:
        of = [at for at, one in enumerate(decisions) if _proves(proof, one)]
        if of:
            proved[of[-1]] = proof
    yield f"{'step':>6} {'GPUs':>5} {'tokens':>7}  decision"
    for at, one in enumerate(decisions):
        what = "propose" if one.plan is not None else "stay"
        forced = " (forced)" if one.forced else ""
        yield (
            f"{one.step:6d} {one.gpus:5d} {one.mean_response_tokens:7.0f}  "
            f"{what}{forced}: {one.reason}"
        )
        if one.plan is not None:
            yield f"{'':22}{layouts(one.plan)}"
            if one.numbers is not None:
                yield f"{'':22}{numbers_text(one.numbers)}"
            if at in proved:
                yield f"{'':22}{proof_text(proved[at])}"
        for other in one.alternatives if alternatives else ():
            yield f"{'':22}not {layouts(other.plan)}: {other.reason}"


def layouts(plan: GlobalPlan) -> str:
    """Stages with one layout together, as `TP4 PP2 DP16 (actor-train, critic-train)`."""
    by_layout: dict[str, list[ModelStage]] = {}
    for stage, one in plan.assignments.items():
        by_layout.setdefault(str(one.layout), []).append(stage)
    parts = (f"{name} ({', '.join(map(str, stages))})" for name, stages in by_layout.items())
    return f"{plan.name}: {'; '.join(parts)}"


def numbers_text(numbers: Numbers) -> str:
    parts = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in numbers.transition_parts_s.items()
    )
    costs = f"{numbers.transition_s:.1f} s" if numbers.transition_s is not None else "unknown"
    return (
        f"step {numbers.step_s:.1f} -> {numbers.new_step_s:.1f} s, transition {costs}"
        + (f" ({parts})" if parts else "")
        + f", memory {100 * numbers.memory:.0f} %"
    )


def _proves(proof: Mapping[str, Any], decision: Decision) -> bool:
    return (
        decision.plan is not None
        and decision.epoch == proof["epoch"]
        and decision.plan.assignments == GlobalPlan.from_dict(proof["plan"]).assignments
    )


def proof_text(proof: Mapping[str, Any]) -> str:
    """Predicted beside measured."""
    predicted = 100 * proof["predicted_s"] / proof["predicted_of_s"]
    spread = 100 * proof["predicted_spread_s"] / proof["predicted_of_s"]
    measured = "nothing to compare with"
    if proof.get("measured") is not None:
        mean, error = proof["measured"]
        measured = f"{100 * mean:+.1f} % (+- {100 * error:.1f})"
    return (
        f"predicted saving {predicted:+.1f} % (+- {spread:.1f}), measured {measured}; "
        f"stall predicted {proof['predicted_stall_s']:.1f} s, measured {proof['stall_s']:.1f} s"
    )
