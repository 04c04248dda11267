"""MLflow's SQLite database: whole from the moment that it is there, and noticed where it isn't.

MLflow makes its schema in dozens of steps, seconds in all, and cannot open what was interrupted in between. So it is made in a
folder of its own beside its place, by one process at a time, and renamed. The store's own database is a view of its files: one
that cannot be used is set aside and made anew.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from mlmclm.progress import say
from mlmclm.storage.files import in_turn
from mlmclm.storage.temporary import swept_folder

ALONGSIDE = ("", "-wal", "-shm")
"""Endings of the files that SQLite keeps for a database; a write-ahead log beside another database would damage that."""
LOCK_SECONDS = 10.0
ARTIFACTS = "artifacts"
"""The folder of the runs' files, beside the database."""


def sqlite_address(path: Path) -> str:
    """The address of a SQLite file.

    Only the two characters that SQLAlchemy would read as something else are escaped: MLflow makes the folders of an address
    without unescaping it, so each escaped one leaves an empty folder beside the right one.
    """
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def sqlite_file(address: str) -> Path | None:
    """The file of a `sqlite:///` address, None for any other."""
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def studies_of(database: Path) -> dict[str, str]:
    """The ids of the experiments that hold runs of studies, by name.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    with closing(_connect(database)) as connection:
        found = connection.execute("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'")
        return {name: str(number) for name, number in sorted(found) if name != "Default"}


def adopt_artifacts(database: Path) -> None:
    """Points the runs of the store's own database to the artifacts beside it.

    MLflow notes where a run's files are as absolute addresses. In a store that was copied they would be those of the old
    one, and in a store that was moved they would be gone.

    Raises:
        sqlite3.Error: it cannot be read or changed.
    """
    here, root = _artifacts(database), f"/{database.parent.name}/{ARTIFACTS}"
    with closing(_connect(database)) as connection, connection:
        for (address,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            begin, found, rest = address.rpartition(root)
            old = begin + found
            if not old.startswith("file:") or rest[:1] not in ("", "/") or old == here:
                continue
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    (here, len(old) + 1, len(old), old),
                )


def make_usable(database: Path, *, own: bool) -> None:
    """Makes a database that isn't there, and exchanges the store's own for a new one where MLflow cannot use it.

    Args:
        own: whether it is the store's own; any other is left as it is, for MLflow to judge.

    Raises:
        EnvironmentFault: its folder is not writable.
        sqlite3.OperationalError: another process holds it up.
    """
    with in_turn(database.parent / f".{database.name}.lock"):
        if database.exists():
            reason = own_fault(database) if own else None
            if reason is None:
                return
            aside = _set_aside(database)
            say(
                f"{database} is not used: {reason}. It is kept as {aside.name}, and this study's runs are written anew; "
                "`mlmclm report STUDY.yaml --export` writes those of another study."
            )
        elif any(database.with_name(database.name + ending).exists() for ending in ALONGSIDE):
            _set_aside(database)
        _make(database)


def own_fault(database: Path) -> str | None:
    """Why this MLflow cannot use the store's own database, None where it can; its pages are looked at too. Raises as `fault`."""
    return fault(database, _revision(), pages=True)


def fault(database: Path, revision: str | None = None, *, pages: bool = False) -> str | None:
    """Why MLflow cannot use a database, None where it can.

    Args:
        revision: of the schema that it must have; None for any.
        pages: read all of it for damage: a second for some hundred MB.

    Raises:
        sqlite3.OperationalError: it cannot be opened, or another process holds it up.
    """
    connection = _connect(database)
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"alembic_version", "experiments", "runs"} <= tables:
            return "it has no whole schema: its making was interrupted"
        found = [version for (version,) in connection.execute("SELECT version_num FROM alembic_version")]
        if not found or (revision is not None and found != [revision]):
            have = ", ".join(map(str, found)) or "none"
            return f"its schema is of revision {have}, and this MLflow's of {revision}: another version made it, or its making was interrupted"
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if pages else "ok"
        return None if damage == "ok" else f"it is damaged ({damage})"
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        return f"it is damaged ({error})"
    finally:
        connection.close()


def _connect(database: Path) -> sqlite3.Connection:
    """Opens a database that is there."""
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=LOCK_SECONDS)


def _artifacts(database: Path) -> str:
    """Where the runs' files are, as MLflow notes it."""
    return (database.parent / ARTIFACTS).resolve().as_uri()


@cache
def _revision() -> str:
    """The schema's, of the MLflow that is installed; it reads all of its migrations for that."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _set_aside(database: Path) -> Path:
    """Renames a database with what belongs to it; returns where it is now."""
    number = 1
    while list(database.parent.glob(f"{database.name}.unusable-{number}*")):
        number += 1
    aside = database.with_name(f"{database.name}.unusable-{number}")
    for ending in ALONGSIDE:
        path = database.with_name(database.name + ending)
        if path.exists():
            path.rename(aside.with_name(aside.name + ending))
    return aside


def _make(database: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with swept_folder(database.parent, ".making-") as folder:
        made = folder / database.name
        store = SqlAlchemyStore(sqlite_address(made), _artifacts(database))
        store.engine.dispose()
        # Twice as fast with 15,000 runs there, and readers don't wait for the writer. The setting stays in the file.
        connection = sqlite3.connect(made)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        finally:
            connection.close()  # which leaves no log behind
        made.rename(database)
