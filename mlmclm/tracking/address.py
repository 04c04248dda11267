"""MLflow addresses: the choice of one, its default in the store, and a check that it answers."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

from mlmclm.errors import EnvironmentFault, UserError, unknown
from mlmclm.tracking.database import fault, sqlite_address, sqlite_file

ANSWER_SECONDS = 4.0
"""Timeout of one attempt to reach an address; there is a second attempt, so that one lost packet is not fatal."""
VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own variable for programs that are given no address."""
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306}


def chosen_address(given: str | None, store: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Choose the address to which a study's runs are written; return it, and where it comes from.

    The study file (`given`) comes first, then MLflow's own environment variable, as in every program that uses MLflow,
    then the store.
    """
    if given is not None:
        return given, "tracking in the study file"
    if environment.get(VARIABLE):
        return environment[VARIABLE], VARIABLE
    return default_address(store), "the store"


def without_password(address: str) -> str:
    """Return the address with its password masked, for display."""
    password = urlsplit(address).password
    return address if not password else address.replace(f":{password}@", ":***@", 1)


def default_address(store: Path) -> str:
    """Return the address of the store's own SQLite file."""
    return sqlite_address(own_database(store))


def own_database(store: Path) -> Path:
    """Return the store's own SQLite file."""
    return store.resolve() / "mlflow" / "mlflow.db"


def check_address(address: str) -> None:
    """Check that an MLflow server or a database answers at an address; takes about 10 s at most.

    Raises:
        UserError: the address is not of a supported kind.
        EnvironmentFault: nothing answers, or something that is neither an MLflow server nor a database.
    """
    # SQLAlchemy's schemes may name a driver too, as in postgresql+psycopg2.
    scheme = urlsplit(address).scheme.split("+")[0]
    if scheme in ("http", "https"):
        _check_server(address)
    elif scheme == "sqlite":
        _check_sqlite(address)
    elif scheme in DATABASE_PORTS:
        _check_port(address, DATABASE_PORTS[scheme])
        _check_driver(address)
    else:
        raise unknown(
            "MLflow address", address, ["http://…", "https://…", "sqlite:///…", "postgresql://…", "mysql://…"]
        )


def experiment_id(address: str, name: str, environment: Mapping[str, str]) -> str | None:
    """Return the id of an experiment on an MLflow server; None if there is none of this name, or the request fails.

    The credentials come from the environment variables of MLflow's client.
    """
    url = f"{address.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(name, safe='')}"
    headers = {"User-Agent": "mlmclm"}
    user, token = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_TOKEN")
    if user:
        pair = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    elif token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_SECONDS) as answer:
            return str(json.load(answer)["experiment"]["experiment_id"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None


def _check_server(address: str) -> None:
    url = address.rstrip("/") + "/health"
    request = urllib.request.Request(url, headers={"User-Agent": "mlmclm"})
    reason = ""
    for _ in range(2):
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                if answer.read(16).strip() == b"OK":
                    return
            raise EnvironmentFault(f"{address} answers, but it is not an MLflow server ({url} is not OK).")
        except urllib.error.HTTPError as error:
            raise EnvironmentFault(f"{address} answers {error.code} at {url}: not an MLflow server.") from error
        except ValueError as error:
            raise UserError(f"{address!r} is not an MLflow address: {error}.") from error
        except (OSError, urllib.error.URLError) as error:
            reason = str(getattr(error, "reason", error))
    raise EnvironmentFault(
        f"The MLflow server at {address} doesn't answer ({reason}). Start it, correct the address, or leave it out "
        "to write everything to the store."
    )


def _check_sqlite(address: str) -> None:
    path = sqlite_file(address)
    if path is None or not path.name:
        raise UserError(f"{address!r} names no file: an SQLite address is sqlite:/// followed by a path.")
    # The first export creates a missing database.
    if not path.exists():
        return
    try:
        reason = fault(path)
    except sqlite3.Error as error:
        reason = str(error)
    if reason is not None:
        raise EnvironmentFault(
            f"{path}: MLflow cannot use this database ({reason}). Move it away, together with any {path.name}-wal and {path.name}-shm beside "
            "it, or choose another address: the next run, or `mlmclm tracking sync STUDY.yaml`, then writes all of the study's runs."
        )


def _check_port(address: str, default_port: int) -> None:
    parts = urlsplit(address)
    host, port = parts.hostname or "localhost", parts.port or default_port
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(f"The database {host}:{port} for MLflow doesn't answer ({error}).") from error


def _check_driver(address: str) -> None:
    from sqlalchemy.engine import make_url  # takes half a second
    from sqlalchemy.exc import NoSuchModuleError

    try:
        make_url(address).get_dialect().import_dbapi()
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise UserError(
            f"{without_password(address)}: MLflow's database needs a driver that is not installed ({error}). Install it, or name another in "
            "the address: postgresql+psycopg2://… (the extra `postgresql`) or mysql+pymysql://… (the package PyMySQL)."
        ) from error
