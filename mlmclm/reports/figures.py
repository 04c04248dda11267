"""The report's figures as Plotly specifications; the page draws them from plain JSON, in light or dark colours.

Colours are the colour-blind-safe set of Okabe and Ito (2008). Each model has one colour in all figures, with a
different line style when colours repeat. The baseline is grey and dashed.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any

import plotly.graph_objects as go

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.study_facts import ModelFacts, TaskFacts

PALETTE = (
    ("#0072b2", "#56aeea"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fcf9f"),
    ("#b5578f", "#e08bc0"),
    ("#b27d00", "#f0b429"),
    ("#5b5bd6", "#9d9dff"),
    ("#7a6a53", "#c4b296"),
)
"""Pairs of a colour on a light page and one on a dark page, as in the constants below."""
BASELINE = ("#6b7280", "#9aa3b2")
INK = ("#1c2530", "#e6e9ee")
FAINT = ("#5a6675", "#9aa5b4")
GRID = ("#e3e7ec", "#2a323d")
DASHES = ("solid", "dash", "dot", "dashdot")
BAND = 0.14
"""Opacity of the interval bands."""


@dataclass(frozen=True)
class Figure:
    """A panel: its place on the page, its title and description, and its specification."""

    id: str
    title: str
    alt: str
    spec: dict[str, Any] = field(repr=False)
    height: int = 280  # in pixels


@dataclass(frozen=True)
class Style:
    """A model's colours (light, dark) and line style."""

    light: str
    dark: str
    dash: str


def styles(names: Sequence[str], baseline: str | None) -> dict[str, Style]:
    """Assign a style to each model, in the order given; the baseline has its own."""
    looks = (Style(*colours, dash) for dash, colours in cycle(product(DASHES, PALETTE)))
    return {name: Style(*BASELINE, "dash") if name == baseline else next(looks) for name in names}


def dark_colours() -> dict[str, str]:
    """Map each colour of the specifications to its counterpart on a dark page."""
    pairs = [*PALETTE, BASELINE, INK, FAINT, GRID]
    return dict(pairs) | {_faded(light): _faded(dark) for light, dark in pairs}


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND})"


def _layout(**more: Any) -> dict[str, Any]:
    axis = {"gridcolor": GRID[0], "zeroline": False, "linecolor": GRID[0], "tickcolor": GRID[0], "automargin": True}
    small = {"title": {"font": {"size": 12}}}
    base = {
        "template": {"layout": {"xaxis": small, "yaxis": small}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": FAINT[0]},
        "margin": {"l": 46, "r": 12, "t": 8, "b": 40},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
    }
    x, y = axis | more.pop("xaxis", {}), axis | more.pop("yaxis", {})
    return base | {"xaxis": x, "yaxis": y} | more


def _upright(x: float, **line: Any) -> dict[str, Any]:
    """Draw a vertical line over the whole height."""
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _at_chance(chance: float | None, axis: str) -> list[dict[str, Any]]:
    """Draw the chance level as a dotted line across an axis of scores, `x` or `y`; nothing if it is not known."""
    if chance is None or math.isnan(chance):
        return []
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}{end}": chance * 100 for end in (0, 1)} | {f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1}
    label = {"text": "chance", "font": {"size": 10, "color": FAINT[0]}, "textposition": "start"}
    return [{"type": "line", **ends, "line": {"color": FAINT[0], "width": 1.2, "dash": "dot"}, "label": label}]


def _hover(model: str, words: str) -> str:
    """Return what is shown over a point: the model's name, and Plotly's template for the rest."""
    return f"<b>{html.escape(model)}</b><br>{words}<extra></extra>"


def plotted(traces: list[Any], **layout: Any) -> dict[str, Any]:
    """Return the specification of a figure in the page's style."""
    # Built with Plotly's own classes, so that a wrong property fails here and not silently in a reader's browser.
    return go.Figure(data=traces, layout=_layout(**layout)).to_plotly_json()


def titled(title: str, standoff: int = 8, **more: Any) -> dict[str, Any]:
    """Return an axis with its title, at a distance in pixels."""
    return {"title": {"text": title, "standoff": standoff}, **more}


def _known(rows: Sequence[Record], name: str) -> list[Record]:
    return [row for row in rows if not math.isnan(row[name])]


def _rate_axis(rates: Sequence[float]) -> dict[str, Any]:
    low, high = math.log10(min(rates)), math.log10(max(rates))
    # In decades; the minimum is for a grid of one learning rate.
    margin = max(0.06 * (high - low), 0.08)
    return {
        "type": "log",
        "tickvals": list(rates),
        "ticktext": [rate_text(rate) for rate in rates],
        "range": [low - margin, high + margin],
        "tickangle": 0 if len(rates) < 5 else -40,
        **titled("learning rate"),
    }


def rate_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: dict[str, Style]) -> list[Figure]:
    """Draw test score against learning rate, one panel per task.

    A line is the mean over seeds, a band its interval, a ring a chosen rate, a cross a rate at which all seeds diverged,
    and a dotted line the chance level.
    """
    figures = []
    curves, picked = records(analysis.curves), records(analysis.chosen)
    for number, task in enumerate(tasks):
        rows = [row for row in curves if row["task"] == task.name]
        if not rows:
            continue
        floor = min((row["test_mean"] for row in _known(rows, "test_mean")), default=0.0)
        traces: list[Any] = []
        for model, look in looks.items():
            own = [row for row in rows if row["model"] == model]
            traces += _curve(model, look, own, floor)
            chosen = {row["learning_rate"] for row in picked if row["model"] == model and row["task"] == task.name}
            ring = [row for row in _known(own, "test_mean") if row["learning_rate"] in chosen]
            mark = {"size": 13, "color": "rgba(0,0,0,0)", "line": {"width": 2, "color": look.light}}
            # `meta` is how the page's legend finds the traces of a model to hide.
            points = _points(ring, "test_mean")
            traces.append(_scatter(model, points, mode="markers", marker=mark, hoverinfo="skip"))
        metric = text.metric(task.metric)
        level = analysis.chances.get(task.name)
        axis, line = titled(metric, 6), _at_chance(None if level is None else level.score, "y")
        figures.append(_panel(f"rates-{number}", task, f"test {metric}", rows, traces, axis, shapes=line))
    return figures


def _panel(
    name: str,
    task: TaskFacts,
    shown: str,
    rows: Sequence[Record],
    traces: list[Any],
    axis: dict[str, Any],
    *,
    shapes: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> Figure:
    """Build a task's figure against the learning rates of `rows`; `shown` names the quantity for the description."""
    about = f"Line chart: {task.title}, {shown} against learning rate for each model; the same numbers are in the table below."
    rates = sorted({row["learning_rate"] for row in rows})
    return Figure(name, task.title, about, plotted(traces, shapes=shapes, xaxis=_rate_axis(rates), yaxis=axis), **more)


def _points(rows: Sequence[Record], column: str) -> list[tuple[float, float]]:
    return [(row["learning_rate"], row[column]) for row in rows]


def _scatter(model: str, points: Sequence[tuple[float, float]], **look: Any) -> Any:
    """Plot scores, in per cent, against learning rates."""
    return go.Scatter(x=[rate for rate, _ in points], y=[score * 100 for _, score in points], meta=model, **look)


def _line(model: str, look: Style, rows: Sequence[Record], column: str, **hover: Any) -> Any:
    """Plot a column as a model's own line."""
    line = {"color": look.light, "width": 2, "dash": look.dash}
    marker = {"size": 6, "color": look.light}
    return _scatter(model, _points(rows, column), mode="lines+markers", line=line, marker=marker, **hover)


def _curve(model: str, look: Style, rows: Sequence[Record], floor: float) -> list[Any]:
    known = _known(rows, "test_mean")
    band = _known(rows, "test_low")
    lost = [row for row in rows if math.isnan(row["test_mean"]) and row["diverged"]]
    traces = []
    if len(band) > 1:
        # A closed outline: along the upper ends, and back along the lower ones.
        outline = _points(band, "test_high") + _points(band, "test_low")[::-1]
        filled = {"fill": "toself", "fillcolor": _faded(look.light), "line": {"width": 0, "color": "rgba(0,0,0,0)"}}
        traces.append(_scatter(model, outline, mode="lines", hoverinfo="skip", **filled))
    told = [
        f"{text.estimate(row['test_mean'], row['test_low'], row['test_high'])}<br>"
        f"{text.plural(row['n'], 'seed')}" + (f", {row['diverged']} diverged" if row["diverged"] else "")
        for row in known
    ]
    rates = [rate_text(row["learning_rate"]) for row in known]
    hover = _hover(model, "learning rate %{customdata}<br>%{text}")
    traces.append(_line(model, look, known, "test_mean", text=told, customdata=rates, hovertemplate=hover))
    if lost:
        # A diverged rate has no score, so its cross is drawn at the level of the lowest mean of the panel.
        crosses = [(row["learning_rate"], floor) for row in lost]
        mark = {"symbol": "x-thin", "size": 10, "line": {"width": 2.5, "color": look.light}}
        hover = _hover(model, "all seeds diverged")
        traces.append(_scatter(model, crosses, mode="markers", marker=mark, hovertemplate=hover))
    return traces


def deviation_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: dict[str, Style]) -> list[Figure]:
    """Draw the standard deviation over seeds of the test score against learning rate, one panel per task."""
    figures = []
    curves = records(analysis.curves)
    for number, task in enumerate(tasks):
        rows = _known([row for row in curves if row["task"] == task.name], "test_sd")
        if not rows:
            continue
        traces = []
        for model, look in looks.items():
            own = [row for row in rows if row["model"] == model]
            told = [[rate_text(row["learning_rate"]), row["n"]] for row in own]
            words = "learning rate %{customdata[0]}<br>deviation %{y:.2f} over %{customdata[1]} seeds"
            traces.append(_line(model, look, own, "test_sd", customdata=told, hovertemplate=_hover(model, words)))
        axis = titled("sd over seeds, points", 6, rangemode="tozero")
        shown = "standard deviation over seeds"
        figures.append(_panel(f"deviation-{number}", task, shown, rows, traces, axis, height=240))
    return figures


def overall_figure(analysis: Analysis, looks: dict[str, Style]) -> Figure | None:
    """Draw every model's mean over tasks with its interval, best on top."""
    rows = _known([row for row in records(analysis.overall) if row["kind"] == "all"], "mean")
    if not rows:
        return None
    # Plotly draws categories from the bottom up, so the best comes last.
    rows.sort(key=lambda row: (row["mean"], row["model"]))
    spec = plotted(
        [_whisker(row["model"], row["mean"], row["low"], row["high"], looks[row["model"]]) for row in rows],
        shapes=_at_chance(rows[0]["chance"], "x"),
        xaxis=titled("mean over tasks, points"),
        yaxis={"type": "category", "showgrid": False, "tickfont": {"size": 12.5, "color": INK[0]}},
        margin={"l": 20, "r": 16, "t": 6, "b": 42},
    )
    alt = "Dot chart: mean over tasks of each model with its interval; the same numbers are in the table below."
    return Figure("overall", "Mean over tasks", alt, spec, 70 + 38 * len(rows))


def error_bars(above: list[float], below: list[float], **look: Any) -> dict[str, Any]:
    """Return Plotly's description of error bars; lengths in points."""
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **look}


def _whisker(model: str, value: float, low: float, high: float, look: Style, *, sign: bool = False) -> Any:
    """Plot a model's estimate with its interval, in points; with `sign` it is a difference."""
    bars = None
    if not math.isnan(low):
        bars = error_bars([(high - value) * 100], [(value - low) * 100], thickness=2, width=5, color=look.light)
    return go.Scatter(
        x=[value * 100],
        y=[html.escape(model)],
        mode="markers",
        marker={"size": 10, "color": look.light},
        error_x=bars,
        text=[text.estimate(value, low, high, sign=sign)],
        hovertemplate=_hover(model, "%{text}"),
        meta=model,
    )


def gain_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: dict[str, Style]) -> list[Figure]:
    """Draw each model's gain over the baseline, one panel for the mean over tasks and one per task."""
    if analysis.baseline is None:
        return []
    figures = []
    rows = against(analysis.comparisons, analysis.baseline)
    panels = [("all", "all tasks", "Mean over tasks")] if len(tasks) > 1 else []
    panels += [("task", task.name, task.title) for task in tasks]
    for number, (kind, scope, title) in enumerate(panels):
        own = {row["model_b"]: row for row in rows if row["kind"] == kind and row["scope"] == scope}
        # Reversed because Plotly draws categories from the bottom up.
        shown = [model for model in reversed(looks) if model in own and not math.isnan(own[model]["difference"])]
        if not shown:
            continue
        # The comparison is "baseline minus model"; flip it to the model's gain.
        spec = plotted(
            [
                _whisker(model, -row["difference"], -row["high"], -row["low"], looks[model], sign=True)
                for model, row in ((model, own[model]) for model in shown)
            ],
            shapes=[_upright(0, color=FAINT[0], width=1.5)],
            xaxis=titled("points over the baseline", rangemode="tozero"),
            yaxis={"type": "category", "showgrid": False, "showticklabels": False},
            margin={"l": 12, "r": 14, "t": 6, "b": 42},
        )
        alt = f"Dot chart: gain over the baseline, {title}; the same numbers are in the table below."
        figures.append(Figure(f"gain-{number}", title, alt, spec, 74 + 24 * len(shown)))
    return figures


def loss_figures(models: Sequence[ModelFacts], looks: dict[str, Style]) -> list[Figure]:
    """Draw training and validation loss of pretraining against the step, for models with loss curves.

    A dotted vertical line marks a change of objective.
    """
    figures = []
    for name, title in (("curve", "Training loss"), ("validation_curve", "Validation loss")):
        traces: list[Any] = []
        marks = []
        for model in models:
            points = getattr(model, name)
            if not points or model.name not in looks:
                continue
            look = looks[model.name]
            drawn = _apart(points, model.switches)
            traces.append(
                go.Scatter(
                    x=[step for step, _ in drawn],
                    y=[value for _, value in drawn],
                    mode="lines+markers" if len(points) < 30 else "lines",
                    line={"color": look.light, "width": 1.8, "dash": look.dash},
                    marker={"size": 4, "color": look.light},
                    hovertemplate=_hover(model.name, "step %{x:,}<br>loss %{y:.3f}"),
                    meta=model.name,
                )
            )
            marks += [_upright(step, color=look.light, width=1.2, dash="dot") for step in model.switches]
        if traces:
            spec = plotted(
                traces,
                shapes=marks,
                xaxis=titled("step"),
                yaxis=titled("nats a predicted token", 6),
            )
            alt = f"Line chart: {title.lower()} of pretraining against the step for each model."
            figures.append(Figure(f"loss-{name.replace('_', '-')}", title, alt, spec, 320))
    return figures


def _apart(points: Sequence[tuple[int, float]], switches: Sequence[int]) -> list[tuple[int, float | None]]:
    """Break the line after each switch: losses of different objectives are not comparable, so no line joins them."""
    found: list[tuple[int, float | None]] = []
    for number, (step, value) in enumerate(points):
        if number and any(points[number - 1][0] <= switch < step for switch in switches):
            # Plotly breaks a line at a null.
            found.append((step, None))
        found.append((step, value))
    return found
