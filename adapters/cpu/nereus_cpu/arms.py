"""What measured comparisons on CPU have in common: arms run one after the other, seed by seed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


def parser_for(description: str | None, arms: Collection[str]) -> argparse.ArgumentParser:
    """Options of every comparison: where, which arms, which seeds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arms", default=",".join(arms), help=f"of {', '.join(arms)}")
    parser.add_argument("--seeds", type=int, default=1, help="1 .. N")
    parser.add_argument("--first-seed", type=int, default=1)
    return parser


def run_arms(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    known: Collection[str],
    run: Callable[[str, int], tuple[Path, dict[str, Any]]],
) -> None:
    """Run them, print a JSON line for each, and at the end the command that compares them.

    Args:
        args: what `parser`, of `parser_for`, made. known: arms.
        run: one arm with a seed, once: where its records are, and what a person wants to know of it
            at once.
    """
    arms = args.arms.split(",")
    if unknown := [name for name in arms if name not in known]:
        parser.error(f"no arm {unknown[0]!r}: choose from {', '.join(known)}")
    # As an exception: a run then ends the job that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    where: dict[str, list[str]] = {name: [] for name in arms}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in arms:
            begin_s = time.time()
            records, told = run(name, seed)
            line = {"arm": name, "seed": seed, **told, "wall_s": time.time() - begin_s}
            print(json.dumps(line), flush=True)
            where[name].append(str(records))
    runs = " ".join(f"--runs {name}={','.join(paths)}" for name, paths in where.items())
    print(f"nereus ab {runs} --baseline {arms[0]} --json")
