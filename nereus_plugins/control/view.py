"""What `nereus status` shows: the records of a run, and what the live job says of itself."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import REFUSED, MessageError
from nereus_plugins.controller.decision import Decision
from nereus_plugins.controller.journal import FILE as DECISIONS_FILE
from nereus_plugins.controller.journal import parse_line
from nereus_plugins.job import Lease, leased
from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    NewRecords,
    Record,
    RunRecord,
    StepRecord,
    TransitionRecord,
    parse_record,
)
from nereus_plugins.trace.show import layout_text, transition_lines

TRANSITIONS = 3
_TAIL_BYTES = 1 << 20  # of the decisions, in which the last one is looked for


class View:
    """A job, looked at again and again; its records are read once.

    Args: steps: how many of the last ones to show.
    """

    def __init__(self, run_dir: Path, steps: int) -> None:
        self._run_dir = run_dir
        self._records = NewRecords(run_dir)
        self._run: RunRecord | None = None
        self._steps: deque[StepRecord] = deque(maxlen=steps)
        self._transitions: deque[TransitionRecord] = deque(maxlen=TRANSITIONS)
        self._plan: dict[str, str] = {}
        self._epoch = self._ranks = 0

    def look(self) -> dict[str, Any]:
        """The job as JSON.

        Returns: `live`; `why` it is not; `control`, the live job's own status (None if it is not
        live); `run`, the last `steps` and the last `transitions`, which are records; `plan`,
        layouts by unit in words, `epoch`, and how many `ranks`; `decision`, the controller's last,
        without alternatives, None where there is none.

        Raises: OSError, RecordError: there are no records, or they cannot be read.
        """
        live, why = _ask(self._run_dir)
        try:
            for record in self._records.read():
                self._take(record)
        except FileNotFoundError:
            if live is None:
                raise FileNotFoundError(
                    f"{self._run_dir} is no run directory: it has no {RECORDS_FILE}"
                ) from None
        plan, epoch, ranks = self._plan, self._epoch, self._ranks
        if live is not None:
            job = live["job"]
            plan = {unit: layout_text(layout) for unit, layout in job.get("plan", {}).items()}
            plan = plan or self._plan
            epoch, ranks = job["epoch"], job.get("world_size", ranks)
        return {
            "live": live is not None,
            "why": why,
            "control": live,
            "run": None if self._run is None else self._run.to_dict(),
            "plan": plan,
            "epoch": epoch,
            "ranks": ranks,
            "steps": [record.to_dict() for record in self._steps],
            "transitions": [record.to_dict() for record in self._transitions],
            "decision": last_decision(self._run_dir),
        }

    def _take(self, record: Record) -> None:
        if isinstance(record, RunRecord):  # a job that was started again goes on in the same file
            self._steps.clear()
            self._transitions.clear()
            self._run, self._plan, self._ranks = record, {}, record.world_size
            self._epoch = 0
        if isinstance(record, RunRecord | StepRecord):
            self._plan |= {unit: layout_text(layout) for unit, layout in record.plan.items()}
        if isinstance(record, StepRecord):
            self._steps.append(record)
            self._epoch = record.epoch
        if isinstance(record, TransitionRecord):
            transition_lines(record)  # says where it cannot be shown
            self._transitions.append(record)
            if record.outcome == "committed" and record.units:
                self._plan |= {unit: str(moved.get("to")) for unit, moved in record.units.items()}
                self._epoch = record.epoch
                self._ranks = record.ranks.get("to", self._ranks)


def last_decision(run_dir: Path) -> dict[str, Any] | None:
    """The controller's last decision, but for its alternatives; its journal is not read whole."""
    try:
        with open(run_dir / DECISIONS_FILE, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        entry = parse_line(line)
        if entry is not None and entry.get("kind") == "decision":
            try:
                decision = Decision.from_dict(entry.get("decision", {}))
            except SpecError:  # of another version: `nereus decisions` says what is wrong with it
                return None
            return dataclasses.replace(decision, alternatives=()).to_dict()
    return None


def _ask(run_dir: Path) -> tuple[dict[str, Any] | None, str]:
    """(the live job's status, "") or (None, why there is none)."""
    try:
        client = Client(run_dir)
        reply = client.call("status")
    except (NoLiveJob, MessageError) as error:
        return None, str(error)
    if reply["state"] == REFUSED:
        return None, f"the job refused to say: {reply['reason']}"
    return reply | {"pid": client.endpoint.pid, "host": client.endpoint.host}, ""


def lines(seen: Mapping[str, Any]) -> Iterator[str]:
    """What `View.look` returned, for a person."""
    run, control = seen["run"], seen["control"]
    name = f"run {run['run_id']} ({run['source']})" if run else "run"
    if control is not None:
        step = control["job"].get("step", 0)
        yield f"{name}: live, pid {control['pid']} on {control['host']}, {step} steps done"
    else:
        yield f"{name}: no live job was reached, this is from its records"
        yield f"  {seen['why']}"
    yield f"plan of epoch {seen['epoch']}, on {seen['ranks']} ranks"
    for unit, layout in seen["plan"].items():
        yield f"  {unit}: {layout}"
    if control is not None and (nodes := control["job"].get("nodes")):
        yield "  nodes: " + ", ".join(f"{n} ({count})" for n, count in Counter(nodes).items())
    if control is not None:
        yield from _commands(control)
    yield from _controller(control, seen["decision"])
    if seen["steps"]:
        yield from _steps(seen["steps"])
    for fields in seen["transitions"]:
        record = parse_record(fields)
        assert isinstance(record, TransitionRecord)
        yield from transition_lines(record)


def _controller(
    control: Mapping[str, Any] | None, decision: Mapping[str, Any] | None
) -> Iterator[str]:
    state = None if control is None else control.get("controller")
    if state is not None:
        died = f", started again {state['restarts']} times" if state["restarts"] else ""
        yield f"controller: {state['mode']}{'' if state['running'] else ', not running'}{died}"
        leases = [] if control is None else [Lease.from_dict(one) for one in control["leases"]]
        yield f"  may use {leased(leases)} GPUs{''.join(map(_terms, leases))}"
    if decision is not None:
        yield f"  after step {decision['step']}: {decision['kind']}: {decision['reason']}"


def _terms(lease: Lease) -> str:
    """What is said of a lease that may end; "" of others."""
    ends = "" if lease.until_s is None else f" for {lease.until_s:.0f} s"
    spot = "" if lease.notice_s is None else f" with {lease.notice_s:.0f} s of notice"
    return f", {lease.gpus} of them{ends}{spot}" if ends or spot else ""


def _commands(control: Mapping[str, Any]) -> Iterator[str]:
    if control["paused"]:
        yield "paused: no transition is executed until `nereus resume`"
    if control.get("doing"):
        yield f"now: {control['doing']}"
    pending = control["pending"]
    if pending is not None:
        yield f"pending: plan {pending['number']} ({pending['state']}): {pending['what']}"
    elif control["answered"]:
        last = control["answered"][-1]
        reason = f": {last['reason']}" if last["reason"] else ""
        yield f"last submitted: plan {last['number']} {last['state']}{reason}"


def _steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A column a step; stages as the framework's timers have them, the longest first."""
    last = steps[-1]
    stages = sorted(last["stages_s"], key=lambda name: -last["stages_s"][name])
    rows = [("step", [str(step["step"]) for step in steps])]
    rows += [
        (
            f"{name} s",
            [f"{s['stages_s'][name]:.2f}" if name in s["stages_s"] else "" for s in steps],
        )
        for name in stages
    ]
    rows.append(("tokens", [f"{step['tokens'].get('total', 0):,}" for step in steps]))
    rows += [
        (f"{name} GiB", [f"{s['memory_bytes'].get(name, 0) / 2**30:.2f}" for s in steps])
        for name in last["memory_bytes"]
        if name != "process_groups"  # a count
    ]
    first = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    yield "last steps (stages nest; memory: the largest over ranks)"
    for name, cells in rows:
        yield f"  {name:{first}}" + "".join(f"  {cell:>{width}}" for cell in cells)
