"""MLflow's database is whole or not there, whatever ends its making and however many make it at once."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.service.mlflow_server import running_server
from mlmclm.tracking import database as database_module
from mlmclm.tracking.database import adopt_artifacts, fault, own_fault
from mlmclm.tracking.records import RunRecord
from small_mlflow import export, names

MAKE = """
import sys, time
from pathlib import Path
from mlmclm.errors import EnvironmentFault
from mlmclm.tracking.records import RunRecord
from small_mlflow import export
store, experiment, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
while True:
    try:
        print(export(store, [RunRecord(f"k{n}", f"run {n}", metrics=[("m", 0.5, 0, 1000)]) for n in range(count)], experiment=experiment))
        break
    except EnvironmentFault:
        time.sleep(0.1)
"""
"""A study's process that writes records, after others of its experiment."""

RECORD_MAKING = """
import sqlite3, sys
from pathlib import Path
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
import mlflow.store.db.utils as utils, sqlalchemy
folder, count = Path(sys.argv[1]), 0

@sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "commit")
def note(connection):
    global count
    count += 1
    (folder / f"{count}.db").write_bytes((folder / "making.db").read_bytes())

SqlAlchemyStore(f"sqlite:///{folder / 'making.db'}", folder.as_uri())
"""
"""Makes a database as MLflow does, in place, and keeps its bytes at each commit."""

RECORDS = [RunRecord(f"k{number}", f"run {number}", metrics=[("m", 0.5, 0, 1000)]) for number in range(2)]


def process(store: Path, experiment: str = "study", count: int = 2) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MAKE, str(store), experiment, str(count)]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(made: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        output, errors = made.communicate(timeout=240)
    finally:
        made.kill()
    return output.strip(), errors


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The bytes of a database at each moment of its making in place, the whole one last."""
    folder = tmp_path_factory.mktemp("halves")
    subprocess.run([sys.executable, "-c", RECORD_MAKING, str(folder)], check=True, capture_output=True)
    return sorted(folder.glob("[0-9]*.db"), key=lambda path: int(path.stem))


def test_a_database_whose_making_was_interrupted_anywhere_is_known_by_its_schema(halves: list[Path]) -> None:
    reasons = [own_fault(path) for path in halves]
    whole = reasons.index(None)
    assert whole > 20
    assert all(reason is not None and "its creation was interrupted" in reason for reason in reasons[:whole])
    assert reasons[whole:] == [None] * len(reasons[whole:])


@pytest.mark.parametrize("kind", ["empty", "few tables", "half", "no database", "other revision", "torn", "stray log"])
def test_an_unusable_database_is_set_aside_and_the_studys_runs_are_written_anew(
    halves: list[Path],
    tmp_path: Path,
    kind: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = halves[-1]
    middle = halves[halves.index(whole) // 2]
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    content = {"few tables": halves[0], "half": middle}.get(kind, whole).read_bytes()
    if kind != "stray log":
        database.write_bytes(
            {"empty": b"", "no database": b"no database " * 999, "torn": content[:50_000]}.get(kind, content)
        )
    else:
        database.with_name("mlflow.db-wal").write_bytes(b"of a database that was deleted")
    if kind == "other revision":
        connection = sqlite3.connect(database)
        connection.execute("UPDATE alembic_version SET version_num = '0123456789ab'")
        connection.commit()
        connection.close()
    before = database.read_bytes() if database.exists() else None
    assert export(tmp_path, RECORDS) == 2
    assert names(tmp_path) == ["run 0", "run 1"]
    if before is None:
        assert database.with_name("mlflow.db.unusable-1-wal").is_file()
        return
    assert database.with_name("mlflow.db.unusable-1").read_bytes() == before
    said = capfd.readouterr().err
    assert f"{database} is not used: " in said
    assert "It is kept as mlflow.db.unusable-1, and this study's runs are written again" in said


def test_only_addresses_of_the_store_s_own_files_follow_it_where_it_goes(halves: list[Path], tmp_path: Path) -> None:
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(halves[-1], database)
    here = (tmp_path / "mlflow" / "artifacts").as_uri()
    addresses = {
        "file:///old/store/mlflow/artifacts": here,
        "file:///old/store/mlflow/artifacts/1": f"{here}/1",
        "file:///old/mlflow/artifacts-old/1": "file:///old/mlflow/artifacts-old/1",
        "s3://bucket/mlflow/artifacts/1": "s3://bucket/mlflow/artifacts/1",
        "file:///elsewhere": "file:///elsewhere",
    }
    with closing(sqlite3.connect(database)) as connection, connection:
        for number, address in enumerate(addresses, 10):
            connection.execute(
                "INSERT INTO experiments (experiment_id, name, artifact_location, lifecycle_stage) VALUES (?, ?, ?, 'active')",
                (number, address, address),
            )
    adopt_artifacts(database)
    with closing(sqlite3.connect(database)) as connection:
        found = dict(connection.execute("SELECT name, artifact_location FROM experiments"))
    assert {name: found[name] for name in addresses} == addresses


def test_the_server_names_an_unusable_database_and_what_writes_it_anew(halves: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    shutil.copy(halves[1], tmp_path / "mlflow" / "mlflow.db")
    with (
        pytest.raises(EnvironmentFault, match=r"its creation was interrupted.*tracking sync STUDY.yaml.*sets it aside"),
        running_server(tmp_path),
    ):
        pass


def test_a_database_that_another_process_holds_up_is_not_set_aside(halves: list[Path], tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    shutil.copy(halves[-1], database)
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mlmclm.tracking.database.LOCK_SECONDS", 0.1)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                fault(database)
    finally:
        connection.close()


@pytest.mark.slow
def test_killed_while_it_makes_the_database_a_study_leaves_none_and_the_next_makes_it(tmp_path: Path) -> None:
    for moment in (0.0, 0.3, 0.6, 1.0, 1.5):
        made = process(tmp_path)
        while made.poll() is None and not list((tmp_path / "mlflow").glob(".making-*/mlflow.db")):
            time.sleep(0.01)
        time.sleep(moment)  # how far it gets does not matter to what must hold
        made.send_signal(signal.SIGKILL)
        made.communicate()
        database = tmp_path / "mlflow" / "mlflow.db"
        assert not database.exists() or own_fault(database) is None
    output, errors = finished(process(tmp_path))
    assert output == "2", errors
    assert names(tmp_path) == ["run 0", "run 1"]
    assert not list((tmp_path / "mlflow").glob("*.unusable*"))


@pytest.mark.slow
def test_writers_of_two_studies_and_two_of_one_study_start_at_once_and_write_each_run_once(tmp_path: Path) -> None:
    started = [process(tmp_path, name, 40) for name in ("one", "two", "two")]
    written = [finished(made) for made in started]
    assert sorted(output for output, _ in written) == ["0", "40", "40"], written
    for name in ("one", "two"):
        assert sorted(names(tmp_path, experiment=name)) == sorted(f"run {number}" for number in range(40))


@pytest.mark.parametrize("folder", ["josé 100%", "a%41b who?", "a#b lr=1e-4 +x"])
def test_records_of_a_store_below_any_folder_leave_nothing_beside_it(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow made the folders of an address without unescaping it."""
    monkeypatch.setattr(database_module, "_make", database_module._make.__wrapped__)  # not a copy
    store, report = tmp_path / folder / "store", tmp_path / "report.html"
    report.write_text("the report")
    assert export(store, [replace(RECORDS[0], artifacts=[(report, "reports")]), *RECORDS[1:]]) == len(RECORDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder, "report.html"])
    assert [path.name for path in (tmp_path / folder).iterdir()] == ["store"]
    (copied,) = (store / "mlflow" / "artifacts").rglob("report.html")
    assert copied.read_text() == "the report"
    assert own_fault(store / "mlflow" / "mlflow.db") is None
