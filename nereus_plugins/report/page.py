"""One page that opens offline: everything in one file, nothing fetched.

Whatever comes from files (names, notes, reasons, layouts, configurations) is escaped on its way in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nereus_plugins.trace.record import TransitionRecord

from . import svg
from .colours import PART_FILLS, STAGE_FILLS, LayoutColours, phase_fill
from .figures import by_part
from .journal import Prediction
from .series import Series, Span, binned
from .svg import GanttBar, Interval, Line, Mark, Part, Point, Strip
from .timeline import bars

BINS = 480
# Transitions that a page draws in full, for each run: the longest.
GANTTS = 12
GIB = 2**30
_FOLDER = Path(__file__).parent

MEANING = {
    "simulated": "Every figure on this page was simulated, none measured.",
    "measured": "Every figure on this page was measured on jobs that ran.",
}


def page(
    kind: str,
    title: str,
    subtitle: str,
    notes: Sequence[str],
    runs: Sequence[Series],
    found: Mapping[str, Any] | None,
    predictions: Sequence[Sequence[Prediction]],
) -> str:
    """The page as HTML.

    Args:
        kind: "simulated" or "measured".
        notes: what a reader must know before anything else.
        runs: what is drawn, one run for each name.
        found: the comparison (`compare.comparison` and what is beside it), None for single runs.
        predictions: of each run, what was expected of its transitions.
    """
    first = min(int(run.step[0]) for run in runs)
    last = max(int(run.step[-1]) for run in runs)
    made = _Page(runs, found, predictions, svg.step_axis(first, last))
    body = [
        f'<div class="banner {escape(kind)}"><b>{escape(kind.upper())}</b> '
        f"{escape(MEANING[kind])}</div>",
        f"<main><h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(subtitle)}</p>',
        *(f'<p class="sub">{escape(note)}</p>' for note in notes),
        made.tiles(),
        made.key(),
        made.difference(),
        made.table(),
        made.sensitivity(),
        made.step_time(),
        made.conditions(),
        made.plans(),
        made.memory(),
        made.where_time_went(),
        made.stalls(),
        made.agreement(),
        made.transitions(),
        made.reward(),
        made.provenance(),
        "</main>",
    ]
    data = {
        "charts": made.charts,
        "colours": svg.PALETTE,
        "width": svg.WIDTH,
        "left": svg.LEFT,
        "inner": svg.INNER,
        "low": made.x.low,
        "high": made.x.high,
        "first": first,
    }
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{(_FOLDER / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
            *(part for part in body if part),
            '<div id="tip" role="status"></div>',
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>{(_FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )


def _json(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(title: str, about: str, *inside: str, long: bool = False) -> str:
    there = "".join(part for part in inside if part)
    if not there:
        return ""
    words = f"<p>{escape(about)}</p>" if about else ""
    mark = ' class="long"' if long else ""
    return f"<section{mark}><h2>{escape(title)}</h2>{words}{there}</section>"


def _legend(fills: Iterable[tuple[str, str]]) -> str:
    inside = "".join(
        f'<span><i style="background:{escape(fill)}"></i>{escape(name)}</span>'
        for name, fill in fills
    )
    return f'<div class="legend">{inside}</div>'


def _signed(value: float) -> str:
    return f"{value:+.1%}".replace("-", "\N{MINUS SIGN}")


def hours(seconds: float) -> str:
    if seconds >= 3600:
        return f"{svg.number(seconds / 3600)} h"
    return f"{svg.number(seconds / 60)} min" if seconds >= 120 else f"{svg.number(seconds)} s"


class _Page:
    """The sections. charts: what a pointer is told, by the name of a chart."""

    def __init__(
        self,
        runs: Sequence[Series],
        found: Mapping[str, Any] | None,
        predictions: Sequence[Sequence[Prediction]],
        x: svg.Axis,
    ) -> None:
        self.runs = runs
        self.found = found
        self.predictions = predictions
        self.x = x
        self.charts: dict[str, Any] = {}
        names = list(found["policies"]) if found else [run.name for run in runs]
        self.group = {name: index for index, name in enumerate(names)}

    # -- figures -------------------------------------------------------------------------------

    def tiles(self) -> str:
        """The largest differences, or what there is of one run."""
        out = []
        if self.found and self.found["differences"]:
            base = self.found["baseline"]
            by_gain = sorted(
                self.found["differences"].items(), key=lambda item: item[1]["run_s"]["mean"]
            )
            for name, each in by_gain[:4]:
                d = each["run_s"]
                between = (
                    f"{_signed(d['low'])} to {_signed(d['high'])}"
                    if d["low"] is not None
                    else "one pair: no interval"
                )
                out.append((_signed(d["mean"]), f"run time, {name} against {base}", between))
        else:
            run = self.runs[0]
            seconds = run.columns["step_s"]
            committed = [t for t in run.transitions if t.outcome == "committed"]
            out = [
                (f"{len(run.step):,}", "steps", ""),
                (f"{svg.number(float(seconds.mean()))} s", "a step, on average", ""),
                (hours(sum(run.stages_s.values())), "run time", ""),
                (str(len(committed)), "transitions", ""),
            ]
        inside = "".join(
            f'<div class="tile"><div class="v">{escape(value)}</div>'
            f'<div class="k">{escape(what)}</div><div class="n">{escape(more)}</div></div>'
            for value, what, more in out
        )
        return f'<div class="tiles">{inside}</div>'

    def key(self) -> str:
        if len(self.group) < 2:
            return ""
        inside = "".join(
            f'<button type="button" aria-pressed="true" data-run="{index}">'
            f'<i style="background:{svg.colour(index)}"></i>{escape(name)}</button>'
            for name, index in self.group.items()
        )
        return f'<div class="key" aria-label="show or hide">{inside}</div>'

    def difference(self) -> str:
        if not self.found or not self.found["differences"]:
            return ""
        parts = []
        for key, title in (
            ("run_s", "run time: steps, transitions, restarts, failures (less is better)"),
            ("step_s_p99", "99th percentile of a step's time (less is better)"),
            ("tokens_per_s_per_gpu", "tokens per second and GPU (more is better)"),
        ):
            rows = [
                Interval(name, self.group[name], d[key]["mean"], d[key]["low"], d[key]["high"])
                for name, d in self.found["differences"].items()
                if key in d
            ]
            if rows:
                parts.append(f"<h3>{escape(title)}</h3>{svg.forest(rows, title)}")
        several = any(len(each) > 1 for each in self.found["runs"].values())
        about = "Relative differences of pairs: " + (
            "dots are (geometric) means, whiskers 95 % intervals by Student's t over seeds."
            if several
            else "one pair each, so that there is no interval."
        )
        oracle = self.found.get("oracle")
        if oracle:
            about += f" The oracle saves {oracle['saving']:.1%} over static_hindsight"
            free = oracle.get("free_saving")
            about += "." if free is None else f", {free:.1%} if transitions were free."
        return _section(f"Against {self.found['baseline']}", about, *parts)

    def table(self) -> str:
        if not self.found:
            return ""
        oracle = self.found.get("oracle") or {"shares": {}}
        heads = ["", "step, s", "p50", "p99", "run, s a step", "tokens/s/GPU", "GPU h", "run",
                 "transitions", "restarts", "stall", "OOM"]  # fmt: skip
        if oracle["shares"]:
            heads.append("of oracle's saving")
        controlled = any(one.get("controller_s_max") for one in self.found["policies"].values())
        if controlled:
            heads.append("controller, ms a step")
        rows = []
        for name, one in self.found["policies"].items():
            dot = f'<i style="background:{svg.colour(self.group[name])}"></i>{escape(name)}'
            if one["step_s_mean"] is None:
                rows.append(
                    f'<tr><td>{dot}</td><td class="text bad" colspan="{len(heads) - 1}">'
                    f"{escape(one['stopped'])}</td></tr>"
                )
                continue
            cells = [
                svg.number(one["step_s_mean"]), svg.number(one["step_s_p50"]),
                svg.number(one["step_s_p99"]),
                svg.number(one.get("run_s_per_step") or float("nan")),
                svg.number(one["tokens_per_s_per_gpu"]), svg.number(one["gpu_hours"]),
                hours(one["run_s"]), svg.number(one["transitions"]), svg.number(one["restarts"]),
                f"{one['transition_share']:.3%}", svg.number(one["oom"]),
            ]  # fmt: skip
            if oracle["shares"]:
                share = oracle["shares"].get(name)
                cells.append("" if share is None else f"{share:.0%}")
            if controlled:
                spent_s = one.get("controller_s_mean")
                cells.append("" if spent_s is None else svg.number(1e3 * spent_s))
            rows.append(
                f"<tr><td>{dot}</td>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
            )
            for why, text in (
                ("did not reach the end", one["stopped"]),
                ("ended early", one.get("ended_early")),
            ):
                if text:
                    rows.append(
                        f'<tr><td></td><td class="text bad" colspan="{len(heads) - 1}">{why}: '
                        f"{escape(text)}</td></tr>"
                    )
        head = "".join(f"<th>{escape(text)}</th>" for text in heads)
        counts = {len(each) for each in self.found["runs"].values()}
        about = (
            f"Means over {', '.join(str(c) for c in sorted(counts))} runs of each. "
            if max(counts) > 1
            else ""
        )
        if "last_step" in self.found:
            about += f"Up to step {self.found['last_step']}, the last that all have finished. "
            about += f"Run time by {self.found['time_by']}."
        return _section(
            "Figures",
            about,
            f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>',
        )

    def sensitivity(self) -> str:
        table = (self.found or {}).get("sensitivity")
        if not table:
            return ""
        parts = []
        for name, verdict in table["verdicts"].items():
            rows = [
                Interval(row["text"], self.group[name], d["mean"], d["low"], d["high"])
                for row in table["rows"]
                if (d := row["differences"].get(name)) is not None
            ]
            if rows:
                parts.append(
                    f'<div class="run r{self.group[name]}"><h3>{escape(f"{name}: {verdict}")}</h3>'
                    f"{svg.forest(rows, f'{name} under other assumptions', wide=True)}</div>"
                )
        base = self.found["baseline"] if self.found else ""
        return _section(
            "Other assumptions",
            f"Run time against {base}, one assumption varied at a time.",
            *parts,
            long=True,
        )

    # -- over steps ----------------------------------------------------------------------------

    def _lines(self, column: str, scale: float = 1.0) -> list[Line]:
        out = []
        for run in self.runs:
            bins = binned(run.step, run.columns[column] / scale, BINS)
            if len(bins.step):
                group = self.group[run.name]
                out.append(Line(run.name, group, bins, svg.colour(group)))
        return out

    def _chart(self, name: str, lines: Sequence[Line], title: str, unit: str, **more: Any) -> str:
        if not lines:
            return ""
        self.charts[name] = {"unit": unit, "lines": svg.values_of(lines)}
        return svg.step_chart(lines, self.x, name=name, title=title, unit=unit, **more)

    def step_time(self) -> str:
        lines = self._lines("step_s")
        # A stall of several times a step's time would flatten everything else.
        usual = max(float(np.quantile(run.columns["step_s"], 0.995)) for run in self.runs)
        most = max(float(run.columns["step_s"].max()) for run in self.runs)
        top = 1.15 * usual if most > 1.4 * usual else 1.05 * most
        beyond = sum(int((run.columns["step_s"] > top).sum()) for run in self.runs)
        chart = self._chart(
            "step_s", lines, "seconds of each step", "seconds", height=300.0, top_value=top
        )
        rows = [(run.name, self.group[run.name], self._marks(run)) for run in self.runs]
        marks = svg.lanes(rows, self.x, "transitions, restarts and failures") if any(
            each for _, _, each in rows
        ) else ""  # fmt: skip
        about = (
            "Seconds of each step, transitions left out. Bands go from the least to the greatest "
            "of neighbouring steps. Below: diamonds are transitions, squares restarts through a "
            "checkpoint, crosses failures."
        )
        if beyond:
            about += f" {beyond} steps are beyond the top."
        return _section("Step time", about, chart, marks)

    def _marks(self, run: Series) -> list[Mark]:
        shown = {id(record): target for target, record in self._shown(run)}
        out = []
        for record in run.transitions:
            kind = (
                "failure"
                if record.outcome in ("failed", "aborted")
                else "restart"
                if "relaunch" in record.seconds
                else "transition"
            )
            if record.outcome == "skipped":
                continue
            out.append(Mark(record.step + 0.5, kind, _tip(record), shown.get(id(record))))
        return out

    def conditions(self) -> str:
        there = self._lines("gpus_there")[:1]
        gpus = [
            line._replace(name="there", stairs=True, area=True, stroke="var(--strong)", group=-1)
            for line in there
        ]
        gpus += [
            line._replace(name=f"{line.name} uses", stairs=True)
            for line in self._lines("gpus_used")
        ]
        parts = [self._titled("GPUs", self._chart("gpus", gpus, "GPUs", "GPUs", height=140.0))]
        # Lengths are the work's: those of one run of a trace are those of all.
        simulated = self.runs[0].source == "simulator"
        lengths = self._lines("response_mean")
        longest = self._lines("response_max")
        if simulated:
            lengths, longest = lengths[:1], longest[:1]
        lines = [one._replace(name=f"{one.name}, mean" if not simulated else "mean")
                 for one in lengths]  # fmt: skip
        lines += [one._replace(name=f"{one.name}, longest" if not simulated else "longest",
                               dash="2 3") for one in longest]  # fmt: skip
        if simulated:
            lines = [one._replace(stroke="var(--accent)", group=-1) for one in lines]
        parts.append(
            self._titled(
                "response length, tokens: mean, and longest (dotted)",
                self._chart("lengths", lines, "response lengths", "tokens", height=150.0),
            )
        )
        return _section(
            "Conditions", "What the jobs met. Grey: GPUs that were there; lines: used.", *parts
        )

    @staticmethod
    def _titled(title: str, chart: str) -> str:
        return f"<h3>{escape(title)}</h3>{chart}" if chart else ""

    def plans(self) -> str:
        layouts = [
            span.fields for run in self.runs for spans in run.plan.values() for span in spans
        ]
        if not layouts:
            return ""
        colours = LayoutColours(layouts)
        groups = []
        for run in self.runs:
            strips = []
            for names, spans in _same_rows(run.plan):
                strips.append(
                    Strip(
                        ", ".join(names),
                        self.group[run.name],
                        [
                            (s.first, s.last, colours.fill(s.fields), _span_tip(names, s))
                            for s in spans
                        ],
                    )
                )
            if strips:  # an imported log says nothing of plans
                groups.append((run.name, self.group[run.name], strips))
        drawn = svg.strips(groups, self.x, "layout of each model-stage over steps")
        return _section(
            "Plans",
            "Layout of each model over the steps (rollout: actor-generate); rows that are alike "
            "are one. A colour is a layout, darker with larger DP; point at it for the whole.",
            _legend(colours.names.items()),
            drawn,
        )

    def memory(self) -> str:
        """Headroom where every run says how much there is, else what was taken."""
        if all(run.capacity_bytes for run in self.runs):
            lines = self._lines("headroom_bytes", GIB)
            about = "Memory that was left on the fullest device in each step; 0 is out of memory."
            title = "memory left on a device"
        else:
            lines = self._lines("memory_bytes", GIB)
            about = "Peak of the fullest device in each step."
            title = "peak memory of a device"
        return _section("Memory", about, self._chart("memory", lines, title, "GiB", height=170.0))

    def reward(self) -> str:
        return _section(
            "Reward",
            "Mean score of each step's responses.",
            self._chart("reward", self._lines("reward"), "mean score", "score"),
        )

    # -- where time went -----------------------------------------------------------------------

    def where_time_went(self) -> str:
        total = max(sum(run.stages_s.values()) for run in self.runs)
        unit, scale = ("h", 3600.0) if total > 2 * 3600 else ("s", 1.0)
        rows = [
            (
                run.name,
                self.group[run.name],
                [Part(n, v, STAGE_FILLS[n]) for n, v in run.stages_s.items()],
            )
            for run in self.runs
        ]
        used = [n for n in STAGE_FILLS if any(n in run.stages_s for run in self.runs)]
        return _section(
            "Where the time went",
            "Run time by stage (the framework's timers), then transitions, restarts, failures and "
            "steps that had to run again.",
            svg.stacked(rows, unit, "run time by stage", scale),
            _legend((n, STAGE_FILLS[n]) for n in used),
        )

    def stalls(self) -> str:
        rows = []
        for run in self.runs:
            seconds: dict[str, float] = {}
            for record in run.transitions:
                if record.outcome == "committed":
                    for part, spent in by_part(record.seconds).items():
                        seconds[part] = seconds.get(part, 0.0) + spent
            if seconds:
                parts = [Part(n, seconds[n], PART_FILLS[n]) for n in PART_FILLS if n in seconds]
                rows.append((run.name, self.group[run.name], parts))
        if not rows:
            return ""
        used = [n for n in PART_FILLS if any(p.name == n for _, _, parts in rows for p in parts)]
        return _section(
            "What transitions and restarts waited for",
            "Stall of the whole run, by part.",
            svg.stacked(rows, "s", "stall by part"),
            _legend((n, PART_FILLS[n]) for n in used),
        )

    def agreement(self) -> str:
        stalls: list[Point] = []
        savings: list[Point] = []
        for run, each in zip(self.runs, self.predictions, strict=True):
            group = self.group[run.name]
            for one in each:
                where = f"{run.name}, after step {one.step}{' (forced)' if one.forced else ''}"
                if one.stall_s > 0 and one.measured_stall_s > 0:
                    tip = (
                        f"{where}\npredicted {svg.number(one.stall_s)} s, was "
                        f"{svg.number(one.measured_stall_s)} s"
                    )
                    stalls.append(Point(one.stall_s, one.measured_stall_s, group, tip))
                if one.saving is not None and one.measured_saving is not None:
                    tip = f"{where}\npredicted {one.saving:+.1%}, was {one.measured_saving:+.1%}"
                    percent = 100 * one.saving, 100 * one.measured_saving
                    savings.append(Point(*percent, group, tip))
        parts = [
            f"<div><h3>{escape(title)}</h3>"
            f"{svg.scatter(points, title, unit, logarithmic=logarithmic)}</div>"
            for title, points, unit, logarithmic in (
                ("stall of each transition", stalls, "s", True),
                ("what each saved of a step, in the steps after it", savings, "%", False),
            )
            if points
        ]
        if not parts:
            return ""
        return _section(
            "Predicted and measured",
            "What the controller expected when it decided, against what came of it. On the dashed "
            "line they agree. Savings are against the plan that was left, at the same lengths.",
            f'<div class="pair">{"".join(parts)}</div>',
        )

    # -- transitions ---------------------------------------------------------------------------

    def _shown(self, run: Series) -> list[tuple[str, TransitionRecord]]:
        """(anchor, record) of the longest ones that committed, in order."""
        done = [r for r in run.transitions if r.outcome == "committed" and r.stall_s > 0]
        longest = sorted(done, key=lambda r: -r.stall_s)[:GANTTS]
        chosen = {id(r) for r in longest}
        group = self.group[run.name]
        return [(f"t{group}-{i}", r) for i, r in enumerate(done) if id(r) in chosen]

    def transitions(self) -> str:
        parts = []
        for run in self.runs:
            shown = self._shown(run)
            if not shown:
                continue
            count = sum(r.outcome == "committed" for r in run.transitions)
            more = f", the {len(shown)} longest of {count}" if count > len(shown) else ""
            group = self.group[run.name]
            inside = "".join(_gantt(target, record) for target, record in shown)
            parts.append(
                f'<div class="run r{group}"><h3 style="color:{svg.colour(group)}">'
                f"{escape(run.name + more)}</h3>{inside}</div>"
            )
        return _section(
            "Transitions",
            "Each unit's phases. A record holds how long a phase took, and each unit within "
            "it, not when within the phase a unit began.",
            *parts,
            long=True,
        )

    # -- where it is from ----------------------------------------------------------------------

    def provenance(self) -> str:
        parts = []
        if self.found:
            if trace := self.found.get("trace"):
                parts.append(_trace(trace))
            if constants := self.found.get("constants"):
                rows = [
                    [name, f"{one['value']:g}", one["kind"], one["source"]]
                    for name, one in constants.items()
                ]
                parts.append(_details("Constants", _rows(("", "value", "basis", "source"), rows)))
            if truth := self.found.get("truth"):
                rows = [[name, f"{value:g}"] for name, value in truth.items()]
                about = "<p>All assumed: spreads of what the cost model does not know.</p>"
                parts.append(_details("Hidden truth and chance", about + _rows(("", ""), rows)))
            rest = {
                key: self.found[key]
                for key in ("versions", "commit", "code_sha256", "arguments", "seeds",
                            "differences_method", "last_step", "time_by", "jobs")
                if self.found.get(key) is not None
            }  # fmt: skip
            parts.append(_details("Versions, arguments, seeds", _pre(rest)))
            parts.append(_details("Every single run", _single_runs(self.found["runs"])))
        for run in self.runs:
            first = run.run
            said = {
                "run": first.run_id,
                "source": first.source,
                "versions": dict(first.versions),
                "ranks": first.world_size,
                "config": dict(first.config),
            }
            parts.append(_details(f"Versions and configuration of {run.name}", _pre(said)))
        return _section("Where this is from", "", *parts, long=True)


def _same_rows(plan: Mapping[str, Sequence[Span]]) -> list[tuple[list[str], Sequence[Span]]]:
    """Units whose layouts are equal throughout are one row."""
    out: list[tuple[list[str], Sequence[Span]]] = []
    for unit, spans in plan.items():
        same = next((names for names, other in out if list(other) == list(spans)), None)
        if same is not None:
            same.append(unit)
        else:
            out.append(([unit], spans))
    return out


def _span_tip(names: Sequence[str], span: Span) -> str:
    steps = (
        f"step {span.first}" if span.first == span.last else f"steps {span.first} to {span.last}"
    )
    return f"{', '.join(names)}\n{span.text}\n{steps}"


def _tip(record: TransitionRecord) -> str:
    what = record.outcome
    if record.outcome == "committed":
        what = "restart" if "relaunch" in record.seconds else "transition"
    lines = [f"{what} after step {record.step}: {svg.number(record.stall_s)} s"]
    lines += [f"{name}: {text}" for name, text in _changes(record)]
    if record.reason:
        lines.append(record.reason)
    return "\n".join(lines)


def _changes(record: TransitionRecord) -> list[tuple[str, str]]:
    """What changed, in words; units that change alike are one."""
    alike: dict[str, list[str]] = {}
    for name, unit in record.units.items():
        if isinstance(unit, Mapping):
            alike.setdefault(f"{unit.get('from')} → {unit.get('to')}", []).append(name)
    out = [(", ".join(names), text) for text, names in alike.items()]
    if record.ranks:
        out.append(("ranks", f"{record.ranks.get('from')} → {record.ranks.get('to')}"))
    if record.knobs:
        out.append(("knobs of", ", ".join(record.knobs)))
    return out


def _gantt(target: str, record: TransitionRecord) -> str:
    found = bars(record)
    drawn = []
    for bar in found:
        row = bar.row if bar.depth == 0 else "parts"
        tip = f"{bar.row}: {bar.phase}\n{svg.number(bar.end_s - bar.begin_s)} s"
        drawn.append(GanttBar(row, bar.begin_s, bar.end_s, phase_fill(bar.phase), tip))
    total = record.stall_s
    begin = min((bar.begin_s for bar in found), default=0.0)
    seen = [bar.phase for bar in found if bar.end_s - bar.begin_s > 0.01 * (total - begin)]
    words = "; ".join(f"{name} {text}" for name, text in _changes(record))
    chart = svg.gantt(drawn, begin, total, f"transition after step {record.step}")
    moved = sum(
        unit.get("bytes_wire", 0) for unit in record.units.values() if isinstance(unit, Mapping)
    )
    text = f"{svg.number(moved / 1e9)} GB between ranks"
    if "relaunch" in record.seconds:
        text = "started again from a checkpoint"
    if "transition_s" in record.predicted:
        text += f"; {svg.number(record.predicted['transition_s'])} s were predicted"
    if record.limit_s:
        limit, over = svg.number(record.limit_s), svg.number(total / record.limit_s)
        text += f"; the wait is {over} times its limit of {limit} s"
    if "hidden_s" in record.background:
        hidden = svg.number(float(record.background["hidden_s"]))
        text += f"; {hidden} s, before 0, in the background: nothing waited for it"
    return (
        f'<details id="{escape(target)}"><summary>after step {record.step}: '
        f"{svg.number(total)} s <small>{escape(words)}</small></summary><div>{chart}"
        f"{_legend((name, phase_fill(name)) for name in dict.fromkeys(seen))}"
        f"<p>{escape(text)}</p></div></details>"
    )


def _details(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary><div>{inside}</div></details>"


def _pre(data: object) -> str:
    return f"<pre>{escape(json.dumps(data, indent=1, ensure_ascii=False, default=str))}</pre>"


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="text">{escape(c)}</td>' if i > 1 else f"<td>{escape(c)}</td>"
            for i, c in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _trace(trace: Mapping[str, Any]) -> str:
    items = [str(trace.get("note", ""))]
    for source in trace.get("sources", ()):
        origin = ", ".join(p for p in (source.get("origin"), source.get("licence")) if p)
        items.append(
            f"{source.get('what')}: {source.get('file')} ({source.get('used', '')}); "
            f"{origin or 'no origin'}"
        )
    items += [f"assumed: {text}" for text in trace.get("assumptions", ())]
    listed = "".join(f"<li>{escape(item)}</li>" for item in items if item)
    setting = _pre(trace.get("setting", {}))
    return _details(
        f"Trace {trace.get('name')}: sources and assumptions", f"<ul>{listed}</ul>"
    ) + _details("Job and cluster", setting)


def _single_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for name, each in runs.items():
        for index, one in enumerate(each):
            if one.get("step_s_mean") is None:
                rows.append([name, str(index + 1), str(one.get("stopped", ""))])
                continue
            rows.append(
                [
                    name, str(index + 1), svg.number(one["step_s_mean"]),
                    svg.number(one["step_s_p99"]), hours(one["run_s"]),
                    svg.number(one["tokens_per_s_per_gpu"]), str(one["transitions"]),
                    f"{one['transition_share']:.3%}", str(one["oom"]), str(one.get("stopped", "")),
                ]
            )  # fmt: skip
    heads = ("", "run", "step, s", "p99", "run", "tokens/s/GPU", "transitions", "stall", "OOM", "")
    return _rows(heads, rows)
