"""Figures of scores against a quantity of pretraining, such as the mask ratio or the tokens seen.

A series joins models that differ in that quantity only. There is a panel for the mean over tasks and one for each task, and
a series is drawn where at least two of its models have a score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlmclm.analysis.results import Record
from mlmclm.numbers import count, plural
from mlmclm.reports import text
from mlmclm.reports.charts import Axis, Chart, Line, Style, Whisker
from mlmclm.reports.drawing import LOOKS, Figure, ReportInput, lines, mark_chance, with_chance
from mlmclm.reports.study_facts import ModelFacts
from mlmclm.results.chance import chance_of

Key = tuple[str, ...]
"""Properties that the models of a series share, in words."""


@dataclass(frozen=True)
class Quantity:
    """The quantity that scores are drawn against.

    Attributes:
        name: the column of the data.
        title: the title of the axis.
        label: formats a value.
        log: whether the axis is logarithmic, with a tick at each value.
    """

    name: str
    title: str
    label: Callable[[float], str]
    log: bool = False

    def axis(self, values: Sequence[float]) -> Axis:
        """Return the axis for these values."""
        if self.log:
            return Axis.ratios(values, self.title, self.label)
        axis = Axis.numbers(values, self.title)
        return replace(axis, ticks=[(value, self.label(value)) for value, _ in axis.ticks])


def model_steps(model: ModelFacts) -> int:
    """Return the steps of a model's phases."""
    return sum(phase.steps for phase in model.phases)


def budget_words(model: ModelFacts) -> str:
    """Say how long a model was pretrained."""
    return f"{count(model.tokens)} tokens" if model.tokens else plural(model_steps(model), "step")


def plan_words(model: ModelFacts) -> str:
    """Return a model's objectives with their shares of its steps: `CLM 25 % then MLM40`."""
    total = model_steps(model)
    parts = [
        f"{phase.objective.upper()} {100 * phase.steps / total:.3g} %{' with decay' if phase.decayed else ''}"
        for phase in model.phases[:-1]
    ]
    return " then ".join([*parts, *(phase.objective.upper() for phase in model.phases[-1:])])


def plain_names(models: Sequence[ModelFacts]) -> dict[str, str]:
    """Return words for the models whose pretraining is known: the objectives, as `CLM then MLM`, and what else distinguishes them.

    A model has no words if another model would have the same.
    """
    by_objective: dict[str, dict[str, Key]] = {}
    for model in models:
        by_objective.setdefault(model.objective, {})[model.name] = (plan_words(model), model.size, budget_words(model))
    by_objective.pop("", None)
    names = {}
    for objective, keys in by_objective.items():
        named = labels(list(keys.values()))
        one_plan = len({key[0] for key in keys.values()}) == 1
        for name, key in keys.items():
            label = f"{objective}, {named[key]}" if one_plan else named[key]
            names[name] = objective if len(keys) == 1 else label
    times = Counter(names.values())
    return {name: words for name, words in names.items() if times[words] == 1}


def labels(keys: Sequence[Key]) -> dict[Key, str]:
    """Return a label for each key: the parts in which the keys differ, or all parts if there is one key."""
    vary = [len({key[index] for key in keys}) > 1 for index in range(len(keys[0]))] if keys else []
    if not any(vary):
        vary = [True] * len(vary)
    return {key: ", ".join(part for part, varies in zip(key, vary, strict=True) if varies and part) for key in keys}


def trend_figures(
    study: ReportInput, name: str, quantity: Quantity, series: Mapping[Key, Sequence[tuple[float, str]]]
) -> list[Figure]:
    """Draw each series on the mean over tasks and on each task.

    Args:
        name: what the figures' ids begin with.
        series: by key, the quantity and the name of each model.
    """
    series = {key: sorted(points) for key, points in series.items() if len({x for x, _ in points}) > 1}
    named = labels(list(series))
    looks = {key: Style(LOOKS[number % len(LOOKS)]) for number, key in enumerate(series)}
    values = [x for points in series.values() for x, _ in points]
    legend = tuple((named[key], look) for key, look in looks.items())
    figures = []
    for number, (scope, title, subtitle, scores) in enumerate(study.scopes()):
        drawn = {key: [(x, model) for x, model in points if model in scores] for key, points in series.items()}
        drawn = {key: points for key, points in drawn.items() if len({x for x, _ in points}) > 1}
        if not drawn:
            continue
        tasks = [task.name for task in study.tasks] if scope == "mean" else [scope]
        chance = chance_of(study.analysis.chances, tasks)
        ends = [100 * end for points in drawn.values() for _, model in points for end in scores[model].values()]
        chart = Chart(quantity.axis(values), Axis.numbers(with_chance(ends, chance), "score, points"), 210)
        mark_chance(chart, chance)
        data: list[Record] = []
        for key, points in drawn.items():
            chart.series(looks[key])
            chart.add(Line([(x, 100 * scores[model]["value"]) for x, model in points]))
            for x, model in points:
                value, low, high = (scores[model][end] for end in ("value", "low", "high"))
                words = lines(model, f"{quantity.title} {quantity.label(x)}", text.estimate(value, low, high))
                chart.add(Whisker(100 * value, 100 * low, 100 * high, x, words, radius=3, upright=True))
                data.append(
                    {"scope": title, "series": named[key], "model": model, quantity.name: x}
                    | {"score": value, "low": low, "high": high}
                )
        alt = f"Line chart: {title}, score against {quantity.title}; the scores are in the tables."
        figures.append(Figure(f"{name}-{number}", title, chart, alt, subtitle, legend, tuple(data)))
    return figures
