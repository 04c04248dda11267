"""Zero-shot results and paired models in the report: encoder, decoder, and each made from the other, side by side.

The comparison is Ettin's (arXiv 2507.11412): the models of a size are shown by how they were made, on every task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.intervals import student
from mlmclm.analysis.results import Record, records
from mlmclm.plans.names import ModelName
from mlmclm.reports import figures, text
from mlmclm.reports.figures import Figure
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts, ZeroShotFacts

ENCODER, DECODER = "encoder", "decoder"
MADE = (ENCODER, DECODER, "encoder from decoder", "decoder from encoder")
"""How a model was made: by masked objectives, by causal ones, by causal ones first, or by masked ones first."""
PRONOUNS = ("masculine", "neutral", "feminine")
NO_SHARES = ("perplexity", "bits_per_byte")
"""Ends of the names of metrics that aren't shares of 1."""
NAN = math.nan


def made(name: ModelName) -> str:
    """Return how a model was made, one of `MADE`; "" if its objectives change more often, or there are none."""
    starts = (0, *(phase.until for phase in name.phases))
    kinds = [phase.objective.causal for start, phase in zip(starts, name.phases, strict=False) if start < name.steps]
    runs = tuple(causal for causal, _ in groupby(kinds))
    words = {(False,): ENCODER, (True,): DECODER, (True, False): MADE[2], (False, True): MADE[3]}
    return words.get(runs, "")


@dataclass(frozen=True)
class Score:
    """A score with its interval; unknown ends are NaN."""

    value: float
    low: float
    high: float
    share: bool = True  # whether it can be shown in points out of 100; a perplexity can't

    @classmethod
    def of(cls, metric: str, entry: Mapping[str, float | None]) -> Score:
        """Return a zero-shot metric's score."""
        ends = (entry[name] for name in ("score", "low", "high"))
        value, low, high = (NAN if each is None else float(each) for each in ends)
        return cls(value, low, high, not metric.endswith(NO_SHARES) and not abs(value) > 1)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return text.NONE
        return text.points(self.value) if self.share else f"{self.value:,.4g}"

    @property
    def interval(self) -> str:
        """The interval in the score's unit, in brackets; "" if there is none."""
        if math.isnan(self.low) or math.isnan(self.high):
            return ""
        return text.interval(self.low, self.high) if self.share else f"[{self.low:,.4g}, {self.high:,.4g}]"


def zero_shot_tables(facts: StudyFacts) -> list[dict[str, Any]]:
    """Return a table of models and metrics for each task, as the template needs them."""
    tables = []
    for task in dict.fromkeys(each.task for each in facts.zero_shot):
        own = [each for each in facts.zero_shot if each.task == task]
        metrics = list(dict.fromkeys(name for each in own for name in each.metrics))
        rows = []
        for each in own:
            cells = [Score.of(name, each.metrics[name]) if name in each.metrics else None for name in metrics]
            rows.append({"model": each.model, "scoring": each.scoring, "cells": cells})
        examples = max((int(entry["examples"] or 0) for each in own for entry in each.metrics.values()), default=0)
        unit = "occupation" if set(PRONOUNS) <= set(metrics) else "example"
        tables.append({"task": task, "metrics": metrics, "rows": rows, "size": text.plural(examples, unit)})
    return tables


def zero_shot_frame(facts: StudyFacts) -> pd.DataFrame:
    """Return the table `zero_shot.csv`: a row for each model, task and metric."""
    rows = [
        (each.model, each.task, each.scoring, name, *(entry[part] for part in ("score", "low", "high", "examples")))
        for each in facts.zero_shot
        for name, entry in each.metrics.items()
    ]
    return pd.DataFrame(rows, columns=("model", "task", "scoring", "metric", "score", "low", "high", "examples"))


@dataclass(frozen=True)
class Row:
    """A task in the comparison of a pair."""

    title: str
    kind: str  # `fine-tuned` or `zero-shot`
    metric: str
    scores: Mapping[str, Score]  # by how the model was made
    difference: Score | None  # decoder minus encoder


@dataclass(frozen=True)
class PairedModels:
    """The models of one size by how they were made, and their scores on every task."""

    size: str
    models: Mapping[str, str]
    rows: tuple[Row, ...]


def pairs(analysis: Analysis, facts: StudyFacts, tasks: Sequence[TaskFacts]) -> list[PairedModels]:
    """Return the comparison for each size that has an encoder and a decoder.

    Of several models of a size that were made alike, the first that has seen the most tokens counts. There is none in a
    study without zero-shot tasks and without all four ways, whose tables of scores say the same.
    """
    best = {(row["model"], row["task"]): row for row in records(analysis.best)}
    zero_shot = {(each.model, each.task): each for each in facts.zero_shot}
    found = []
    for size in dict.fromkeys(model.size for model in facts.models):
        models = _models([model for model in facts.models if model.size == size])
        if ENCODER in models and DECODER in models and (zero_shot or len(models) == len(MADE)):
            compared = against(analysis.comparisons, models[DECODER])
            rows = [_fine_tuned(task, models, best, compared) for task in tasks]
            rows += [_zero_shot(task, models, zero_shot) for task in dict.fromkeys(task for _, task in zero_shot)]
            found.append(PairedModels(size, models, tuple(row for row in rows if row.scores)))
    return found


def _models(models: Sequence[ModelFacts]) -> dict[str, str]:
    alike = {way: [model for model in models if model.made == way] for way in MADE}
    return {way: max(own, key=lambda model: model.tokens or 0).name for way, own in alike.items() if own}


def _fine_tuned(
    task: TaskFacts,
    models: Mapping[str, str],
    best: Mapping[tuple[str, str], Record],
    compared: Sequence[Record],
) -> Row:
    known = {way: best[name, task.name] for way, name in models.items() if (name, task.name) in best}
    scores = {way: Score(*(row[f"test_{part}"] for part in ("mean", "low", "high"))) for way, row in known.items()}
    wanted = "task", task.name, models[ENCODER]
    own = (row for row in compared if (row["kind"], row["scope"], row["model_b"]) == wanted)
    difference = next((Score(row["difference"], row["low"], row["high"]) for row in own), None)
    return Row(task.title, "fine-tuned", text.metric(task.metric), scores, difference)


def _zero_shot(task: str, models: Mapping[str, str], results: Mapping[tuple[str, str], ZeroShotFacts]) -> Row:
    known = {way: results[name, task] for way, name in models.items() if (name, task) in results}
    scores = {way: Score.of(each.main, each.metrics[each.main]) for way, each in known.items()}
    main = next((each.main for each in known.values()), "")
    # A score that isn't the mean of its examples' values, such as a perplexity, has no difference over examples.
    both = [
        known[way].values
        for way in (DECODER, ENCODER)
        if way in known
        and known[way].values
        and math.isclose(fmean(known[way].values), scores[way].value, abs_tol=1e-9)
    ]
    difference = None
    if len(both) == 2 and len(both[0]) == len(both[1]) > 1:
        # Both answer the same examples, so the interval is that of paired differences.
        estimate = student([ours - theirs for ours, theirs in zip(*both, strict=True)])
        difference = Score(estimate.value, estimate.low, estimate.high)
    return Row(task, "zero-shot", main, scores, difference)


def pair_frame(found: Sequence[PairedModels]) -> pd.DataFrame:
    """Return the table `pairs.csv`: a row for each size, task and model."""
    rows = [
        (pair.size, row.title, row.kind, row.metric, way, pair.models[way], score.value, score.low, score.high)
        for pair in found
        for row in pair.rows
        for way, score in row.scores.items()
    ]
    return pd.DataFrame(rows, columns=("size", "task", "kind", "metric", "made", "model", "score", "low", "high"))


def pair_figures(found: Sequence[PairedModels]) -> list[Figure]:
    """Draw each size's models on all tasks whose scores are shares."""
    drawn = []
    for number, pair in enumerate(found):
        rows = [row for row in pair.rows if all(score.share for score in row.scores.values())]
        traces = []
        for colour, way in zip(figures.PALETTE, pair.models, strict=False):
            own = [(row, row.scores[way]) for row in rows if way in row.scores]
            traces.append(
                go.Bar(
                    x=[f"{row.title}<br>{row.kind}" for row, _ in own],
                    y=[score.value * 100 for _, score in own],
                    name=way,
                    marker={"color": colour[0]},
                    error_y=figures.error_bars(
                        [_width(score.high - score.value) for _, score in own],
                        [_width(score.value - score.low) for _, score in own],
                        thickness=1.5,
                        width=3,
                        color=figures.INK[0],
                    ),
                    customdata=[[f"{score} {score.interval}"] for _, score in own],
                    hovertemplate=f"<b>{way}</b><br>%{{x}}: %{{customdata[0]}}<extra></extra>",
                )
            )
        spec = figures.plotted(
            traces,
            barmode="group",
            showlegend=True,
            legend={"orientation": "h", "y": 1.12, "x": 0},
            yaxis=figures.titled("score, points", rangemode="tozero"),
            margin={"l": 46, "r": 12, "t": 36, "b": 56},
        )
        alt = (
            "Bar chart: scores by task of the models of one size, by how they were made; the numbers are in the table."
        )
        drawn.append(Figure(f"pairs{number}", f"Pairs of size {pair.size}", alt, spec, 360))
    return drawn


def _width(value: float) -> float:
    return 0.0 if math.isnan(value) else max(0.0, value * 100)


def pronoun_figure(facts: StudyFacts) -> Figure | None:
    """Draw the shares of the pronouns that each model takes in Winogender's sentences, as stacked bars."""
    known = [each for each in facts.zero_shot if all(name in each.metrics for name in PRONOUNS)]
    if not known:
        return None
    known.reverse()  # Plotly draws categories from the bottom up
    traces = [
        go.Bar(
            y=[each.model for each in known],
            x=[100 * Score.of(name, each.metrics[name]).value for each in known],
            orientation="h",
            name=name,
            marker={"color": colour[0]},
            hovertemplate=f"<b>%{{y}}</b><br>{name}: %{{x:.1f}} %<extra></extra>",
        )
        for name, colour in zip(PRONOUNS, (figures.PALETTE[0], figures.BASELINE, figures.PALETTE[1]), strict=True)
    ]
    spec = figures.plotted(
        traces,
        barmode="stack",
        showlegend=True,
        legend={"orientation": "h", "y": 1.15, "x": 0},
        xaxis=figures.titled("share of answers, %", range=[0, 100]),
        yaxis={"type": "category", "showgrid": False},
        margin={"l": 20, "r": 16, "t": 36, "b": 42},
    )
    alt = "Stacked bars: the share of masculine, neutral and feminine pronouns that each model takes."
    return Figure("pronouns", "Which pronoun do the models take?", alt, spec, 110 + 34 * len(known))
