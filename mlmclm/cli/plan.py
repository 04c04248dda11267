"""`mlmclm plan`: show the training stages behind model names, the steps they share, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.numbers import count
from mlmclm.plans.devices import DEFAULT_UTILISATION, DEVICES, HERE, Device
from mlmclm.progress import say
from mlmclm.storage.files import write_atomic

if TYPE_CHECKING:
    from mlmclm.models.sizes import Size
    from mlmclm.plans.costs import Cost, Pricing
    from mlmclm.plans.recipe import Recipe
    from mlmclm.plans.stages import Plan, Stage
    from mlmclm.plans.suite import Suite
    from mlmclm.studies.study_file import StudyFile

_NAMES_SHOWN = 2
DEFAULT_DEVICE = "h100"


def plan(
    names: Annotated[list[str] | None, Argument(help="Model names, such as 610m-clm-10k-mlm40-42k.")] = None,
    suite: options.Suite = None,
    study: Annotated[Path | None, Option(help="Take recipe (and models, if none are named) from a study file.")] = None,
    device: Annotated[
        str | None,
        Option(
            help=f"What hours are counted on: {', '.join(DEVICES)}, or {HERE}: this machine, measured. By default {HERE} for a study "
            f"of your own, else {DEFAULT_DEVICE}."
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        Option(
            min=1,
            help="Size of the vocabulary; by default the study's, else the published model's: the paper's 128,256, ModernBERT's 50,368.",
        ),
    ] = None,
    utilisation: Annotated[
        float, Option(help="Share of the device's peak that is assumed to be reached.")
    ] = DEFAULT_UTILISATION,
    picture: Annotated[Path | None, Option(help="Also draw the stages into this .html file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Shows the training stages that model names stand for, and what they cost.

    Steps that several models share are trained once: a stage leaves the state from which another model branches off. Without
    `--study` the recipe is the published one (warm-up 2,000 steps, decay 2,000, 1,152 sequences of 2,048 tokens a step). Hours are
    model FLOPs over the device's peak times the utilisation: an estimate. A model to continue from is counted with its own vocabulary.
    A phase can be given as a share of the whole, as in 1m-clm-25%-mlm40-1k. For a suite, what departs from its publication is listed
    too.

    Example: mlmclm plan --suite paper --device mi250x --picture plan.html
    """
    from mlmclm.models.sizes import SIZES
    from mlmclm.plans.costs import Pricing
    from mlmclm.plans.names import parse
    from mlmclm.plans.recipe import Recipe
    from mlmclm.plans.stages import make_plan
    from mlmclm.plans.suite import find_suite
    from mlmclm.studies.study_file import load_study

    if names and suite is not None:
        raise UserError("plan: name models or give --suite, not both.")
    if picture is not None and picture.suffix != ".html":
        raise UserError(f"--picture {picture}: pictures are HTML pages; allowed: a name that ends in .html.")
    file = load_study(study) if study is not None else None
    recipe = file.recipe if file is not None else Recipe()
    sizes = file.sizes if file is not None else tuple(SIZES)
    chosen = find_suite(suite, sizes) if suite is not None else None
    if chosen is not None:
        sources = file.corpora if file is not None else ()
        models = chosen.parsed
        recipe = chosen.recipe_over(recipe, where=f"--suite {suite}: recipe", sources=sources)
    elif names or file is not None:
        models = tuple(parse(name, sizes) for name in names or (file.models if file is not None else ()))
    else:
        raise UserError("plan: name at least one model, or give --suite or --study.")
    made = make_plan(models, recipe)
    if vocabulary is None and file is not None and file.tokenizer is not None:
        vocabulary = file.tokenizer.train_vocab_size
    shapes = _shapes(file, {name.size for name in models}) if file is not None else {}
    device = device or (HERE if file is not None and suite is None else DEFAULT_DEVICE)
    here = _this_machine(recipe) if device == HERE else None
    pricing = Pricing(recipe, vocabulary, device, utilisation, {**SIZES, **shapes}, here)
    if picture is not None:
        from mlmclm.reports.plan_figure import plan_page

        write_atomic(picture, plan_page(made, pricing))
        say(f"picture: {picture}")
    if as_json:
        of_suite = {} if chosen is None else chosen.model_dump(mode="json", include={"mixes", "departures"})
        print_json(describe(made, pricing) | of_suite)
        return
    _show(made, pricing)
    if chosen is not None:
        _show_suite(chosen, suite or "")


def _this_machine(recipe: Recipe) -> Device:
    # Said before the import, which loads torch.
    say("measuring this machine (--device names another)")
    from mlmclm.pretraining.speed import this_machine

    return this_machine(bf16=recipe.precision != "fp32")


def _shapes(file: StudyFile, sizes: set[str]) -> dict[str, Size]:
    """Return the shapes of the models to continue from, read from their configurations alone."""
    given = {size: source for size, source in file.initial.items() if size in sizes}
    if not given:
        return {}
    from mlmclm.pretraining.initial import source_sizes

    return source_sizes(given, beside=file.folder)


def describe(made: Plan, pricing: Pricing) -> dict[str, Any]:
    """Return a plan and its costs as plain values."""
    cost, alone = pricing.plan(made), pricing.states(made.alone)
    return {
        "models": [str(name) for name in made.models],
        "stages": [_describe(made, stage, pricing) for stage in made.tree()],
        "steps": made.steps,
        "steps_without_sharing": made.steps_alone,
        "steps_shared": made.steps_shared,
        "tokens": cost.tokens,
        "tokens_without_sharing": alone.tokens,
        "flops": cost.flops,
        "flops_without_sharing": alone.flops,
        "device_hours": cost.device_hours,
        "device_hours_without_sharing": alone.device_hours,
        "sizes": _sizes(made, pricing),
        "utilisation": pricing.utilisation,
        "device": {"name": pricing.device_name, **asdict(pricing.device)},
    }


def _describe(made: Plan, stage: Stage, pricing: Pricing) -> dict[str, Any]:
    cost = pricing.stage(stage)
    return {
        "objective": str(stage.objective),
        "size": stage.end.size,
        "from": stage.start.step,
        "starts_from": str(stage.start),
        "depth": made.depth(stage),
        "to": stage.end.step,
        "deposits": [state.step for state in stage.states],
        "stretches": [
            {"from": part.start, "to": part.stop, "models": list(part.models)} for part in made.stretches(stage)
        ],
        "tokens": cost.tokens,
        "flops": cost.flops,
        "device_hours": cost.device_hours,
        "models": list(stage.models),
    }


def _show(made: Plan, pricing: Pricing) -> None:
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("tokens", "FLOPs", "time")]
    columns: list[str | Column] = ["stage", Column("leaves behind"), "shared steps", *numbers, "for"]
    rows = []
    for stage in made.tree():
        shared = [part for part in made.stretches(stage) if len(part.models) > 1]
        title, behind = "  " * made.depth(stage) + stage.title, ", ".join(f"{state.step:,}" for state in stage.states)
        steps = f"{shared[0].start:,}-{shared[-1].stop:,}" if shared else ""
        rows.append((title, behind, steps, *_cells(pricing.stage(stage)), _shortened(stage.models)))
    drop = ("shared steps", "leaves behind", "FLOPs", "tokens")
    show_table(columns, rows, drop=drop, lines=box.SIMPLE_HEAD)
    for size, facts in _sizes(made, pricing).items():
        show(
            f"{size}: {count(facts['parameters'])} parameters without LM head at a vocabulary of {facts['vocabulary']:,} "
            f"({facts['vocabulary_of']})"
        )
    totals = [
        (title, f"{cost.steps:,}", *_cells(cost))
        for title, cost in (("as planned", pricing.plan(made)), ("each model alone", pricing.states(made.alone)))
    ]
    show_table(("", "steps", "tokens", "FLOPs", "time"), totals)
    show(
        f"{len(made.models)} models, {len(made.stages)} stages; {made.steps_shared:,} steps are trained once for several models, "
        f"{made.steps_alone - made.steps:,} saved."
    )
    show(
        f"Time of one {pricing.device.title}, assuming {pricing.utilisation:.0%} of its {pricing.device.peak / 1e12:,.3g} TFLOP/s "
        f"({pricing.device.source})."
    )


def _show_suite(suite: Suite, name: str) -> None:
    """Show a suite's mixes, and what departs from its publication."""
    from mlmclm.corpora.mixes import words

    for phase, mix in suite.mixes.items():
        show(f"{phase}: {words(mix)}")
    if suite.departures:
        show(f"Suite {name} departs from its publication, or infers what that leaves open:")
    for departure in suite.departures:
        show(f"- {departure}")


def _sizes(made: Plan, pricing: Pricing) -> dict[str, dict[str, Any]]:
    """Return what is known of each size of a plan's models, in order."""
    from mlmclm.models.sizes import TITLES, parameters

    found = {}
    for size in dict.fromkeys(name.size for name in made.models):
        shape, rows = pricing.sizes[size], pricing.rows(size)
        whose = "its own" if shape.vocabulary is not None else "as given"
        if shape.vocabulary is None and pricing.vocabulary is None:
            whose = f"as published: {TITLES[shape.architecture]}"
        facts = {"architecture": shape.architecture, "vocabulary": rows, "vocabulary_of": whose}
        found[size] = {**facts, "parameters": parameters(shape, rows)}
    return found


def _cells(cost: Cost) -> tuple[str, str, str]:
    """Format tokens, FLOPs and time as three table cells."""
    return count(cost.tokens), f"{cost.flops:.2e}", time_text(cost.device_hours)


def time_text(hours: float) -> str:
    """Format a duration in the largest unit of which there is at least one."""
    units = ((hours, "h"), (60 * hours, "min"), (3600 * hours, "s"))
    amount, unit = next((each for each in units if each[0] >= 1), units[-1])
    return f"{amount:,.0f} {unit}" if amount >= 10 else f"{amount:.2g} {unit}"


def _shortened(names: Sequence[str]) -> str:
    """List the first names, and say how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
