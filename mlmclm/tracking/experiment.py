"""The MLflow experiment of a study: opened, and created with its views if it is missing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.files import only_one
from mlmclm.tracking.address import own_database
from mlmclm.tracking.bulk_writer import BulkWriter
from mlmclm.tracking.client_writer import ClientWriter
from mlmclm.tracking.database import adopt_artifacts, commit_lightly, make_usable, sqlite_file
from mlmclm.tracking.saved_views import view_tags
from mlmclm.tracking.writer import Writer

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CLIENT_ENVIRONMENT = {
    # The follower (`studies.follower`) retries by itself. MLflow's client would create a run twice if the reply to its first request was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # saves one request per run
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that MLflow reads on import or on calls; values that the user has set stay."""


@contextmanager
def writer_of(address: str, experiment: str, store: Path) -> Iterator[Writer]:
    """Open a study's experiment, and yield a writer that only one thread may use.

    A missing database, schema or experiment is created. The first time this takes seconds (importing MLflow 2 s,
    creating its SQLite schema 3 s).

    Raises:
        EnvironmentFault: another process of this store has the experiment open, or the store is not writable.
    """
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Imported here because it takes 2 s, and some of the variables are read on import.
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)  # the import resets the level
    # This logger would print each error of the database, with its traceback and the rows, before raising it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    database = sqlite_file(address)
    in_store = database is not None and database == own_database(store)
    if database is not None:
        make_usable(database, own=in_store)
        if in_store:
            adopt_artifacts(database)
            commit_lightly()
    folder = own_database(store).parent
    with ExitStack() as stack:
        try:
            stack.enter_context(only_one(folder / f".{experiment}.lock", f"experiment {experiment!r} in MLflow"))
        except UserError as error:  # this error passes when the other process ends
            raise EnvironmentFault(str(error)) from error
        client = MlflowClient(tracking_uri=address)
        # A server decides for itself where artifacts go; only a database needs a location from its clients.
        artifacts = (folder / "artifacts").as_uri() if database is not None else None
        number = _opened(client, experiment, artifacts)
        if not in_store:
            yield ClientWriter(client, number)
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        writer = BulkWriter(client, number, SqlAlchemyStore(address, artifacts))
        yield writer
        writer.analyse()


def _opened(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Return the id of the experiment, which is created or restored, with its shared views."""
    existing = client.get_experiment_by_name(name)
    if existing is not None and existing.lifecycle_stage == "deleted":
        # MLflow keeps the name of a deleted experiment reserved, so a new one could not be created under it.
        client.restore_experiment(existing.experiment_id)
    number = client.create_experiment(name, artifact_location=artifacts) if existing is None else existing.experiment_id
    for tag, value in view_tags().items():
        if existing is None or tag not in existing.tags:  # else `views.sweep_record` has set them
            client.set_experiment_tag(number, tag, value)
    return str(number)
