"""`mlmclm pretrain`: train the models of a study."""

from __future__ import annotations

import shlex
from typing import Annotated

from typer import Argument

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.output import print_json, show


def pretrain(
    file: options.Study,
    models: Annotated[list[str] | None, Argument(help="Only these models of the study.")] = None,
    suite: options.Suite = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Trains the models of a study, each stage as a Ray Train run of DeepSpeed workers, and exports Hugging Face folders.

    Steps that several models share are trained once. Stages run side by side if the cluster has room for the workers of several.
    An interrupted run resumes from its last checkpoint. With `--suite`, the models (and what the suite says of the recipe)
    take the place of the study's; corpus, tokenizer and the rest of the recipe are the study's. A suite's mixes are used if the
    study's corpora have all of their sources.

    Example: mlmclm pretrain examples/quickstart.yaml 1m-clm-1k
    """
    from mlmclm.cli.study_report import show_plan
    from mlmclm.studies.api import trained_study

    study = trained_study(file, models or (), suite=suite, store=store, data=data, task_dirs=task_dir)
    if dry_run:
        show_plan(study.plan_pretraining(), as_json=as_json)
        return
    exported = study.pretrain(ray=ray, wait_for_nodes=wait_for_nodes)
    if as_json:
        print_json({model.name: {"folder": str(model.folder), "weights": model.weights} for model in exported})
    else:
        for model in exported:
            show(f"{model.name}: {study.folder / 'models' / model.name}")
        condition = "" if study.trained_file.space else ", once the file has a `space:`"
        show(f"mlmclm study {shlex.quote(str(file))} fine-tunes them and writes the report{condition}.")
