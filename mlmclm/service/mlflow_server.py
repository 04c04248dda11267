"""The MLflow server on a store's own database, for looking at a study: on loopback only, in the foreground."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.temporary import swept_folder
from mlmclm.tracking.address import default_address
from mlmclm.tracking.database import adopt_artifacts, own_fault, sqlite_file, studies_of
from mlmclm.tracking.views import experiment_link

HOST = "127.0.0.1"
START_SECONDS = 60.0
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves eight processes of 235 MB each
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def serve(store: Path, *, port: int | None = None, on_ready: Callable[[str], None] = typer.echo) -> None:
    """Run the server until it is interrupted (Ctrl-C or SIGTERM).

    Args:
        on_ready: called with a line with a link for each study, once the server answers.

    Raises:
        UserError: the store has no MLflow database yet, or the port is taken.
        EnvironmentFault: the database is damaged, or the server doesn't start.
    """
    with running_server(store, port=port) as (links, process):
        for study, link in links.items():
            on_ready(f"{study}: {link}")
        # SIGTERM would end this process without running the clean-up that stops the server; SystemExit runs it.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            process.wait()
        except KeyboardInterrupt:
            return
        finally:
            signal.signal(signal.SIGTERM, before)
        raise EnvironmentFault(f"The MLflow server ended by itself with exit code {process.returncode}.")


@contextmanager
def running_server(store: Path, *, port: int | None = None) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Run an MLflow server on the store for the duration of the block.

    Yields:
        The link to each study's runs, and the server's process.

    Raises:
        UserError, EnvironmentFault: as for `serve`.
    """
    address = default_address(store)
    database = sqlite_file(address)
    if database is None or not database.exists():
        raise UserError(
            f"{store}: no MLflow records there yet; run a study with this store, or write those of one that has run with `mlmclm tracking sync STUDY.yaml`."
        )
    try:
        reason = own_fault(database)
        if reason is None:
            adopt_artifacts(database)
            studies = studies_of(database)
    except sqlite3.Error as error:
        raise EnvironmentFault(f"{database}: cannot be read ({error}).") from error
    if reason is not None:
        raise EnvironmentFault(
            f"{database}: MLflow cannot use this database ({reason}). It is only a view of the store: `mlmclm tracking sync STUDY.yaml` "
            "sets it aside and writes the study's runs anew."
        )
    port = _free_port() if port is None else _checked_port(port)
    base = f"http://{HOST}:{port}"
    with swept_folder(store / "mlflow", ".server-") as folder:
        log = folder / "server.log"
        command = [
            *(sys.executable, "-m", "mlflow", "server"),
            *("--backend-store-uri", address),
            *("--artifacts-destination", (store.resolve() / "mlflow" / "artifacts").as_uri()),
            *("--host", HOST, "--port", str(port), "--workers", "1"),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SERVER_ENVIRONMENT},
                # In a process group of its own, Ctrl-C reaches only this process, which then ends the server with all
                # its workers.
                start_new_session=True,
            )
        try:
            _wait(process, base, log)
            links = {name: experiment_link(base, number) for name, number in studies.items()}
            yield links or {"MLflow": experiment_link(base)}, process
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    """Wait until the server answers.

    Raises:
        EnvironmentFault: it exits or doesn't answer in `START_SECONDS`.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise EnvironmentFault("The MLflow server doesn't start. Its last words:\n" + "\n".join(lines[-5:]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group, first with SIGTERM and then with SIGKILL."""
    for sign, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _checked_port(port: int) -> int:
    with socket.socket() as probe:
        # The server may bind a port in TIME_WAIT, such as that of a previous run, so the probe must too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"Port {port} cannot be used ({error}). Choose another with --port, or leave it out."
            ) from error
    return port
