"""Parts of the report's figures: looks of models, shared charts, and the registry of the figures.

Colours are based on the colour-blind-safe set of Okabe and Ito (2008); `templates/charts.css` has them, for light and
dark pages. Each model has one look in all figures. The baseline is grey and dashed. If there are more models than looks, each
objective has a colour, in which its best model stands out; if the objectives are not known, or are too few or too many for this,
the best models have colours and the others are grey. Pointing at a pale or grey model brings it out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import ClassVar, Literal

from markupsafe import Markup

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.results import Record, records
from mlmclm.errors import UserError
from mlmclm.numbers import rate_text
from mlmclm.registry import KINDS, Registry
from mlmclm.reports import text
from mlmclm.reports.charts import LONGEST_NAME, Axis, Chart, Style, Whisker, shortened
from mlmclm.reports.paired_models import PairedModels, pairs
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.reports.svg_charts import svg_of
from mlmclm.reports.templating import render

HUES = tuple(f"c{number}" for number in range(7))
"""Classes of the colours in `templates/charts.css`."""
DASHES = ("", "dash")
BASELINE, QUIET = "c-base dash", "c-base quiet"
LOOKS = tuple(f"{hue} {dash}".strip() for dash, hue in product(DASHES, HUES))
"""The looks that a reader can distinguish."""

Legend = tuple[tuple[str, Style], ...]
Section = Literal[
    "top", "answer", "scores", "rates", "stability", "baseline", "choices", "zero-shot", "pairs", "pretraining", "added"
]
"""A part of the report; `top` is the first screen, and `choices` shows the effects of choices in pretraining."""


@dataclass(frozen=True)
class Figure:
    """A panel: its title, the sentence below the title, its chart, and a legend if its colours are not those of the models.

    Attributes:
        alt: the chart in words, for readers who don't see it.
        data: the rows that are drawn, as written beside the figure; scores are fractions of 1.
    """

    id: str
    title: str
    chart: Chart
    alt: str
    subtitle: str = ""
    legend: Legend = ()
    data: tuple[Record, ...] = ()

    @cached_property
    def svg(self) -> Markup:
        """The chart as the page shows it."""
        return svg_of(self.chart, self.id, self.alt)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return render("figure.html.j2", figure=self)


@dataclass(frozen=True)
class ReportInput:
    """The input that figures are drawn from.

    Attributes:
        facts: the facts of the study; models, and their zero-shot results, are in the order of all tables and figures.
        listed: the models that have or should have results, the best first.
        tasks: the tasks that have or should have results.
        every: the look of each model, including models without results.
        plain: plain words for the models whose pretraining is known (`trends.plain_names`).
    """

    analysis: Analysis
    facts: StudyFacts
    listed: tuple[ModelFacts, ...]
    tasks: tuple[TaskFacts, ...]
    every: Mapping[str, Style]
    plain: Mapping[str, str]

    @property
    def labels(self) -> Mapping[str, str]:
        """The plain words as labels of rows if all models have words that are short enough, else empty."""
        words = [self.plain.get(model.name, "") for model in self.listed]
        return self.plain if all(0 < len(label) <= LONGEST_NAME for label in words) else {}

    @property
    def looks(self) -> dict[str, Style]:
        """The look of each model that has or should have results, the best model first."""
        return {model.name: self.every[model.name] for model in self.listed}

    @cached_property
    def paired(self) -> list[PairedModels]:
        """The models of each size by how they were made."""
        return pairs(self.analysis, self.facts, self.tasks)

    @cached_property
    def best(self) -> dict[tuple[str, str], Record]:
        """The rows of the table `best` by model and task."""
        return {(row["model"], row["task"]): row for row in records(self.analysis.best)}

    def scopes(self) -> list[tuple[str, str, str, dict[str, Record]]]:
        """List the scopes of scores: the mean over tasks if there are several tasks, and each task.

        Returns:
            Name, title and subtitle, with the `value`, `low` and `high` of each model that has a score, the best model first.
        """
        names = [model.name for model in self.listed]
        means = {row["model"]: row for row in records(self.analysis.overall) if row["kind"] == "all"}
        entries = []
        if len(self.tasks) > 1:
            entries.append(
                ("mean", "Mean over tasks", "", known_scores({name: means.get(name) for name in names}, "mean"))
            )
        for task in self.tasks:
            rows = {name: self.best.get((name, task.name)) for name in names}
            entries.append((task.name, task.name, subtitle_of(task), known_scores(rows, "score", "score_")))
        return [scope for scope in entries if scope[-1]]

    def families(self) -> dict[str, dict[str, Record]]:
        """Return `value`, `low` and `high` by family and model, for models with a score, the best model first."""
        rows = {(row["kind"], row["scope"], row["model"]): row for row in records(self.analysis.overall)}
        by_family: dict[str, dict[str, Record]] = {}
        names = [model.name for model in self.listed]
        for family in dict.fromkeys(task.family for task in self.tasks):
            tasks = [task.name for task in self.tasks if task.family == family]
            if len(tasks) == 1:
                scores = known_scores({name: self.best.get((name, tasks[0])) for name in names}, "score", "score_")
            else:  # a family of all tasks has no row of its own
                scope = ("all", ALL_TASKS) if len(tasks) == len(self.tasks) else ("family", family)
                scores = known_scores({name: rows.get((*scope, name)) for name in names}, "mean")
            by_family |= {family: scores} if scores else {}
        return by_family


def known_scores(rows: Mapping[str, Record | None], value: str, ends: str = "") -> dict[str, Record]:
    """Return `value`, `low` and `high` of the models that have a score."""
    return {
        name: {"value": row[value], "low": row[f"{ends}low"], "high": row[f"{ends}high"]}
        for name, row in rows.items()
        if row is not None and not math.isnan(row[value])
    }


class FigureGroup(ABC):
    """Figures that belong together: panels that share a legend. The built-in ones are in `reports.figures`.

    Class attributes:
        name: of the group, and of the files that `mlmclm report --figures` writes.
        section: the part of the report that shows it.
        title: its heading there; empty for none.
        note: sentences below the heading.
        by_model: whether colours are those of the models where a figure has no legend of its own.
    """

    name: ClassVar[str]
    section: ClassVar[Section] = "added"
    title: ClassVar[str] = ""
    note: ClassVar[str] = ""
    by_model: ClassVar[bool] = True

    @abstractmethod
    def draw(self, study: ReportInput) -> Sequence[Figure]:
        """Return the figures; none if the study doesn't have what they show."""


FIGURES: Registry[type[FigureGroup]] = KINDS["figure"]
"""The groups of figures by name."""


def drawn(study: ReportInput) -> dict[str, Sequence[Figure]]:
    """Return the figures of `draw_all`."""
    return draw_all(study)[0]


def draw_all(study: ReportInput) -> tuple[dict[str, Sequence[Figure]], list[str]]:
    """Draw the figures of all groups, by the group's name; groups without any are left out.

    Returns:
        The figures, and why added groups are left out: they fail, don't return figures, or use an id of another group.
    """
    owners = dict[str, str]()

    def draw(name: str, group: type[FigureGroup]) -> Sequence[Figure]:
        figures = list(group().draw(study))
        for figure in figures:
            if not isinstance(figure, Figure):
                raise UserError(f"draws a list of mlmclm.reports.drawing.Figure, not a {type(figure).__name__}.")
            if owners.get(figure.id, name) != name:
                raise UserError(f"{figure.id!r} is the id of a figure of {owners[figure.id]!r} too; rename one.")
            if not FIGURES.is_built_in(name):  # so that a bad figure fails here, and not in the page or the files
                text.plain([{**row} for row in figure.data])
                figure.svg  # noqa: B018
        owners.update((figure.id, name) for figure in figures)
        return figures

    groups, without = FIGURES.each(draw)
    return {name: figures for name, figures in groups.items() if figures}, without


def needs_legend(study: ReportInput, group: str, figures: Sequence[Figure]) -> bool:
    """Return whether a group needs a legend of the models; charts with a row for each model don't."""
    names = {shortened(name) for name in (*study.looks, *study.labels.values())}
    named = all(figure.chart.y.rows and {label for _, label in figure.chart.y.ticks} <= names for figure in figures)
    return FIGURES[group].by_model and not named


def styles(
    names: Sequence[str], baseline: str | None, ranked: Sequence[str] = (), kinds: Mapping[str, str] | None = None
) -> dict[str, Style]:
    """Assign a look to each model; the baseline has its own.

    Args:
        ranked: the models from the best on; if there are more models than looks, the first ones have colours.
        kinds: the models' objectives, as far as known. If there are more models than looks, and several kinds but no more than
            colours, the models of a kind share its colour and all but the best of them are pale.
    """
    trained = [name for name in names if name != baseline]
    leading = [name for name in dict.fromkeys((*ranked, *trained)) if name in trained]
    kinds = {name: kind for name, kind in (kinds or {}).items() if kind and name in trained}
    colours = dict(zip(sorted(set(kinds.values())), HUES, strict=False))
    if len(trained) <= len(LOOKS):
        classes = dict(zip(trained, LOOKS, strict=False))
    elif len(set(kinds.values())) == len(colours) > 1:
        classes = {name: f"{colours[kinds[name]]} quiet" for name in leading if name in kinds}
        for kind, hue in colours.items():
            classes[next(name for name in leading if kinds.get(name) == kind)] = hue
    else:
        classes = dict(zip(leading, HUES, strict=False))
    if baseline is not None:
        classes[baseline] = BASELINE
    return {name: Style(classes.get(name, QUIET), number) for number, name in enumerate(names)}


def back_to_front(looks: Mapping[str, Style]) -> list[tuple[str, Style]]:
    """Return the models in the order in which they are drawn: first the pale ones, so that they cover no others."""
    return sorted(looks.items(), key=lambda item: not item[1].quiet)


def known_rows(rows: Sequence[Record], name: str) -> list[Record]:
    """Return the rows in which a column is known."""
    return [row for row in rows if not math.isnan(row[name])]


def parts_of(row: Record, *names: str) -> Record:
    """Return the named columns of a row."""
    return {name: row[name] for name in names}


def rate_axis(rates: Sequence[float]) -> Axis:
    """Return an axis with a tick at each learning rate."""
    return Axis.ratios(rates, "learning rate", rate_text)


def lines(*words: str) -> str:
    """Join the words that are shown over a mark, one line each."""
    return "\n".join(line for line in words if line)


def with_chance(values: Sequence[float], chance: float) -> list[float]:
    """Return scores, in points, with the chance level unless that would take more than half of their axis."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or math.isnan(chance):
        return finite
    low, high, level = min(finite), max(finite), 100 * chance
    return [*finite, level] if max(low - level, level - high) <= high - low else finite


def mark_chance(chart: Chart, chance: float) -> None:
    """Draw the chance level, if it is known."""
    chart.level(100 * chance, f"chance {text.points(chance)}")


def subtitle_of(task: TaskFacts) -> str:
    """Return the task's title, which is a sentence; empty if the title is just the task's name."""
    return task.title if task.title != task.name else ""


def row_height(rows: int) -> int:
    """Return the height of a row in pixels; many rows are closer together."""
    return 30 if rows <= 14 else 21


def whisker_chart(
    rows: Mapping[str, Record],
    looks: Mapping[str, Style],
    title: str,
    *,
    sign: bool = False,
    zero: bool = False,
    chance: float = math.nan,
    beneath: Mapping[str, str] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Chart:
    """Draw models' estimates with their intervals, a row each; with `sign` they are differences, and 0 is marked.

    Args:
        rows: `value`, `low` and `high` by model.
        zero: whether the axis begins at 0.
        beneath: words by model that are shown below its estimate.
        labels: the labels of rows by model; a model without one is labelled with its name.
    """
    ends = with_chance([100 * row[end] for row in rows.values() for end in ("value", "low", "high")], chance)
    names = Axis.names([labels.get(model, model) for model in rows])
    chart = Chart(Axis.numbers(ends, title, zero=sign or zero), names, row_height(len(rows)) * len(rows))
    if sign:
        chart.upright(0, Style("zero"))
    mark_chance(chart, chance)
    for place, (model, row) in enumerate(rows.items()):
        words = lines(model, text.estimate(row["value"], row["low"], row["high"], sign=sign), beneath.get(model, ""))
        chart.series(looks[model])
        chart.add(Whisker(100 * row["value"], 100 * row["low"], 100 * row["high"], place, words))
    return chart
