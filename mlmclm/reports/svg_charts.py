"""Charts as SVG that fits any width: horizontal positions are in per cent, vertical ones in pixels, and text keeps its size.

A page scales its charts without a script, on a phone and on paper. Lines and bands are paths, which allow no
percentages, so they are in an inner SVG that is stretched to the chart's width; their strokes are not stretched.
Colours and line styles are classes of `templates/charts.css`, in light and dark. A mark's `<title>` is what
`templates/charts.js` shows over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from markupsafe import Markup

from mlmclm.reports import charts

PATH_WIDTH = 1000
"""Width of the inner SVG in its own units."""


def svg_of(chart: charts.Chart, identity: str, alt: str) -> Markup:
    """Return a chart, in a box with room for the labels of its axes."""
    return Markup(_SvgChart(chart).drawn(identity, alt))


class _SvgChart:
    """The elements of a chart."""

    def __init__(self, chart: charts.Chart) -> None:
        self._chart, self._height = chart, chart.height

    def drawn(self, identity: str, alt: str) -> str:
        chart = self._chart
        axes, top, bottom = self._axes()
        behind = "".join(
            self._upright(line) if isinstance(line, charts.Upright) else self._level(line) for line in chart.behind
        )
        groups = [(series.style, [self._mark(mark) for mark in series.marks]) for series in chart.drawn]
        paths = "".join(_group(style, [path for path, _ in marks]) for style, marks in groups)
        marks = "".join(_group(style, [mark for _, mark in marks]) for style, marks in groups)
        inner = (
            f'<svg width="100%" height="{self._height}" viewBox="0 0 {PATH_WIDTH} {self._height}" preserveAspectRatio="none">{paths}</svg>'
            if paths
            else ""
        )
        kinds = (
            "plot" + " rows" * chart.y.rows + " dense" * (chart.x.tilted and len(chart.x.ticks) > charts.MANY_COLUMNS)
        )
        return (
            f'<div class="{kinds}" style="--left:{chart.y.gutter}px;--top:{top}px;--bottom:{bottom}px">'
            f'<svg id="{identity}" role="img" tabindex="0" aria-label="{escape(alt)}" width="100%" height="{self._height}">'
            f"{axes}{behind}{inner}{marks}</svg></div>"
        )

    def _x(self, value: float) -> str:
        return f"{_short(100 * self._chart.x.share(value))}%"

    def _y(self, value: float) -> str:
        return _short(self._height * (1 - self._chart.y.share(value)))

    def _path(self, points: Sequence[charts.Point]) -> str:
        return "L".join(f"{_short(PATH_WIDTH * self._chart.x.share(x))} {self._y(y)}" for x, y in points)

    def _mark(self, mark: charts.Mark) -> tuple[str, str]:
        """Return the elements of a mark in the stretched inner SVG, and those above it."""
        match mark:
            case charts.Band():
                return f'<path class="band" d="M{self._path([*mark.upper, *mark.lower[::-1]])}z"/>', ""
            case charts.Line():
                return self._line(mark), ""
            case charts.Dot():
                kind = f' class="{mark.kind}"' if mark.kind else ""
                start = f'<circle{kind} cx="{self._x(mark.x)}" cy="{self._y(mark.y)}" r="{_short(mark.radius)}"'
                return "", _closed(start, "circle", _title(mark.words))
            case charts.Cross():
                start = f'<svg class="cross" x="{self._x(mark.x)}" y="{self._y(mark.y)}"'
                return "", _closed(start, "svg", f'{_title(mark.words)}<path d="M-4-4L4 4M-4 4L4-4"/>')
            case charts.Whisker():
                return "", self._whisker(mark)
            case charts.Stripe():
                return "", self._bar(mark)
            case charts.HeatCell():
                return "", self._tile(mark)

    def _line(self, mark: charts.Line) -> str:
        parts = [
            self._path([(x, y) for x, y in part if y is not None])
            for known, part in groupby(mark.points, lambda point: point[1] is not None)
            if known
        ]
        return f'<path class="line" d="M{"M".join(parts)}"/>' if parts else ""

    def _whisker(self, mark: charts.Whisker) -> str:
        if mark.upright:
            ends = [
                f'<line x1="{self._x(mark.place)}" x2="{self._x(mark.place)}" y1="{self._y(mark.low)}" y2="{self._y(mark.high)}"/>'
            ]
            dot = charts.Dot(mark.place, mark.value, mark.words, mark.radius)
        else:
            y, dot = float(self._y(mark.place)), charts.Dot(mark.value, mark.place, mark.words, mark.radius)
            lines = [(mark.low, y, mark.high, y)] if mark.known else []
            lines += [(end, y - mark.radius, end, y + mark.radius) for end in (mark.low, mark.high) if mark.known]
            ends = [
                f'<line x1="{self._x(x1)}" y1="{_short(y1)}" x2="{self._x(x2)}" y2="{_short(y2)}"/>' for x1, y1, x2, y2 in lines
            ]  # fmt: skip
        return "".join(ends if mark.known else []) + self._mark(dot)[1]

    def _bar(self, mark: charts.Stripe) -> str:
        kind = f' class="{mark.kind}"' if mark.kind else ""
        start = (
            f'<rect{kind} x="{self._x(mark.start)}" y="{_short(float(self._y(mark.row)) - mark.thickness / 2)}" '
            f'width="{_short(100 * (self._chart.x.share(mark.stop) - self._chart.x.share(mark.start)))}%" '
            f'height="{_short(mark.thickness)}"'
        )
        return _closed(start, "rect", _title(mark.words)) + self._on_bar(
            (mark.start + mark.stop) / 2, mark.row, mark.label
        )

    def _tile(self, mark: charts.HeatCell) -> str:
        left, right = (self._chart.x.share(mark.column + side) for side in (-0.5, 0.5))
        top, bottom = (float(self._y(mark.row + side)) for side in (-0.5, 0.5))
        start = (
            f'<rect x="{_short(100 * left)}%" y="{_short(top)}" width="{_short(100 * (right - left))}%" '
            f'height="{_short(bottom - top)}" fill-opacity="{_short(mark.opacity)}"'
        )
        label = self._on_bar(mark.column, mark.row, mark.label, f"on-{mark.tone}")
        return _closed(start, "rect", _title(mark.words)) + label

    def _on_bar(self, x: float, row: float, label: str, kind: str = "on-bar") -> str:
        place = f'x="{self._x(x)}" y="{_short(float(self._y(row)) + 4)}"'
        return f'<text class="{kind}" {place}>{escape(label)}</text>' if label else ""

    def _upright(self, line: charts.Upright) -> str:
        top, bottom = ("0", str(self._height)) if line.ends is None else (self._y(end) for end in line.ends)
        x = self._x(line.x)
        return f'<line{_look(line.style)} x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'

    def _level(self, level: charts.Level) -> str:
        chart = self._chart
        axis = chart.x if chart.y.rows else chart.y
        value = min(max(level.value, axis.low), axis.high)
        if chart.y.rows:
            place, right = self._x(value), axis.share(value) > 0.7
            line, text = f'x1="{place}" x2="{place}" y1="0" y2="{self._height}"', f'x="{place}" y="9"'
        else:
            y, right = float(self._y(value)), True
            line = f'x1="0" x2="100%" y1="{_short(y)}" y2="{_short(y)}"'
            text = f'x="100%" y="{_short(max(y - 4, 10))}"'
        drawn = f'<line class="level" {line}/>' if value == level.value else ""
        kind = "level right" if right else "level"
        words = escape(chart.level_words(level))
        return f'{drawn}<text class="{kind}" {text} dx="{-4 if right else 4}">{words}</text>'

    def _axes(self) -> tuple[str, int, int]:
        """Return the elements of both axes, and the heights in pixels of what is above and below the chart."""
        parts, (x_axis, y_axis) = [], (self._chart.x, self._chart.y)
        for value, label in y_axis.ticks:
            place = self._y(value)
            # The cells of a heat map need no lines between them.
            parts += [] if x_axis.tilted else [f'<line x1="0" x2="100%" y1="{place}" y2="{place}"/>']
            parts.append(f'<text class="y" x="-8" y="{_short(float(place) + 4)}">{escape(label)}</text>')
        if y_axis.title:
            parts.append(f'<text x="{8 - y_axis.gutter}" y="-12">{escape(y_axis.title)}</text>')
        if x_axis.tilted:
            return self._columns(parts)
        rows = x_axis.label_rows
        for (value, label), row in zip(x_axis.ticks, rows, strict=True):
            parts.append(f'<line x1="{self._x(value)}" x2="{self._x(value)}" y1="0" y2="{self._height}"/>')
            if row is not None:
                parts.append(
                    f'<text class="x" x="{self._x(value)}" y="{self._height + 16 + 13 * row}">{escape(label)}</text>'
                )
        bottom = self._height + 16 + 13 * max((row or 0 for row in rows), default=0)
        if x_axis.title:
            bottom += 19
            parts.append(f'<text class="x" x="50%" y="{bottom}">{escape(x_axis.title)}</text>')
        return f'<g class="axes">{"".join(parts)}</g>', 24 if y_axis.title else 6, bottom - self._height + 6

    def _columns(self, parts: list[str]) -> tuple[str, int, int]:
        """Return the same as `_axes` for columns, whose names are tilted by 40 degrees; `parts` are the elements of the vertical axis."""
        ticks = self._chart.x.ticks
        parts += [f'<text class="tilted" x="{self._x(value)}" y="-6">{escape(label)}</text>' for value, label in ticks]
        longest = max((len(label) for _, label in ticks), default=0)
        return f'<g class="axes">{"".join(parts)}</g>', 18 + math.ceil(0.64 * charts.TEXT_PIXELS * longest), 6


def _closed(start: str, name: str, content: str) -> str:
    return f"{start}>{content}</{name}>" if content else f"{start}/>"


def _title(words: str) -> str:
    return f"<title>{escape(words, quote=False)}</title>" if words else ""


def _look(style: charts.Style) -> str:
    return f' class="{style.classes}"' + ("" if style.number is None else f' data-m="{style.number}"')


def _group(style: charts.Style, elements: Sequence[str]) -> str:
    content = "".join(elements)
    return f"<g{_look(style)}>{content}</g>" if content else ""


def _short(value: float) -> str:
    """Format a coordinate, to a hundredth."""
    words = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if words in ("-0", "") else words
