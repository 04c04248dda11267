"""The picture of a plan: one lane per stage, and one bar per stretch of steps that the same models share."""

from __future__ import annotations

from mlmclm.plans.costs import Pricing
from mlmclm.plans.stages import Plan
from mlmclm.reports.charts import Axis, Chart, Stripe, Style
from mlmclm.reports.drawing import LOOKS, Figure
from mlmclm.reports.templating import render

_LANE_PIXELS = 26
_BAR_PIXELS = 18


def plan_page(plan: Plan, pricing: Pricing) -> str:
    """Return a self-contained HTML page; steps run to the right, and a stage's children are in the lanes below it.

    The number on a bar is the number of models that share its steps, which are trained once; pointing at the bar shows
    their names.
    """
    stages = plan.tree()
    lane = {stage: number for number, stage in enumerate(stages)}
    steps = Axis.numbers([0, *(stage.end.step for stage in stages)], "optimiser steps", tight=True)
    chart = Chart(steps, Axis.names([stage.title for stage in stages]), _LANE_PIXELS * len(stages))
    for stage in stages:
        parent = plan.parent(stage)
        if parent is not None:
            # Connects a stage to its parent at the step at which it branches off.
            chart.upright(stage.start.step, Style("branch"), (lane[parent], lane[stage]))
    objectives = sorted({str(stage.objective) for stage in stages})
    legend = tuple(
        (objective, Style(LOOKS[number % len(LOOKS)], number)) for number, objective in enumerate(objectives)
    )
    for objective, style in legend:
        chart.series(style)
        for stage in stages:
            if str(stage.objective) == objective:
                for part in plan.stretches(stage):
                    words = "\n".join((f"steps {part.start:,} to {part.stop:,}, for", *part.models))
                    shared = str(len(part.models)) if len(part.models) > 1 else ""
                    chart.add(Stripe(part.start, part.stop, lane[stage], _BAR_PIXELS, words, shared))
    cost, alone = pricing.plan(plan), pricing.states(plan.alone)
    subtitle = (
        f"{cost.steps:,} steps, {alone.steps:,} if each model were trained alone; {cost.flops:.3g} FLOPs, {cost.device_hours:,.0f} hours of one "
        f"{pricing.device.title} at {pricing.utilisation:.0%} of its peak"
    )
    title = f"{len(plan.models)} models in {len(stages)} stages"
    alt = "Bars: the stages of the plan against optimiser steps, coloured by objective."
    return render("plan.html.j2", figure=Figure("plan", title, chart, alt, subtitle, legend))
