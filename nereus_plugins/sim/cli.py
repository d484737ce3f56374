"""`nereus sim`: policies on a trace, simulated."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus_plugins.controller.journal import FILE as DECISIONS_FILE
from nereus_plugins.spec import SpecError
from nereus_plugins.trace.conditions import find
from nereus_plugins.trace.record import RECORDS_FILE

from . import run
from .constants import BASIS, Constants
from .truth import TruthSpec
from .world import World

EPILOG = """policies:
{policies}

examples:
  nereus sim growth --policies static,dp_scaling,static_hindsight
  nereus sim my-trace.json --policies static --seed 3 --records out/ --json

Every figure is simulated. docs/simulator.md says what is modelled, what is assumed, and what each
policy may know."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus sim",
        description="Run policies through a trace on a simulated cluster.",
        epilog=EPILOG.format(
            policies="\n".join(f"  {name:17} {text}" for name, text in run.SUMMARIES.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("trace", help="a trace file, or the name of one that ships")
    p.add_argument(
        "--policies",
        help="comma-separated, of those below; default: all (without the oracle where conditions "
        "go by wall clock)",
    )
    p.add_argument("--seed", type=int, help="of truth and chance; default: the trace's")
    p.add_argument("--truth", type=Path, metavar="FILE", help="spreads of truth and chance (YAML)")
    p.add_argument("--constants", type=Path, metavar="FILE", help="costs of transitions (YAML)")
    p.add_argument("--records", type=Path, metavar="DIR", help="each policy's records go here")
    p.add_argument("--json", action="store_true")
    p.add_argument(
        "--show-constants", action="store_true", help="constants and where they are from"
    )
    return p


def constants_text(constants: Constants) -> str:
    lines = ["constants of transitions and restarts:"]
    for name, basis in BASIS.items():
        lines.append(f"  {name:26} {getattr(constants, name):<12g} {basis.kind}: {basis.source}")
    return "\n".join(lines)


def _check_records(folder: Path) -> None:
    """Raises: SpecError where a run's records cannot be, said before it is simulated."""
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise SpecError(f"--records: {there} is no directory that can be written to: give another")
    if any((folder / name).exists() for name in (RECORDS_FILE, DECISIONS_FILE)):
        raise SpecError(f"--records: {folder} has records already: remove them, or give another")


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 done, 1 a policy did not reach the end, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        trace = find(args.trace)
        if args.policies is None:
            names = [n for n in run.POLICIES if n != "oracle" or trace.indexed_by == "step"]
        else:
            names = list(dict.fromkeys(n.strip() for n in args.policies.split(",") if n.strip()))
        unknown = [name for name in names if name not in run.POLICIES]
        if unknown or not names:
            wrong = unknown[0] if unknown else args.policies
            raise SpecError(
                f"--policies: no policy {wrong!r}: choose from {', '.join(run.POLICIES)}"
            )
        if args.seed is not None and args.seed < 0:
            raise SpecError(f"--seed must be at least 0, got {args.seed}")
        for name in names if args.records else ():
            _check_records(args.records / name)
        world = World(
            trace,
            seed=args.seed,
            truth=TruthSpec.load(args.truth) if args.truth else None,
            constants=Constants.load(args.constants) if args.constants else None,
        )
        results = []
        for name in names:
            try:
                found = run.run(world, name, args.records / name if args.records else None)
            except SpecError as error:
                if len(names) == 1:
                    raise
                found = run.not_begun(name, str(error))
            results.append(found)
    except BrokenPipeError:
        raise
    except (SpecError, OSError) as error:
        print(f"nereus sim: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(run.report(world, results)))
    else:
        print(run.text(world, results))
        if args.show_constants:
            print()
            print(constants_text(world.constants))
    return 1 if any(result.stopped for result in results) else 0
