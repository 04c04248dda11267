"""Where MLflow has the runs behind a report's numbers, as the report says it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlmclm.reports.study_facts import RecordedRuns
from mlmclm.service.state import own_server
from mlmclm.studies.study_file import AnyFile
from mlmclm.tracking.address import chosen_address, default_address, experiment_id, without_password
from mlmclm.tracking.views import filter_of, run_pages


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
