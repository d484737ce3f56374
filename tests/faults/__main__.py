"""Many seeds, and a table of what became of the jobs: fault by place by outcome."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.scenario import Scenario, scenario
from tests.faults.strike import Outcome, Plain, plain, strike


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--backends", default="fsdp2,megatron")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    backends = args.backends.split(",")
    found: list[tuple[Scenario, Outcome]] = []
    failed: list[str] = []
    known: dict[Any, Plain] = {}
    begin = time.perf_counter()
    for seed in range(args.first, args.first + args.seeds):
        it = scenario(seed, backends)
        try:
            outcome = run(it, known)
        except Exception:
            failed.append(f"{it}\n{traceback.format_exc()}")
            print(f"FAILED  {failed[-1]}", flush=True)
            continue
        found.append((it, outcome))
        said = f" ({outcome.steps_lost} steps lost)" if outcome.how == "restarted" else ""
        print(f"{outcome.how}{said}: {it}", flush=True)
    print("\n".join(table(found)))
    print(f"{len(found)} of {args.seeds} as promised, in {time.perf_counter() - begin:.0f} s")
    if args.json:
        print(json.dumps(summary(found, failed)))
    return 1 if failed else 0


def run(it: Scenario, known: dict[Any, Plain]) -> Outcome:
    """Args: known: what jobs without a fault are, by case; filled as needed."""
    key = (str(it.case), it.staged)
    with tempfile.TemporaryDirectory(prefix="nereus-faults-") as folder:
        if key not in known:
            known[key] = plain(it.case, it.staged)
        return strike(it, known[key], Path(folder) / "struck")


def table(found: list[tuple[Scenario, Outcome]]) -> list[str]:
    hows = ("committed", "aborted", "restarted")
    counts = Counter((it.fault, it.where, outcome.how) for it, outcome in found)
    lines = [f"{'fault':10} {'where':14} " + " ".join(f"{how:>10}" for how in hows)]
    for fault, where in sorted({key[:2] for key in counts}):
        row = " ".join(f"{counts[fault, where, how]:10d}" for how in hows)
        lines.append(f"{fault:10} {where:14} {row}")
    return lines


def summary(found: list[tuple[Scenario, Outcome]], failed: list[str]) -> dict[str, Any]:
    recovered = [outcome.recovery_s for _, outcome in found if outcome.how == "restarted"]
    return {
        "seeds": len(found) + len(failed),
        "failed": len(failed),
        "outcomes": dict(Counter(outcome.how for _, outcome in found)),
        "recovery_s_median": statistics.median(recovered) if recovered else None,
        "recovery_s_max": max(recovered, default=None),
    }


if __name__ == "__main__":
    sys.exit(main())
