"""`mlmclm tracking sync`: write to MLflow what it lacks of a study."""

from __future__ import annotations

import typer

from mlmclm.cli import options

verbs = typer.Typer(
    help="MLflow's records; `tracking sync STUDY` writes what they lack.",
    callback=lambda: None,  # with a callback a group keeps its only verb's name
    rich_markup_mode="markdown",
)


@verbs.command()
def sync(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
) -> None:
    """Writes to MLflow what it lacks of a study, including what was deleted there: stages, summaries, report, and all cells.

    Everything comes from the store; nothing is computed, and no run is written twice.

    Example: mlmclm tracking sync quickstart
    """
    from mlmclm.studies.door import open as open_store

    open_store(store, data=data, task_dirs=task_dir).study(file).report(track=True)
