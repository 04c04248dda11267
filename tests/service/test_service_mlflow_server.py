"""`mlmclm tracking ui`: the MLflow server on a store, found under the link that it prints."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from mlflow.tracking import MlflowClient

from mlmclm.errors import UserError
from mlmclm.service.mlflow_server import running_server
from mlmclm.tracking.address import check_address
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.saved_views import MODEL_TRAINING, VIEW
from small_mlflow import export


def test_a_store_without_records_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no MLflow records there yet"), running_server(tmp_path):
        pass


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a store; the file beside its run has another text there."""
    folder = tmp_path_factory.mktemp("stores")
    report = folder / "report.txt"
    report.write_text("original")
    export(folder / "store", [RunRecord("k", "a run", artifacts=[(report, "")])])
    shutil.copytree(folder / "store", folder / "copied")
    (kept,) = (folder / "copied" / "mlflow" / "artifacts").rglob("report.txt")
    kept.write_text("copied")
    return folder / "copied"


def served(link: str) -> str:
    """The file of the only run of the study behind a link."""
    base = link.partition("/#/")[0]
    client = MlflowClient(base)
    (number,) = (each.experiment_id for each in client.search_experiments() if each.name == "study")
    (run,) = client.search_runs([number])
    with urllib.request.urlopen(
        f"{base}/get-artifact?path=report.txt&run_uuid={run.info.run_id}", timeout=1500
    ) as answer:
        return str(answer.read().decode())


def test_a_port_that_is_taken_is_the_users_error(copied: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"Port {port} cannot be used"),
            running_server(copied, port=port),
        ):
            pass


def test_the_server_shows_the_runs_and_files_of_a_copied_store_and_ends_with_the_block(copied: Path) -> None:
    with running_server(copied) as (links, process):
        assert list(links) == ["study", "study, cells", "study, charts"]
        parts = urlsplit(links["study"])
        assert parts.hostname == "127.0.0.1"
        base = f"{parts.scheme}://{parts.netloc}"
        check_address(base)
        with urllib.request.urlopen(f"{base}/api/2.0/mlflow/experiments/search?max_results=10", timeout=1500) as answer:
            numbers = {item["name"]: item["experiment_id"] for item in json.load(answer)["experiments"]}
        page = f"/experiments/{numbers['study']}/runs?{MODEL_TRAINING}&viewStateShareKey={VIEW}"
        assert parts.fragment == page, "without that query a fresh browser shows MLflow's page for generative AI"
        assert served(links["study"]) == "copied"
        # Else a study on this store that runs without the server could write no files to it.
        made = MlflowClient(base).get_experiment(MlflowClient(base).create_experiment("by the server"))
        assert made.artifact_location.startswith((copied / "mlflow" / "artifacts").as_uri())
    assert process.poll() is not None
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{base}/health", timeout=2)
