"""What transitions took, by kind and part, from the records of jobs that ran.

    python benchmarks/transition_times.py FOLDER...

Reads every run directory below the folders (of `nereus demo`, of benchmarks, of tests run with
`pytest --basetemp=FOLDER`) and prints a Markdown table: of the committed transitions of each kind
and engine how many there were, the median of what all ranks received from each other, and the
median seconds of every part.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from nereus_plugins.trace.record import (
    RECORDS_FILE,
    Record,
    RunRecord,
    TransitionRecord,
    read_records,
)

# What is shown of a transition's seconds: a column, and what it adds up.
COLUMNS = {
    "claim": ("claim", "join"),
    "build": ("prepare.form_groups", "prepare.build"),
    "move": ("prepare.move",),
    "verify": ("prepare.verify",),
    "prepare": ("prepare",),
    "commit": ("journal", "commit"),
    "release": ("release", "follow"),
    "rollout": ("rollout",),
}


def kind(record: TransitionRecord) -> str:
    """What changes: ranks or layouts, knobs, servers that are launched; and if it was hidden."""
    parts = []
    if record.ranks:
        joined, left = record.ranks["joined"], record.ranks["left"]
        parts += [f"{len(joined)} join"] if joined else []
        parts += [f"{len(left)} leave"] if left else []
    elif record.units:
        parts.append("layout")
    parts += ["knobs"] if record.knobs else []
    if launched := record.rollout.get("launched"):
        # Only vLLM's servers have a part of that name; OpenRLHF has no others, and no parts.
        replicas = record.rollout["replicas"]
        vllm = not replicas or any("profile" in one.get("seconds", {}) for one in replicas)
        parts.append(f"{len(launched)} {'vLLM ' if vllm else ''}server(s) launched")
    return ", ".join(parts) + (" (in the background)" if "hidden_s" in record.background else "")


def engine(records: Sequence[Record]) -> str:
    if any(isinstance(r, RunRecord) and r.source == "openrlhf" for r in records):
        return "DeepSpeed"
    layouts = [
        unit["from"]
        for r in records
        if isinstance(r, TransitionRecord)
        for unit in r.units.values()
    ]
    if not layouts:
        return ""
    return "FSDP2" if any("FSDP" in one or "HSDP" in one for one in layouts) else "Megatron"


def rows(folders: Iterable[Path]) -> list[list[str]]:
    """The table's rows. Raises: RecordError."""
    found: dict[tuple[str, str], list[TransitionRecord]] = defaultdict(list)
    for folder in folders:
        for file in sorted(folder.rglob(RECORDS_FILE)):
            records = list(read_records(file))
            for record in records:
                if isinstance(record, TransitionRecord) and record.outcome == "committed":
                    found[kind(record), engine(records)].append(record)
    out = []
    for (what, ran), transitions in sorted(found.items()):
        wire = [sum(u.get("bytes_wire", 0) for u in t.units.values()) for t in transitions]
        cells = [what, ran, str(len(transitions)), f"{statistics.median(wire) / 1e6:.1f}"]
        for phases in COLUMNS.values():
            seconds = [
                sum(t.seconds[phase] for phase in phases if phase in t.seconds)
                for t in transitions
                if any(phase in t.seconds for phase in phases)
            ]
            cells.append(f"{statistics.median(seconds):.2f}" if seconds else "")
        waited = [sum(s for phase, s in t.seconds.items() if "." not in phase) for t in transitions]
        cells.append(f"{statistics.median(waited):.2f} ({min(waited):.2f}-{max(waited):.2f})")
        out.append(cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    head = ["what changes", "engine", "n", "MB", *COLUMNS, "waited for (range)"]
    table = [head, ["---"] * len(head), *rows(parser.parse_args().folders)]
    print("\n".join("| " + " | ".join(cells) + " |" for cells in table))


if __name__ == "__main__":
    main()
