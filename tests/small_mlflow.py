"""Records written to MLflow, and the runs that it then has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlmclm.tracking.address import default_address
from mlmclm.tracking.experiment import writer_of
from mlmclm.tracking.records import RunRecord


def export(store: Path, records: Sequence[RunRecord], *, address: str | None = None, experiment: str = "study") -> int:
    """Write records in batches of the writer's size; return how many runs were created or changed."""
    with writer_of(address or default_address(store), experiment, store) as writer:
        size = writer.at_once
        return sum(writer.write(records[start : start + size]) for start in range(0, len(records), size))


def client(store: Path, address: str | None = None) -> Any:
    """MLflow's client of a store's own database, or of another address."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(address or default_address(store))


def runs(store: Path, address: str | None = None, *, experiment: str = "study") -> list[Any]:
    """The runs of an experiment, by name; none if there is no experiment."""
    existing = client(store, address).get_experiment_by_name(experiment)
    if existing is None:
        return []
    order = ["attributes.run_name ASC"]
    return list(client(store, address).search_runs([existing.experiment_id], max_results=5000, order_by=order))


def names(store: Path, *, experiment: str = "study") -> list[str]:
    """The runs' names."""
    return [run.info.run_name for run in runs(store, experiment=experiment)]
