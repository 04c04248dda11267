"""`mlmclm tracking`: show the store's MLflow records, and write what they lack of a study."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from mlmclm.cli import options
from mlmclm.errors import UserError
from mlmclm.storage.files import is_locked
from mlmclm.storage.place import LOCK

verbs = typer.Typer(
    help="MLflow's records: `tracking ui` shows them, `tracking sync STUDY` writes what they lack.",
    rich_markup_mode="markdown",
)


@verbs.command()
def sync(
    file: options.StudyOrSweep,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    to: Annotated[
        str | None,
        Option(metavar="NAME", help="Another tracker: `tensorboard`, `trackio`, `wandb`, or one of your own."),
    ] = None,
    follow: Annotated[
        bool, Option("--follow", help="If another process is running the study, go on until that has ended.")
    ] = False,
) -> None:
    """Writes to MLflow what it lacks of a study, including what was deleted there: stages, summaries, report, and all cells.

    Everything comes from the store; nothing is computed, and no run is written twice.

    Example: mlmclm tracking sync quickstart
    """
    from mlmclm.studies.api import open as open_store
    from mlmclm.studies.study_tracking import follow_study

    if follow and to is not None:
        raise UserError(
            f"--follow --to {to}: only MLflow can be followed; without --follow, another tracker gets a study that has ended."
        )
    study = open_store(store, data=data, task_dirs=task_dir).study(file)
    if follow and is_locked(study.folder / LOCK):
        follow_study(study.file, study.place.store)
    else:
        study.report(track=to or True)


@verbs.command()
def ui(store: options.Store = options.DEFAULT_STORE, port: options.Port = None) -> None:
    """Starts the MLflow server on the store's own records (on loopback), prints the link, and runs until Ctrl-C.

    Example: mlmclm tracking ui --port 5000
    """
    from mlmclm.service.mlflow_server import serve

    serve(store.resolve(), port=port)
