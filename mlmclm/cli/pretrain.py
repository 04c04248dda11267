"""`mlmclm pretrain`: trains the models of a study."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from mlmclm.cli import options
from mlmclm.cli.options import (
    AddressOption,
    DataOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    StudyArgument,
    SuiteOption,
    TaskDirOption,
)

if TYPE_CHECKING:
    from mlmclm.study.study_file import StudyFile


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("pretrain")(pretrain_models)


def pretrain_models(
    file: StudyArgument,
    models: Annotated[
        list[str] | None, typer.Argument(help="Only these models of the study.", show_default=False)
    ] = None,
    suite: SuiteOption = None,
    store: StoreOption = options.DEFAULT_STORE,
    data: DataOption = None,
    task_dir: TaskDirOption = None,
    ray: AddressOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Trains the models of a study, each stage as a Ray Train run of DeepSpeed workers, and exports Hugging Face folders.

    Steps that several models share are trained once, and stages side by side where the cluster has room for the workers of several.
    A run that was interrupted goes on from its last checkpoint. With `--suite`, the models (and what the suite says of the recipe)
    take the place of the study's; corpus, tokenizer and the rest of the recipe are the study's.

    Example: mlmclm pretrain examples/quickstart.yaml 1m-clm-1k
    """
    from mlmclm.cli.output import print_json, show
    from mlmclm.cli.shared import at_work, on_cluster, shared_session
    from mlmclm.errors import unknown
    from mlmclm.study.model_folders import export_models
    from mlmclm.study.prepare import prepare
    from mlmclm.study.pretrain import pretrain
    from mlmclm.study.study_file import load_study
    from mlmclm.study.tracking import StudyTracking

    study, place = load_study(file), options.place(store, data, task_dir)
    if suite is not None:
        study = with_suite(study, suite)
    models = [study.spelled(name) for name in models or ()]
    for name in models:
        if name not in study.models:
            raise unknown("model", name, study.models, where=str(file) if suite is None else f"--suite {suite}")
    if models:
        kept = study.baseline if study.baseline in models else None
        study = study.model_copy(update={"models": tuple(models), "baseline": kept})
    if dry_run:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(study, place, as_json=as_json, sweep=False)
        return
    with at_work(study, place), ExitStack() as stack:
        tracking = stack.enter_context(StudyTracking(study, place))
        session = shared_session(stack, place, ray)
        prepared = prepare(study, place, session=session if on_cluster(ray) else None)
        if prepared.unfinished():
            session()
            pretrain(prepared, tracking.stage_lines(prepared))
        exported = export_models(prepared)
        tracking.pretrained(prepared)
    if as_json:
        print_json({model.name: {"folder": str(model.folder), "weights": model.weights} for model in exported})
    else:
        for model in exported:
            show(f"{model.name}: {model.folder}")


def with_suite(study: StudyFile, suite: str) -> StudyFile:
    """The study with the models of a suite, by name or path, and the suite's fields of the recipe.

    Raises:
        UserError: no such suite, or one that is wrong or doesn't fit the study's recipe.
    """
    from mlmclm.plans.suite import find_suite

    chosen = find_suite(suite, study.sizes)
    recipe = chosen.recipe_over(study.recipe, where=f"--suite {suite}: recipe")
    models = tuple(str(name) for name in chosen.parsed)
    return study.model_copy(update={"models": models, "baseline": None, "recipe": recipe})
