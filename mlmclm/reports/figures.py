"""The report's figures, each a function from the analysis to charts (`reports.charts`).

Colours are based on the colour-blind-safe set of Okabe and Ito (2008); `templates/charts.css` has them, for light and
dark pages. Each model has one look in all figures. The baseline is grey and dashed. Of more models than there are looks, the
best have colours and the others share a grey, in which pointing at one brings it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from markupsafe import Markup

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.registry import KINDS, Registry
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Point, Style
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts

HUES = tuple(f"c{number}" for number in range(7))
"""Classes of the colours in `templates/charts.css`."""
DASHES = ("", "dash")
BASELINE, QUIET = "c-base dash", "c-base quiet"
MOST_POINTS = 400
"""Points of a loss curve that are drawn, at most about."""
MOST_WORDS = 30
"""Points of a loss curve over which its value is shown, at most about."""


@dataclass(frozen=True)
class Figure:
    """A panel: its title, the sentence below that, its chart, and what its colours mean if they aren't the models'."""

    id: str
    title: str
    chart: Markup
    subtitle: str = ""
    legend: tuple[tuple[str, Style], ...] = ()


FIGURES: Registry[Callable[[Analysis, StudyFacts, Mapping[str, Style]], Sequence[Figure]]] = KINDS["figure"]
"""The figures that are added to a report's own, by name."""


def styles(names: Sequence[str], baseline: str | None, ranked: Sequence[str] = ()) -> dict[str, Style]:
    """Assign a look to each model; the baseline has its own.

    Args:
        ranked: the models from the best on; if there are more models than looks, the first of these have colours.
    """
    others = [name for name in names if name != baseline]
    looks = [f"{hue} {dash}".strip() for dash, hue in product(DASHES, HUES)]
    if len(others) <= len(looks):
        classes = dict(zip(others, looks, strict=False))
    else:
        leading = [name for name in (*ranked, *others) if name in others]
        classes = dict(zip(dict.fromkeys(leading), HUES, strict=False))
    if baseline is not None:
        classes[baseline] = BASELINE
    return {name: Style(classes.get(name, QUIET), number) for number, name in enumerate(names)}


def _back_to_front(looks: Mapping[str, Style]) -> list[tuple[str, Style]]:
    """Return the models in the order in which they are drawn: first those in grey, so that they cover no colour."""
    return sorted(looks.items(), key=lambda item: not item[1].quiet)


def _known(rows: Sequence[Record], name: str) -> list[Record]:
    return [row for row in rows if not math.isnan(row[name])]


def _rate_axis(rates: Sequence[float]) -> Axis:
    # The minimum is for a grid of one learning rate.
    margin = max((max(rates) / min(rates)) ** 0.06, 10**0.08)
    ticks = [(rate, rate_text(rate)) for rate in rates]
    return Axis(min(rates) / margin, max(rates) * margin, ticks, "learning rate", log=True)


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def rate_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: Mapping[str, Style]) -> list[Figure]:
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
        known = _known(rows, "test_mean")
        seen = [100 * row[part] for row in known for part in ("test_mean", "test_low", "test_high")]
        metric, level = text.metric(task.metric), analysis.chances.get(task.name)
        chance = math.nan if level is None else level.score
        axis = Axis.numbers(_with_chance(seen, chance), f"{metric}, points")
        chart = Chart(_rate_axis(sorted({row["learning_rate"] for row in rows})), axis, 210)
        _mark_chance(chart, chance)
        floor = min((row["test_mean"] for row in known), default=0.0)
        for model, look in _back_to_front(looks):
            own = [row for row in rows if row["model"] == model]
            chosen = {row["learning_rate"] for row in picked if row["model"] == model and row["task"] == task.name}
            _curve(chart, model, look, own, floor, chosen)
        figures.append(_panel(f"rates-{number}", task, f"test {metric}", chart))
    return figures


def _with_chance(values: Sequence[float], chance: float) -> list[float]:
    """Return scores, in points, with the chance level unless that would take more than half of their axis."""
    known = [value for value in values if math.isfinite(value)]
    if not known or math.isnan(chance):
        return known
    low, high, level = min(known), max(known), 100 * chance
    return [*known, level] if max(low - level, level - high) <= high - low else known


def _mark_chance(chart: Chart, chance: float) -> None:
    if not math.isnan(chance):
        chart.level(100 * chance, f"chance {text.points(chance)}")


def _panel(name: str, task: TaskFacts, shown: str, chart: Chart) -> Figure:
    """Return a task's figure; `shown` names the quantity for the description."""
    about = f"Line chart: {task.name}, {shown} against learning rate for each model; the same numbers are in the table below."
    return Figure(name, task.name, chart.svg(name, about), subtitle_of(task))


def subtitle_of(task: TaskFacts) -> str:
    """Return the task's title unless that is its name; titles are sentences."""
    return task.title if task.title != task.name else ""


def _points(rows: Sequence[Record], column: str) -> list[Point]:
    """Return scores, in points, by learning rate."""
    return [(row["learning_rate"], 100 * row[column]) for row in rows]


def _curve(chart: Chart, model: str, look: Style, rows: Sequence[Record], floor: float, chosen: set[float]) -> None:
    known, band = _known(rows, "test_mean"), _known(rows, "test_low")
    chart.series(look)
    if len(band) > 1:
        chart.band(_points(band, "test_high"), _points(band, "test_low"))
    chart.line(_points(known, "test_mean"))
    for row, (rate, score) in zip(known, _points(known, "test_mean"), strict=True):
        seeds = text.plural(row["n"], "seed") + (f", {row['diverged']} diverged" if row["diverged"] else "")
        estimate = text.estimate(row["test_mean"], row["test_low"], row["test_high"])
        chart.dot(rate, score, _lines(model, f"learning rate {rate_text(rate)}", estimate, seeds))
        if rate in chosen:
            chart.dot(rate, score, "", radius=6.5, kind="ring")
    for row in rows:
        if math.isnan(row["test_mean"]) and row["diverged"]:
            # A diverged rate has no score, so its cross is drawn at the level of the lowest mean of the panel.
            words = _lines(model, f"learning rate {rate_text(row['learning_rate'])}", "all seeds diverged")
            chart.cross(row["learning_rate"], 100 * floor, words)


def deviation_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: Mapping[str, Style]) -> list[Figure]:
    """Draw the standard deviation over seeds of the test score against learning rate, one panel per task."""
    figures = []
    curves = records(analysis.curves)
    for number, task in enumerate(tasks):
        rows = _known([row for row in curves if row["task"] == task.name], "test_sd")
        if not rows:
            continue
        axis = Axis.numbers([100 * row["test_sd"] for row in rows], "sd over seeds, points", zero=True)
        chart = Chart(_rate_axis(sorted({row["learning_rate"] for row in rows})), axis, 170)
        for model, look in _back_to_front(looks):
            own = [row for row in rows if row["model"] == model]
            chart.series(look)
            chart.line(_points(own, "test_sd"))
            for row, (rate, deviation) in zip(own, _points(own, "test_sd"), strict=True):
                words = f"deviation {deviation:.2f} over {row['n']} seeds"
                chart.dot(rate, deviation, _lines(model, f"learning rate {rate_text(rate)}", words))
        figures.append(_panel(f"deviation-{number}", task, "standard deviation over seeds", chart))
    return figures


def row_height(rows: int) -> int:
    """Return the height of a row in pixels; many rows are closer together."""
    return 30 if rows <= 14 else 21


def overall_figure(analysis: Analysis, looks: Mapping[str, Style]) -> Figure | None:
    """Draw every model's mean over tasks with its interval, in the order of the tables."""
    means = {row["model"]: row for row in records(analysis.overall) if row["kind"] == "all"}
    rows = _known([means[model] for model in looks if model in means], "mean")
    if not rows:
        return None
    ends = [(row["model"], row["mean"], row["low"], row["high"]) for row in rows]
    chart = _whiskers(ends, looks, "mean over tasks, points", chance=rows[0]["chance"])
    alt = "Dot chart: mean over tasks of each model with its interval; the same numbers are in the table below."
    return Figure("overall", "Mean over tasks", chart.svg("overall", alt))


def _whiskers(
    rows: Sequence[tuple[str, float, float, float]],
    looks: Mapping[str, Style],
    title: str,
    *,
    sign: bool = False,
    chance: float = math.nan,
) -> Chart:
    """Draw models' estimates with their intervals, a row each; with `sign` they are differences, and 0 is marked."""
    ends = _with_chance([100 * end for _, *ends in rows for end in ends], chance)
    height = row_height(len(rows)) * len(rows)
    chart = Chart(Axis.numbers(ends, title, zero=sign), Axis.names([model for model, *_ in rows]), height)
    if sign:
        chart.upright(0, Style("zero"))
    _mark_chance(chart, chance)
    for place, (model, value, low, high) in enumerate(rows):
        chart.series(looks[model])
        words = _lines(model, text.estimate(value, low, high, sign=sign))
        chart.whisker(100 * value, 100 * low, 100 * high, place, words)
    return chart


def gain_figures(analysis: Analysis, tasks: Sequence[TaskFacts], looks: Mapping[str, Style]) -> list[Figure]:
    """Draw each model's gain over the baseline, one panel for the mean over tasks and one per task."""
    if analysis.baseline is None:
        return []
    figures = []
    rows = against(analysis.comparisons, analysis.baseline)
    panels = [("all", "all tasks", "Mean over tasks", "")] if len(tasks) > 1 else []
    panels += [("task", task.name, task.name, subtitle_of(task)) for task in tasks]
    for number, (kind, scope, title, subtitle) in enumerate(panels):
        own = {row["model_b"]: row for row in rows if row["kind"] == kind and row["scope"] == scope}
        shown = [model for model in looks if model in own and not math.isnan(own[model]["difference"])]
        if not shown:
            continue
        # The comparison is "baseline minus model"; flip it to the model's gain.
        gains = [(model, *(-own[model][part] for part in ("difference", "high", "low"))) for model in shown]
        chart = _whiskers(gains, looks, "points over the baseline", sign=True)
        alt = f"Dot chart: gain over the baseline, {title}; the same numbers are in the table below."
        figures.append(Figure(f"gain-{number}", title, chart.svg(f"gain-{number}", alt), subtitle))
    return figures


def loss_figures(models: Sequence[ModelFacts], looks: Mapping[str, Style]) -> list[Figure]:
    """Draw training and validation loss of pretraining against the step, for models with loss curves.

    A dotted vertical line marks a change of objective.
    """
    figures = []
    for name, title in (("curve", "Training loss"), ("validation_curve", "Validation loss")):
        drawn = {model.name: thinned(getattr(model, name)) for model in models if getattr(model, name)}
        shown = [model for model in models if model.name in drawn and model.name in looks]
        if not shown:
            continue
        points = [point for model in shown for point in drawn[model.name]]
        steps = Axis.numbers([step for step, _ in points], "step", tight=True)
        chart = Chart(steps, Axis.numbers([value for _, value in points], "nats per predicted token"), 250)
        for model in sorted(shown, key=lambda model: not looks[model.name].quiet):
            own = drawn[model.name]
            chart.series(looks[model.name])
            chart.line(_apart(own, model.switches))
            few = len(own) < MOST_WORDS
            told = own if few else own[:: math.ceil(len(own) / MOST_WORDS)]
            for step, value in told:
                words = _lines(model.name, f"step {step:,}", f"loss {value:.3f}")
                chart.dot(step, value, words, radius=2 if few else 4, kind="" if few else "hit")
            for step in model.switches:
                chart.upright(step, looks[model.name])
        alt = f"Line chart: {title.lower()} of pretraining against the step for each model."
        identity = f"loss-{name.replace('_', '-')}"
        figures.append(Figure(identity, title, chart.svg(identity, alt)))
    return figures


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of a curve; of a long one the first, the last, and the highest and lowest of equal stretches."""
    known = [point for point in points if math.isfinite(point[1])]
    if len(known) <= MOST_POINTS:
        return known
    size = math.ceil(len(known) / (MOST_POINTS // 2))
    kept = {known[0], known[-1]}
    for start in range(0, len(known), size):
        stretch = known[start : start + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def _apart(points: Sequence[tuple[int, float]], switches: Sequence[int]) -> list[tuple[int, float | None]]:
    """Break the line after each switch: losses of different objectives are not comparable, so no line joins them."""
    found: list[tuple[int, float | None]] = []
    for number, (step, value) in enumerate(points):
        if number and any(points[number - 1][0] <= switch < step for switch in switches):
            found.append((step, None))
        found.append((step, value))
    return found
