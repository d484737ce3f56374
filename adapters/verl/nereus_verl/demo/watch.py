"""Shows a running job from its records: a line a step, a table a transition."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    RunRecord,
    StepRecord,
    TransitionRecord,
    _Record,
    parse_record,
)

REWARD = "critic/score/mean"
BAR_CHARACTERS = 24
# verl's timers, in the order in which the stages run.
STAGES = {
    "gen": "generate",
    "old_log_prob": "log-probs",
    "ref": "reference",
    "values": "values",
    "update_critic": "critic",
    "update_actor": "actor",
    "update_weights": "sync",
}
# What a start says in its log, and what to tell the person who waits.
MILESTONES = {
    "Started a local Ray instance": "Ray is up",
    "train and validate dataloader initialized": "prompts loaded, starting the ranks",
    "actor and ref model engine initialized": "models built on all ranks",
    "all initialize finished": "rollout server is up, first step",
}


class RecordTail:
    """Reads the records that were added to a file since the last call."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RECORDS_FILE
        self._read_bytes = 0

    def new(self) -> Iterator[_Record]:
        import json

        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            yield parse_record(json.loads(line))


class Watcher:
    """Prints a job as it goes on, and keeps what is needed to judge it at the end."""

    def __init__(self, console: Console, run_dir: Path, steps: int) -> None:
        self.steps: list[StepRecord] = []
        self.transitions: list[TransitionRecord] = []
        self._console = console
        self._tail = RecordTail(run_dir)
        self._total = steps
        self._began_s = time.monotonic()
        self._open_milestones = dict(MILESTONES)

    def on_line(self, line: str) -> None:
        """Called with every line of the job's log."""
        for text, meaning in list(self._open_milestones.items()):
            if text in line:
                del self._open_milestones[text]
                waited = time.monotonic() - self._began_s
                self._console.print(f"  [dim]{waited:4.0f} s  {meaning}[/dim]")
        self.update()

    def update(self) -> None:
        """Prints the records written since the last call."""
        for record in self._tail.new():
            if isinstance(record, RunRecord):
                plan = ", ".join(
                    f"{u} [bold]{layout_text(x)}[/bold]" for u, x in record.plan.items()
                )
                self._console.print(f"\n{record.world_size} ranks, {plan}\n")
            elif isinstance(record, StepRecord):
                self.steps.append(record)
                self._console.print(step_line(record, self._total), highlight=False)
            elif isinstance(record, TransitionRecord):
                self.transitions.append(record)
                self._console.print(transition_table(record))


def layout_text(layout: Any) -> str:
    """A layout as records carry it (a mapping or its text) -> its text."""
    return str(Layout.from_dict(layout)) if isinstance(layout, Mapping) else str(layout)


def bar(share: float) -> str:
    """0 to 1 as a bar of fixed width."""
    full = round(min(max(share, 0.0), 1.0) * BAR_CHARACTERS)
    return "█" * full + "░" * (BAR_CHARACTERS - full)


def step_line(record: StepRecord, total: int) -> str:
    """One line: step, reward as a bar and a number, seconds by stage."""
    reward = record.metrics[REWARD]
    stages = "  ".join(
        f"{name} {record.stages_s[timer]:.1f}"
        for timer, name in STAGES.items()
        if timer in record.stages_s
    )
    return (
        f"step {record.step:2d}/{total}  reward {reward:.3f} [green]{bar(reward)}[/green] "
        f"{record.step_s:5.1f} s  [dim]{stages}[/dim]"
    )


def transition_table(record: TransitionRecord) -> Table:
    """One row a unit: layouts, bytes, seconds by part, and what was verified."""
    total = sum(seconds for part, seconds in record.seconds.items() if "." not in part)
    colour = "cyan" if record.outcome == "committed" else "red"
    title = f"after step {record.step}: {record.outcome}, training waited {total:.2f} s"
    caption = f"all ranks agreed on one schedule ({record.digest[:12]})" if record.digest else ""
    table = Table(title=f"[bold {colour}]{title}[/]", caption=record.reason or caption)
    for column in ("unit", "from", "to"):
        table.add_column(column, no_wrap=True)
    for column in ("between ranks", "kept"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("seconds by part")
    table.add_column("verified")
    for name, unit in record.units.items():
        seconds = unit.get("seconds", {})
        parts = ", ".join(f"{part} {s:.2f}" for part, s in seconds.items() if s >= 0.005)
        verified = ", ".join(f"{n} {what}" for what, n in unit.get("verified", {}).items())
        table.add_row(
            name,
            str(unit["from"]),
            str(unit["to"]),
            size_text(unit.get("bytes_wire", 0)),
            size_text(unit.get("bytes_local", 0)),
            parts,
            verified,
        )
    return table


def size_text(size_bytes: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
