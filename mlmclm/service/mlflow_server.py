"""The MLflow server on a store's own database, for looking at a study: on loopback only, in the foreground."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.service.servers import HOST, port_for, server_process
from mlmclm.storage.temporary import swept_folder
from mlmclm.tracking.address import own_database
from mlmclm.tracking.database import adopt_artifacts, artifact_location, own_fault, sqlite_address, studies_of
from mlmclm.tracking.saved_views import experiment_links

SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes of 235 MB each
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
SECONDS_BETWEEN_LOOKS = 0.2


def serve(store: Path, *, port: int | None = None) -> None:
    """Run the server until this process is interrupted; print the links once it answers.

    Raises:
        UserError: the store has no MLflow database yet, or the port is taken.
        EnvironmentFault: the database is damaged, or the server doesn't start.
    """
    with running_server(store, port=port) as (links, process):
        for study, link in links.items():
            typer.echo(f"{study}: {link}")
        # Not `process.wait()`: libraries (polars) make the system restart this call after Ctrl-C.
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise EnvironmentFault(f"The MLflow server ended by itself with exit code {process.returncode}.")


@contextmanager
def running_server(store: Path, *, port: int | None = None) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Run an MLflow server on the store for the block; yield links to each study's runs and charts, and the server's process.

    Raises:
        UserError: the store has no MLflow records.
        EnvironmentFault: MLflow cannot use the store's database.
    """
    database = own_database(store)
    if not database.exists():
        raise UserError(
            f"{store}: no MLflow records there yet; run a study with this store, or write the records of a finished one with `mlmclm tracking sync STUDY.yaml`."
        )
    try:
        if (reason := own_fault(database)) is not None:
            raise EnvironmentFault(
                f"{database}: MLflow cannot use this database ({reason}). It is only a view of the store: `mlmclm tracking sync STUDY.yaml` "
                "sets it aside and writes the study's runs again."
            )
        adopt_artifacts(database)
        studies = studies_of(database)
    except sqlite3.Error as error:
        raise EnvironmentFault(f"{database}: cannot be read ({error}).") from error
    port = port_for(port)
    base = f"http://{HOST}:{port}"
    artifacts = artifact_location(database)
    with swept_folder(store / "mlflow", ".server-") as folder:
        command = [
            *(sys.executable, "-m", "mlflow", "server"),
            *("--backend-store-uri", sqlite_address(database)),
            *("--artifacts-destination", artifacts),
            # New experiments get the location that a study without a server gives them. The server's default location
            # (mlflow-artifacts:) could not be written to later without a server.
            *("--default-artifact-root", artifacts),
            *("--host", HOST, "--port", str(port), "--workers", "1"),
        ]
        with server_process(
            command, "The MLflow server", f"{base}/health", folder / "server.log", SERVER_ENVIRONMENT
        ) as process:
            yield experiment_links(base, studies), process
