"""`mlmclm try`: compare models on a data file, with `init --data` and `study` in one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from typer import Argument, Option

from mlmclm.cli import init, options
from mlmclm.cli.output import show_table
from mlmclm.progress import starting


def try_models(
    file: Annotated[Path, Argument(metavar="FILE", help="Labelled rows, as for `init --data`.")],
    model: options.Models = None,
    test: init.Test = None,
    validation: init.Validation = None,
    family: init.Family = None,
    text_column: init.TextColumn = None,
    label_column: init.LabelColumn = None,
    seeds: Annotated[int, Option(min=1, metavar="N", help="The number of seeds.")] = 3,
    store: options.Store = options.DEFAULT_STORE,
    dry_run: options.DryRun = False,
) -> None:
    """Compares models on a data file: shows what is in it, writes a study beside it, as `init --data` does, and runs or resumes it.

    Example: mlmclm try reviews.csv --model ./my_encoder --model answerdotai/ModernBERT-base
    """
    from mlmclm.cli.study_report import show_plan, show_results
    from mlmclm.studies.api import study
    from mlmclm.studies.data_file import read_task
    from mlmclm.studies.new_study import STUDY, settings_for, write_study
    from mlmclm.studies.place import open_place
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
