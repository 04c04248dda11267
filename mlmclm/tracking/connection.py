"""A connection to the experiments of one study at one MLflow address; the only module that calls MLflow's client.

Everything here may raise whatever the client raises; `Tracker` contains it.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlmclm.progress import say
from mlmclm.storage.files import in_turn
from mlmclm.tracking.address import own_database
from mlmclm.tracking.database import adopt_artifacts, commit_lightly, make_usable, sqlite_file
from mlmclm.tracking.index import Entry, Index
from mlmclm.tracking.records import DataSet, Point, RunRecord, points_hash
from mlmclm.tracking.views import CELLS_ID, cells_experiment, view_tags

KEY_TAG = "mlmclm.key"
IDENTITY_TAG, LAYOUT_TAG = "mlmclm.experiment", "mlmclm.layout"
LAYOUT = "2"
"""Version of the layout of a study's runs; the first one had all of them in one experiment."""
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # with MLflow's defaults a dead server blocks a client for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # saves one request per run
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that MLflow reads on import or on calls; the user's own values stay."""
POINTS_A_BATCH, VALUES_A_BATCH = 1000, 100
LONGEST_PARAM, LONGEST_TAG = 6000, 5000


@dataclass(frozen=True)
class Experiment:
    """One of a study's two experiments, with the index of its runs."""

    experiment_id: str
    index: Index


class Connection:
    """The experiments of a study, ready to take runs.

    Opening them creates what is missing: database, schema, experiments, index. The first time this takes seconds
    (importing MLflow 2 s, creating its SQLite schema 3 s). A connection belongs to one thread.

    Args:
        experiment: the name of the study's experiment; that of its cells follows from it (`cells_experiment`).
        folder: the store's `mlflow/`, which holds the index.
        verify: whether to forget deleted runs, which takes about 2 ms for each existing run.
    """

    def __init__(self, address: str, experiment: str, folder: Path, *, verify: bool = False) -> None:
        for name, value in CLIENT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        database = sqlite_file(address)
        # Imported here because it takes 2 s, and some of the variables are read on import.
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # the import resets the level
        if database is not None:
            own = database == own_database(folder.parent)
            make_usable(database, own=own)
            if own:
                adopt_artifacts(database)
                commit_lightly()
        self._client = MlflowClient(tracking_uri=address)
        self._folder = folder
        # A server decides for itself where artifacts go; only a database needs a location from its clients.
        self._artifacts = (folder / "artifacts").resolve().as_uri() if database is not None else None
        with in_turn(folder / ".experiment.lock"):  # another process may be opening the same ones
            self._main = self._open(experiment, view_tags(cells=False), verify)
            self._cells = self._open(cells_experiment(experiment), view_tags(cells=True), verify)

    def part(self, record: RunRecord) -> Experiment:
        """Return the experiment of a record's run."""
        return self._cells if record.bulk else self._main

    def _open(self, name: str, view: Mapping[str, str], verify: bool) -> Experiment:
        """Find or create an experiment with a shared view, and index our runs that its index lacks."""
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            # MLflow keeps the name of a deleted experiment reserved, so a new one could not be created under it.
            self._client.restore_experiment(found.experiment_id)
        if found is not None and IDENTITY_TAG in found.tags and LAYOUT_TAG not in found.tags:
            self._retire(name, found.experiment_id)
            found = None
        number: str
        if found is None:
            number, tags = self._client.create_experiment(name, artifact_location=self._artifacts), {}
        else:
            number, tags = found.experiment_id, found.tags
        identity = tags.get(IDENTITY_TAG)
        # The identity is written last: an experiment that has one but no layout is of an earlier version.
        for tag, value in {**view, LAYOUT_TAG: LAYOUT}.items():
            if tags.get(tag) != value:
                self._client.set_experiment_tag(number, tag, value)
        if identity is None:
            # Experiment ids repeat from database to database; a random tag tells the experiments apart.
            identity = uuid.uuid4().hex
            self._client.set_experiment_tag(number, IDENTITY_TAG, identity)
        part = Experiment(number, Index(self._folder / "index.jsonl", identity))
        if found is not None:
            # With an empty index (lost, or the experiment is another store's) every run is looked up. Otherwise only
            # runs still marked RUNNING can be ones whose creator was killed before it could index them.
            there = self._adopt(part, "" if verify or not part.index.entries else "attributes.status = 'RUNNING'")
            for entry in list(part.index.entries.values()) if verify else ():
                if entry.run_id not in there:
                    part.index.drop(entry.key)  # so that the next export creates the run again
        return part

    def _retire(self, name: str, experiment_id: str) -> None:
        """Rename and delete an experiment of the first layout; MLflow can restore it."""
        number = 1
        while self._client.get_experiment_by_name(aside := f"{name}/first layout {number}") is not None:
            number += 1
        self._client.rename_experiment(experiment_id, aside)
        self._client.delete_experiment(experiment_id)
        say(
            f"MLflow: the runs of {name} are written again, in the layout of this version. The earlier ones are deleted; "
            f"`mlflow experiments restore -x {experiment_id}` brings them back as {aside!r}."
        )

    def export(self, record: RunRecord, content: str, *, look_first: bool) -> None:
        """Create or update the run of a record to match it.

        Args:
            content: the record's `content_hash`.
            look_first: search for a run with this key before creating one, because an earlier request may have
                succeeded although its reply was lost.
        """
        part = self.part(record)
        entry = part.index.get(record.key)
        if entry is None and look_first:
            self._adopt(part, f"tags.`{KEY_TAG}` = '{record.key}'")
            entry = part.index.get(record.key)
        parent_run = self._parent(record)
        tags = {name: text.replace(CELLS_ID, self._cells.experiment_id) for name, text in record.tags.items()}
        tags |= {KEY_TAG: record.key, **({"mlflow.parentRunId": parent_run} if parent_run else {})}
        if entry is not None and self._is_gone(entry):
            part.index.drop(record.key)
            entry = None
        created = False
        if entry is None:
            with part.index.locked():  # which also reads what another process has created since
                entry = part.index.get(record.key)
                if entry is None:
                    own = _cut({**_written_by(), **tags}, LONGEST_TAG)
                    run = self._client.create_run(part.experiment_id, record.start_ms, own, record.name)
                    entry = Entry(record.key, run.info.run_id, parent=parent_run)
                    part.index.set(entry)
                    created = True
        if not created:
            self._client.update_run(entry.run_id, status="RUNNING", name=record.name)
        self._fill(entry, record, {} if created else tags)
        if record.status != "RUNNING":
            self._client.set_terminated(entry.run_id, status=record.status, end_time=record.end_ms)
        points, final = list(record.metrics), record.status != "RUNNING"
        # Only a complete run gets its content hash: one that was interrupted is filled again by the next export.
        part.index.set(Entry(record.key, entry.run_id, content, len(points), points_hash(points), parent_run, final))

    def is_unchanged(self, record: RunRecord, content: str) -> bool:
        """Return whether the run exists with this content and below the parent's current run.

        A record that announces a finished run as running again, with nothing new in it, leaves the run as it is: a
        study that is run again announces everything before it finds that nothing is left to do.
        """
        entry = self.part(record).index.get(record.key)
        if entry is None or entry.content is None:
            return False
        announced = record.status == "RUNNING" and entry.final and len(record.metrics) <= entry.points
        return (announced or entry.content == content) and entry.parent == self._parent(record)

    def _parent(self, record: RunRecord) -> str | None:
        """Return the run of a record's parent; parents are never in the experiment of the cells."""
        entry = self._main.index.get(record.parent_key) if record.parent_key else None
        return entry.run_id if entry else None

    def _fill(self, entry: Entry, record: RunRecord, tags: Mapping[str, str]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        params, changed = dict(record.params), {}
        if entry.content is not None or entry.points or tags:
            # MLflow parameters are write-once; a changed one is shown as a tag next to it.
            there = self._client.get_run(entry.run_id).data.params
            changed = {f"changed.{name}": value for name, value in params.items() if there.get(name, value) != value}
            params = {name: value for name, value in params.items() if name not in there}
        points = [Metric(name, value, time, step) for name, value, step, time in _new_points(entry, record)]
        all_tags = _cut({**tags, **changed}, LONGEST_TAG)
        batches: Iterator[tuple[Sequence[Any], ...]] = zip_longest(
            _chunks(points, POINTS_A_BATCH),
            _chunks([Param(*pair) for pair in _cut(params, LONGEST_PARAM).items()], VALUES_A_BATCH),
            _chunks([RunTag(*pair) for pair in all_tags.items()], VALUES_A_BATCH),
            fillvalue=[],
        )
        # One request carries a batch of each kind, within MLflow's limits per request.
        for metrics, parameters, run_tags in batches:
            self._client.log_batch(entry.run_id, metrics=metrics, params=parameters, tags=run_tags)
        if record.inputs:
            self._client.log_inputs(entry.run_id, [_dataset(data) for data in record.inputs])
        for path, folder in record.artifacts:
            self._client.log_artifact(entry.run_id, str(path), folder or None)

    def _is_gone(self, entry: Entry) -> bool:
        """Return whether an indexed run has been deleted on the server."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(entry.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return True
            raise
        return bool(run.info.lifecycle_stage == "deleted")

    def _adopt(self, part: Experiment, condition: str) -> set[str]:
        """Index our runs that the index lacks: it was lost, or their creator was killed before it could index them.

        `condition` is a filter of MLflow's run search, empty for all runs. Returns the ids of all runs that were found.
        """
        token, there = None, set()
        while True:
            page = self._client.search_runs(
                [part.experiment_id], filter_string=condition, max_results=1000, page_token=token
            )
            for run in page:
                there.add(run.info.run_id)
                key = run.data.tags.get(KEY_TAG)
                if key is not None and part.index.get(key) is None:
                    part.index.set(Entry(key, run.info.run_id))
            token = page.token
            if not token:
                return there


@cache
def _written_by() -> dict[str, str]:
    """Return MLflow's own tags for who writes a run, and by which program.

    They are not part of a record's content, so a study that another user continues leaves the runs as they are.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return {"mlflow.user": user, "mlflow.source.name": "mlmclm", "mlflow.source.type": "LOCAL"}


def _dataset(data: DataSet) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    # A digest has 36 characters at most.
    dataset = Dataset(data.name, data.digest[:36], "local", json.dumps({"uri": data.source}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", data.context)])


def _new_points(entry: Entry, record: RunRecord) -> Sequence[Point]:
    """Return the points that the run lacks.

    If the points in the run are no longer the first ones of the record, all of the record's points are written again
    with the current time, which makes them the latest. MLflow does not duplicate a point that is already there exactly
    as given.
    """
    points = list(record.metrics)
    if not entry.points:
        return points
    if points_hash(points[: entry.points]) == entry.points_hash:
        return points[entry.points :]
    now = int(time.time() * 1000)
    return [(name, value, step, now) for name, value, step, _ in points]


def _cut(values: Mapping[str, Any], longest: int) -> dict[str, str]:
    """Convert values to text, cut to the length that MLflow accepts."""
    texts = {name: str(value) for name, value in values.items()}
    return {name: text if len(text) <= longest else f"{text[: longest - 1]}…" for name, text in texts.items()}


def _chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
