"""How well the cost model predicts public measurements it was not fitted on.

    python benchmarks/cost_accuracy.py                  # over the tables that ship
    python benchmarks/cost_accuracy.py --data DIR       # over tables of the same names and columns
    python benchmarks/cost_accuracy.py --page docs/cost-accuracy.md
    python benchmarks/cost_accuracy.py --json           # the last line is one JSON object

Each row is predicted from the columns a planner would know (`cost_tables.TABLES`). Rows that
differ only in what was measured are merged; their spread is the noise floor. The baseline beside
each table is the best that one constant can do: model FLOPs over (MFU * peak), the MFU fitted, on
the very rows it is judged on, for each GPU and recompute mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import cost_tables
from cost_tables import Answers, Inputs, Modelled, NotModelled, Table

from nereus_plugins.cost import stacks
from nereus_plugins.cost.estimate import estimate
from nereus_plugins.cost.memory import memory
from nereus_plugins.cost.step import step
from nereus_plugins.spec import SpecError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "benchmarks" / "data" / "perf"

# Groups (source, model, GPU) on which constants were fitted: the sustained GEMM rate of A100 and
# H100, the slow-down under overlapped communication, the FA1-era attention factors (llm_foundry),
# the loss and adapter bytes of PyTorch-operation code (prime_rl), and launch times (megatron_lm);
# and groups that were looked at when an assumption was given its value: exposed async tensor
# parallelism and bytes of a parallel loss (torchtitan 70b), slow-down of expert products
# (megatron_bridge), balance of experts (nemo_rl).
FITTED = {
    ("llm_foundry", "7b", "a100_40gb"),
    ("llm_foundry", "7b", "h100_80gb"),
    ("llm_foundry", "13b", "h100_80gb"),
    ("prime_rl", "qwen3-0.6b", "h100_80gb"),
    ("megatron_lm", "gpt 12x512", "h100_80gb"),
    ("torchtitan", "llama3-70b", "h100_96gb"),
    ("megatron_bridge", "gpt-oss-120b", "h100_80gb"),
    ("nemo_rl", "qwen3-30b-a3b", "h100_80gb"),
}


@dataclasses.dataclass
class Row:
    """A distinct set of inputs, what was predicted, and the measurements merged into it."""

    table: str
    source: str
    modelled: Modelled
    label: str
    measured: list[Answers]
    step_s: float = 0.0
    allocated_bytes: float = 0.0
    reserved_bytes: float = 0.0
    moment: str = ""

    @property
    def group(self) -> tuple[str, str, str]:
        return (self.source, self.modelled.model, self.modelled.case.gpu.name)

    @property
    def fitted(self) -> bool:
        return self.group in FITTED or self.modelled.calibration

    @property
    def hidden(self) -> int:
        return self.modelled.case.shape.model.hidden_size

    def answer(self, name: str) -> float | None:
        values = [v for a in self.measured if (v := getattr(a, name)) is not None]
        return statistics.median(values) if values else None

    def error(self, name: str) -> float | None:
        """Signed relative error of the prediction."""
        answer = self.answer(name)
        return getattr(self, name) / answer - 1.0 if answer else None

    @property
    def memory_error(self) -> float | None:
        error = self.error("allocated_bytes")
        return self.error("reserved_bytes") if error is None else error


def load(directory: Path) -> tuple[list[Row], Counter[str], dict[str, int]]:
    """Rows modelled, reasons of those that are not, and rows read by table."""
    rows: dict[tuple[Any, ...], Row] = {}
    reasons: Counter[str] = Counter()
    read: dict[str, int] = {}
    known = {table.file: table for table in cost_tables.TABLES}
    for path in sorted(directory.glob("*.csv")):
        table = known.get(path.name)
        raw = cost_tables.read(path)
        read[path.name] = len(raw)
        if table is None:
            reasons[f"table {path.name} is not known"] += len(raw)
            continue
        for record in raw:
            _take(table, record, rows, reasons)
    return list(rows.values()), reasons, read


def _take(
    table: Table, record: dict[str, str], rows: dict[tuple[Any, ...], Row], reasons: Counter[str]
) -> None:
    inputs = Inputs(record, table.inputs)
    try:
        modelled = table.model(inputs)
    except NotModelled as reason:
        reasons[f"{table.source}: {reason}"] += 1
        return
    except (SpecError, ArithmeticError, LookupError, ValueError) as error:
        # A row of a table not seen before may say what no layout or model can be.
        reasons[f"{table.source}: inputs contradict each other: {error}"] += 1
        return
    answers = table.answers(record, modelled)
    if not any(
        cost_tables.is_number(getattr(answers, f.name)) for f in dataclasses.fields(answers)
    ):
        reasons[f"{table.source}: nothing was measured (a failed run or empty cells)"] += 1
        return
    # What the model sees decides what is the same row; a release's number is not seen.
    key = (table.file, modelled)
    if key in rows:
        rows[key].measured.append(answers)
        return
    case = modelled.case
    label = f"{modelled.model} {modelled.gpus}x{case.gpu.name} {case.layout} {case.software.name}"
    row = Row(table.file, table.source, modelled, label, [answers])
    if modelled.whole_job is not None:
        row.step_s = estimate(*modelled.whole_job, stacks.NEMO_RL).iteration_s
    else:
        row.step_s = step(case).seconds
    peak = memory(case, modelled.stage)
    row.allocated_bytes, row.reserved_bytes = peak.allocated_bytes, peak.reserved_bytes
    row.moment = peak.moment
    rows[key] = row


def summary(errors: list[float | None]) -> dict[str, float | int | None]:
    """n, median and 90th percentile of absolute relative errors."""
    known = sorted(abs(e) for e in errors if e is not None)
    if not known:
        return {"n": 0, "median": None, "p90": None}
    at = 0.9 * (len(known) - 1)
    low = int(at)
    high = min(low + 1, len(known) - 1)
    p90 = known[low] + (known[high] - known[low]) * (at - low)
    return {"n": len(known), "median": round(statistics.median(known), 4), "p90": round(p90, 4)}


def scores(rows: list[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, part in (("all", rows), ("hidden_ge_2048", [r for r in rows if r.hidden >= 2048])):
        out[name] = {
            "step_time": summary([r.error("step_s") for r in part]),
            "memory": {
                **summary([r.memory_error for r in part]),
                "allocated": summary([r.error("allocated_bytes") for r in part]),
                "reserved": summary([r.error("reserved_bytes") for r in part]),
            },
        }
    return out


def baseline(rows: list[Row]) -> dict[int, float]:
    """Signed errors of one MFU per (GPU, recompute mode), fitted to the table's own rows."""
    mfus: dict[tuple[str, str], list[tuple[float, float, int]]] = defaultdict(list)
    for row in rows:
        answer = row.answer("step_s")
        if answer is None:
            continue
        m = row.modelled
        ideal = cost_tables.model_flops(m.case, m.tokens) / (m.gpus * m.case.gpu.bf16_flops)
        mfus[m.case.gpu.name, m.recompute].append((ideal, answer, id(row)))
    out = {}
    for values in mfus.values():
        constant = statistics.median(answer / ideal for ideal, answer, _ in values)
        for ideal, answer, row_id in values:
            out[row_id] = constant * ideal / answer - 1.0
    return out


def noise(rows: list[Row]) -> dict[str, Any]:
    """Deviation from their median of measurements whose inputs are the same."""
    out = {}
    for name in ("step_s", "allocated_bytes", "reserved_bytes"):
        spread = []
        for row in rows:
            values = [v for a in row.measured if (v := getattr(a, name)) is not None]
            if len(values) > 1:
                middle = statistics.median(values)
                spread += [abs(v / middle - 1.0) for v in values]
        out[name] = summary(list(spread))
    return out


def ranking(rows: list[Row]) -> dict[str, Any]:
    """Where rows share model, GPU, GPU count and tokens a step: order and regret of the first."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        m = row.modelled
        if row.answer("step_s"):
            key = (row.source, m.model, m.case.gpu.name, m.gpus, m.tokens, m.case.batch.attended)
            groups[key].append(row)
    taus, regrets = [], []
    for members in groups.values():
        if len(members) < 2:
            continue
        agree = total = 0
        for a, b in combinations(members, 2):
            x, y = a.answer("step_s"), b.answer("step_s")
            assert x is not None
            assert y is not None
            if x == y:
                continue
            total += 1
            agree += 1 if (a.step_s < b.step_s) == (x < y) else -1
        if total:
            taus.append(agree / total)
        chosen = min(members, key=lambda r: r.step_s).answer("step_s")
        best = min(r.answer("step_s") or 0.0 for r in members)
        assert chosen is not None
        regrets.append(chosen / best - 1.0)
    return {
        "groups": len(taus),
        "kendall_tau_mean": round(statistics.mean(taus), 3) if taus else None,
        "regret_mean": round(statistics.mean(regrets), 4) if regrets else None,
        "regret_max": round(max(regrets), 4) if regrets else None,
    }


def result(rows: list[Row], reasons: Counter[str], read: dict[str, int]) -> dict[str, Any]:
    unfitted, fitted = [r for r in rows if not r.fitted], [r for r in rows if r.fitted]
    tables: dict[str, Any] = {}
    for name in read:
        own = [r for r in rows if r.table == name]
        constant = baseline(own)
        tables[name] = {
            "rows_read": read[name],
            "rows_modelled": sum(len(r.measured) for r in own),
            "distinct": len(own),
            "fitted": scores([r for r in own if r.fitted]),
            "unfitted": scores([r for r in own if not r.fitted]),
            "step_time": summary([r.error("step_s") for r in own]),
            "one_constant": summary(list(constant.values())),
            "noise": noise(own),
            "ranking": ranking(own),
        }
    return {
        "overall": {"unfitted": scores(unfitted), "fitted": scores(fitted)},
        "ranking": ranking(rows),
        "tables": tables,
        "not_modelled": dict(sorted(reasons.items())),
    }


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _scores_line(name: str, score: dict[str, Any]) -> str:
    time, alloc = score["step_time"], score["memory"]["allocated"]
    held = score["memory"]["reserved"]
    cells = [name]
    for part in (time, alloc, held):
        cells += [str(part["n"]), _percent(part["median"]), _percent(part["p90"])]
    return "| " + " | ".join(cells) + " |"


def page(rows: list[Row], out: dict[str, Any]) -> str:
    """The accuracy page, Markdown."""
    head = "| | n | median | p90 | n | median | p90 | n | median | p90 |"
    lines = [
        "# Accuracy of the cost model",
        "",
        "Written by `python benchmarks/cost_accuracy.py --page docs/cost-accuracy.md`; nothing "
        "here is typed by hand. Absolute relative errors. Simulated against published "
        "measurements; nothing was run on a GPU for this page.",
        "",
        "| rows | step time | | | allocated | | | reserved | | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        head,
    ]
    for kind in ("unfitted", "fitted"):
        for size in ("all", "hidden_ge_2048"):
            lines.append(_scores_line(f"{kind}, {size}", out["overall"][kind][size]))
    lines += [
        "",
        "Fitted groups (source, model, GPU): "
        + "; ".join(", ".join(g) for g in sorted(FITTED))
        + ". Calibration rows are marked C below.",
        "",
        "## By table",
        "",
        "One constant: an MFU for each GPU and recompute mode, fitted to the very rows it is "
        "judged on.",
        "",
        "| table | rows | distinct | step time median | p90 | one constant median | p90 | "
        "noise median | p90 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, table in out["tables"].items():
        time, one, floor = table["step_time"], table["one_constant"], table["noise"]["step_s"]
        lines.append(
            f"| {name} | {table['rows_modelled']}/{table['rows_read']} | {table['distinct']} | "
            f"{_percent(time['median'])} | {_percent(time['p90'])} | {_percent(one['median'])} | "
            f"{_percent(one['p90'])} | {_percent(floor['median'])} | {_percent(floor['p90'])} |"
        )
    order = out["ranking"]
    lines += [
        "",
        f"Ranking: {order['groups']} groups of rows share model, GPU, GPU count and tokens a step; "
        f"mean Kendall tau {order['kendall_tau_mean']}, mean regret "
        f"{_percent(order['regret_mean'])}, worst {_percent(order['regret_max'])}.",
        "",
        "## Not modelled",
        "",
        "| reason | rows |",
        "|---|---|",
    ]
    lines += [f"| {reason} | {count} |" for reason, count in out["not_modelled"].items()]
    for name in out["tables"]:
        own = [r for r in rows if r.table == name]
        if not own:
            continue
        constant = baseline(own)
        lines += [
            "",
            f"## {name}",
            "",
            "F: fitted group, C: calibration row. Errors are signed: predicted over measured - 1.",
            "",
            "| | row | micro-batches x tokens | recompute | step s | measured | error "
            "| one constant | memory GiB | measured | error |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in own:
            lines.append(_row_line(row, constant))
    return "\n".join(lines) + "\n"


def _row_line(row: Row, constant: dict[int, float]) -> str:
    batch, m = row.modelled.case.batch, row.modelled
    mark = "C" if m.calibration else "F" if row.fitted else ""
    allocated = row.answer("allocated_bytes")
    measured = allocated or row.answer("reserved_bytes")
    predicted = row.allocated_bytes if allocated else row.reserved_bytes
    memory_cells = (
        [f"{predicted / 2**30:.2f}", f"{measured / 2**30:.2f}" + ("" if allocated else " r"),
         f"{100 * (predicted / measured - 1):+.1f} %"]
        if measured
        else ["", "", ""]
    )  # fmt: skip
    step_s, error = row.answer("step_s"), row.error("step_s")
    cells = [
        mark,
        row.label,
        f"{batch.micro_batches} x {batch.tokens:g}",
        m.recompute,
        f"{row.step_s:.4g}",
        f"{step_s:.4g}" if step_s else "",
        f"{100 * error:+.1f} %" if error is not None else "",
        f"{100 * constant[id(row)]:+.1f} %" if id(row) in constant else "",
        *memory_cells,
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=SHIPPED, help="directory of tables")
    parser.add_argument("--json", action="store_true", help="print the result, last, as one line")
    parser.add_argument("--page", type=Path, help="write the page here")
    args = parser.parse_args(argv)
    if not args.data.is_dir():
        print(f"cost_accuracy: --data {args.data} is not a directory", file=sys.stderr)
        return 2
    rows, reasons, read = load(args.data)
    out = result(rows, reasons, read)
    text = page(rows, out)
    if args.page:
        args.page.write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps(out))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
