"""What `nereus status` shows: the records of a run, and what the live job says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import REFUSED, MessageError
from nereus_plugins.trace.record import (
    RECORDS_FILE,
    Record,
    RunRecord,
    StepRecord,
    TransitionRecord,
    parse_record,
    read_records,
)
from nereus_plugins.trace.show import layout_text, transition_lines

TRANSITIONS = 3


def view(run_dir: Path, steps: int) -> dict[str, Any]:
    """The job as JSON.

    Returns: `live`; `why` it is not; `control`, the live job's own status (None if it is not live);
    `run`, the last `steps` `steps` and the last `transitions`, which are records; `plan`, layouts
    by unit in words, and `epoch`.

    Raises: OSError, RecordError: there are no records, or they cannot be read.
    """
    live, why = _ask(run_dir)
    try:
        records = _of_last_run(list(read_records(run_dir)))
    except FileNotFoundError:
        if live is None:
            raise FileNotFoundError(
                f"{run_dir} is no run directory: it has no {RECORDS_FILE}"
            ) from None
        records = []
    plan, epoch, ranks = _in_force(records)
    if live is not None:
        job = live["job"]
        plan = {unit: layout_text(layout) for unit, layout in job.get("plan", {}).items()} or plan
        epoch, ranks = job["epoch"], job.get("world_size", ranks)
    runs = [record for record in records if isinstance(record, RunRecord)]
    return {
        "live": live is not None,
        "why": why,
        "control": live,
        "run": runs[-1].to_dict() if runs else None,
        "plan": plan,
        "epoch": epoch,
        "ranks": ranks,
        "steps": [r.to_dict() for r in records if isinstance(r, StepRecord)][-steps:],
        "transitions": [r.to_dict() for r in records if isinstance(r, TransitionRecord)][
            -TRANSITIONS:
        ],
    }


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


def _of_last_run(records: Sequence[Record]) -> Sequence[Record]:
    """A job that was started again goes on in the same file."""
    starts = [place for place, record in enumerate(records) if isinstance(record, RunRecord)]
    return records[starts[-1] :] if starts else records


def _in_force(records: Sequence[Record]) -> tuple[dict[str, str], int, int]:
    """(layouts by unit in words, epoch, ranks) after the last record."""
    plan: dict[str, str] = {}
    epoch = ranks = 0
    for record in records:
        if isinstance(record, RunRecord | StepRecord):
            plan |= {unit: layout_text(layout) for unit, layout in record.plan.items()}
        if isinstance(record, RunRecord):
            ranks = record.world_size
        elif isinstance(record, StepRecord):
            epoch = record.epoch
        elif (
            isinstance(record, TransitionRecord) and record.outcome == "committed" and record.units
        ):
            plan |= {unit: str(moved["to"]) for unit, moved in record.units.items()}
            epoch = record.epoch
            ranks = record.ranks.get("to", ranks)
    return plan, epoch, ranks


def lines(seen: Mapping[str, Any]) -> Iterator[str]:
    """What `view` returned, for a person."""
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
    if control is not None:
        yield from _commands(control)
    if seen["steps"]:
        yield from _steps(seen["steps"])
    for fields in seen["transitions"]:
        record = parse_record(fields)
        assert isinstance(record, TransitionRecord)
        yield from transition_lines(record)


def _commands(control: Mapping[str, Any]) -> Iterator[str]:
    if control["paused"]:
        yield "paused: no transition is executed until `nereus resume`"
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
