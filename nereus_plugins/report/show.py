"""`nereus report`: a page, and a trace for Perfetto, from the records of one or more runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus_plugins.spec import SpecError
from nereus_plugins.trace import files

from . import measured, perfetto
from .compare import comparison
from .render import write_page

EPILOG = """examples:
  nereus report run/ -o report.html
  nereus report --runs off=run-off --runs act=run-act -o report.html
  nereus report run/ --perfetto trace.json

The page is one file and opens offline. The trace opens in ui.perfetto.dev or chrome://tracing."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus report",
        description="A page from the records of live, imported or simulated runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="*", help="run directories or records; each is its own name")
    p.add_argument("--runs", action="append", default=[], metavar="NAME=DIR")
    p.add_argument("-o", "--out", type=Path, metavar="FILE", help="the page (HTML)")
    p.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="the runs as a Chrome trace (JSON)"
    )
    return p


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 done, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        if args.out is None and args.perfetto is None:
            raise SpecError("say where it goes: -o FILE for a page, --perfetto FILE for a trace")
        for option, path in (("-o", args.out), ("--perfetto", args.perfetto)):
            if path is not None:
                files.check_out(path, option)
        named = measured.named_runs(args.run, args.runs)
        if not named:
            raise SpecError("give a run directory, or --runs NAME=DIR")
        kind, records = measured.read_all(named)
        first = {name: runs[0] for name, runs in records.items()}
        if args.out is not None:
            found = None
            if len(named) > 1:
                counted_by, runs = measured.figures_of(records)
                found = comparison(runs, next(iter(named))) | {
                    "time_by": counted_by,
                    "last_step": measured.last_common_step(records),
                    "jobs": measured.described(named, records),
                }
            drawn = {name: (named[name][0], run) for name, run in first.items()}
            write_page(args.out, kind, " / ".join(named), drawn, found)
            print(f"page saved to {args.out}")
        if args.perfetto is not None:
            files.replace(args.perfetto, perfetto.text(first, kind))
            print(f"trace saved to {args.perfetto}")
    except BrokenPipeError:
        raise
    except (SpecError, OSError) as error:
        print(f"nereus report: {error}", file=sys.stderr)
        return 2
    return 0
