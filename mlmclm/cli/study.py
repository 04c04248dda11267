"""Verbs that begin, run and replicate a study."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from typer import Argument, Option

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_plan, show_results, show_table
from mlmclm.errors import UserError
from mlmclm.progress import starting

Test = Annotated[Path | None, Option(metavar="FILE", help="Test rows; by default a fifth of the rows is held out.")]
Validation = Annotated[
    Path | None, Option(metavar="FILE", help="Validation rows; by default a tenth of the rows is held out.")
]
Family = Annotated[
    str | None,
    Option(
        help="The kind of task, in place of the inferred one: sequence-classification, sequence-regression, token-classification, "
        "question-answering or retrieval."
    ),
]
TextColumn = Annotated[
    list[str] | None,
    Option(
        metavar="COLUMN",
        help="The column of text. Given twice: first and second text, question and context, or query and positive.",
    ),
]
LabelColumn = Annotated[str | None, Option(metavar="COLUMN", help="The column of labels, numbers, tags or answers.")]


def init(
    folder: Annotated[Path, Argument(help="Folder to write to; created if it does not exist.")] = Path(),
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Labelled rows, whose task is inferred: a CSV, TSV, JSON, JSON Lines or Parquet file, or one with a word and its tags on "
            "each line; compressed or not.",
        ),
    ] = None,
    model: options.Models = None,
    test: Test = None,
    validation: Validation = None,
    family: Family = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    schema: Annotated[
        str | None,
        Option(
            metavar="study|sweep|space|protocol|claims",
            help="Write nothing, and print the JSON Schema of a kind of file: with it, an editor explains and completes keys, and marks wrong "
            "ones. A file names its schema in its first line: `# yaml-language-server: $schema=space.json`.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    dry_run: Annotated[bool, Option("--dry-run", help="With --data: show the files, and write nothing.")] = False,
    as_json: options.Json = False,
) -> None:
    """Writes a study to edit: the commented quickstart (study.yaml, space.yaml), or with --data a study of models on your data.

    With --data, the task is inferred from the file and written to tasks/, the rows to data/, and a small grid for the models to
    study.yaml. Files that exist are not overwritten.

    Examples:

    mlmclm init my_study

    mlmclm init my_study --data reviews.csv --model ./my_encoder --model answerdotai/ModernBERT-base

    mlmclm init --schema space > space.json
    """
    if schema is not None:
        from mlmclm.studies.new_study import schema_of

        print_json(schema_of(schema))
        return
    from mlmclm.storage.place import open_place
    from mlmclm.studies.new_study import new_study, run_command, settings_for, write_study
    from mlmclm.tasks.data_file import read_task
    from mlmclm.tasks.inference import Overrides

    if data is None:
        flags = {"model": model, "test": test, "validation": validation, "family": family, "text-column": text_column}
        for name, value in (flags | {"label-column": label_column, "dry-run": dry_run}).items():
            if value:
                raise UserError(f"--{name} says more about a data file: give --data FILE too.")
        study, space = new_study(folder)
        show(f"{study}: the study\n{space}: its search space\nWhat it would compute: mlmclm study {study} --dry-run")
        return
    overrides = Overrides(family, tuple(text_column or ()), label_column)
    task = read_task(data, overrides, test=test, validation=validation)
    settings = settings_for(folder, task, model or (), open_place(store=store))
    if not dry_run:
        write_study(folder, task, settings)
    files = {folder / "tasks" / f"{task.name}.yaml": task.declaration, folder / "study.yaml": settings}
    command = run_command(folder)
    if as_json:
        print_json(
            {"data": dict(task.facts), "files": {str(path): text for path, text in files.items()}, "command": command}
        )
        return
    for path, text in files.items():
        show(f"{path}:", style="bold")
        show(text)
    show("To read the file otherwise: --text-column, --label-column, --family, --test FILE, --validation FILE.")
    show("Nothing is written (--dry-run)." if dry_run else f"What it would compute: {command} --dry-run")


def try_models(
    file: Annotated[Path, Argument(metavar="FILE", help="Labelled rows, as for `init --data`.")],
    model: options.Models = None,
    test: Test = None,
    validation: Validation = None,
    family: Family = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    seeds: Annotated[int, Option(min=1, metavar="N", help="The number of seeds.")] = 3,
    store: options.Store = options.DEFAULT_STORE,
    dry_run: options.DryRun = False,
) -> None:
    """Compares models on a data file: shows what is in it, writes a study beside it, as `init --data` does, and runs or resumes it.

    Example: mlmclm try reviews.csv --model ./my_encoder --model answerdotai/ModernBERT-base
    """
    from mlmclm.storage.place import open_place
    from mlmclm.studies.api import study
    from mlmclm.studies.new_study import STUDY, settings_for, write_study
    from mlmclm.tasks.data_file import read_task
    from mlmclm.tasks.inference import Overrides

    task = read_task(file, Overrides(family, tuple(text_column or ()), label_column), test=test, validation=validation)
    show_table(("what", "as inferred"), [*task.facts.items(), *(("note", note) for note in task.notes)])
    with TemporaryDirectory() as temporary, starting("loading libraries and reading the models"):
        folder = file.parent / f"{task.name}-study"
        resume = not dry_run or folder.exists()
        folder = folder if resume else Path(temporary) / folder.name
        settings = settings_for(folder, task, model or (), open_place(store=store), seeds=seeds)
        write_study(folder, task, settings, resume=resume)
        opened = study(folder / STUDY, store=store, data=folder / "data", task_dirs=[folder / "tasks"])
        show_plan(opened.plan(), as_json=False) if dry_run else show_results(opened.run(check=False), as_json=False)


def study(
    file: options.Study,
    overrides: options.Overrides = None,
    part: options.Part = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    wait_for_storage: options.WaitForStorage = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Runs a whole study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What the store already has is not computed again: after a crash, a kill or a change of the file, the same command computes
    only what is missing. A change that leaves out or alters a part of the grid needs another name, or --replace. A study whose
    file has parts can be computed part by part, with `--part`.

    Examples:

    mlmclm study quickstart

    mlmclm study my_study.yaml name=larger-batch recipe.batch=32 --data ~/datasets
    """
    from mlmclm.studies.api import study as open_study

    options.refuse_without_dry_run(dry_run=dry_run, workers=workers, price=price)
    opened = open_study(
        file,
        part=part,
        overrides=overrides or (),
        store=store,
        data=data,
        task_dirs=task_dir,
        wait_for_storage=wait_for_storage,
    )
    if dry_run:
        show_plan(opened.plan(workers=workers, price=price), as_json=as_json)
        return
    show_results(opened.run(ray=ray, replace=replace, wait_for_nodes=wait_for_nodes, check=False), as_json=as_json)


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
    from mlmclm.studies.api import study as open_study

    study = open_study(file, store=store, data=data, task_dirs=task_dir).narrowed(models or (), suite)
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


def replicate(
    paper: Annotated[str, Argument(metavar="study|ettin", help="arXiv 2507.00994 (study) or 2507.11412 (ettin).")],
    scale: Annotated[
        str,
        Option(
            metavar="tiny|small",
            help="tiny: minutes, without data. small: a night on two cores, with the data sets of --data.",
        ),
    ] = "tiny",
    part: options.Part = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    dry_run: options.DryRun = False,
    write: Annotated[
        Path | None, Option(metavar="FOLDER", help="Only copy the study file and its tasks to a folder, to edit.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Runs the packaged study that replicates a paper, and says of each of the paper's claims whether the results show it.

    It is a study like any other (`mlmclm study replicate-study-small` is the same): what the store has is not computed again.
    Its parts, of at most three hours each on two cores, each end with tables, a report and claims.

    Examples:

    mlmclm replicate study --scale tiny

    mlmclm replicate ettin --scale small --data ~/datasets --part half
    """
    from mlmclm.studies.plan import replication_of, write_replication

    name = replication_of(paper, scale)
    if write is not None:
        study, *task_files = write_replication(name, write)
        show("\n".join(map(str, (study, *task_files))))
        show(f"What it would compute: mlmclm study {study} --dry-run")
    else:
        from mlmclm.studies.api import study as open_study

        opened = open_study(name, part=part, store=store, data=data)
        if dry_run:
            show_plan(opened.plan(), as_json=as_json)
            return
        results = opened.run(ray=ray, wait_for_nodes=wait_for_nodes, check=False)
        show_results(results, as_json=as_json, claims=True)
