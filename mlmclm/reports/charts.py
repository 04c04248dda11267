"""Charts as SVG that fits any width: horizontal places are percentages, vertical ones pixels, text keeps its size.

A page scales its charts without a script, on a phone and on paper. Lines and bands are paths, which have no
percentages, so they lie in an inner SVG that is stretched to the same width; their strokes are not stretched.
Colours and line styles are classes of `templates/charts.css`, in light and dark. A mark's `<title>` is what
`templates/charts.js` shows over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from markupsafe import Markup

from mlmclm.reports.text import MINUS

Point = tuple[float, float]

PATH_WIDTH = 1000
"""Width of the inner SVG in its own units."""
NARROW = 270
"""Width in pixels of a chart on a phone, where the labels of its axis must not overlap."""
TEXT_PIXELS, NAME_PIXELS = 6.6, 7.3
"""Widths of a digit, and of a character of a row's name, in pixels, at most."""
FLAT = 1e-6
"""Share of their size by which numbers may differ and have an axis as if they were equal."""
LONGEST_NAME = 24
"""Characters of a label that names a row; longer ones are shortened in the middle."""


@dataclass(frozen=True)
class Style:
    """How a series looks: its classes, such as `c0 dash`, and its number in the page's legend (None: in no legend)."""

    classes: str
    number: int | None = None

    @property
    def quiet(self) -> bool:
        """Whether it is one of many models that share a grey."""
        return "quiet" in self.classes.split()


@dataclass(frozen=True)
class Axis:
    """An axis from `low` (left, or below) to `high`, with the labels at its ticks."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str = ""
    log: bool = False
    rows: bool = False  # whether its ticks name rows

    def share(self, value: float) -> float:
        """Return a value's place: 0 at `low`, 1 at `high`."""
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return (value - low) / (high - low)

    @classmethod
    def numbers(cls, values: Iterable[float], title: str, *, zero: bool = False, tight: bool = False) -> Axis:
        """Return a linear axis that covers the values, with round numbers at its ticks.

        Args:
            zero: whether it also covers 0.
            tight: whether it ends at the outermost values, without a margin.
        """
        known = [each for each in values if math.isfinite(each)] + [0.0] * zero
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        # Values that are equal up to rounding have no scale of their own.
        flat = high - low <= FLAT * max(abs(low), abs(high))
        margin = 0.5 if flat else 0 if tight else 0.06 * (high - low)
        # There is nothing on the other side of a 0 that is only there to be seen.
        ends = low - margin * (not (zero and low == 0)), high + margin * (not (zero and low < high == 0))
        return cls(*ends, [(tick, number_label(tick, ends)) for tick in round_ticks(*ends)], title)

    @classmethod
    def names(cls, names: Sequence[str]) -> Axis:
        """Return an axis with a row for each name, from top to bottom; row i is at the value i."""
        return cls(len(names) - 0.5, -0.5, [(row, shortened(name)) for row, name in enumerate(names)], rows=True)

    @property
    def gutter(self) -> int:
        """Width in pixels of the labels left of a vertical axis."""
        return 16 + math.ceil(
            (NAME_PIXELS if self.rows else TEXT_PIXELS) * max((len(label) for _, label in self.ticks), default=0)
        )


def round_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Return up to about `most` multiples of 1, 2 or 5 times a power of ten between the ends."""
    step = _step(low, high, most)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _step(low: float, high: float, most: int) -> float:
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most)


def number_label(value: float, ends: tuple[float, float], *, most: int = 6) -> str:
    """Format a tick with the decimals that tell it from its neighbours."""
    decimals = max(0, -math.floor(math.log10(_step(*ends, most)) + 1e-9))
    words = f"{abs(value):,.{decimals}f}"
    return f"{MINUS}{words}" if value < 0 and float(words.replace(",", "")) else words


def shortened(name: str) -> str:
    """Return a name, or its beginning and its end if it is too long for a label."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def label_rows(places: Sequence[float], labels: Sequence[str]) -> list[int | None]:
    """Return for each label along a narrow axis the row, 0 or 1, in which it overlaps no other; None leaves it out.

    Args:
        places: where the labels' middles are, as ascending shares of the axis.
    """
    ends = [-math.inf, -math.inf]
    rows: list[int | None] = []
    for place, label in zip(places, labels, strict=True):
        middle, half = place * NARROW, TEXT_PIXELS * len(label) / 2
        row = next((row for row, end in enumerate(ends) if middle - half >= end), None)
        if row is not None:
            ends[row] = middle + half + 4
        rows.append(row)
    return rows


@dataclass
class _Drawn:
    """The elements of one series: those in the stretched inner SVG, and those above it."""

    style: Style
    paths: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)


class Chart:
    """A chart under construction; later series are drawn over earlier ones.

    Args:
        height: of the plotting area, in pixels.
    """

    def __init__(self, x: Axis, y: Axis, height: int) -> None:
        self.x, self.y, self.height = x, y, height
        self._series: list[_Drawn] = []
        self._lines: list[str] = []

    def series(self, style: Style) -> None:
        """Begin a series, to which all marks that follow belong."""
        self._series.append(_Drawn(style))

    def _x(self, value: float) -> str:
        return f"{_short(100 * self.x.share(value))}%"

    def _y(self, value: float) -> str:
        return _short(self.height * (1 - self.y.share(value)))

    def _path(self, points: Sequence[Point]) -> str:
        return "L".join(f"{_short(PATH_WIDTH * self.x.share(x))} {self._y(y)}" for x, y in points)

    def band(self, upper: Sequence[Point], lower: Sequence[Point]) -> None:
        """Fill the area between two lines."""
        self._series[-1].paths.append(f'<path class="band" d="M{self._path([*upper, *lower[::-1]])}z"/>')

    def line(self, points: Sequence[tuple[float, float | None]]) -> None:
        """Draw a line, interrupted where a value is None."""
        parts = [
            self._path([(x, y) for x, y in part if y is not None])
            for known, part in groupby(points, lambda point: point[1] is not None)
            if known
        ]
        if parts:
            self._series[-1].paths.append(f'<path class="line" d="M{"M".join(parts)}"/>')

    def dot(self, x: float, y: float, words: str, *, radius: float = 3, kind: str = "") -> None:
        """Draw a point; `kind` is `ring` for a circle around one, or `hit` for an invisible one that has words only."""
        title, kind = _title(words), f' class="{kind}"' if kind else ""
        self._mark(f'<circle{kind} cx="{self._x(x)}" cy="{self._y(y)}" r="{_short(radius)}"', "circle", title)

    def cross(self, x: float, y: float, words: str) -> None:
        """Draw a cross."""
        self._mark(
            f'<svg class="cross" x="{self._x(x)}" y="{self._y(y)}"',
            "svg",
            f'{_title(words)}<path d="M-4-4L4 4M-4 4L4-4"/>',
        )

    def whisker(self, value: float, low: float, high: float, row: float, words: str, *, radius: float = 5) -> None:
        """Draw an estimate in a row with its interval, if that is known."""
        if not math.isnan(low) and not math.isnan(high):
            y = float(self._y(row))
            ends = [(low, y, high, y), *((end, y - radius, end, y + radius) for end in (low, high))]
            self._series[-1].marks += [
                f'<line x1="{self._x(x1)}" y1="{_short(y1)}" x2="{self._x(x2)}" y2="{_short(y2)}"/>' for x1, y1, x2, y2 in ends
            ]  # fmt: skip
        self.dot(value, row, words, radius=radius)

    def bar(self, start: float, stop: float, row: float, thickness: float, words: str, label: str = "") -> None:
        """Draw a horizontal bar, `thickness` pixels high, with a label in its middle."""
        self._mark(
            f'<rect x="{self._x(start)}" y="{_short(float(self._y(row)) - thickness / 2)}" '
            f'width="{_short(100 * (self.x.share(stop) - self.x.share(start)))}%" height="{_short(thickness)}"',
            "rect",
            _title(words),
        )
        if label:
            place = f'x="{self._x((start + stop) / 2)}" y="{_short(float(self._y(row)) + 4)}"'
            self._series[-1].marks.append(f'<text class="on-bar" {place}>{escape(label)}</text>')

    def _mark(self, start: str, name: str, content: str) -> None:
        self._series[-1].marks.append(f"{start}>{content}</{name}>" if content else f"{start}/>")

    def upright(self, x: float, style: Style, ends: tuple[float, float] | None = None) -> None:
        """Draw a vertical line behind all series, over the whole height or between two values of the vertical axis."""
        top, bottom = ("0", str(self.height)) if ends is None else (self._y(end) for end in ends)
        self._lines.append(f'<line{_look(style)} x1="{self._x(x)}" x2="{self._x(x)}" y1="{top}" y2="{bottom}"/>')

    def level(self, value: float, words: str) -> None:
        """Draw a thin dotted line with words at a value of the vertical axis or, in a chart of rows, of the horizontal one.

        Of a value beyond the axis there are only the words, at its end, with an arrow.
        """
        axis = self.x if self.y.rows else self.y
        below, beyond = value < axis.low, value > axis.high
        inside = not (below or beyond)
        arrows = ("← ", " →") if self.y.rows else ("↓ ", " ↑")
        words = f"{arrows[0] if below else ''}{words}{arrows[1] if beyond else ''}"
        if self.y.rows:
            place = self._x(min(max(value, axis.low), axis.high))
            line, text = f'x1="{place}" x2="{place}" y1="0" y2="{self.height}"', f'x="{place}" y="9"'
            right = axis.share(value) > 0.7
        else:
            y = float(self._y(min(max(value, axis.low), axis.high)))
            line, right = f'x1="0" x2="100%" y1="{_short(y)}" y2="{_short(y)}"', True
            text = f'x="100%" y="{_short(max(y - 4, 10))}"'
        if inside:
            self._lines.append(f'<line class="level" {line}/>')
        kind = "level right" if right else "level"
        self._lines.append(f'<text class="{kind}" {text} dx="{-4 if right else 4}">{escape(words)}</text>')

    def svg(self, identity: str, alt: str) -> Markup:
        """Return the chart, in a box with room for the labels of its axes."""
        bottom, axes = self._axes()
        paths = "".join(_group(each.style, each.paths) for each in self._series)
        marks = "".join(_group(each.style, each.marks) for each in self._series)
        inner = (
            f'<svg width="100%" height="{self.height}" viewBox="0 0 {PATH_WIDTH} {self.height}" preserveAspectRatio="none">{paths}</svg>'
            if paths
            else ""
        )
        rows = " rows" if self.y.rows else ""
        top = 24 if self.y.title else 6
        return Markup(
            f'<div class="plot{rows}" style="--left:{self.y.gutter}px;--top:{top}px;--bottom:{bottom}px">'
            f'<svg id="{identity}" role="img" tabindex="0" aria-label="{escape(alt)}" width="100%" height="{self.height}">'
            f"{axes}{''.join(self._lines)}{inner}{marks}</svg></div>"
        )

    def _axes(self) -> tuple[int, str]:
        """Return the height in pixels of the labels below, and the elements of both axes."""
        parts = []
        for value, label in self.y.ticks:
            place = self._y(value)
            parts.append(f'<line x1="0" x2="100%" y1="{place}" y2="{place}"/>')
            parts.append(f'<text class="y" x="-8" y="{_short(float(place) + 4)}">{escape(label)}</text>')
        if self.y.title:
            parts.append(f'<text x="{8 - self.y.gutter}" y="-12">{escape(self.y.title)}</text>')
        rows = label_rows([self.x.share(value) for value, _ in self.x.ticks], [label for _, label in self.x.ticks])
        for (value, label), row in zip(self.x.ticks, rows, strict=True):
            parts.append(f'<line x1="{self._x(value)}" x2="{self._x(value)}" y1="0" y2="{self.height}"/>')
            if row is not None:
                parts.append(
                    f'<text class="x" x="{self._x(value)}" y="{self.height + 16 + 13 * row}">{escape(label)}</text>'
                )
        bottom = self.height + 16 + 13 * max((row or 0 for row in rows), default=0)
        if self.x.title:
            bottom += 19
            parts.append(f'<text class="x" x="50%" y="{bottom}">{escape(self.x.title)}</text>')
        return bottom - self.height + 6, f'<g class="axes">{"".join(parts)}</g>'


def _title(words: str) -> str:
    return f"<title>{escape(words, quote=False)}</title>" if words else ""


def _look(style: Style) -> str:
    return f' class="{style.classes}"' + ("" if style.number is None else f' data-m="{style.number}"')


def _group(style: Style, elements: Sequence[str]) -> str:
    return f"<g{_look(style)}>{''.join(elements)}</g>" if elements else ""


def _short(value: float) -> str:
    """Format a coordinate, to a hundredth."""
    words = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if words in ("-0", "") else words
