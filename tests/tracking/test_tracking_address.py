"""An MLflow address answers, or the user is told in time."""

from __future__ import annotations

import http.server
import platform
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_plus

import psutil
import pytest
from mlflow.tracking import MlflowClient

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.service.state import MLFLOW, Member, ServiceState, members_of, write_service_state
from mlmclm.storage.files import machine, only_one
from mlmclm.storage.place import LOCK, Place
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_tracking import GRAFANA_VARIABLES, other_pages, recorded_runs, tracked
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.tracking import address
from mlmclm.tracking.address import (
    VARIABLE,
    check_address,
    chosen_address,
    default_address,
    experiment_id,
    without_password,
)
from mlmclm.tracking.views import model_record, sweep_record
from small_mlflow import export, runs
from small_results import make_result
from sweep_cells import make_cell


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def other_server() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_dead_address_is_a_fault_that_names_it() -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(EnvironmentFault, match=f"The MLflow server at {address} doesn't answer"):
        check_address(address)


def test_a_server_that_accepts_and_never_answers_is_a_fault_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.ANSWER_SECONDS <= 5
    monkeypatch.setattr(address, "ANSWER_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(EnvironmentFault, match="doesn't answer"),
    ):
        check_address(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_that_is_not_mlflow_is_a_fault(other_server: str) -> None:
    with pytest.raises(EnvironmentFault, match="not an MLflow server"):
        check_address(other_server)


def test_a_dead_database_server_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="doesn't answer"):
        check_address(f"postgresql://user:secret@127.0.0.1:{closed_port()}/mlflow")


@pytest.mark.parametrize("kind", ["postgresql+unknown", "mysql+unknown"])
def test_a_database_without_a_driver_is_an_error_that_names_one(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UserError) as raised:
        check_address(f"{kind}://user:secret@127.0.0.1:{listener.getsockname()[1]}/mlflow")
    assert "secret" not in str(raised.value)
    assert f"{kind}://user:***@127.0.0.1" in str(raised.value) and "driver" in str(raised.value)


def test_the_stores_own_database_needs_not_be_there_yet(tmp_path: Path) -> None:
    check_address(default_address(tmp_path))


@pytest.mark.parametrize("name", ["50%25", "a?b=1", "a b#c", "ä+&"])
def test_the_database_is_in_the_store_whatever_characters_its_path_has(tmp_path: Path, name: str) -> None:
    store = tmp_path / name
    export(store, [])
    assert (store / "mlflow" / "mlflow.db").stat().st_size > 0
    others = [path for path in tmp_path.rglob("*") if not path.is_relative_to(store) and not path.is_dir()]
    assert others == []
    assert MlflowClient(default_address(store)).get_experiment_by_name("study") is not None


def test_a_damaged_database_is_a_fault_that_says_how_to_get_another(tmp_path: Path) -> None:
    path = tmp_path / "mlflow" / "mlflow.db"
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(EnvironmentFault, match=r"file is not a database.*Move it away"):
        check_address(default_address(tmp_path))


@pytest.mark.parametrize("address", ["./mlruns", "file:///mlruns", "databricks", "http//localhost", "sqlite:///"])
def test_what_is_no_address_of_a_known_kind_is_the_users_error(address: str) -> None:
    with pytest.raises(UserError):
        check_address(address)


def test_the_study_file_s_address_comes_before_mlflow_s_variable_and_that_before_the_store(tmp_path: Path) -> None:
    environment = {VARIABLE: "http://variable"}
    assert chosen_address("http://file", tmp_path, environment)[0] == "http://file"
    assert chosen_address(None, tmp_path, environment) == ("http://variable", VARIABLE)
    for empty in ({}, {VARIABLE: ""}):
        assert chosen_address(None, tmp_path, empty) == (default_address(tmp_path), "the store")


def study(**changes: object) -> StudyFile:
    values = {"name": "s", "models": ["1m-clm-10"], "corpus": {"source": "x"}, "tokenizer": {"train_vocab_size": 300}}
    return StudyFile.model_validate({**values, "recipe": {}, "space": "quickstart", **changes})


def test_a_dead_mlflow_tracking_uri_is_refused_before_any_work_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ignored without a word."""
    address = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(EnvironmentFault, match=rf"^{VARIABLE}: The MLflow server at {address} .*Unset {VARIABLE}"):
        tracked(study(), Place(tmp_path)).__enter__()
    monkeypatch.setenv(VARIABLE, "databricks")
    with pytest.raises(UserError, match=rf"^{VARIABLE}: unknown MLflow address 'databricks'"):
        tracked(study(), Place(tmp_path)).__enter__()
    assert not any(tmp_path.iterdir())


def test_mlflow_tracking_uri_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    address = f"sqlite:///{tmp_path / 'mine.db'}"
    monkeypatch.setenv(VARIABLE, address)
    with tracked(study(), Place(tmp_path / "store")) as tracking:
        assert tracking.elsewhere == address
    assert f"MLflow: runs are written to {address} ({VARIABLE})" in " ".join(capfd.readouterr().err.split())
    monkeypatch.delenv(VARIABLE)
    with tracked(study(), Place(tmp_path / "store")) as tracking:
        assert tracking.elsewhere is None


def test_a_job_writes_to_the_database_of_the_store_whose_server_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store, address = tmp_path / "store", f"http://127.0.0.1:{closed_port()}"
    server = (Member(MLFLOW, 1, 1),)
    write_service_state(store, ServiceState(machine(), platform.node(), 1.0, True, {"mlflow": address}, server))
    monkeypatch.setenv(VARIABLE, address)
    cell = make_cell()
    ResultsStore(store).write(make_result(key=cell_key(cell), model=cell.model))
    folder = Place(store).study_folder("s")
    with only_one(folder / LOCK, "s"), tracked(study(), Place(store)) as tracking:
        write_manifest(folder, "s", Planned([cell]))
        tracking.tell(records=(model_record("s", cell.model, about={}),))
        assert tracking.elsewhere == address
    assert f"MLflow: runs are written to {address} ({VARIABLE})" in " ".join(capfd.readouterr().err.split())
    assert sorted(run.data.tags["mlmclm.kind"] for run in runs(store, experiment="s")) == ["cell", "model"]
    with pytest.raises(EnvironmentFault, match="doesn't answer"):
        tracked(study(), Place(tmp_path / "other")).__enter__()
    write_service_state(store, ServiceState(machine(), platform.node(), 1.0, True, {"mlflow": address}, ()))
    with pytest.raises(EnvironmentFault, match="doesn't answer"):  # a service that uses another's server
        tracked(study(), Place(store)).__enter__()


def test_a_study_links_to_the_programs_whose_addresses_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, *GRAFANA_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert other_pages(study(), tmp_path) == {}
    monkeypatch.setenv("RAY_GRAFANA_HOST", "DISABLED")
    assert other_pages(study(), tmp_path) == {}
    monkeypatch.setenv("RAY_GRAFANA_HOST", "http://inside:3000/")
    (me,) = members_of(MLFLOW, [psutil.Process()])
    own = {"mlflow": f"http://127.0.0.1:{closed_port()}", "dashboard": "http://127.0.0.1:8265"}
    write_service_state(tmp_path, ServiceState(machine(), platform.node(), 1.0, True, own, (me,)))
    pages = other_pages(study(), tmp_path)
    assert pages["MLflow"].startswith(f"{own['mlflow']}/#/experiments") and pages["Ray dashboard"] == own["dashboard"]
    assert pages["Grafana"] == f"http://inside:3000/d/mlmclm-sweep?var-store={quote_plus(str(tmp_path))}&var-study=s"
    monkeypatch.setenv("RAY_GRAFANA_IFRAME_HOST", "https://outside")
    row = {"cost": {"finished": "1970-01-01T00:01:40+00:00", "seconds": 40.0, "worker": "host/1"}}
    assert other_pages(study(), tmp_path, [row])["Grafana"].endswith("&var-study=s&from=60000&to=100000")
    record = sweep_record(
        "s", models=["m"], tasks=["t"], learning_rates=[1e-3], seeds=[0], pages={"Grafana": "https://g"}
    )
    assert record.tags["mlflow.note.content"].endswith("show the study, too: [Grafana](https://g).")


def test_a_password_is_not_shown() -> None:
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert without_password("http://host:80/x") == "http://host:80/x"


def test_a_report_says_how_to_find_its_runs_where_no_server_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    own = recorded_runs(study(), tmp_path, ["sst2"])
    assert own.how == "mlmclm tracking ui starts its web interface and prints the link to s."
    assert own.search == "params.model = 'MODEL' and params.task = 'TASK'" and not own.pages
    other = recorded_runs(study(tracking="postgresql://me:secret@host/db"), tmp_path, ["sst2"])
    assert other.how.startswith("mlflow ui --backend-store-uri postgresql://me:***@host/db starts") and not other.pages


def test_a_report_is_written_although_the_mlflow_server_does_not_answer_or_is_none(
    tmp_path: Path, other_server: str
) -> None:
    for server in (f"http://127.0.0.1:{closed_port()}", other_server):
        found = recorded_runs(study(tracking=server), tmp_path, ["sst2"])
        assert found.how == f"They are in the experiment s at {server}." and not found.pages


class AskingServer(http.server.BaseHTTPRequestHandler):
    """Answers as an MLflow server with one experiment does, to the right password."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Basic bWU6cHc="
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b'{"experiment": {"experiment_id": "7"}}' if known else b"")


def test_links_lead_to_a_server_that_asks_for_a_password_and_do_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), AskingServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    assert experiment_id(address, "s", {}) is None
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pw")
    found = recorded_runs(study(tracking=address), tmp_path, ["sst2"])
    server.shutdown()
    server.server_close()
    assert set(found.pages) == {("1m-clm-10", ""), ("1m-clm-10", "sst2")}
    assert all(page.startswith(f"{address}/#/experiments/7/runs?") for page in found.pages.values())
    assert "pw" not in found.how and "links" in found.how
