"""Each model's gain over the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.analysis.comparison import against
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, subtitle_of, whisker_chart


class BaselineGains(FigureGroup):
    """Each model's gain over the baseline, one panel for the mean over tasks and one per task."""

    name = "gains"
    section = "baseline"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        if study.analysis.baseline is None:
            return []
        figures = []
        rows = against(study.analysis.comparisons, study.analysis.baseline)
        panels = [("all", "all tasks", "Mean over tasks", "")] if len(study.tasks) > 1 else []
        panels += [("task", task.name, task.name, subtitle_of(task)) for task in study.tasks]
        for number, (kind, scope, title, subtitle) in enumerate(panels):
            gaps = {row["model_b"]: row for row in rows if row["kind"] == kind and row["scope"] == scope}
            scored = [model for model in study.looks if model in gaps and not math.isnan(gaps[model]["difference"])]
            if not scored:
                continue
            # The comparison is "baseline minus model"; flip it to the model's gain.
            ends = {"value": "difference", "low": "high", "high": "low"}
            gains = {model: {end: -gaps[model][part] for end, part in ends.items()} for model in scored}
            chart = whisker_chart(gains, study.looks, "points over the baseline", sign=True)
            alt = f"Dot chart: gain over the baseline, {title}; the same numbers are in the table below."
            data = tuple({"model": model, "scope": scope, **row} for model, row in gains.items())
            figures.append(Figure(f"gain-{number}", title, chart, alt, subtitle, data=data))
        return figures
