"""Exporter that turns records into MLflow runs in a background thread.

The work never waits for MLflow and never fails because of it: a record that cannot be exported is retried, and what is
left at the end is reported, not raised. MLflow is a view of the store's files and can be rebuilt from them at any time.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mlmclm.progress import say
from mlmclm.tracking.address import default_address
from mlmclm.tracking.connection import Connection
from mlmclm.tracking.records import RunRecord

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between attempts while nothing can be exported; the pause doubles each time."""
GIVE_UP_AFTER = 3
"""Number of consecutive failures on closing after which the server is considered down, rather than one record bad."""


@dataclass(frozen=True)
class ExportReport:
    """The outcome of an export: `exported` records were written, `unchanged` already there, `failed` are missing."""

    exported: int
    unchanged: int
    failed: int
    error: str | None = None


class Tracker:
    """Background exporter to one experiment; thread-safe. Use it as a context manager, or call `close`.

    Args:
        store: the store; the index is kept in its `mlflow/`.
        experiment: the experiment's name; a study has one experiment.
        address: an MLflow tracking address; None for the store's own database.
        close_seconds: how long leaving the context waits for pending records.
    """

    def __init__(self, store: Path, experiment: str, *, address: str | None = None, close_seconds: float = 60) -> None:
        self.address = address or default_address(store)
        self.experiment = experiment
        self.experiment_id: str | None = None
        """Set once something has been exported."""
        self._folder = store.resolve() / "mlflow"
        self._close_seconds = close_seconds
        self._changed = threading.Condition()
        self._waiting: dict[str, RunRecord] = {}
        self._suspect: set[str] = set()  # keys with a failed request, whose reply may have been lost
        self._run_ids: dict[str, str] = {}
        self._busy = False
        self._closing = False
        self._closed: ExportReport | None = None
        self._exported = self._unchanged = 0
        self._failures_in_a_row = 0
        self._error: str | None = None
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="mlmclm-tracker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the user wants the message, not a long wait for MLflow.
        self.close(timeout=self._close_seconds if error is None else 5)

    def put(self, record: RunRecord) -> None:
        """Queue a record and return at once; a queued record with the same key is replaced.

        Put parents before children: a child whose parent is neither exported nor queued has no parent until it is put
        again.
        """
        with self._changed:
            if self._closed is not None:
                raise RuntimeError("put after close")
            self._waiting[record.key] = record
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is exported; return False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def run_id(self, key: str) -> str | None:
        """Return the MLflow run id of a record that this tracker has exported or found unchanged, else None."""
        return self._run_ids.get(key)

    def close(self, timeout: float = 60) -> ExportReport:
        """Export what is left, retry what failed, and report the outcome; say so if records remain."""
        with self._changed:
            if self._closed is not None:
                return self._closed
            self._closing = True
            self._failures_in_a_row = 0
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            failed = len(self._waiting) + self._busy
            if failed and self._error is None:
                self._error = f"not finished within {timeout:g} s"
            self._closed = ExportReport(self._exported, self._unchanged, failed, self._error if failed else None)
        if failed:
            say(
                f"{failed} records could not be written to MLflow at {self.address} ({self._closed.error}). Nothing is lost: the "
                "results are in the store, and the same command run again, or `mlmclm report --export`, writes what is missing."
            )
        return self._closed

    def _run(self) -> None:
        """Export records one by one until closed (the thread's main function); back off after failures."""
        while True:
            record = self._take()
            if record is None:
                return
            try:
                self._export(record)
            except Exception as error:  # whatever MLflow, its database or the network raises stays here
                if self._failed(record, error):
                    return
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take(self) -> RunRecord | None:
        """Return the next record, parents before children; None when closing with nothing left."""
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            key = next(iter(self._waiting))
            while (parent := self._waiting[key].parent_key) is not None and parent in self._waiting:
                key = parent
            self._busy = True
            return self._waiting.pop(key)

    def _export(self, record: RunRecord) -> None:
        # Opened here, in the thread: importing MLflow takes seconds, and opening may fail like any export.
        if self._connection is None:
            self._connection = Connection(self.address, self.experiment, self._folder)
            self.experiment_id = self._connection.experiment_id
        content = record.content_hash()
        if self._connection.is_unchanged(record, content):
            entry = self._connection.index.get(record.key)
            run_id = entry.run_id if entry else ""
            self._unchanged += 1
        else:
            run_id = self._connection.export(record, content, look_first=record.key in self._suspect)
            self._exported += 1
        self._suspect.discard(record.key)
        self._run_ids[record.key] = run_id
        self._failures_in_a_row = 0

    def _failed(self, record: RunRecord, error: Exception) -> bool:
        """Requeue a record at the end and back off; return True if the thread should end."""
        with self._changed:
            self._suspect.add(record.key)
            self._failures_in_a_row += 1
            self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            logger.debug("MLflow export of %s failed", record.name, exc_info=error)
            if record.key not in self._waiting:  # a newer version may have been put meanwhile
                self._waiting[record.key] = record
            self._busy = False
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures_in_a_row - 1))
            if not self._closing:
                # `close` cuts the pause short.
                self._changed.wait_for(lambda: self._closing, pause)
                return False
            return self._failures_in_a_row >= GIVE_UP_AFTER
