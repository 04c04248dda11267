"""Score against the tokens or steps of pretraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlmclm.analysis.comparison import against
from mlmclm.numbers import count, plural
from mlmclm.reports.crossings import crossing
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.trends import Key, Quantity, model_steps, plan_words, trend_figures


class Budgets(FigureGroup):
    """Score against the tokens seen, or against the steps where the tokens are not known."""

    name = "budgets"
    section = "choices"
    title = "Score against budget"
    note = (
        "Models of one size and plan that differ in how long they were pretrained. The checkpoints of a run, whose rate has not decayed yet, "
        "are a line of their own, which ends in the finished model."
    )

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        models = [model for model in study.listed if model.phases]
        by_tokens = all(model.tokens for model in models)
        finished = {model.name: model for model in models}
        runs = {model.finished for model in models if model.finished}
        series: dict[Key, list[tuple[float, str]]] = {}
        for model in models:
            x = float(model.tokens or 0) if by_tokens else float(model_steps(model))
            if not model.finished:
                series.setdefault((model.size, plan_words(model), ""), []).append((x, model.name))
            if model.finished or model.name in runs:
                end = finished.get(model.finished or model.name)
                key = (
                    (plan_words(end), f"run of {plural(model_steps(end), 'step')}") if end else (model.finished, "run")
                )
                series.setdefault((model.size, *key), []).append((x, model.name))
        title = "tokens" if by_tokens else "steps"
        figures = trend_figures(study, self.name, Quantity(title, title, count, log=True), series)
        # The first panel is the mean over tasks, unless there is one task, whose panel has a subtitle of its own.
        return (
            [replace(figures[0], subtitle=figures[0].subtitle or _crossings(study, series, title)), *figures[1:]]
            if figures
            else []
        )


def _crossings(study: ReportInput, series: Mapping[Key, Sequence[tuple[float, str]]], unit: str) -> str:
    """Say at which budget CLM and each masked objective cross on the mean over tasks, by size."""
    causal = {model.name: [phase.causal for phase in model.phases] for model in study.listed}
    sentences = []
    for (size, plan, run), points in series.items():
        if not all(causal[model] == [False] for _, model in points):
            continue
        for (size_b, objective, run_b), points_b in series.items():
            model_at = {x: model for x, model in points_b if (size_b, run_b) == (size, run) and causal[model] == [True]}
            rows = []
            for x, model in points:
                gaps = against(study.analysis.comparisons, model_at[x]) if x in model_at else []
                overall = (row for row in gaps if row["kind"] == "all" and row["model_b"] == model)
                rows += [(x, row["difference"], row["low"], row["high"]) for row in overall]
            budget = crossing(rows)
            if budget is not None:
                within = f" within a {run}" if run else ""
                sentences.append(f"{size}: {objective} and {plan} cross at {budget} {unit}{within}.")
    return " ".join(sentences)
