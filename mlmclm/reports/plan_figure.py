"""The picture of a plan: one lane per stage, and one bar per stretch of steps that the same models share."""

from __future__ import annotations

import html

import plotly.graph_objects as go

from mlmclm.plans.costs import Pricing
from mlmclm.plans.stages import Plan
from mlmclm.reports.figures import FAINT, GRID, INK, PALETTE

_LANE_PIXELS = 26
_BAR = 0.7
"""Height of a bar as a fraction of a lane."""


def plan_page(plan: Plan, pricing: Pricing) -> str:
    """Return a self-contained HTML page; steps run to the right, and a stage's children are in the lanes below it.

    The number on a bar is the number of models that share its steps, which are trained once; hovering shows their
    names.
    """
    stages = plan.tree()
    lane = {stage: number for number, stage in enumerate(stages)}
    figure = go.Figure()
    for stage in stages:
        parent = plan.parent(stage)
        if parent is not None:
            # Connects a stage to its parent at the step at which it branches off.
            figure.add_shape(
                type="line", x0=stage.start.step, x1=stage.start.step, y0=lane[parent], y1=lane[stage],
                line={"color": FAINT[0], "width": 1.5}, layer="below",
            )  # fmt: skip
    objectives = sorted({str(stage.objective) for stage in stages})
    for number, objective in enumerate(objectives):
        bars = [
            (lane[stage], part) for stage in stages if str(stage.objective) == objective for part in plan.stretches(stage)
        ]  # fmt: skip
        figure.add_bar(
            name=objective,
            orientation="h",
            width=_BAR,
            y=[row for row, _ in bars],
            base=[part.start for _, part in bars],
            x=[part.steps for _, part in bars],
            text=[str(len(part.models)) if len(part.models) > 1 else "" for _, part in bars],
            hovertext=[
                f"steps {part.start:,} to {part.stop:,}, for<br>{'<br>'.join(map(html.escape, part.models))}"
                for _, part in bars
            ],
            hoverinfo="text",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            marker={"color": PALETTE[number % len(PALETTE)][0], "line": {"color": "white", "width": 1}},
        )
    cost, alone = pricing.plan(plan), pricing.states(plan.alone)
    subtitle = (
        f"{cost.steps:,} steps, {alone.steps:,} if each model were trained alone; {cost.flops:.3g} FLOPs, {cost.device_hours:,.0f} hours of one "
        f"{pricing.device.title} at {pricing.utilisation:.0%} of its peak"
    )
    figure.update_layout(
        title={"text": f"{len(plan.models)} models in {len(stages)} stages<br><sub>{html.escape(subtitle)}</sub>"},
        barmode="overlay",
        template="plotly_white",
        font={"color": INK[0]},
        height=180 + _LANE_PIXELS * len(stages),
        showlegend=True,
        legend={"title": "objective"},
        xaxis={"title": "optimiser steps", "gridcolor": GRID[0], "rangemode": "tozero"},
        yaxis={
            "tickvals": list(lane.values()),
            "ticktext": [stage.title for stage in stages],
            "autorange": "reversed",
            "showgrid": False,
        },
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
