"""What a run's own records teach the cost model, as `nereus calibrate` reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nereus_plugins.cost.calibrate import Observed, read_log
from nereus_plugins.spec import Layout, SpecError
from nereus_plugins.trace.record import RECORDS_FILE, RecordError, StepRecord, read_records


def read_run(path: str | Path) -> Iterator[Observed]:
    """Steps of a run directory or its records file; of other logs as `read_log` has them.

    Raises: OSError; SpecError on records that do not follow the schema.
    """
    path = Path(path)
    if path.suffix != ".jsonl" and not (path / RECORDS_FILE).exists():
        yield from read_log(path)
        return
    try:
        for record in read_records(path):
            if isinstance(record, StepRecord) and record.samples > 0:
                yield observed_of(record, f"{path}: step {record.step}: plan")
    except RecordError as error:
        raise SpecError(str(error)) from None


def observed_of(record: StepRecord, where: str = "plan") -> Observed:
    """A step's metrics by verl's names, and its layouts by unit.

    Raises: SpecError naming `where` if its plan is not of layouts.
    """
    metrics = {f"timing_s/{name}": float(value) for name, value in record.stages_s.items()}
    metrics |= {name: float(value) for name, value in record.metrics.items()}
    metrics["step"] = float(record.step)
    for name in ("prompt", "response"):
        if name in record.tokens:
            metrics.setdefault(f"{name}_length/mean", record.tokens[name] / record.samples)
    layouts = {
        unit: Layout.from_dict(fields, where=f"{where}.{unit}")
        for unit, fields in record.plan.items()
    }
    return Observed(metrics, layouts)
