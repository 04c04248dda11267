"""Exporter that turns records into MLflow runs in a background thread.

The work never waits for MLflow and never fails because of it: a record that cannot be exported is retried, and what is
left at the end is reported, not raised. Summaries come first: a bulk record (`RunRecord.bulk`) waits until no other
record is left.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from mlmclm.progress import SECONDS_OF_SILENCE, Bar, say
from mlmclm.tracking.address import default_address, without_password
from mlmclm.tracking.connection import Connection
from mlmclm.tracking.records import RunRecord

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between attempts while nothing can be exported; the pause doubles each time."""
GIVE_UP_AFTER = 3
"""Number of consecutive failures on closing after which the server is considered down, rather than one record bad."""
STOP_SECONDS = 5.0
"""Seconds that closing waits for the record that is being written when the time is up."""


@dataclass(frozen=True)
class ExportReport:
    """The outcome of an export: `exported` records were written, `unchanged` ones existed already, `failed` ones are missing."""

    exported: int
    unchanged: int
    failed: int
    error: str | None = None


class Tracker:
    """Background exporter to a study's experiments; thread-safe.

    Args:
        store: the store; the index is kept in its `mlflow/`.
        experiment: the name of the study's experiment.
        address: an MLflow tracking address; None for the store's own database.
        verify: whether to look for deleted runs (`Connection`).
    """

    def __init__(self, store: Path, experiment: str, *, address: str | None = None, verify: bool = False) -> None:
        self._address, self._experiment, self._verify = address or default_address(store), experiment, verify
        self._folder = store.resolve() / "mlflow"
        self._changed = threading.Condition()
        self._summaries: dict[str, RunRecord] = {}
        self._cells: dict[str, RunRecord] = {}
        self._current: RunRecord | None = None
        self._suspect: set[str] = set()  # keys with a failed request, whose reply may have been lost
        self._closing = self._stopped = False
        self._closed: ExportReport | None = None
        self._exported = self._unchanged = 0
        self._failures_in_a_row = 0
        self._error: str | None = None
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="mlmclm-tracker", daemon=True)
        self._thread.start()

    def put(self, record: RunRecord) -> None:
        """Queue a record and return at once; replaces a queued one with the same key. A `RuntimeError` after `close`.

        Put parents before children: a child whose parent is neither exported nor queued has no parent until it is put
        again.
        """
        with self._changed:
            if self._closed is not None:
                raise RuntimeError("put after close")
            self._queue(record)[record.key] = record
            self._changed.notify_all()

    def close(self, timeout: float = 60, cells: float = 60) -> ExportReport:
        """Export what is left, retry what failed, and report the outcome; say so if records remain.

        Args:
            timeout: seconds to wait for the summaries.
            cells: seconds to wait for the bulk records after that, under a progress bar.
        """
        with self._changed:
            if self._closed is not None:
                return self._closed
            self._closing = True
            self._failures_in_a_row = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended() or not self._left(bulk=False), timeout)
            if not self._left(bulk=False):
                self._wait_for_cells(cells)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(STOP_SECONDS)
        with self._changed:
            summaries, left = self._left(bulk=False), self._left()
            reason = self._error if summaries or self._ended() else None
            reason = reason or f"not finished within {timeout + (0 if summaries else cells):g} s"
            self._closed = ExportReport(self._exported, self._unchanged, left, reason if left else None)
        if left:
            what = f"{left} records could not be" if summaries else f"{left} cells are not"
            say(
                f"{what} written to MLflow at {without_password(self._address)} ({reason}). Nothing is lost: the results are in the "
                "store, and the same command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
            )
        return self._closed

    def _wait_for_cells(self, seconds: float) -> None:
        """Show the progress of the bulk records until they are exported or the time is up; holds the lock."""
        end = time.monotonic() + seconds
        if self._changed.wait_for(lambda: self._ended() or not self._left(), min(seconds, SECONDS_OF_SILENCE)):
            return
        total = self._left()
        with Bar("MLflow, one run a cell (Ctrl-C leaves them for later)", total, unit="cells") as bar:
            while (left := self._left()) and not self._ended() and time.monotonic() < end:
                self._changed.wait(1.0)
                bar.update(total - self._left())
            bar.complete = not left

    def _queue(self, record: RunRecord) -> dict[str, RunRecord]:
        return self._cells if record.bulk else self._summaries

    def _left(self, *, bulk: bool = True) -> int:
        """Count the records that are not exported yet, with or without those in bulk."""
        busy = self._current is not None and (bulk or not self._current.bulk)
        return len(self._summaries) + busy + (len(self._cells) if bulk else 0)

    def _ended(self) -> bool:
        """Return whether the thread has given up."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Export records one by one until closed (the thread's main function); back off after failures."""
        while (record := self._take()) is not None:
            error = None
            try:
                self._export(record)
            except Exception as raised:  # whatever MLflow, its database or the network raises stays here
                error = raised
            with self._changed:
                self._current = None
                given_up = error is not None and self._failed(record, error)
                self._changed.notify_all()
            if given_up:
                return

    def _take(self) -> RunRecord | None:
        """Return the next record, summaries first and parents before children; None when there is no more to do."""
        with self._changed:
            while not (self._summaries or self._cells) and not self._closing:
                self._changed.wait()
            queue = self._summaries or self._cells
            if self._stopped or not queue:
                return None
            key = next(iter(queue))
            while (parent := queue[key].parent_key) is not None and parent in queue:
                key = parent
            self._current = queue.pop(key)
            return self._current

    def _export(self, record: RunRecord) -> None:
        # Opened here, in the thread: importing MLflow takes seconds, and opening may fail like any export.
        if self._connection is None:
            self._connection = Connection(self._address, self._experiment, self._folder, verify=self._verify)
        content = record.content_hash()
        if self._connection.is_unchanged(record, content):
            self._unchanged += 1
        else:
            self._connection.export(record, content, look_first=record.key in self._suspect)
            self._exported += 1
        self._suspect.discard(record.key)
        self._failures_in_a_row = 0

    def _failed(self, record: RunRecord, error: Exception) -> bool:
        """Requeue a record at the end and back off; return True if the thread should end. The caller holds the lock."""
        self._suspect.add(record.key)
        self._failures_in_a_row += 1
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.debug("MLflow export of %s failed", record.name, exc_info=error)
        # A newer version may have been put meanwhile.
        self._queue(record).setdefault(record.key, record)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures_in_a_row - 1))
        if not self._closing:
            # `close` cuts the pause short.
            self._changed.wait_for(lambda: self._closing, pause)
            return False
        return self._failures_in_a_row >= GIVE_UP_AFTER
