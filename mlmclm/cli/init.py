"""`mlmclm init`: write a study to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError

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
    from mlmclm.studies.data_file import read_task
    from mlmclm.studies.new_study import new_study, run_command, settings_for, write_study
    from mlmclm.studies.place import open_place
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
