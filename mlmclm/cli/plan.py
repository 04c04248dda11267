"""`mlmclm plan`: show the training stages behind model names, the steps they share, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich import box
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.numbers import count, time_text
from mlmclm.plans.devices import DEFAULT_UTILISATION
from mlmclm.progress import say
from mlmclm.storage.files import write_atomic

if TYPE_CHECKING:
    from mlmclm.plans.costs import Cost
    from mlmclm.plans.suite import Suite
    from mlmclm.studies.plan import PricedPlan

_NAMES_SHOWN = 2


def plan(
    names: Annotated[list[str] | None, Argument(help="Model names, such as 610m-clm-10k-mlm40-42k.")] = None,
    suite: options.Suite = None,
    study: Annotated[Path | None, Option(help="Take recipe (and models, if none are named) from a study file.")] = None,
    device: options.Device = None,
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
    price: Annotated[
        float | None, Option(min=0, help="Price of an hour of one device, for the cost of pretraining.")
    ] = None,
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
    from mlmclm.studies.plan import price_plan

    if picture is not None and picture.suffix != ".html":
        raise UserError(f"--picture {picture}: pictures are HTML pages; allowed: a name that ends in .html.")
    priced = price_plan(
        names or (), suite=suite, study=study, device=device, vocabulary=vocabulary, utilisation=utilisation
    )
    if picture is not None:
        from mlmclm.studies.plan import plan_page

        write_atomic(picture, plan_page(priced.plan, priced.pricing))
        say(f"picture: {picture}")
    hours = priced.pricing.plan(priced.plan).device_hours
    if as_json:
        print_json(priced.as_dict() | ({} if price is None else {"cost": hours * price}))
        return
    show_priced(priced, suite)
    if price is not None:
        show(f"Cost of pretraining: {hours * price:,.0f} for {time_text(hours)} at {price:,.2f} an hour.")


def show_priced(priced: PricedPlan, suite: str | None) -> None:
    """Print a plan and its costs; `suite` is the name of the plan's suite, if it has one."""
    planned, pricing = priced.plan, priced.pricing
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("tokens", "FLOPs", "time")]
    columns: list[str | Column] = ["stage", Column("leaves behind"), "shared steps", *numbers, "for"]
    rows = []
    for stage in planned.tree():
        shared = [part for part in planned.stretches(stage) if len(part.models) > 1]
        title = "  " * planned.depth(stage) + stage.title
        behind = ", ".join(f"{state.step:,}" for state in stage.states)
        steps = f"{shared[0].start:,}-{shared[-1].stop:,}" if shared else ""
        rows.append((title, behind, steps, *_cells(pricing.stage(stage)), _shortened(stage.models)))
    drop = ("shared steps", "leaves behind", "FLOPs", "tokens")
    show_table(columns, rows, drop=drop, lines=box.SIMPLE_HEAD)
    for size, facts in priced.sizes().items():
        show(
            f"{size}: {count(facts['parameters'])} parameters without LM head at a vocabulary of {facts['vocabulary']:,} "
            f"({facts['vocabulary_of']})"
        )
    totals = [
        (title, f"{cost.steps:,}", *_cells(cost))
        for title, cost in (("as planned", pricing.plan(planned)), ("each model alone", pricing.states(planned.alone)))
    ]
    show_table(("", "steps", "tokens", "FLOPs", "time"), totals)
    show(
        f"{len(planned.models)} models, {len(planned.stages)} stages; {planned.steps_shared:,} steps are trained once for several models, "
        f"{planned.steps_alone - planned.steps:,} saved."
    )
    show(
        f"Time of one {pricing.device.title}, assuming {pricing.utilisation:.0%} of its {pricing.device.peak / 1e12:,.3g} TFLOP/s "
        f"({pricing.device.source})."
    )
    if priced.suite is not None:
        _show_suite(priced.suite, suite or "")


def _show_suite(suite: Suite, name: str) -> None:
    """Show a suite's mixes, and what departs from its publication."""
    from mlmclm.corpora.mixes import mix_text

    for phase, mix in suite.mixes.items():
        show(f"{phase}: {mix_text(mix)}")
    if suite.departures:
        show(f"Suite {name} departs from its publication, or infers what that leaves open:")
    for departure in suite.departures:
        show(f"- {departure}")


def _cells(cost: Cost) -> tuple[str, str, str]:
    """Format tokens, FLOPs and time as three table cells."""
    return count(cost.tokens), f"{cost.flops:.2e}", time_text(cost.device_hours)


def _shortened(names: Sequence[str]) -> str:
    """List the first names, and say how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
