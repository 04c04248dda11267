"""Errors of writing to MLflow pass, or stay until somebody acts."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy

from mlmclm.storage.files import in_turn
from mlmclm.tracking.failures import passing


def test_an_error_passes_if_it_needs_nobody_to_act(tmp_path: Path) -> None:
    def raised(act: Callable[[], object]) -> Exception:
        with pytest.raises(Exception) as caught:
            act()
        return caught.value

    def asked(statement: str, mode: str = "rw") -> None:
        with sqlalchemy.create_engine(f"sqlite:///{database.as_uri()}?mode={mode}&uri=true").connect() as connection:
            connection.execute(sqlalchemy.text(statement))

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            file.write(b"x")

    database, file = tmp_path / "a.db", tmp_path / "file"
    file.touch()
    with closing(sqlite3.connect(database)) as other:
        assert not passing(raised(lambda: asked("SELECT * FROM runs"))), "no such table"
        assert not passing(raised(lambda: asked("SELECT run FROM sqlite_master"))), "no such column"
        assert not passing(raised(lambda: asked("CREATE TABLE runs (a)", mode="ro"))), "it may only be read"
        other.execute("BEGIN EXCLUSIVE")
        with closing(sqlite3.connect(database, timeout=0.0)) as connection:
            assert passing(raised(lambda: connection.execute("CREATE TABLE runs (a)"))), "it is locked"
    assert not passing(raised(lambda: in_turn(file / "lock").__enter__())), "a file is in the way"
    assert not passing(raised(lambda: write(tmp_path / "none" / "artifact"))), "it is missing"
    assert passing(raised(lambda: write(Path("/dev/full")))), "the disk is full"
    assert passing(raised(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1.0))), "nobody answers"
