"""`mlmclm pretrain`: train the models of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.progress import say
from mlmclm.sweeps.cluster_terms import ClusterTerms

if TYPE_CHECKING:
    from mlmclm.studies.study_file import StudyFile


def pretrain(
    file: options.Study,
    models: Annotated[list[str] | None, Argument(help="Only these models of the study.")] = None,
    suite: options.Suite = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = options.DEFAULT_TERMS.wait_for_nodes,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Trains the models of a study, each stage as a Ray Train run of DeepSpeed workers, and exports Hugging Face folders.

    Steps that several models share are trained once. Stages run side by side if the cluster has room for the workers of several.
    An interrupted run resumes from its last checkpoint. With `--suite`, the models (and what the suite says of the recipe)
    take the place of the study's; corpus, tokenizer and the rest of the recipe are the study's. A suite's mixes count if the
    study's corpora have all of their sources.

    Example: mlmclm pretrain examples/quickstart.yaml 1m-clm-1k
    """
    from mlmclm.cli.shared import prepared_for, work_on
    from mlmclm.studies.study_file import load_study

    study, place = load_study(file), options.place(store, data, task_dir)
    if suite is not None:
        study = with_suite(study, suite)
    if models:
        where = str(file) if suite is None else f"--suite {suite}"
        chosen = tuple(study.model_of(name, where=where) for name in models)
        kept = study.baseline if study.baseline in chosen else None  # a baseline must be one of the models
        study = study.model_copy(update={"models": chosen, "baseline": kept})
    if dry_run:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(study, place, None, as_json=as_json)
        return
    with work_on(study, place, ray, ClusterTerms(wait_for_nodes)) as work:
        exported = work.pretrain(prepared_for(study, place, ray, work.session))
    if as_json:
        print_json({model.name: {"folder": str(model.folder), "weights": model.weights} for model in exported})
    else:
        for model in exported:
            show(f"{model.name}: {model.folder}")


def with_suite(study: StudyFile, suite: str) -> StudyFile:
    """Return the study with a suite's models, and with the recipe fields that the suite sets.

    Raises:
        UserError: the suite doesn't exist, is invalid, or doesn't fit the study's recipe.
    """
    from mlmclm.plans.suite import find_suite

    chosen = find_suite(suite, study.sizes)
    if lacking := chosen.lacking(study.corpora):
        say(
            f"--suite {suite}: its mixes are left out, and all phases read the study's own text: the study's corpora lack {', '.join(lacking)}."
        )
    recipe = chosen.recipe_over(study.recipe, where=f"--suite {suite}: recipe", sources=study.corpora)
    models = tuple(str(name) for name in chosen.parsed)
    return study.model_copy(update={"models": models, "baseline": None, "recipe": recipe})
