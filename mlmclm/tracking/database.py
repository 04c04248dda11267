"""MLflow's SQLite database: created atomically, and checked for damage before use.

MLflow creates its schema in dozens of steps that take seconds in all, and it cannot open a database whose creation was
interrupted. One process at a time therefore creates the database in a temporary folder beside its final path and
renames it. The store's own database is only a view of the store's files: if it is unusable, it is set aside and created
again.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import ArgumentError

from mlmclm.progress import say
from mlmclm.storage.files import in_turn
from mlmclm.storage.temporary import swept_folder

ALONGSIDE = ("", "-wal", "-shm")
"""Suffixes of the files that make up an SQLite database.

They move together: a write-ahead log next to another database would corrupt that one.
"""
LOCK_SECONDS = 10.0
ARTIFACTS = "artifacts"
"""Name of the artifact folder beside the database."""


def sqlite_address(path: Path) -> str:
    """Return the address of an SQLite file.

    MLflow creates the folders of a `sqlite:///` address without unescaping it, and would leave an empty folder beside
    the right one. An address that names the driver avoids this.
    """
    plain = str(path)
    escaped = plain.replace("%", "%25").replace("?", "%3F")
    return f"sqlite{'' if escaped == plain else '+pysqlite'}:///{escaped}"


def sqlite_file(address: str) -> Path | None:
    """Return the file of a `sqlite:///` address, or None for any other address."""
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def studies_of(database: Path) -> dict[str, str]:
    """Return the ids of the experiments that hold studies' runs, by name.

    Raises:
        sqlite3.Error: the database cannot be read.
    """
    with closing(_connect(database)) as connection:
        rows = connection.execute("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'")
        # Every MLflow database has an experiment named Default.
        return {name: str(number) for name, number in sorted(rows) if name != "Default"}


def adopt_artifacts(database: Path) -> None:
    """Point the runs of the store's own database to the artifacts beside it.

    MLflow records artifact locations as absolute addresses. After a store is copied they would point into the old
    store, and after it is moved they would point nowhere.

    Raises:
        sqlite3.Error: the database cannot be read or changed.
    """
    location, root = artifact_location(database), f"/{database.parent.name}/{ARTIFACTS}"
    with closing(_connect(database)) as connection, connection:
        for (address,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            begin, separator, rest = address.rpartition(root)
            old = begin + separator
            if not old.startswith("file:") or rest[:1] not in ("", "/") or old == location:
                continue
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    # Replace only the prefix, and compare with substr because LIKE would treat `_` and `%` in paths
                    # as wildcards.
                    (location, len(old) + 1, len(old), old),
                )


def make_usable(database: Path, *, own: bool) -> None:
    """Create a missing database, and replace the store's own if MLflow cannot use it.

    Args:
        own: whether it is the store's own; any other existing database is left as it is, for MLflow to check.

    Raises:
        EnvironmentFault: the folder is not writable.
        sqlite3.OperationalError: another process keeps the database locked.
    """
    with in_turn(database.parent / f".{database.name}.lock"):
        if database.exists():
            reason = own_fault(database) if own else None
            if reason is None:
                return
            aside = _set_aside(database)
            say(
                f"{database} is not used: {reason}. It is kept as {aside.name}, and this study's runs are written again; "
                "`mlmclm tracking sync STUDY.yaml` writes those of another study."
            )
        # Companion files without their database would corrupt a new one of the same name.
        elif any(database.with_name(database.name + ending).exists() for ending in ALONGSIDE):
            _set_aside(database)
        _make(database)


@cache
def commit_lightly() -> None:
    """Sync this process's SQLite databases to the disk at checkpoints rather than at every commit.

    A power failure may then lose the last runs, which `mlmclm tracking sync` writes again; it cannot damage the file.
    MLflow commits six times for each run; with a sync at each commit, a third of the time went to waiting for the disk.
    """

    @event.listens_for(Engine, "connect")
    def relax(connection: Any, _: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=NORMAL")


def own_fault(database: Path) -> str | None:
    """Return the `fault` of the store's own database; also checks the schema's revision and the pages."""
    return fault(database, _revision(), pages=True)


def fault(database: Path, revision: str | None = None, *, pages: bool = False) -> str | None:
    """Return why MLflow cannot use a database, or None if it can.

    Args:
        revision: the schema revision that it must have; None for any.
        pages: whether to read the whole file for damage, about a second for some hundred MB.

    Raises:
        sqlite3.OperationalError: it cannot be opened, or another process keeps it locked.
    """
    try:
        with closing(_connect(database)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"alembic_version", "experiments", "runs"} <= tables:
                return "its schema is incomplete: its creation was interrupted"
            revisions = [version for (version,) in connection.execute("SELECT version_num FROM alembic_version")]
            if not revisions or (revision is not None and revisions != [revision]):
                listed = ", ".join(map(str, revisions)) or "none"
                return f"its schema has revision {listed}, and this MLflow's {revision}: another version made it, or its creation was interrupted"
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if pages else "ok"
            return None if damage == "ok" else f"it is damaged ({damage})"
    # A subclass of DatabaseError that means "locked" or "cannot open", not "damaged".
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        return f"it is damaged ({error})"


def _connect(database: Path) -> sqlite3.Connection:
    """Open an existing database; `mode=rw` keeps SQLite from creating one."""
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=LOCK_SECONDS)


def artifact_location(database: Path) -> str:
    """Return the location of the artifacts beside a database, in the form that MLflow records."""
    return (database.parent / ARTIFACTS).resolve().as_uri()


@cache
def _revision() -> str:
    """Return the schema revision of the installed MLflow; slow, as it reads all of MLflow's migrations."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _set_aside(database: Path) -> Path:
    """Rename a database together with its companion files; return its new path."""
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
        new = folder / database.name
        store = SqlAlchemyStore(sqlite_address(new), artifact_location(database))
        store.engine.dispose()
        # Twice as fast with 15,000 runs, and readers don't wait for the writer. The file keeps the setting.
        with closing(sqlite3.connect(new)) as connection:  # the last connection removes the log on closing
            connection.execute("PRAGMA journal_mode=WAL")
        new.rename(database)
