"""`mlmclm tracking sync`: write to MLflow what it lacks of a study."""

from __future__ import annotations

import typer

from mlmclm.cli import options
from mlmclm.cli.results_of import results_of

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
    from mlmclm.cli.study_report import command_of, record, writable
    from mlmclm.studies.study_tracking import StudyTracking

    place = options.place(store, data, task_dir)
    found = results_of(file, place, None)
    place = found.place
    own = place.study_folder(found.file)
    with StudyTracking(found.file, place, patient=True) as tracking:
        tracking.stored(found.prepared, found.space, found.results)
        record(
            found.analyse(),
            found.facts(found.command or command_of(found.verb, [file], data, task_dir)),
            found.space,
            tracking,
            folder=own if writable(own) else None,
        )
