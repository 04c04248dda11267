"""Links from a study to the other programs that show it, as far as their addresses are known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from mlmclm.cluster.ray_cluster import lasting_dashboard
from mlmclm.reports.provenance import cell_work
from mlmclm.reports.study_facts import RecordedRuns
from mlmclm.service.state import MLFLOW, own_addresses, own_server
from mlmclm.studies.study_file import AnyFile
from mlmclm.tracking.address import chosen_address, default_address, experiment_id, without_password
from mlmclm.tracking.saved_views import experiment_links
from mlmclm.tracking.views import filter_of, run_pages

DASHBOARD, GRAFANA = "Ray dashboard", "Grafana"
GRAFANA_VARIABLES = ("RAY_GRAFANA_IFRAME_HOST", "RAY_GRAFANA_HOST")
"""Ray's own variables with Grafana's address: as browsers reach it, or else as the head node does."""


def other_pages(file: AnyFile, store: Path, rows: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Return the name of each program with its link to a study.

    Args:
        rows: the study's results, whose times Grafana shows; without any, its last half hour.
    """
    service = own_addresses(store)
    pages = {
        MLFLOW: _mlflow_page(file, store, service.get("mlflow")),
        DASHBOARD: lasting_dashboard() or service.get("dashboard"),
        GRAFANA: _grafana_page(file.name, store, rows),
    }
    return {name: page for name, page in pages.items() if page}


def recorded_runs(file: AnyFile, store: Path, tasks: Sequence[str]) -> RecordedRuns:
    """Return links to a study's runs if an MLflow server other than the store's own has them, else how to find them.

    The server is asked for the id of the study's experiment, for a few seconds at most. Runs may still be on their way, so
    links search for a model and task.
    """
    address, _ = chosen_address(file.tracking, store, os.environ)
    search = filter_of("MODEL", "TASK")
    if address in (default_address(store), own_server(store)):
        return RecordedRuns(f"mlmclm tracking ui starts its web interface and prints the link to {file.name}.", search)
    shown = without_password(address)
    if not address.startswith(("http://", "https://")):
        how = f"mlflow ui --backend-store-uri {shown} starts its web interface; they are in the experiment {file.name}."
        return RecordedRuns(how, search)
    number = experiment_id(address, file.name, os.environ)
    if number is None:
        return RecordedRuns(f"They are in the experiment {file.name} at {shown}.", search)
    how = f"They are in the experiment {file.name} at {shown}; models and scores in the tables are links to them."
    return RecordedRuns(how, search, run_pages(shown, number, file.models, tasks))


def _mlflow_page(file: AnyFile, store: Path, own: str | None) -> str | None:
    """Return the page of a study's experiment, or the list of experiments if the server doesn't have it yet."""
    address, _ = chosen_address(file.tracking, store, os.environ)
    if address == default_address(store):
        address = own or ""
    if not address.startswith(("http://", "https://")):
        return None
    number = experiment_id(address, file.name, os.environ)
    return next(iter(experiment_links(without_password(address), {file.name: number} if number else {}).values()))


def _grafana_page(study: str, store: Path, rows: Iterable[Mapping[str, Any]]) -> str | None:
    host = next((os.environ[name] for name in GRAFANA_VARIABLES if os.environ.get(name)), "")
    if not host.startswith(("http://", "https://")):  # Ray's word for none is DISABLED
        return None
    works = [cell_work(row) for row in rows]
    span = {}
    if works:
        span = {"from": f"{1000 * min(w.began for w in works):.0f}", "to": f"{1000 * max(w.ended for w in works):.0f}"}
    query = urlencode({"var-store": str(store), "var-study": study, **span})
    return f"{host.rstrip('/')}/d/mlmclm-sweep?{query}"
