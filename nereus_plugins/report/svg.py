"""Drawings as inline SVG: text in, escaped text out. Colours are CSS variables or HSL.

Charts whose x is the step share one geometry, so that they stand exactly below each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .series import Bins

WIDTH, LEFT, RIGHT = 1080.0, 150.0, 18.0
INNER = WIDTH - LEFT - RIGHT
# Tells runs apart, in order; readable on light and dark.
PALETTE = (
    "#4178d4", "#e07b2e", "#2f9e6e", "#c0508f", "#b8960c", "#7a5fd0",
    "#3aa3b8", "#d1495b", "#7c8a2e", "#8c6d4f", "#6f7d8c", "#a86bd6",
)  # fmt: skip


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


class Axis(NamedTuple):
    """From values to places along one direction."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        reach = self.high - self.low
        part = (value - self.low) / reach if reach else 0.5
        return self.start + part * (self.end - self.start)


def step_axis(first: float, last: float) -> Axis:
    """Half a step of room at either side, so that a step's span is a step wide."""
    return Axis(first - 0.5, last + 0.5, LEFT, LEFT + INNER)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values."""
    reach = high - low
    if not reach > 0 or not math.isfinite(reach):
        return [low] if math.isfinite(low) else []
    raw = reach / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / size - 1e-9)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people: three figures, thousands set apart."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"


def element(tag: str, inside: str = "", **attributes: object) -> str:
    """One element; underscores in names stand for hyphens, a last one is dropped. `inside` is
    markup, attributes are escaped."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>"


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def label(x: float, y: float, text: str, anchor: str = "start", **more: object) -> str:
    return element("text", escape(text) or " ", x=x, y=y, text_anchor=anchor, **more)


def drawing(height: float, inside: Iterable[str], title: str, **attributes: object) -> str:
    return element(
        "svg",
        element("title", escape(title)) + "".join(inside),
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        **attributes,
    )


class Line(NamedTuple):
    """One run in a chart. group: what its legend entry shows and hides. stairs: a value holds for
    its whole step. area: filled to zero, without a line."""

    name: str
    group: int
    bins: Bins
    stroke: str
    dash: str | None = None
    stairs: bool = False
    area: bool = False


def step_chart(
    lines: Sequence[Line],
    x: Axis,
    *,
    name: str,
    title: str,
    unit: str,
    height: float = 150.0,
    top_value: float | None = None,
) -> str:
    """Lines over steps, a band from least to greatest where steps are binned.

    Args:
        name: the chart's in the page, by which its values are looked up.
        top_value: what the y axis ends at; default: what all bins reach.
    """
    values = [one.bins.high for one in lines if len(one.bins.high)]
    high = top_value or max([float(v.max()) for v in values], default=1.0) * 1.05
    high = high if high > 0 else 1.0
    low = min([1.05 * float(one.bins.low.min()) for one in lines if len(one.bins.low)] + [0.0])
    plot_top, bottom = 12.0, height - 22.0
    y = Axis(low, high, bottom, plot_top)
    clip = f"clip-{name}"
    out = [
        element(
            "clipPath",
            element("rect", x=LEFT, y=plot_top, width=INNER, height=bottom - plot_top),
            id=clip,
        )
    ]
    out += _grid(x, y, bottom, unit)
    inside = []
    for line in lines:
        inside.append(_line(line, x, y))
    out.append(element("g", "".join(inside), clip_path=f"url(#{clip})"))
    out.append(element("line", x1=LEFT, x2=LEFT, y1=plot_top, y2=bottom, class_="cross"))
    return drawing(height, out, title, class_="steps", data_chart=name)


def _grid(x: Axis, y: Axis, bottom: float, unit: str) -> list[str]:
    out = []
    for value in ticks(y.low, y.high, round((bottom - y(y.high)) / 42)):
        at = y(value)
        out.append(element("line", x1=LEFT, x2=LEFT + INNER, y1=at, y2=at, class_="grid"))
        out.append(label(LEFT - 8, at + 4, number(value), "end"))
    out.append(label(8, y(y.high) + 4, unit, class_="quiet"))
    out += step_ticks(x, bottom)
    return out


def step_ticks(x: Axis, bottom: float) -> list[str]:
    out = []
    for value in ticks(math.ceil(x.low), math.floor(x.high), 10):
        if value == int(value):
            out.append(label(x(value), bottom + 16, number(value), "middle"))
    return out


def _line(line: Line, x: Axis, y: Axis) -> str:
    bins = line.bins
    if not len(bins.step):
        return ""
    xs = [x(float(step)) for step in bins.step]
    means = [y(float(v)) for v in bins.mean]
    parts = []
    path = _stairs(xs, means) if line.stairs else None
    if line.area and path is not None:
        whole = f"{path}V{y(0.0):.1f}H{LEFT:.1f}Z"
        parts.append(element("path", d=whole, fill=line.stroke, class_="area"))
    elif bool(np.any(bins.high > bins.low)):
        up = [f"{a:.1f},{y(float(v)):.1f}" for a, v in zip(xs, bins.high, strict=True)]
        down = [f"{a:.1f},{y(float(v)):.1f}" for a, v in zip(xs, bins.low, strict=True)]
        parts.append(
            element("polygon", points=" ".join(up + down[::-1]), fill=line.stroke, class_="band")
        )
    if line.area:
        pass
    elif path is not None:
        parts.append(element("path", d=path, stroke=line.stroke, class_="line"))
    elif len(xs) == 1:
        parts.append(element("circle", cx=xs[0], cy=means[0], r=3.0, fill=line.stroke))
    else:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, means, strict=True))
        parts.append(
            element(
                "polyline", points=points, stroke=line.stroke, class_="line",
                stroke_dasharray=line.dash,
            )
        )  # fmt: skip
    return element("g", "".join(parts), class_=f"run r{line.group}")


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Each value from halfway after the one before it until halfway to the next."""
    path = f"M{LEFT:.1f},{ys[0]:.1f}"
    for (here, then), value in zip(pairwise(xs), ys[1:], strict=True):
        path += f"H{(here + then) / 2:.1f}V{value:.1f}"
    last = xs[-1] + (xs[-1] - xs[-2]) / 2 if len(xs) > 1 else LEFT + INNER
    return path + f"H{min(last, LEFT + INNER):.1f}"


class Mark(NamedTuple):
    """Something that happened at a boundary. kind: "transition", "restart", "failure"."""

    step: float
    kind: str
    tip: str
    target: str | None = None


def lanes(rows: Sequence[tuple[str, int, Sequence[Mark]]], x: Axis, title: str) -> str:
    """A row of marks for each run."""
    size = 16.0
    out = []
    for index, (name, group, marks) in enumerate(rows):
        middle = 4.0 + (index + 0.5) * size
        inside = [
            label(LEFT - 8, middle + 4, short(name, 22), "end", fill=colour(group)),
            element("line", x1=LEFT, x2=LEFT + INNER, y1=middle, y2=middle, class_="lane"),
        ]
        for mark in marks:
            at = x(mark.step)
            if mark.kind == "failure":
                shape = f"M{at - 4:.1f},{middle - 4:.1f}l8,8m0,-8l-8,8"
            elif mark.kind == "restart":
                shape = f"M{at - 4:.1f},{middle - 4:.1f}h8v8h-8z"
            else:
                shape = f"M{at:.1f},{middle - 5:.1f}l4,5l-4,5l-4,-5z"
            drawn = element(
                "path", d=shape, class_=f"mark {mark.kind}", data_tip=mark.tip,
                fill=colour(group) if mark.kind == "transition" else None,
            )  # fmt: skip
            inside.append(
                element("a", drawn, href=f"#{mark.target}") if mark.target is not None else drawn
            )
        out.append(element("g", "".join(inside), class_=f"run r{group}"))
    return drawing(8.0 + size * len(rows), out, title, class_="steps lanes")


class Strip(NamedTuple):
    """A row of spans. spans: (first step, last step, fill, tip)."""

    name: str
    group: int
    spans: Sequence[tuple[float, float, str, str]]


def strips(groups: Sequence[tuple[str, int, Sequence[Strip]]], x: Axis, title: str) -> str:
    """Rows of coloured spans, below the name of the run that they belong to."""
    row, head, gap = 15.0, 17.0, 8.0
    out, y = [], 2.0
    for name, group, rows in groups:
        inside = [label(LEFT, y + 12, name, class_="head", fill=colour(group))]
        y += head
        for strip in rows:
            inside.append(label(LEFT - 8, y + 11, short(strip.name, 24), "end"))
            for first, last, fill, tip in strip.spans:
                begin, end = x(first - 0.5), x(last + 0.5)
                inside.append(
                    element(
                        "rect", x=begin, y=y, width=max(end - begin, 0.75), height=row - 3.0,
                        fill=fill, data_tip=tip,
                    )
                )  # fmt: skip
            y += row
        y += gap
        out.append(element("g", "".join(inside), class_=f"run r{group}"))
    out += step_ticks(x, y - 4)
    return drawing(y + 18.0, out, title, class_="steps")


class Part(NamedTuple):
    """A piece of a stacked bar."""

    name: str
    value: float
    fill: str


def stacked(
    rows: Sequence[tuple[str, int, Sequence[Part]]], unit: str, title: str, scale: float = 1.0
) -> str:
    """Horizontal stacked bars, all on one scale; values are shown divided by `scale`."""
    row = 26.0
    most = max([sum(p.value for p in parts) for _, _, parts in rows], default=0.0) or 1.0
    x = Axis(0.0, most, LEFT, LEFT + INNER - 90.0)
    out = []
    for index, (name, group, parts) in enumerate(rows):
        y = 2.0 + index * row
        inside = [label(LEFT - 8, y + 15, short(name, 22), "end", fill=colour(group))]
        now = 0.0
        total = sum(p.value for p in parts)
        for part in parts:
            begin, end = x(now), x(now + part.value)
            tip = (
                f"{name}\n{part.name}: {number(part.value / scale)} {unit} "
                f"({part.value / total:.1%})"
            )
            inside.append(
                element(
                    "rect", x=begin, y=y, width=max(end - begin - 0.5, 0.2), height=row - 6.0,
                    fill=part.fill, data_tip=tip,
                )
            )  # fmt: skip
            now += part.value
        inside.append(label(x(now) + 6, y + 15, f"{number(total / scale)} {unit}"))
        out.append(element("g", "".join(inside), class_=f"run r{group}"))
    return drawing(4.0 + row * len(rows), out, title)


class Interval(NamedTuple):
    """One row of a forest plot; low and high None where there is no interval."""

    name: str
    group: int
    mean: float
    low: float | None
    high: float | None


def forest(rows: Sequence[Interval], title: str, *, wide: bool = False) -> str:
    """Relative differences with their intervals, around none. wide: names are sentences."""
    row, left = (22.0, 330.0) if wide else (26.0, LEFT)
    means = [0.0, *(one.mean for one in rows)]
    # An interval that is far wider than all differences would hide them: it is cut.
    most = 2.5 * max(abs(mean) for mean in means)
    ends = [max(-most, min(most, v)) for r in rows for v in (r.low, r.high) if v is not None]
    low, high = min(means + ends), max(means + ends)
    room = 0.06 * (high - low or 0.1)
    x = Axis(low - room, high + room, left, LEFT + INNER - 215.0)
    bottom = 4.0 + row * len(rows)
    out = []
    marks = ticks(x.low, x.high, 7)
    fine = 0 if len(marks) < 2 or marks[1] - marks[0] > 0.0099 else 1
    for value in marks:
        at = x(value)
        out.append(
            element(
                "line", x1=at, x2=at, y1=0.0, y2=bottom,
                class_="zero" if abs(value) < 1e-12 else "grid",
            )
        )  # fmt: skip
        out.append(
            label(at, bottom + 15, f"{value:+.{fine}%}" if abs(value) > 1e-12 else "0", "middle")
        )
    for index, one in enumerate(rows):
        y = 4.0 + (index + 0.5) * row
        text = f"{one.mean:+.1%}"
        name = short(one.name, 54 if wide else 22)
        fill = None if wide else colour(one.group)
        inside = [label(left - 8, y + 4, name, "end", fill=fill)]
        if one.low is not None and one.high is not None:
            text += f"   ({one.low:+.1%} to {one.high:+.1%})"
            shape = f"M{x(max(one.low, x.low)):.1f},{y:.1f}H{x(min(one.high, x.high)):.1f}"
            for end in (one.low, one.high):
                if x.low <= end <= x.high:
                    shape += f"M{x(end):.1f},{y - 5:.1f}v10"
            inside.append(element("path", d=shape, stroke=colour(one.group), class_="whisker"))
        inside.append(element("circle", cx=x(one.mean), cy=y, r=5.0, fill=colour(one.group)))
        inside.append(label(WIDTH - RIGHT, y + 4, text, "end", class_="figure"))
        out.append(element("g", "".join(inside), class_=f"run r{one.group}"))
    return drawing(bottom + 22.0, out, title)


class GanttBar(NamedTuple):
    """begin, end: in seconds."""

    row: str
    begin: float
    end: float
    fill: str
    tip: str


def gantt(bars: Sequence[GanttBar], begin: float, end: float, title: str) -> str:
    """Bars by row over seconds, from `begin` (0, or before it) to `end`."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    size = 22.0
    bottom = 4.0 + size * len(rows)
    x = Axis(begin, end if end > begin else begin + 1.0, LEFT, LEFT + INNER)
    out = []
    for value in ticks(begin, x.high, 8):
        kind = "zero" if begin < 0 and abs(value) < 1e-12 else "grid"
        out.append(element("line", x1=x(value), x2=x(value), y1=0.0, y2=bottom, class_=kind))
        out.append(label(x(value), bottom + 15, f"{number(value)} s", "middle"))
    for index, row in enumerate(rows):
        out.append(label(LEFT - 8, 4.0 + index * size + 14, short(row, 22), "end"))
    for bar in bars:
        y = 4.0 + rows.index(bar.row) * size
        left, right = x(bar.begin), x(bar.end)
        out.append(
            element(
                "rect", x=left, y=y, width=max(right - left - 0.4, 0.6), height=size - 5.0,
                fill=bar.fill, data_tip=bar.tip,
            )
        )  # fmt: skip
    return drawing(bottom + 22.0, out, title)


def _round_logarithms(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2, 5, 10, ... between two."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    found = [power + math.log10(digit) for power in decades for digit in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


class Point(NamedTuple):
    """What was predicted, and what was measured."""

    predicted: float
    measured: float
    group: int
    tip: str


def scatter(points: Sequence[Point], title: str, unit: str, *, logarithmic: bool) -> str:
    """Predicted (x) against measured (y), with the line on which they agree.

    logarithmic: both axes; values then have to be above 0.
    """
    size, left, bottom = 380.0, 64.0, 340.0
    place = math.log10 if logarithmic else float
    values = [place(v) for p in points for v in (p.predicted, p.measured)]
    room = 0.05 * (max(values) - min(values)) or 0.1
    low, high = min(values) - room, max(values) + room
    x, y = Axis(low, high, left, size - 14.0), Axis(low, high, bottom, 14.0)
    out = []
    for value in _round_logarithms(low, high) if logarithmic else ticks(low, high, 5):
        text = number(10.0**value if logarithmic else value)
        out.append(element("line", x1=x(value), x2=x(value), y1=14.0, y2=bottom, class_="grid"))
        out.append(element("line", x1=left, x2=size - 14, y1=y(value), y2=y(value), class_="grid"))
        out.append(label(x(value), bottom + 16, text, "middle"))
        out.append(label(left - 6, y(value) + 4, text, "end"))
    out.append(element("line", x1=x(low), y1=y(low), x2=x(high), y2=y(high), class_="limit"))
    out.append(label(size - 14, bottom + 34, f"predicted, {unit}", "end", class_="quiet"))
    out.append(label(left + 6, 26, f"measured, {unit}", class_="quiet"))
    for one in points:
        dot = element(
            "circle", cx=x(place(one.predicted)), cy=y(place(one.measured)), r=4.0,
            fill=colour(one.group), class_="dot", data_tip=one.tip,
        )  # fmt: skip
        out.append(element("g", dot, class_=f"run r{one.group}"))
    return element(
        "svg",
        element("title", escape(title)) + "".join(out),
        viewBox=f"0 0 {size:g} {size:g}",
        role="img",
        class_="square",
    )


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def values_of(lines: Sequence[Line]) -> list[Mapping[str, object]]:
    """What a reader's pointer is told: by line, its binned values."""
    return [
        {
            "n": line.name,
            "g": line.group,
            "x": [round(float(v), 1) for v in line.bins.step],
            "y": [_figure(v) for v in line.bins.mean],
            "l": [_figure(v) for v in line.bins.low],
            "h": [_figure(v) for v in line.bins.high],
        }
        for line in lines
    ]


def _figure(value: float) -> float:
    return float(f"{value:.5g}")
