"""Charts as data: axes, series and their marks. `svg_charts` draws them on a page, and `printed_charts` on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlmclm.reports.text import MINUS

Point = tuple[float, float]

NARROW = 270
"""Width in pixels of a chart on a phone, where the labels of its axis must not overlap."""
TEXT_PIXELS, NAME_PIXELS = 6.6, 7.3
"""Widths of a digit, and of a character of a row's name, in pixels, at most."""
FLAT = 1e-6
"""Relative difference up to which numbers get an axis as if they were equal."""
LONGEST_NAME = 24
"""Characters of a label that names a row; longer ones are shortened in the middle."""

PALEST = 0.06
"""Opacity of a heat map's lowest cells."""
STRONG, STRONGEST = 0.62, 0.84
"""Shares from which on the label of a heat map's cell needs the other colour: on a dark page, and on a light one."""
MANY_COLUMNS = 7
"""Maximum number of columns of a heat map whose labels have room on a phone."""


@dataclass(frozen=True)
class Style:
    """How a series looks: its CSS classes, such as `c0 dash`, and its number in the page's legend (None: in no legend)."""

    classes: str
    number: int | None = None

    @property
    def quiet(self) -> bool:
        """Whether it is pale, because many models share its colour."""
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
    tilted: bool = False  # whether its labels name columns; they are tilted, above the chart

    def share(self, value: float) -> float:
        """Return a value's position on the axis: 0 at `low`, 1 at `high`."""
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    @classmethod
    def numbers(cls, values: Iterable[float], title: str, *, zero: bool = False, tight: bool = False) -> Axis:
        """Return a linear axis that covers the values, with round numbers at its ticks.

        Args:
            zero: whether it also covers 0.
            tight: whether it ends at the outermost values, without a margin.
        """
        finite = [x for x in values if math.isfinite(x)] + [0.0] * zero
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        # Values that are equal up to rounding have no scale of their own.
        flat = high - low <= FLAT * max(abs(low), abs(high))
        margin = 0.5 if flat else 0 if tight else 0.06 * (high - low)
        # An end at 0 that `zero` adds is for orientation only and needs no margin beyond it.
        ends = low - margin * (not (zero and low == 0)), high + margin * (not (zero and low < high == 0))
        return cls(*ends, [(tick, number_label(tick, ends)) for tick in round_ticks(*ends)], title)

    @classmethod
    def names(cls, names: Sequence[str]) -> Axis:
        """Return an axis with a row for each name, from top to bottom; row i is at the value i."""
        return cls(len(names) - 0.5, -0.5, [(row, shortened(name)) for row, name in enumerate(names)], rows=True)

    @classmethod
    def columns(cls, names: Sequence[str]) -> Axis:
        """Return an axis with a column for each name, from left to right; column i is at the value i."""
        return cls(-0.5, len(names) - 0.5, [(place, shortened(name)) for place, name in enumerate(names)], tilted=True)

    @classmethod
    def ratios(cls, values: Iterable[float], title: str, label: Callable[[float], str]) -> Axis:
        """Return a logarithmic axis with a tick at each of the values, which are positive."""
        ticks = sorted(set(values))
        # A single value has the ratio 1, so the margin needs a minimum.
        margin = max((ticks[-1] / ticks[0]) ** 0.06, 10**0.08)
        return cls(ticks[0] / margin, ticks[-1] * margin, [(value, label(value)) for value in ticks], title, log=True)

    @property
    def label_rows(self) -> list[int | None]:
        """For each tick, the row below the axis that its label is in (function `label_rows`)."""
        return label_rows([self.share(value) for value, _ in self.ticks], [label for _, label in self.ticks])

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
    """Format a tick with the decimals that distinguish it from its neighbours."""
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


@dataclass(frozen=True)
class Band:
    """A filled area between two lines."""

    upper: Sequence[Point]
    lower: Sequence[Point]


@dataclass(frozen=True)
class Line:
    """A line, interrupted where a value is None."""

    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Dot:
    """A point. `kind` is `ring` for a circle around a point, or `hit` for an invisible point that only shows words."""

    x: float
    y: float
    words: str
    radius: float = 3
    kind: str = ""


@dataclass(frozen=True)
class Cross:
    """A cross."""

    x: float
    y: float
    words: str


@dataclass(frozen=True)
class Whisker:
    """An estimate in a row (`upright`: in a column) with its interval; unknown ends are NaN."""

    value: float
    low: float
    high: float
    place: float
    words: str
    radius: float = 5
    upright: bool = False

    @property
    def known(self) -> bool:
        """Whether the interval is known."""
        return not math.isnan(self.low) and not math.isnan(self.high)


@dataclass(frozen=True)
class Stripe:
    """A horizontal bar in a row, `thickness` pixels high, with a label in its middle."""

    start: float
    stop: float
    row: float
    thickness: float
    words: str
    label: str = ""
    kind: str = ""


@dataclass(frozen=True)
class HeatCell:
    """A cell of a heat map: a bar of one column's width, darker for a higher `share` (0 to 1)."""

    column: float
    row: float
    share: float
    words: str
    label: str

    @property
    def opacity(self) -> float:
        """Opacity of its colour; the lowest cell is not white."""
        return PALEST + (1 - PALEST) * self.share

    @property
    def tone(self) -> Literal["pale", "mid", "bar"]:
        """The class of its label: `pale` is in the text's colour, `mid` dark on any page, `bar` in the page's colour."""
        return "pale" if self.share < STRONG else "mid" if self.share < STRONGEST else "bar"


Mark = Band | Line | Dot | Cross | Whisker | Stripe | HeatCell


@dataclass
class Series:
    """The marks that share a look."""

    style: Style
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Upright:
    """A vertical line behind all series, over the whole height or between two values of the vertical axis."""

    x: float
    style: Style
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Level:
    """A thin dotted line with words at a value of the vertical axis or, in a chart of rows, of the horizontal one.

    A value beyond the axis has only its words, at the axis's end, with an arrow.
    """

    value: float
    words: str


class Chart:
    """A chart under construction; later series are drawn over earlier ones.

    Args:
        height: of the plotting area, in pixels.
    """

    def __init__(self, x: Axis, y: Axis, height: int) -> None:
        self.x, self.y, self.height = x, y, height
        self.drawn: list[Series] = []
        self.behind: list[Upright | Level] = []

    def series(self, style: Style) -> None:
        """Begin a series, to which all marks that follow belong."""
        self.drawn.append(Series(style))

    def add(self, *marks: Mark) -> None:
        """Add marks to the current series."""
        self.drawn[-1].marks += marks

    def level(self, value: float, words: str) -> None:
        """Mark a value with a `Level`; a value that is not known (NaN) is not marked."""
        if not math.isnan(value):
            self.behind.append(Level(value, words))

    def upright(self, x: float, style: Style, ends: tuple[float, float] | None = None) -> None:
        """Draw a vertical line, see `Upright`."""
        self.behind.append(Upright(x, style, ends))

    def level_words(self, level: Level) -> str:
        """Return the words at a level, with an arrow if its value is beyond the axis."""
        axis = self.x if self.y.rows else self.y
        before, after = ("← ", " →") if self.y.rows else ("↓ ", " ↑")
        return f"{before if level.value < axis.low else ''}{level.words}{after if level.value > axis.high else ''}"
