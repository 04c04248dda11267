"""`mlmclm plan`: the stages behind model names, and which steps they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mlmclm.cli.options import JsonOption, print_json
from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES, STUDY_VOCABULARY, parameters
from mlmclm.studies.names import parse
from mlmclm.studies.plans import Plan, make_plan
from mlmclm.studies.recipe import Recipe
from mlmclm.study_file import load_study


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("plan")(plan)


def plan(
    names: Annotated[list[str] | None, typer.Argument(help="Model names, such as 610m-clm-10k-mlm40-42k.")] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="Take recipe (and models, if none are named) from a study file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows the training stages that model names stand for.

    Steps that several models share are trained once: a stage deposits the state from which another model branches off. Without
    `--study` the recipe is the published one (warm-up 2,000 steps, decay 2,000, 2,304 sequences of 2,048 tokens a step).

    Example: mlmclm plan 610m-clm-42k 610m-clm-10k-mlm40-42k
    """
    file = load_study(study) if study is not None else None
    if not names and file is None:
        raise UserError("plan: name at least one model, or a study file with --study.")
    recipe = file.recipe if file is not None else Recipe()
    made = make_plan([parse(name) for name in names or (file.models if file is not None else ())], recipe)
    if as_json:
        print_json(describe(made, recipe))
    else:
        _show(made, recipe)


def describe(made: Plan, recipe: Recipe) -> dict[str, Any]:
    """A plan as plain values."""
    tokens = recipe.batch * recipe.block_length
    return {
        "models": [str(name) for name in made.models],
        "stages": [
            {
                "objective": str(stage.objective),
                "size": stage.end.size,
                "from": stage.start.step,
                "starts_from": str(stage.start),
                "to": stage.end.step,
                "deposits": [state.step for state in stage.states],
                "tokens": stage.steps * tokens,
                "models": list(stage.models),
            }
            for stage in made.stages
        ],
        "steps": made.steps,
        "steps_without_sharing": made.steps_alone,
        "tokens": made.steps * tokens,
    }


def _show(made: Plan, recipe: Recipe) -> None:
    output = Console(highlight=False)
    table = Table("stage", "starts from", "deposits at", "tokens", "for", title=None)
    tokens = recipe.batch * recipe.block_length
    for stage in made.stages:
        table.add_row(
            stage.title,
            str(stage.start),
            ", ".join(f"{state.step:,}" for state in stage.states),
            f"{stage.steps * tokens / 1e6:,.1f} M",
            ", ".join(stage.models),
        )
    output.print(table)
    for size in dict.fromkeys(name.size for name in made.models):
        count = parameters(SIZES[size], STUDY_VOCABULARY)
        output.print(
            f"{size}: {count / 1e6:,.0f} M parameters without LM head at the study's vocabulary of {STUDY_VOCABULARY:,}"
        )
    saved = made.steps_alone - made.steps
    output.print(
        f"{len(made.stages)} stages, {made.steps:,} steps, {made.steps * tokens / 1e6:,.1f} M tokens; "
        f"{made.steps_alone:,} steps if each model were trained alone ({saved:,} saved by sharing)"
    )
