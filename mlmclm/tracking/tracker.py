"""The exporter: takes records from the work and makes them MLflow runs in a thread of its own.

The work never waits for MLflow and never fails because of it: a record that cannot be exported now is tried again, and
what is left in the end is reported, not raised. MLflow is a view of the store's files and can be rebuilt from them at
any time.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mlmclm.tracking.address import default_address
from mlmclm.tracking.connection import Connection
from mlmclm.tracking.records import RunRecord

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between tries while nothing can be exported; doubled each time."""
GIVE_UP_AFTER = 3
"""Records that fail one after the other once the work is over: then the server, not a record, is at fault."""


@dataclass(frozen=True)
class ExportReport:
    """What became of the records: `exported` were written, `unchanged` were there already, `failed` are not there."""

    exported: int
    unchanged: int
    failed: int
    error: str | None = None


class Tracker:
    """Exports to one experiment. Safe to call from any thread; use as a context manager, or call `close`.

    Args:
        store: the store; the index is kept in its `mlflow/`.
        experiment: the experiment's name; a study has one.
        address: an MLflow tracking address; None for the store's own database.
        close_seconds: how long leaving the context waits for what is left.
    """

    def __init__(self, store: Path, experiment: str, *, address: str | None = None, close_seconds: float = 60) -> None:
        self.address = address or default_address(store)
        self.experiment = experiment
        self.experiment_id: str | None = None
        """Known once something has been exported."""
        self._folder = store.resolve() / "mlflow"
        self._close_seconds = close_seconds
        self._changed = threading.Condition()
        self._waiting: dict[str, RunRecord] = {}
        self._suspect: set[str] = set()  # keys of which a request failed, so that its reply may have been lost
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
        self.close(timeout=self._close_seconds if error is None else 5)

    def put(self, record: RunRecord) -> None:
        """Queues a record and returns at once; a queued one of the same key is replaced.

        Put parents before children: a child whose parent is neither there nor queued gets none until it is put again.
        """
        with self._changed:
            if self._closed is not None:
                raise RuntimeError("put after close")
            self._waiting[record.key] = record
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything queued is exported; False where that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def run_id(self, key: str) -> str | None:
        """The MLflow run of a record that this tracker has seen exported."""
        return self._run_ids.get(key)

    def close(self, timeout: float = 60) -> ExportReport:
        """Exports what is left, tries once more what failed, and says what became of all; logs a warning for the
        rest."""
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
            logger.warning(
                "%d records could not be written to MLflow at %s (%s). Nothing is lost: the results are in the "
                "store, and the same command run again, or `mlmclm report --export`, writes what is missing.",
                failed,
                self.address,
                self._closed.error,
            )
        return self._closed

    def _run(self) -> None:
        """The thread: one record after the other until closed; after a failure it pauses, longer each time."""
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
        """The next record, a parent before its child; None when closing and nothing is left."""
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
        """Puts the record back behind the others and pauses; True where the thread should end."""
        with self._changed:
            self._suspect.add(record.key)
            self._failures_in_a_row += 1
            self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            logger.debug("MLflow export of %s failed", record.name, exc_info=error)
            if record.key not in self._waiting:  # unless a newer one has been put meanwhile
                self._waiting[record.key] = record
            self._busy = False
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures_in_a_row - 1))
            if not self._closing:
                self._changed.wait_for(lambda: self._closing, pause)
                return False
            return self._failures_in_a_row >= GIVE_UP_AFTER
