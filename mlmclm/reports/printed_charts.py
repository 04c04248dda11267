"""Charts on paper: the panels of a group of figures on one page with their legend, as SVG or PDF, by matplotlib.

Colours are those of `templates/charts.css` for light pages. Equal charts give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mlmclm.reports import charts
from mlmclm.reports.drawing import Figure, Legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Page

PIXELS = 130
"""Number of pixels of a chart on a web page that make an inch on paper."""
PANEL, WIDE = 2.7, 6.8
"""Width in inches of one of several panels, and of a text block."""
SETTINGS: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "grid.linewidth": 0.4,
    "grid.color": "#e3e7ec",
    "axes.axisbelow": True,
    # Fonts as TrueType, which publishers ask for; ids in SVG that don't change from run to run.
    "pdf.fonttype": 42,
    "svg.hashsalt": "mlmclm",
}
INK = "#1c2530"
FAINT = 0.35
"""Opacity of a model that shares its colour with others."""


def printed(figures: Sequence[Figure], legend: Legend) -> dict[str, bytes]:
    """Return the panels of a group as files: `svg` and `pdf`.

    Args:
        legend: the legend of all panels that have none themselves; empty if rows or tiles have names.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    columns = 1 if len(figures) == 1 else 2 if len(figures) <= 4 else 3
    rows = math.ceil(len(figures) / columns)
    # Names of rows and of tilted columns take room beside the chart.
    tall = max(figure.chart.height for figure in figures) / PIXELS + (1.3 if figures[0].chart.x.tilted else 0.8)
    wide = WIDE if len(figures) == 1 else PANEL * columns + sum(figure.chart.y.rows for figure in figures[:columns])
    legends = {figure.legend for figure in figures}
    entries = legends.pop() if len(legends) == 1 and figures[0].legend else legend
    with matplotlib.rc_context(SETTINGS):
        beside = _entries_a_row([name for name, _ in entries], wide)
        page = Canvas(figsize=(wide, rows * tall + 0.14 * math.ceil(len(entries) / beside)), layout="constrained")
        for place, figure in enumerate(figures):
            axes = page.add_subplot(rows, columns, place + 1)
            axes.set_title(figure.title, loc="left")
            _draw(axes, figure.chart)
        if entries:
            page.legend(
                [_sample(style) for _, style in entries], [name for name, _ in entries], loc="outside lower center", ncols=beside
            )  # fmt: skip
        # Without a date, equal figures are equal files.
        return {kind: _saved(page, kind, {date: None}) for kind, date in (("svg", "Date"), ("pdf", "CreationDate"))}


def _entries_a_row(names: Sequence[str], wide: float) -> int:
    """Return how many entries of a legend fit side by side into a width in inches, at most four."""
    size = float(SETTINGS["font.size"]) / 72
    # The mean width of a letter is 0.6 of the font size; a line sample and its gaps are as wide as four times the font size.
    longest = size * (4 + 0.6 * max(map(len, names), default=0))
    return max(1, min(4, len(names), int(wide / longest)))


def _saved(page: Page, kind: str, metadata: dict[str, None]) -> bytes:
    written = io.BytesIO()
    page.savefig(written, format=kind, metadata=metadata)
    return written.getvalue()


@cache
def _colours() -> dict[str, str]:
    style = resources.files("mlmclm.reports").joinpath("templates/charts.css").read_text(encoding="utf-8")
    return dict(re.findall(r"\.(c[0-9]|c-base)\{--c:(#\w+)\}", style.partition("@media")[0]))


def _look(style: charts.Style) -> dict[str, Any]:
    classes = style.classes.split()
    colour = next((value for name, value in _colours().items() if name in classes), INK)
    return {
        "color": colour,
        "alpha": FAINT if style.quiet else 1,
        "linestyle": (0, (5, 2)) if "dash" in classes else "-",
    }


def _sample(style: charts.Style) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker="o", markersize=3, **_look(style))


def _draw(axes: Axes, chart: charts.Chart) -> None:
    from matplotlib.ticker import NullLocator

    if chart.x.log:
        axes.set_xscale("log")
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.set_ylim(chart.y.low, chart.y.high)
    rows = chart.x.label_rows
    labels = [label for _, label in chart.x.ticks]
    if not chart.x.tilted:
        labels = ["" if row is None else "\n" * row + label for row, label in zip(rows, labels, strict=True)]
    axes.set_xticks([value for value, _ in chart.x.ticks], labels)
    if chart.x.tilted:
        axes.tick_params(axis="x", rotation=40, top=True, labeltop=True, bottom=False, labelbottom=False)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="left", rotation_mode="anchor")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([value for value, _ in chart.y.ticks], [label for _, label in chart.y.ticks])
    axes.set_xlabel(chart.x.title)
    axes.set_ylabel(chart.y.title)
    axes.grid(visible=not chart.x.tilted)
    axes.spines[["top", "right"]].set_visible(False)
    for line in chart.behind:
        _behind(axes, chart, line)
    for place, series in enumerate(chart.drawn):
        look = _look(series.style) | {"zorder": 2 + place / 1000}
        for mark in series.marks:
            _mark(axes, chart, mark, look, pale=series.style.quiet)


def _behind(axes: Axes, chart: charts.Chart, line: charts.Upright | charts.Level) -> None:
    if isinstance(line, charts.Upright):
        low, high = line.ends or (chart.y.low, chart.y.high)
        axes.plot(
            [line.x, line.x], [low, high], **_look(line.style) | {"linewidth": 0.7, "linestyle": ":", "zorder": 1}
        )
        return
    axis = chart.x if chart.y.rows else chart.y
    inside = axis.low <= line.value <= axis.high
    value, words = min(max(line.value, axis.low), axis.high), chart.level_words(line)
    if chart.y.rows:
        if inside:
            axes.axvline(value, color=INK, linewidth=0.7, linestyle=":")
        axes.annotate(words, (value, 1), xycoords=("data", "axes fraction"), fontsize=6, va="top")
    else:
        if inside:
            axes.axhline(value, color=INK, linewidth=0.7, linestyle=":")
        axes.annotate(words, (1, value), xycoords=("axes fraction", "data"), fontsize=6, ha="right", va="bottom")


def _mark(axes: Axes, chart: charts.Chart, mark: charts.Mark, look: dict[str, Any], *, pale: bool) -> None:
    """Draw a mark; marks that only show words to the pointer are left out."""
    dot = look | {"linestyle": "none", "marker": "o", "markeredgewidth": 0}
    match mark:
        case charts.Band() if not pale:
            points = [*mark.upper, *mark.lower[::-1]]
            axes.fill(
                *zip(*points, strict=True), facecolor=look["color"], alpha=0.14, linewidth=0, zorder=look["zorder"]
            )
        case charts.Line():
            for known, part in groupby(mark.points, lambda point: point[1] is not None):
                if known:
                    axes.plot(*zip(*part, strict=True), **look)
        case charts.Dot(kind="ring"):
            axes.plot([mark.x], [mark.y], **dot | {"markersize": 6, "markerfacecolor": "none", "markeredgewidth": 0.9})
        case charts.Dot(kind=""):
            axes.plot([mark.x], [mark.y], **dot | {"markersize": mark.radius})
        case charts.Cross():
            axes.plot([mark.x], [mark.y], **dot | {"marker": "x", "markersize": 4, "markeredgewidth": 1})
        case charts.Whisker():
            ends, place = [mark.low, mark.high], [mark.place, mark.place]
            at = ([mark.place], [mark.value]) if mark.upright else ([mark.value], [mark.place])
            if mark.known:
                solid = look | {"linestyle": "-", "linewidth": 0.9}
                axes.plot(*((place, ends) if mark.upright else (ends, place)), **solid)
            axes.plot(*at, **dot | {"markersize": 0.8 * mark.radius})
        case charts.Stripe():
            thick = mark.thickness * abs(chart.y.high - chart.y.low) / chart.height
            shade = 0.45 if mark.kind == "pale" else look["alpha"]
            axes.barh(
                mark.row,
                mark.stop - mark.start,
                thick,
                left=mark.start,
                color=look["color"],
                alpha=shade,
                zorder=look["zorder"],
            )
            if mark.label:
                axes.text((mark.start + mark.stop) / 2, mark.row, mark.label, ha="center", va="center", color="white")
        case charts.HeatCell():
            axes.barh(mark.row, 1, 1, left=mark.column - 0.5, color=look["color"], alpha=mark.opacity, linewidth=0)
            colour = "white" if mark.tone == "bar" else INK
            axes.text(mark.column, mark.row, mark.label, ha="center", va="center", fontsize=5.5, color=colour)
