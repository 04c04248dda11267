"""Losses of pretraining against the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlmclm.reports.charts import Axis, Chart, Dot, Line
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput, lines

MOST_POINTS = 400
"""Approximate maximum number of points of a loss curve that are drawn."""
MOST_IN_ALL = 4_000
"""Approximate maximum number of points that are drawn in all loss curves of a figure."""
LEAST_POINTS = 100
MOST_WORDS = 30
"""Approximate maximum number of points of a loss curve that show their values to the pointer."""


class LossCurves(FigureGroup):
    """Training and validation loss of pretraining against the step, for models with loss curves.

    A dotted vertical line marks a change of objective.
    """

    name = "losses"
    section = "pretraining"

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        figures = []
        models, looks = study.facts.models, study.every
        for name, title in (("curve", "Training loss"), ("validation_curve", "Validation loss")):
            with_curve = [model for model in models if getattr(model, name) and model.name in looks]
            if not with_curve:
                continue
            limit = min(MOST_POINTS, max(LEAST_POINTS, MOST_IN_ALL // len(with_curve)))
            drawn = {model.name: thinned(getattr(model, name), limit) for model in with_curve}
            points = [point for curve in drawn.values() for point in curve]
            steps = Axis.numbers([step for step, _ in points], "step", tight=True)
            chart = Chart(steps, Axis.numbers([value for _, value in points], "nats per predicted token"), 250)
            for model in sorted(with_curve, key=lambda model: not looks[model.name].quiet):
                curve = drawn[model.name]
                chart.series(looks[model.name])
                chart.add(Line(_apart(curve, model.switches)))
                few = len(curve) < MOST_WORDS
                labelled = curve if few else curve[:: math.ceil(len(curve) / MOST_WORDS)]
                for step, value in labelled:
                    words = lines(model.name, f"step {step:,}", f"loss {value:.3f}")
                    chart.add(Dot(step, value, words, radius=2 if few else 4, kind="" if few else "hit"))
                for step in model.switches:
                    chart.upright(step, looks[model.name])
            alt = f"Line chart: {title.lower()} of pretraining against the step for each model."
            data = tuple(
                {"model": name, "step": step, "loss": value} for name, curve in drawn.items() for step, value in curve
            )
            figures.append(Figure(f"loss-{name.replace('_', '-')}", title, chart, alt, data=data))
        return figures


def thinned(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """Return the points of a curve; for a long curve, only the first, the last, and the highest and lowest of equal segments."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / (most // 2))
    kept = {finite[0], finite[-1]}
    for start in range(0, len(finite), size):
        segment = finite[start : start + size]
        kept |= {min(segment, key=lambda point: point[1]), max(segment, key=lambda point: point[1])}
    return sorted(kept)


def _apart(points: Sequence[tuple[int, float]], switches: Sequence[int]) -> list[tuple[int, float | None]]:
    """Break the line after each switch: losses of different objectives are not comparable, so no line joins them."""
    broken: list[tuple[int, float | None]] = []
    for number, (step, value) in enumerate(points):
        if number and any(points[number - 1][0] <= switch < step for switch in switches):
            broken.append((step, None))
        broken.append((step, value))
    return broken
