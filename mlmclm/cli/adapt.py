"""`mlmclm adapt`: train a model further on one's own text, and say whether it helped."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.sweeps.cluster_terms import ClusterTerms


def adapt(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A model's folder, its name in a study of the store (NAME or STUDY/NAME), or its name on the Hugging Face Hub "
            "(OWNER/NAME[@REVISION]).",
        ),
    ],
    text: Annotated[str, Option(metavar="FOLDER|FILE", help="The text to train on.")],
    task: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FILE",
            help="Also fine-tune both models on this task, and compare them: a task's name, or a data file as for `mlmclm try`; may be given "
            "several times.",
        ),
    ] = None,
    objective: Annotated[
        str | None, Option(help="Such as mlm15 or clm; by default mlm30 for an encoder and clm for a decoder.")
    ] = None,
    steps: Annotated[
        int | None, Option(help="Steps of training; by default up to three passes over the text, and at most 2,000.")
    ] = None,
    lr: Annotated[
        float | None, Option(help="The peak learning rate; by default a low one by the model's size.")
    ] = None,
    replicates: Annotated[
        int, Option(help="Runs of the training that differ in their seeds; with one, its own luck is in no interval.")
    ] = 1,
    text_column: Annotated[
        str, Option(metavar="COLUMN", help="The column of text, in files that have columns.")
    ] = "text",
    space: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE", help="A search space for the tasks in place of a small one that is made for the model."
        ),
    ] = None,
    seeds: options.Seeds = None,
    name: Annotated[
        str | None,
        Option(help="Name of the study's folder and the MLflow experiment; by default adapt- and the model's name."),
    ] = None,
    write: Annotated[
        Path | None, Option(metavar="FOLDER", help="Write the study as files to edit, and compute nothing.")
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = options.DEFAULT_TERMS.wait_for_nodes,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Trains a model further on your own text, beside the untouched one, and says whether that helped, by how much and how sure that is.

    Both are compared on documents that are held out, and with --task on tasks. The same command resumes, and computes nothing twice.

    Examples:

    mlmclm adapt answerdotai/ModernBERT-base --text my_texts

    mlmclm adapt ./my_encoder --text my_texts --task reviews.csv --replicates 3
    """
    from mlmclm.cli.study_report import show_advice, show_best, show_plan
    from mlmclm.studies.adapt import adapt as make

    options.for_estimates(dry_run=dry_run, workers=workers, price=price)
    made = make(
        model,
        text,
        tasks=task or (),
        objective=objective,
        steps=steps,
        learning_rate=lr,
        replicates=replicates,
        text_column=text_column,
        space=space,
        seeds=seeds,
        name=name,
        store=store,
        data=data,
        task_dirs=task_dir,
    )
    tasks = {each.name: dict(each.facts) for each in made.data}
    chosen = {**made.facts, **({"tasks": tasks} if tasks else {})}
    if not as_json:
        show_table(("what", "as chosen"), list(made.facts.items()), title=f"{model} on {text}")
        for each, facts in tasks.items():
            show_table(("what", "as inferred"), list(facts.items()), title=each)
        show("- To change this: --steps, --lr, --objective, --replicates; or --write FOLDER, and edit the study.")
    if write is not None:
        paths = made.write(write)
        more = f" --task-dir {write / 'tasks'} --data {write / 'data'}" if tasks else ""
        again = f"mlmclm study {paths[0]}{more}"
        if as_json:
            print_json({"chosen": chosen, "files": list(map(str, paths)), "command": again})
        else:
            show(f"\nWritten: {', '.join(map(str, paths))}\nTo go on from there: {again}")
        return
    if dry_run:
        plan = made.plan(workers=workers, price=price)
        if as_json:
            print_json({"chosen": chosen, **plan.as_dict()})
        else:
            show()
            show_plan(plan, as_json=False)
        return
    found = made.run(replace=replace, ray=ray, terms=ClusterTerms(wait_for_nodes))
    if as_json:
        fall = {key: None if math.isnan(value) else value for key, value in asdict(found.fall).items()}
        loss = {"before": found.before, "after": list(found.after), "documents": found.documents, "fall": fall}
        advice = None if found.results is None else asdict(found.results.advice)
        models = {each: str(folder) for each, folder in found.models.items()}
        print_json({"chosen": chosen, "answers": list(found.answers), "loss": loss, "models": models, "advice": advice})
        return
    if found.results is not None:
        show_best(found.results.analysis)
        show_advice(found.results.advice)
    for number, answer in enumerate(found.answers):
        show(answer, style=None if number else "bold")
    for each, folder in found.models.items():
        show(f"model:   {folder}" if len(found.models) == 1 else f"{each}: {folder}")
    if found.results is not None:
        show(f"report:  {found.results.report}")
