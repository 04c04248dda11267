"""A connection to the experiment of one study at one MLflow address; the only module that calls MLflow's client.

Runs in the store's own database are written in bulk (`BulkWriter`), those elsewhere one by one. Everything here may
raise whatever MLflow raises; `Tracker` contains it.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlmclm.storage.files import in_turn
from mlmclm.tracking.address import own_database
from mlmclm.tracking.bulk_writer import CONTEXT_TAG, LONGEST_DIGEST, USER_TAG, BulkRun, BulkWriter
from mlmclm.tracking.database import adopt_artifacts, commit_lightly, make_usable, sqlite_file
from mlmclm.tracking.index import Entry, Index
from mlmclm.tracking.records import DataSet, Point, RunRecord, points_hash
from mlmclm.tracking.saved_views import view_tags
from mlmclm.tracking.views import EXPERIMENT_ID

KEY_TAG, PARENT_TAG = "mlmclm.key", "mlflow.parentRunId"
IDENTITY_TAG = "mlmclm.experiment"
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # with MLflow's defaults a dead server blocks a client for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # saves one request per run
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that MLflow reads on import or on calls; the user's own values stay."""
POINTS_A_BATCH, VALUES_A_BATCH = 1000, 100
LONGEST_PARAM, LONGEST_TAG = 6000, 5000


class Connection:
    """The experiment of a study, ready to take runs.

    Opening it creates what is missing: database, schema, experiment, index. The first time this takes seconds
    (importing MLflow 2 s, creating its SQLite schema 3 s). A connection belongs to one thread.

    Args:
        experiment: the name of the study's experiment.
        folder: the store's `mlflow/`, which holds the index.
        verify: whether to write runs again that were deleted in MLflow. Elsewhere than in the store's own database
            this takes about 2 ms for each existing run.
    """

    def __init__(self, address: str, experiment: str, folder: Path, *, verify: bool = False) -> None:
        for name, value in CLIENT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        database = sqlite_file(address)
        own = database is not None and database == own_database(folder.parent)
        # Imported here because it takes 2 s, and some of the variables are read on import.
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # the import resets the level
        # It logs each error of the database, with its traceback and the rows, before raising it.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        if database is not None:
            make_usable(database, own=own)
            if own:
                adopt_artifacts(database)
                commit_lightly()
        self._client = MlflowClient(tracking_uri=address)
        self._folder, self._verify = folder, verify
        self._writer: BulkWriter | None = None
        # A server decides for itself where artifacts go; only a database needs a location from its clients.
        artifacts = (folder / "artifacts").resolve().as_uri() if database is not None else None
        with in_turn(folder / ".experiment.lock"):  # another process may be opening the same one
            self._experiment_id, self._index = self._open(experiment, artifacts)
            if own:
                from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

                store = SqlAlchemyStore(address, artifacts)
                self._writer = BulkWriter(store, self._experiment_id, KEY_TAG)
            else:
                self._adopt_runs(verify)

    def _open(self, name: str, artifacts: str | None) -> tuple[str, Index]:
        """Find or create the experiment with its shared views; return its id and the index of its runs."""
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            # MLflow keeps the name of a deleted experiment reserved, so a new one could not be created under it.
            self._client.restore_experiment(found.experiment_id)
        if found is None:
            number, tags = self._client.create_experiment(name, artifact_location=artifacts), {}
        else:
            number, tags = found.experiment_id, found.tags
        identity = tags.get(IDENTITY_TAG)
        for tag, value in view_tags().items():
            if tags.get(tag) != value:
                self._client.set_experiment_tag(number, tag, value)
        if identity is None:
            # Experiment ids repeat from database to database; a random tag tells the experiments apart.
            identity = uuid.uuid4().hex
            self._client.set_experiment_tag(number, IDENTITY_TAG, identity)
        return number, Index(self._folder / "index.jsonl", identity)

    def _adopt_runs(self, verify: bool) -> None:
        """Index our runs that the index lacks; if `verify` is set, also forget those that don't exist any more."""
        # With an empty index (lost, or the experiment is another store's) every run is looked up. Otherwise only runs
        # still marked RUNNING can be ones whose creator was killed before it could index them.
        every = verify or not self._index.entries
        there = self._adopt("" if every else "attributes.status = 'RUNNING'")
        for entry in list(self._index.entries.values()) if verify else ():
            if entry.run_id not in there:
                self._index.drop(entry.key)  # so that the next export creates the run again

    def export(self, records: Sequence[RunRecord], *, look_first: Collection[str] = ()) -> int:
        """Create or update the runs of records to match them; return how many have changed.

        Args:
            records: parents come before their children.
            look_first: keys of records to search for before their runs are created, because an earlier request may
                have succeeded although its reply was lost. The store's own database is always searched.
        """
        if self._writer is not None:
            return self._export_in_bulk(records, self._writer)
        changed = 0
        for record in records:
            content = record.content_hash()
            if not self._is_unchanged(record, content, self._parent(record)):
                self._export_one(record, content, look_first=record.key in look_first)
                changed += 1
        return changed

    def close(self) -> None:
        """Leave the store's own database as MLflow's server searches it fastest."""
        if self._writer is not None:
            self._writer.analyse()

    def _export_in_bulk(self, records: Sequence[RunRecord], writer: BulkWriter) -> int:
        """Write the records that have changed in one transaction, which makes their runs whole or leaves none."""
        runs: list[BulkRun] = []
        entries: list[Entry] = []
        with self._index.locked():  # no other process of the store writes meanwhile
            there = writer.there({key for record in records for key in (record.key, record.parent_key) if key})
            for record in records:
                content, parent = record.content_hash(), self._parent(record, there)
                gone = self._verify and record.key not in there
                if not gone and self._is_unchanged(record, content, parent):
                    continue
                run_id = there.get(record.key)
                entry = self._index.get(record.key)
                if entry is None or entry.run_id != run_id:
                    entry = Entry(record.key, run_id or uuid.uuid4().hex)
                there[record.key] = entry.run_id
                kept = entry.points if _continues(entry, record) else 0
                tags = ({} if run_id else _written_by()) | self._tags(record, parent)
                texts = _cut(record.params, LONGEST_PARAM), _cut(tags, LONGEST_TAG)
                again = run_id is not None and not kept
                runs.append(BulkRun(entry.run_id, record, *texts, points=record.metrics[kept:], again=again))
                entries.append(_complete(record, entry.run_id, content, parent))
            writer.write(runs)
            for run in runs:
                self._write_artifacts(run.run_id, run.record)
            # A process that is killed before this finds its runs by their keys.
            self._index.set(*entries)
        return len(runs)

    def _export_one(self, record: RunRecord, content: str, *, look_first: bool) -> None:
        """Create or update the run of a record by MLflow's client."""
        entry = self._index.get(record.key)
        if entry is None and look_first:
            self._adopt(f"tags.`{KEY_TAG}` = '{record.key}'")
            entry = self._index.get(record.key)
        parent = self._parent(record)
        tags = self._tags(record, parent)
        if entry is not None and self._is_gone(entry):
            self._index.drop(record.key)
            entry = None
        created = False
        if entry is None:
            with self._index.locked():  # which also reads what another process has created since
                entry = self._index.get(record.key)
                if entry is None:
                    own = _cut({**_written_by(), **tags}, LONGEST_TAG)
                    run = self._client.create_run(self._experiment_id, record.start_ms, own, record.name)
                    entry = Entry(record.key, run.info.run_id, parent=parent)
                    self._index.set(entry)
                    created = True
        if not created:
            self._client.update_run(entry.run_id, status="RUNNING", name=record.name)
        self._fill(entry, record, {} if created else tags)
        if record.status != "RUNNING":
            self._client.set_terminated(entry.run_id, status=record.status, end_time=record.end_ms)
        # Only a complete run gets its content hash: one that was interrupted is filled again by the next export.
        self._index.set(_complete(record, entry.run_id, content, parent))

    def _is_unchanged(self, record: RunRecord, content: str, parent: str | None) -> bool:
        """Return whether the run exists with this content and below this parent.

        A record that announces a finished run as running again, with nothing new in it, leaves the run as it is: a
        study that is run again announces everything before it finds that nothing is left to do.
        """
        entry = self._index.get(record.key)
        if entry is None or entry.content is None:
            return False
        announced = record.status == "RUNNING" and entry.final and len(record.metrics) <= entry.points
        return (announced or entry.content == content) and entry.parent == parent

    def _tags(self, record: RunRecord, parent: str | None) -> dict[str, str]:
        """Return a record's tags, and those that lead from its run to the record and to the parent's run."""
        tags = {name: text.replace(EXPERIMENT_ID, self._experiment_id) for name, text in record.tags.items()}
        return {**tags, KEY_TAG: record.key, **({PARENT_TAG: parent} if parent else {})}

    def _parent(self, record: RunRecord, there: Mapping[str, str] = MappingProxyType({})) -> str | None:
        """Return the run of a record's parent: that of `there`, else of the index."""
        entry = self._index.get(record.parent_key) if record.parent_key else None
        known = entry.run_id if entry else None
        return there.get(record.parent_key, known) if record.parent_key else None

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
        self._write_artifacts(entry.run_id, record)

    def _write_artifacts(self, run_id: str, record: RunRecord) -> None:
        for path, folder in record.artifacts:
            self._client.log_artifact(run_id, str(path), folder or None)

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

    def _adopt(self, condition: str) -> set[str]:
        """Index our runs that the index lacks: it was lost, or their creator was killed before it could index them.

        `condition` is a filter of MLflow's run search, empty for all runs. Returns the ids of all runs that were found.
        """
        token, there = None, set()
        while True:
            page = self._client.search_runs(
                [self._experiment_id], filter_string=condition, max_results=1000, page_token=token
            )
            for run in page:
                there.add(run.info.run_id)
                key = run.data.tags.get(KEY_TAG)
                if key is not None and self._index.get(key) is None:
                    self._index.set(Entry(key, run.info.run_id))
            token = page.token
            if not token:
                return there


def _complete(record: RunRecord, run_id: str, content: str, parent: str | None) -> Entry:
    """Return the entry of a run that has everything of a record."""
    points = list(record.metrics)
    return Entry(record.key, run_id, content, len(points), points_hash(points), parent, record.status != "RUNNING")


@cache
def _written_by() -> dict[str, str]:
    """Return MLflow's own tags for who writes a run, and by which program.

    They are not part of a record's content, so a study that another user continues leaves the runs as they are.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return {USER_TAG: user, "mlflow.source.name": "mlmclm", "mlflow.source.type": "LOCAL"}


def _dataset(data: DataSet) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(data.name, data.digest[:LONGEST_DIGEST], "local", json.dumps({"uri": data.source}))
    return DatasetInput(dataset, [InputTag(CONTEXT_TAG, data.context)])


def _new_points(entry: Entry, record: RunRecord) -> Sequence[Point]:
    """Return the points that the run lacks.

    If the points in the run are no longer the first ones of the record, all of the record's points are written again
    with the current time, which makes them the latest. MLflow does not duplicate a point that is already there exactly
    as given.
    """
    points = list(record.metrics)
    if not entry.points:
        return points
    if _continues(entry, record):
        return points[entry.points :]
    now = int(time.time() * 1000)
    return [(name, value, step, now) for name, value, step, _ in points]


def _continues(entry: Entry, record: RunRecord) -> bool:
    """Return whether the points in the run are the first ones of the record."""
    return points_hash(record.metrics[: entry.points]) == entry.points_hash


def _cut(values: Mapping[str, Any], longest: int) -> dict[str, str]:
    """Convert values to text, cut to the length that MLflow accepts."""
    texts = {name: str(value) for name, value in values.items()}
    return {name: text if len(text) <= longest else f"{text[: longest - 1]}…" for name, text in texts.items()}


def _chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
