"""`nereus ab`: policies or jobs side by side, simulated or measured."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.sim import run as running
from nereus_plugins.sim.constants import BASIS, Constants
from nereus_plugins.sim.truth import TruthSpec
from nereus_plugins.spec import SpecError
from nereus_plugins.trace import files
from nereus_plugins.trace.conditions import MOST_STEPS, Trace, find

from . import measured, sensitivity, simulated
from .compare import comparison
from .figures import read_run
from .render import Drawn, write_page
from .thin import thinned
from .versions import code_sha256, commit, versions

JSON_FILE, PAGE_FILE = "ab.json", "report.html"
EPILOG = """examples:
  nereus ab --trace growth --policies static,dp_scaling,static_hindsight --seeds 3 --json
  nereus ab --trace my-trace.json --policies static,dp_scaling --seeds 5 -o compared/
  nereus ab runs/off runs/act
  nereus ab --runs off=off-1,off-2,off-3 --runs act=act-1,act-2,act-3 --baseline off -o compared/

A report is simulated or measured, never both. docs/ab.md says what each figure is."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus ab",
        description="Policies on a trace (simulated) or finished jobs (measured), side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="*", help="measured: run directories; each is its own name")
    p.add_argument(
        "--runs",
        action="append",
        default=[],
        metavar="NAME=DIR[,DIR...]",
        help="measured: a name and its runs; the n-th runs of all names are a pair",
    )
    p.add_argument("--baseline", help="the name that differences are against; default: the first")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line")
    p.add_argument(
        "-o", "--out", type=Path, metavar="DIR",
        help="results go here, and are taken from here when asked for again",
    )  # fmt: skip
    s = p.add_argument_group("simulated")
    s.add_argument("--trace", help="a trace file, or the name of one that ships")
    s.add_argument("--policies", help=f"comma-separated, of {', '.join(running.POLICIES)}")
    s.add_argument("--seeds", type=int, metavar="N", help="seeds of truth and chance; default: 1")
    s.add_argument("--steps", type=int, help="thin the trace out to so many steps")
    s.add_argument("--truth", type=Path, metavar="FILE", help="spreads of truth and chance (YAML)")
    s.add_argument("--constants", type=Path, metavar="FILE", help="costs of transitions (YAML)")
    s.add_argument(
        "--vary", metavar="NAMES",
        help="vary assumptions one at a time and tabulate the differences: all, or "
        f"comma-separated of {', '.join(sensitivity.ASSUMPTIONS)}",
    )  # fmt: skip
    s.add_argument("--jobs", type=int, metavar="N", help="processes, by seed; default: 1")
    return p


def _say(text: str) -> None:
    print(f"nereus ab: {text}", file=sys.stderr, flush=True)


def _baseline(args: argparse.Namespace, names: Sequence[str]) -> str:
    if args.baseline is not None and args.baseline not in names:
        raise SpecError(f"--baseline {args.baseline!r} is none of {', '.join(names)}")
    return args.baseline or names[0]


_MOST = {"seeds": 1000, "steps": MOST_STEPS, "jobs": 1000}


def _check_counts(args: argparse.Namespace) -> None:
    for name, most in _MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise SpecError(f"--{name} must be 1 to {most}, got {value}")


def _check_folder(folder: Path) -> None:
    """Raises: SpecError where results cannot be kept, before anything is computed."""
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise SpecError(f"--out: {there} is no directory that can be written to: give another")


def request(args: argparse.Namespace) -> simulated.Request:
    """What is to be simulated, checked. Raises: SpecError; OSError."""
    _check_counts(args)
    names = tuple(dict.fromkeys(n.strip() for n in (args.policies or "").split(",") if n.strip()))
    if not names:
        raise SpecError(f"--policies is required: choose from {', '.join(running.POLICIES)}")
    for name in names:
        if name not in running.POLICIES:
            raise SpecError(f"no policy {name!r}: choose from {', '.join(running.POLICIES)}")
    trace = find(args.trace)
    if args.steps is not None:
        trace = thinned(trace, args.steps)
    return simulated.Request(
        trace,
        names,
        tuple(trace.seed + i for i in range(args.seeds or 1)),
        TruthSpec.load(args.truth) if args.truth else TruthSpec(),
        Constants.load(args.constants) if args.constants else Constants(),
    )


def _runs(
    asked: simulated.Request, out: Path | None, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """By policy, its figures in the order of the seeds."""
    found = simulated.run_all(asked, out, args.jobs or 1, _say)
    return {name: [by_seed[seed] for seed in asked.seeds] for name, by_seed in found.items()}


def _simulated(args: argparse.Namespace) -> tuple[dict[str, Any], Drawn]:
    asked = request(args)
    baseline = _baseline(args, asked.policies)
    others = sensitivity.settings(asked, args.vary) if args.vary is not None else []
    runs = _runs(asked, args.out, args)
    drawn = {}
    if args.out is not None:
        for name in asked.policies:
            folder = simulated.folder_of(args.out, name, asked.seeds[0])
            if runs[name][0].get("steps"):  # else it stopped before a step was done
                drawn[name] = (folder, read_run(folder))
    varied = []
    for other in others:
        _say(f"varied: {other.text}")
        beside = args.out / "varied" / other.name if args.out is not None else None
        varied.append((other, _runs(other.request, beside, args)))
    return {
        "kind": "simulated",
        **comparison(runs, baseline),
        "sensitivity": sensitivity.tabulated(runs, varied, baseline) if varied else None,
        "seeds": list(asked.seeds),
        "trace": describe_trace(asked.trace),
        "truth": dataclasses.asdict(asked.truth),
        "constants": {
            name: {"value": getattr(asked.constants, name), "kind": b.kind, "source": b.source}
            for name, b in BASIS.items()
        },
    }, drawn


def describe_trace(trace: Trace) -> dict[str, Any]:
    """What a reader must know of a trace; its series are left out."""
    whole = trace.to_dict()
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    series = ("mean_response_tokens", "gpus", "tail")
    return {k: v for k, v in whole.items() if k not in series} | {
        "steps": trace.steps,
        "sha256": digest,
    }


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], Drawn]:
    named = measured.named_runs(args.run, args.runs)
    if len(named) < 2:
        raise SpecError("a comparison needs two names at least: run directories, or --runs twice")
    baseline = _baseline(args, list(named))
    kind, records = measured.read_all(named)
    counted_by, runs = measured.figures_of(records)
    return {
        "kind": kind,
        **comparison(runs, baseline),
        "time_by": counted_by,
        "last_step": measured.last_common_step(records),
        "jobs": measured.described(named, records),
    }, {name: (named[name][0], runs[0]) for name, runs in records.items()}


def made(args: argparse.Namespace) -> tuple[dict[str, Any], Drawn]:
    """The whole comparison, JSON-able, and the runs to draw. Raises: SpecError; OSError."""
    if args.out is not None:
        _check_folder(args.out)
    simulate = [f"--{n}" for n in ("trace", "policies", "seeds", "steps", "truth", "constants",
                                   "vary", "jobs") if getattr(args, n) is not None]  # fmt: skip
    if args.run or args.runs:
        if simulate:
            raise SpecError(
                f"{simulate[0]} is of simulations, runs are of jobs that have run: measured and "
                "simulated figures are never mixed in one report"
            )
        found, drawn = _measured(args)
    elif args.trace is None:
        raise SpecError("give --trace and --policies, or two runs")
    else:
        found, drawn = _simulated(args)
    return found | {
        "versions": versions(),
        "commit": commit(),
        "code_sha256": code_sha256(),
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if value not in (None, [], False)
        },
    }, drawn


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 done, 1 a policy did not reach the end, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        found, drawn = made(args)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            files.replace(args.out / JSON_FILE, (json.dumps(found, indent=1), "\n"))
            if drawn:
                trace = found.get("trace")
                names = list(found["policies"])
                title = " / ".join(names) if len(names) < 4 else f"{len(names)} policies"
                title += f" on {trace['name']}" if trace else ""
                write_page(args.out / PAGE_FILE, found["kind"], title, drawn, found)
                _say(f"page: {args.out / PAGE_FILE}")
    except BrokenPipeError:
        raise
    except (SpecError, OSError) as error:
        print(f"nereus ab: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else text(found))
    return 1 if any(one["stopped"] for one in found["policies"].values()) else 0


def text(found: Mapping[str, Any]) -> str:
    """The comparison as a table."""
    if found["kind"] == "simulated" and "trace" in found:
        trace = found["trace"]
        lines = [
            f"SIMULATED, not measured: trace {trace['name']}, {trace['steps']} steps by "
            f"{trace.get('indexed_by', 'step')}, {len(found['seeds'])} seeds from "
            f"{found['seeds'][0]}",
            trace["note"],
        ]
    else:
        lines = [
            f"{found['kind'].upper()}, up to step {found['last_step']}; run time by "
            f"{found['time_by']}"
        ]
        lines += [f"  {name}: {_software(jobs)}" for name, jobs in found.get("jobs", {}).items()]
    width = max(12, *(len(name) for name in found["policies"]))
    lines += [
        "",
        f"{'':{width}} {'step s':>9} {'p50':>9} {'p99':>9} {'tok/s/GPU':>10} {'run s/step':>10} "
        f"{'GPU h':>9} {'trans':>6} {'restarts':>8} {'share':>8} {'oom':>5}",
    ]
    for name, one in found["policies"].items():
        lines.append(f"{name:{width}} " + _row(one))
    lines += ["", f"against {found['baseline']}, run time (95 % interval over seeds):"]
    for name, by_figure in found["differences"].items():
        d = by_figure["run_s"]
        interval = "one pair" if d["low"] is None else f"{d['low']:+.1%} to {d['high']:+.1%}"
        lines.append(f"  {name:{width}} {d['mean']:+.1%}  ({interval})")
    if found["oracle"] is not None:
        oracle = found["oracle"]
        free = oracle["free_saving"]
        bound = "" if free is None else f" ({free:.1%} if transitions were free)"
        lines += [
            "",
            f"the oracle saves {oracle['saving']:.1%} over static_hindsight{bound}; of it:",
        ]
        for name, share in oracle["shares"].items():
            gain = oracle["against_hindsight"][name]
            lines.append(
                f"  {name:{width}} "
                + (f"{share:.0%}" if share is not None else f"{gain:+.1%} of the whole")
            )
    if found.get("sensitivity"):
        lines += ["", f"assumptions varied one at a time; run time against {found['baseline']}:"]
        lines += _sensitivity(found["sensitivity"], width)
    return "\n".join(lines)


def _sensitivity(table: Mapping[str, Any], width: int) -> list[str]:
    names = list(table["verdicts"])
    column = max(len(row["text"]) for row in table["rows"])
    lines = [f"  {'':{column}} " + " ".join(f"{name:>{width}}" for name in names)]
    for row in table["rows"]:
        cells = []
        for name in names:
            d = row["differences"].get(name)
            cells.append(f"{'stopped' if d is None else format(d['mean'], '+.1%'):>{width}}")
        lines.append(f"  {row['text']:{column}} " + " ".join(cells))
    return lines + [f"  {name}: {verdict}" for name, verdict in table["verdicts"].items()]


def _software(jobs: Sequence[Mapping[str, Any]]) -> str:
    """What a name's runs say of themselves; each once."""
    each = (
        f"{job['source']} on {job['world_size']} ranks ("
        + (", ".join(f"{k} {v}" for k, v in job["versions"].items()) or "no versions recorded")
        + ")"
        for job in jobs
    )
    return "; ".join(dict.fromkeys(each))


def _row(one: Mapping[str, Any]) -> str:
    if one["step_s_mean"] is None:
        return f"STOPPED {one['stopped']}"
    end = f"  STOPPED {one['stopped']}" if one["stopped"] else ""
    if one.get("ended_early"):
        end += f"  ENDED EARLY: {one['ended_early']}"
    per_step = one.get("run_s_per_step") or 0.0
    return (
        f"{one['step_s_mean']:9.2f} {one['step_s_p50']:9.2f} {one['step_s_p99']:9.2f} "
        f"{one['tokens_per_s_per_gpu']:10.1f} {per_step:10.2f} {one['gpu_hours']:9.1f} "
        f"{one['transitions']:6.4g} {one['restarts']:8.3g} {100 * one['transition_share']:7.3f}% "
        f"{one['oom']:5.2g}{end}"
    )
