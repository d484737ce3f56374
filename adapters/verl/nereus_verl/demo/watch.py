"""Shows a running job from its records: a line a step, a table a transition."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
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
BAR_CHARACTERS = 12
# verl's timers, in the order in which the stages run.
STAGES = {
    "gen": "gen",
    "old_log_prob": "logp",
    "ref": "ref",
    "values": "val",
    "update_critic": "critic",
    "update_actor": "actor",
}
# A transition's phases as `nereus_plugins.gtg` names them, in their order.
PHASES = ("free_gradients", "park", "build", "describe", "plan", "agree", "move", "verify", "fetch")
VERIFIED = {
    "bytes": "bytes checksummed at both ends",
    "tensors_tiled": "tensors covered exactly once",
    "scalars": "optimizer scalars equal",
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
        self._held: list[TransitionRecord] = []

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
                line = step_line(record, self._total)
                self._console.print(line, highlight=False, soft_wrap=True)
                self._show_transitions()
            elif isinstance(record, TransitionRecord):
                # It is recorded before the step that it follows, whose end it is.
                self.transitions.append(record)
                self._held.append(record)

    def finish(self) -> None:
        """Prints what is left; call it when the job has ended."""
        self.update()
        self._show_transitions()

    def _show_transitions(self) -> None:
        for record in self._held:
            self._console.print("\n" + transition_title(record), soft_wrap=True)
            self._console.print(transition_table(record), "")
        self._held.clear()


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
    stages = " ".join(
        f"{name} {record.stages_s[timer]:.1f}"
        for timer, name in STAGES.items()
        if timer in record.stages_s
    )
    return (
        f"step {record.step:2d}/{total}  reward {reward:.3f} [green]{bar(reward)}[/green] "
        f"{record.step_s:5.1f} s  [dim]{stages}[/dim]"
    )


def transition_title(record: TransitionRecord) -> str:
    """One line: when, how it ended, how long training waited for it."""
    parts = {part: s for part, s in record.seconds.items() if "." not in part}
    listed = ", ".join(f"{part} {s:.2f}" for part, s in parts.items() if s >= 0.005)
    colour = "cyan" if record.outcome == "committed" else "red"
    note = f": {record.reason}" if record.reason else ""
    return (
        f"[bold {colour}]transition after step {record.step} {record.outcome}, "
        f"training waited {sum(parts.values()):.2f} s[/] ({listed}){note}"
    )


def transition_table(record: TransitionRecord) -> Table:
    """One column a unit: layouts, bytes, seconds by part, and what was verified."""
    table = Table()
    table.add_column("", no_wrap=True)
    for name in record.units:
        table.add_column(name, no_wrap=True, justify="right")
    units = list(record.units.values())

    def row(title: str, cells: Iterable[str], last: bool = False) -> None:
        table.add_row(title, *cells, end_section=last)

    row("from", (str(unit["from"]) for unit in units))
    row("to", (f"[bold]{unit['to']}[/bold]" for unit in units), last=True)
    row("moved between ranks", (size_text(unit.get("bytes_wire", 0)) for unit in units))
    row("copied on its own rank", (size_text(unit.get("bytes_local", 0)) for unit in units), True)
    for phase in PHASES:
        seconds = [unit.get("seconds", {}).get(phase, 0.0) for unit in units]
        if any(seconds):
            row(f"{phase.replace('_', ' ')}, s", (f"{s:.2f}" for s in seconds))
    table.add_section()
    for what in _keys(units, "verified"):
        counts = (f"{unit.get('verified', {}).get(what, 0):,}" for unit in units)
        row(VERIFIED.get(what, f"{what} verified"), counts)
    return table


def _keys(units: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """The keys of all units' mappings called `name`, each once, in their order."""
    return list(dict.fromkeys(key for unit in units for key in unit.get(name, {})))


def size_text(size_bytes: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
