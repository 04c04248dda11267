"""The training stages of models, the steps that they share, their cost, and a chart of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES, TITLES, Size, parameters
from mlmclm.plans.costs import Pricing
from mlmclm.plans.devices import DEFAULT_DEVICE, DEFAULT_UTILISATION, HERE, Device
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Plan, Stage, make_plan
from mlmclm.plans.suite import Suite, find_suite
from mlmclm.progress import say
from mlmclm.reports.charts import Axis, Chart, Stripe, Style
from mlmclm.reports.drawing import LOOKS, Figure
from mlmclm.reports.templating import render
from mlmclm.studies.study_file import StudyFile, load_study


@dataclass(frozen=True)
class PricedPlan:
    """A plan, its cost, and the suite whose models it trains, if any."""

    plan: Plan
    pricing: Pricing
    suite: Suite | None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan and its costs as plain values."""
        plan, pricing = self.plan, self.pricing
        cost, alone = pricing.plan(plan), pricing.states(plan.alone)
        return {
            "models": [str(name) for name in plan.models],
            "stages": [self._stage(stage) for stage in plan.tree()],
            "steps": plan.steps,
            "steps_without_sharing": plan.steps_alone,
            "steps_shared": plan.steps_shared,
            "tokens": cost.tokens,
            "tokens_without_sharing": alone.tokens,
            "flops": cost.flops,
            "flops_without_sharing": alone.flops,
            "device_hours": cost.device_hours,
            "device_hours_without_sharing": alone.device_hours,
            "sizes": self.sizes(),
            "utilisation": pricing.utilisation,
            "device": {"name": pricing.device_name, **asdict(pricing.device)},
            **({} if self.suite is None else self.suite.model_dump(mode="json", include={"mixes", "departures"})),
        }

    def _stage(self, stage: Stage) -> dict[str, Any]:
        plan, cost = self.plan, self.pricing.stage(stage)
        return {
            "objective": str(stage.objective),
            "size": stage.end.size,
            "from": stage.start.step,
            "starts_from": str(stage.start),
            "depth": plan.depth(stage),
            "to": stage.end.step,
            "deposits": [state.step for state in stage.states],
            "stretches": [
                {"from": part.start, "to": part.stop, "models": list(part.models)} for part in plan.stretches(stage)
            ],
            "tokens": cost.tokens,
            "flops": cost.flops,
            "device_hours": cost.device_hours,
            "models": list(stage.models),
        }

    def sizes(self) -> dict[str, dict[str, Any]]:
        """Return architecture, vocabulary and parameters of each size of the plan's models, in order."""
        plan, pricing, sizes = self.plan, self.pricing, dict[str, dict[str, Any]]()
        for size in dict.fromkeys(name.size for name in plan.models):
            shape, rows = pricing.sizes[size], pricing.rows(size)
            whose = "its own" if shape.vocabulary is not None else "as given"
            if shape.vocabulary is None and pricing.vocabulary is None:
                whose = f"as published: {TITLES[shape.architecture]}"
            facts = {"architecture": shape.architecture, "vocabulary": rows, "vocabulary_of": whose}
            sizes[size] = {**facts, "parameters": parameters(shape, rows)}
        return sizes


def price_plan(
    names: Sequence[str] = (),
    *,
    suite: str | None = None,
    study: Path | None = None,
    device: str | None = None,
    vocabulary: int | None = None,
    utilisation: float = DEFAULT_UTILISATION,
) -> PricedPlan:
    """Return the plan of models and its costs; a study gives the recipe, and the models unless some are named.

    Args:
        names: model names.
        suite: name or file of a suite, in place of names.
        study: a study file, or the name of a packaged study.
        device: the device whose hours are counted; for the models of a study, by default this machine, measured.
        vocabulary: its size in tokens; by default the study's, else the published models'.
        utilisation: share of the device's peak that is assumed to be reached.

    Raises:
        UserError: a name, the suite or the study is wrong, or there is nothing to plan.
    """
    if names and suite is not None:
        raise UserError("plan: name models or give --suite, not both.")
    file = load_study(study) if study is not None else None
    recipe = file.recipe if file is not None else Recipe()
    sizes = file.sizes if file is not None else tuple(SIZES)
    chosen = find_suite(suite, sizes) if suite is not None else None
    if chosen is not None:
        sources = file.corpora if file is not None else ()
        models = chosen.parsed
        recipe = chosen.recipe_over(recipe, where=f"--suite {suite}: recipe", sources=sources)
    elif names or file is not None:
        models = tuple(parse_name(name, sizes) for name in names or (file.models if file is not None else ()))
    else:
        raise UserError("plan: name at least one model, or give --suite or --study.")
    plan = make_plan(models, recipe)
    if vocabulary is None and file is not None and file.tokenizer is not None:
        vocabulary = file.tokenizer.train_vocab_size
    shapes = _shapes(file, {name.size for name in models}) if file is not None else {}
    device = device or (HERE if file is not None and suite is None else DEFAULT_DEVICE)
    machine = _this_machine(recipe) if device == HERE else None
    return PricedPlan(plan, Pricing(recipe, vocabulary, device, utilisation, {**SIZES, **shapes}, machine), chosen)


def _this_machine(recipe: Recipe) -> Device:
    # Printed before the import, which takes long because it loads torch.
    say("measuring this machine (--device names another)")
    from mlmclm.pretraining.speed import this_machine

    return this_machine(bf16=recipe.precision != "fp32")


def _shapes(file: StudyFile, sizes: set[str]) -> dict[str, Size]:
    """Return the shapes of the models to continue from, read from their configurations alone."""
    sources = {size: source for size, source in file.initial.items() if size in sizes}
    if not sources:
        return {}
    from mlmclm.pretraining.initial import source_sizes

    return source_sizes(sources, beside=file.folder)


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
