"""`mlmclm try`: compare models on a data file, without any other file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.sweeps.cluster_terms import ClusterTerms

if TYPE_CHECKING:
    from mlmclm.studies.data_file import FileTask


def try_models(
    rows: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help="A CSV, TSV, JSON, JSON Lines or Parquet file, or one with a word and its tags on each line; compressed or not.",
        ),
    ],
    model: Annotated[
        list[str],
        Option(
            metavar="[NAME=]SOURCE",
            help="A model's folder, its name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or its name on the Hugging Face "
            "Hub (OWNER/NAME[@REVISION]); may be given several times.",
        ),
    ],
    test: Annotated[
        Path | None, Option(metavar="FILE", help="Test rows; by default a fifth of FILE is held out.")
    ] = None,
    validation: Annotated[
        Path | None, Option(metavar="FILE", help="Validation rows; by default a tenth of FILE is held out.")
    ] = None,
    family: Annotated[
        str | None,
        Option(
            help="The kind of task, in place of the inferred one: sequence-classification, sequence-regression, token-classification, "
            "question-answering or retrieval."
        ),
    ] = None,
    text_column: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN",
            help="The column of text. Given twice: first and second text, question and context, or query and positive.",
        ),
    ] = None,
    label_column: Annotated[
        str | None, Option(metavar="COLUMN", help="The column of labels, numbers, tags or answers.")
    ] = None,
    space: Annotated[
        str | None,
        Option(metavar="NAME|FILE", help="A search space in place of the small one that is made for the models."),
    ] = None,
    seeds: options.Seeds = None,
    name: Annotated[
        str | None,
        Option(help="Name of the report's folder and the MLflow experiment; by default try- and the file's name."),
    ] = None,
    baseline: Annotated[str | None, Option(help="The model with which the others are compared.")] = None,
    write: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Write the same as files to edit (sweep, search space, task, data), and compute nothing.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = options.DEFAULT_TERMS.wait_for_nodes,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Compares models on a data file: infers what is in it, shows that, fine-tunes the models over a small grid, and advises.

    The file's rows are kept in the store. The same command resumes, and computes nothing twice.

    Examples:

    mlmclm try reviews.csv --model ./my_encoder --model answerdotai/ModernBERT-base

    mlmclm try train.jsonl --test test.jsonl --label-column stars --model ./my_encoder --dry-run
    """
    from mlmclm.cli.study_report import show_advice, show_best, show_plan
    from mlmclm.reports.wording import baseline_sentence
    from mlmclm.studies import try_models as studies

    options.for_estimates(dry_run=dry_run, workers=workers, price=price)
    made = studies.try_models(
        rows,
        model,
        test=test,
        validation=validation,
        family=family,
        text_columns=text_column or (),
        label_column=label_column,
        space=space,
        seeds=seeds,
        name=name,
        baseline=baseline,
        store=store,
        data=data,
    )
    if not as_json:
        show_data(made.data, rows)
    if write is not None:
        paths = made.write(write)
        again = f"mlmclm sweep {paths[0]} --task-dir {write / 'tasks'} --data {write / 'data'}"
        if as_json:
            print_json({"data": dict(made.data.facts), "files": list(map(str, paths)), "command": again})
        else:
            show(f"\nWritten: {', '.join(map(str, paths))}\nTo go on from there: {again}")
        return
    if dry_run:
        plan = made.plan(workers=workers, price=price)
        if as_json:
            print_json({"data": dict(made.data.facts), **plan.as_dict()})
        else:
            show()
            show_plan(plan, as_json=False)
        return
    results = made.run(replace=replace, ray=ray, terms=ClusterTerms(wait_for_nodes))
    if as_json:
        from mlmclm.analysis.summary import summary

        report = {"data": dict(made.data.facts), "report": str(results.report), "advice": asdict(results.advice)}
        print_json({**report, **summary(results.analysis)})
        return
    show_best(results.analysis)
    show_advice(results.advice)
    if baseline is not None:
        show(baseline_sentence(results.analysis))
    show(f"report:  {results.report}")


def show_data(data: FileTask, path: Path) -> None:
    """Print what a data file is read as, and what changes that."""
    show_table(("what", "as inferred"), list(data.facts.items()), title=str(path))
    for note in data.notes:
        show(f"- {note}")
    show("- To change this: --text-column, --label-column, --family, --test FILE, --validation FILE.")
