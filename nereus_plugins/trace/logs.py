"""Logs of frameworks and trackers, read strictly: the scalars of each finished step.

    verl        console log (`step:12 - actor/entropy:0.2 - timing_s/gen:62.9 - ...`), or a CSV with
                the same names as columns
    openrlhf    console log (`Global step 12: {'timing/generation': 62.9, ...}`)
    wandb       CSV exported from a chart or a run's history; history as JSON or JSON lines
    tensorboard event files; the CSV or JSON files that TensorBoard's page downloads, one a tag

Every reader raises `SpecError` naming file, line and field, and what to do; nothing else.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nereus_plugins.cost.tensorboard_log import is_event_file, read_scalars
from nereus_plugins.spec import SpecError


class Entry(NamedTuple):
    """One finished step: its scalars by the log's own names. where: file and line."""

    step: int
    metrics: Mapping[str, float]
    where: str
    time_unix_s: float | None = None


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VERL_STEP = re.compile(r"\bstep:(\d{1,12}) - (.*)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# A number as Python or NumPy prints it; of the last field of a line, other output may follow.
_FIELD = re.compile(
    rf"([^\s:]+):(?:np\.\w+\()?({_NUMBER}|nan|-?inf|None|True|False)\)?(\s.*)?", re.DOTALL
)
_OPENRLHF_STEP = re.compile(r"\bGlobal step (\d{1,12}): (\{.*\})")
_NOT_A_LITERAL = re.compile(r"(?<![\w'\"./])-?(?:nan|inf)\b")
# Columns that say which step a row is of, the first that a file has: OpenRLHF counts its own, since
# W&B's counts every call of its logger.
_STEP_COLUMNS = ("train/global_step", "_step", "Step", "step")
_TIME_COLUMNS = ("_timestamp", "Wall time")
# What a chart's export adds beside each series.
_BOUNDS = ("__MIN", "__MAX")


def read(kind: str, path: Path, run: str | None = None) -> list[Entry]:
    """Steps of a log, in its order; at least one.

    Args:
        kind: one of `KINDS`.
        run: which run, of a file that holds several.

    Raises: SpecError; OSError where the file cannot be read.
    """
    try:
        entries = list(KINDS[kind](path, run))
    except (csv.Error, UnicodeError, RecursionError, OverflowError) as error:
        raise SpecError(f"{path}: cannot be read as {kind}: {error}") from None
    if not entries:
        raise SpecError(f"{path}: no finished step found; {_LOOKED_FOR[kind]}")
    return entries


_LOOKED_FOR = {
    "verl": "verl prints lines 'step:N - name:value - ...' where trainer.logger has 'console'",
    "openrlhf": "OpenRLHF prints lines 'Global step N: {...}' on the driver's console",
    "wandb": f"a row needs one of the columns {', '.join(_STEP_COLUMNS)} and a value",
    "tensorboard": "give an event file, a folder of them, or what TensorBoard's page downloads",
}


def _verl(path: Path, run: str | None) -> Iterator[Entry]:
    if path.suffix == ".csv":
        yield from _csv_rows(path, run)
        return
    _no_run(path, run)
    for number, line, whole in _lines(path):
        match = _VERL_STEP.search(line)
        if match is None or not whole:
            continue  # a line without its end may be cut inside a number
        fields = match[2].rstrip().split(" - ")
        metrics: dict[str, float] = {}
        for index, text in enumerate(fields):
            found = _FIELD.fullmatch(text)
            last = index == len(fields) - 1
            if found is None or (found[3] and not last):
                raise SpecError(
                    f"{path}:{number}: field {_short(text)} is not name:number; the line was cut "
                    "or mixed with other output: mend or delete it"
                )
            _put(metrics, found[1], found[2])
        # Validation alone is logged as a step of its own.
        if any(name.startswith("timing_s/") for name in metrics):
            yield Entry(int(match[1]), metrics, f"{path}:{number}")


def _no_run(path: Path, run: str | None) -> None:
    if run is not None:
        raise SpecError(f"{path}: a console's log is of one run: leave --run out")


def _openrlhf(path: Path, run: str | None) -> Iterator[Entry]:
    _no_run(path, run)
    for number, line, _ in _lines(path):
        match = _OPENRLHF_STEP.search(line)
        if match is None:
            continue
        try:
            values = ast.literal_eval(_NOT_A_LITERAL.sub("None", match[2]))
        except (ValueError, SyntaxError, MemoryError, TypeError):
            values = None
        if not isinstance(values, dict):
            raise SpecError(
                f"{path}:{number}: what follows 'Global step {match[1]}:' is not a dictionary of "
                "numbers; the line was cut or mixed with other output: mend or delete it"
            )
        metrics: dict[str, float] = {}
        for name, value in values.items():
            _put(metrics, str(name), value)
        yield Entry(int(match[1]), metrics, f"{path}:{number}")


def _wandb(path: Path, run: str | None) -> Iterator[Entry]:
    if path.suffix in (".json", ".jsonl"):
        return _merged(_json_rows(path), path, run)
    return _csv_rows(path, run)


def _tensorboard(path: Path, run: str | None) -> Iterator[Entry]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".csv", ".json"))
        if not any(is_event_file(p) for p in path.rglob("*")):
            return _one_tag_a_file(files)
    elif not is_event_file(path):
        return _one_tag_a_file([path])
    return (
        Entry(_step(row.pop("step"), f"{path}"), row, f"{path}")
        for row in map(dict, read_scalars(path))
    )


def _one_tag_a_file(files: Iterable[Path]) -> Iterator[Entry]:
    """Each file holds one tag, which its name ends with: `run-NAME-tag-TAG.csv`."""
    steps: dict[int, tuple[dict[str, float], float]] = {}
    last = ""
    for path in files:
        _, marked, tag = path.stem.rpartition("-tag-")
        if not marked:
            raise SpecError(
                f"{path}: the name does not say which tag it holds; keep the name that TensorBoard "
                "gave it (run-...-tag-TAG), or give the event files"
            )
        last = str(path)
        for number, (wall, step, value) in _tag_rows(path):
            where = f"{path}:{number}"
            known, _ = steps.setdefault(_step(step, where), ({}, _time(wall) or 0.0))
            _put(known, _slashes(tag), value)
    for step in sorted(steps):
        metrics, wall_s = steps[step]
        yield Entry(step, metrics, last, wall_s or None)


def _tag_rows(path: Path) -> Iterator[tuple[int, tuple[Any, Any, Any]]]:
    """(line, (wall time, step, value))."""
    if path.suffix == ".json":
        rows = _loads(path.read_text(encoding="utf-8", errors="replace"), str(path))
        for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
            if not isinstance(row, list) or len(row) != 3:
                raise SpecError(f"{path}: entry {number} is not [wall time, step, value]")
            yield number, (row[0], row[1], row[2])
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        for name in ("Wall time", "Step", "Value"):
            if name not in (reader.fieldnames or ()):
                raise SpecError(f"{path}:1: no column {name!r}: not a CSV of TensorBoard's page")
        for row in reader:
            yield reader.line_num, (row["Wall time"], row["Step"], row["Value"])


def _slashes(tag: str) -> str:
    """A tag as it was logged; browsers write the slashes of a file's name as underscores."""
    for group in (
        "timing_s", "response_length", "prompt_length", "perf", "critic", "actor", "training",
        "timing", "rollout", "train",
    ):  # fmt: skip
        if tag.startswith(f"{group}_") and not tag.startswith(("timing_s_per", "timing_per")):
            rest = tag[len(group) + 1 :]
            if group in ("response_length", "prompt_length", "critic") and "_" in rest:
                rest = "/".join(rest.rsplit("_", 1))
            return f"{group}/{_slashes(rest) if group == 'train' else rest}"
    return tag


def _csv_rows(path: Path, run: str | None) -> Iterator[Entry]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        if not reader.fieldnames:
            raise SpecError(f"{path}:1: no header line with the names of the columns")

        def rows() -> Iterator[tuple[int, dict[str, Any]]]:
            for row in reader:
                if None in row:
                    raise SpecError(
                        f"{path}:{reader.line_num}: more values than the header has columns"
                    )
                yield reader.line_num, dict(row)

        yield from _merged(rows(), path, run)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("["):
        rows: Iterable[tuple[int, Any]] = enumerate(_loads(text, str(path)), 1)
    else:
        lines = enumerate(text.splitlines(), 1)
        rows = ((n, _loads(line, f"{path}:{n}")) for n, line in lines if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise SpecError(f"{path}:{number}: a row of a history must be an object, got a list")
        yield number, row


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not valid JSON: {error}") from None


def _merged(
    rows: Iterable[tuple[int, dict[str, Any]]], path: Path, run: str | None
) -> Iterator[Entry]:
    """Rows of one step, which trackers may write apart, together; in the order of the file."""
    step_column = ""
    known: Entry | None = None
    for number, row in rows:
        where = f"{path}:{number}"
        if not step_column:
            here = [name for name in _STEP_COLUMNS if name in row]
            if not here:
                raise SpecError(
                    f"{where}: no column for the step; one of {', '.join(_STEP_COLUMNS)} is needed"
                )
            step_column = here[0]
            if path.suffix == ".csv":
                run = _only_run(path, row, run)
        if "run" in row and run is not None and row["run"] != run:
            continue
        if row.get(step_column) in (None, ""):
            continue  # logged apart from training: evaluation, tables
        metrics: dict[str, float] = {}
        for name, value in row.items():
            plain = _of_run(name, run)
            if plain is None or name in (step_column, "run", *_TIME_COLUMNS):
                continue
            if isinstance(value, str) and value.strip() and _float(value) is None:
                if path.suffix == ".csv" and " - " not in name and "/" not in name:
                    continue  # a text column, such as a note
                raise SpecError(
                    f"{where}: column {name!r} holds {_short(value)}, which is not a number: mend "
                    "the value or leave it empty"
                )
            _put(metrics, plain, value)
        step = _step(row[step_column], where)
        at_s = next((t for c in _TIME_COLUMNS if (t := _time(row.get(c))) is not None), None)
        if known is not None and known.step == step:
            known = known._replace(metrics={**known.metrics, **metrics})
            continue
        if known is not None and known.metrics:
            yield known
        known = Entry(step, metrics, where, at_s)
    if known is not None and known.metrics:
        yield known


def _only_run(path: Path, row: Mapping[str, Any], run: str | None) -> str | None:
    """The run to read: that asked for, or the only one a chart's export holds.

    Raises: SpecError listing them where there are several.
    """
    if "run" in row:
        names = _runs_in_column(path)
    else:
        prefixes = (name.rpartition(" - ")[0] for name in row)
        names = sorted({prefix for prefix in prefixes if prefix})
    if run is None and len(names) > 1:
        raise SpecError(f"{path}: holds runs {', '.join(names)}: choose one with --run")
    if run is not None and run not in names:
        listed = f"holds {', '.join(names)}" if names else "names none: leave --run out"
        raise SpecError(f"{path}: no run {run!r}; the file {listed}")
    return run or (names[0] if names else None)


def _runs_in_column(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return sorted({row["run"] for row in csv.DictReader(file) if row.get("run")})


def _of_run(column: str, run: str | None) -> str | None:
    """The metric's name; None for a column of another run, and for bounds."""
    if column.endswith(_BOUNDS):
        return None
    prefix, separator, metric = column.rpartition(" - ")
    if not separator:
        return column
    return metric if prefix == run else None


def _lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(number, text without colours, whether the line ends with a newline)."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, _ANSI.sub("", line).replace("\r", " "), line.endswith("\n")


def _put(metrics: dict[str, float], name: str, value: Any) -> None:
    """Finite numbers; what a framework logs as nan, inf or text is left out."""
    number = _float(value)
    if number is not None and math.isfinite(number):
        metrics[name] = number


def _float(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _time(value: Any) -> float | None:
    number = _float(value)
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def _step(value: Any, where: str) -> int:
    number = _float(value)
    if number is None or not 0 <= number < 1e12 or number != int(number):
        raise SpecError(f"{where}: the step is {_short(value)}, not a whole number of at least 0")
    return int(number)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


KINDS: Mapping[str, Callable[[Path, str | None], Iterator[Entry]]] = {
    "verl": _verl,
    "openrlhf": _openrlhf,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}
