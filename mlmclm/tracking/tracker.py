"""Exporter that turns records into MLflow runs in a background thread.

The work never waits for MLflow and never fails because of it: a record that cannot be exported is retried, and what is
left at the end is reported, not raised. Summaries come first: a bulk record (`RunRecord.bulk`) waits until no other
record is left. The store's own database takes many records at once, another address one by one.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
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
"""Number of consecutive failures on closing, none of which looks as if it could pass, after which the rest is left."""
PASSING = {"OSError", "OperationalError", "EnvironmentFault"}
"""Classes of errors that can pass: the database is locked, its disk is full, or the server is out of reach."""
LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # no permission to write
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),  # a file that is missing, or in the way
    *(errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS),  # a file system without locks
}
"""Numbers of errors of these classes that stay until somebody acts."""
LASTING_IN_SQLITE = ("SQLITE_ERROR", "SQLITE_READONLY", "SQLITE_AUTH")
"""Beginnings of the names of SQLite's errors that stay: a wrong schema, or a database that may only be read."""
STOP_SECONDS = 5.0
"""Seconds that closing waits for the records that are being written when the time is up."""
BATCH = 500
"""Records written to the store's own database in one transaction, which other writers wait for: some 0.2 s for cells."""


@dataclass(frozen=True)
class ExportReport:
    """The outcome of an export: `exported` records were written, `unchanged` ones existed already, `failed` ones are missing."""

    exported: int
    unchanged: int
    failed: int
    error: str | None = None


class Tracker:
    """Background exporter to a study's experiment; thread-safe.

    Args:
        store: the store; the index is kept in its `mlflow/`.
        experiment: the name of the study's experiment.
        address: an MLflow tracking address; None for the store's own database.
        verify: whether to write deleted runs again (`Connection`).
    """

    def __init__(self, store: Path, experiment: str, *, address: str | None = None, verify: bool = False) -> None:
        own = default_address(store)
        self._address, self._experiment, self._verify = address or own, experiment, verify
        self._folder = store.resolve() / "mlflow"
        self._at_once = BATCH if self._address == own else 1
        self._changed = threading.Condition()
        self._summaries: dict[str, RunRecord] = {}
        self._cells: dict[str, RunRecord] = {}
        self._current: list[RunRecord] = []
        self._suspect: set[str] = set()  # keys with a failed request, whose reply may have been lost
        self._refused: dict[str, RunRecord] = {}  # MLflow says that they are wrong, so trying again is of no use
        self._closing = self._stopped = False
        self._closed: ExportReport | None = None
        self._exported = self._unchanged = 0
        self._failures_in_a_row = self._hopeless_in_a_row = 0
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
            self._refused.pop(record.key, None)
            self._changed.notify_all()

    def close(
        self, patience: float = 60, *, limit: float = math.inf, waiting: Callable[[int], object] = lambda left: None
    ) -> ExportReport:
        """Export what is left, retry what failed, and report the outcome; say so if records remain.

        Args:
            patience: seconds to wait without any record being written. A progress bar is shown meanwhile.
            limit: seconds to wait in all.
            waiting: called about once a second, with the number of records that are left.
        """
        with self._changed:
            if self._closed is not None:
                return self._closed
            self._closing = True
            self._failures_in_a_row = self._hopeless_in_a_row = 0
            self._changed.notify_all()
            reason = self._wait(patience, limit, waiting)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(STOP_SECONDS)
        with self._changed:
            missing = [*self._summaries.values(), *self._cells.values(), *self._current, *self._refused.values()]
            left, reason = len(missing), reason or self._error
            self._closed = ExportReport(self._exported, self._unchanged, left, reason if left else None)
        if left:
            kind = "cell" if all(each.bulk for each in missing) else "record"
            what = f"{left} {kind}{'s' if left > 1 else ''} could not be"
            say(
                f"{what} written to MLflow at {without_password(self._address)} ({reason}). Nothing is lost: the results are in the "
                "store, and the same command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
            )
        return self._closed

    def _wait(self, patience: float, limit: float, waiting: Callable[[int], object]) -> str | None:
        """Wait until everything is exported or the time is up; holds the lock. Return why it was, if no error says so."""
        began = moved = time.monotonic()
        left = total = self._left()
        with ExitStack() as stack:
            bar: Bar | None = None
            while left and not self._ended():
                now = time.monotonic()
                if now - moved > patience:
                    return None if self._error else f"nothing was written for {patience:g} s"
                if now - began > limit:
                    return None if self._error else f"not finished within {limit:g} s"
                if bar is None and now - began > SECONDS_OF_SILENCE:
                    title = "MLflow, one run a cell (Ctrl-C leaves them for later)"
                    bar = stack.enter_context(Bar(title, total, unit="runs"))
                waiting(left)
                self._changed.wait(min(1.0, patience, limit))
                if self._left() < left:
                    moved = time.monotonic()
                left = self._left()
                if bar is not None:
                    bar.update(total - left, note=f"trying again ({self._error})" if self._failures_in_a_row else "")
            if bar is not None:
                bar.complete = not left
        return None

    def _queue(self, record: RunRecord) -> dict[str, RunRecord]:
        return self._cells if record.bulk else self._summaries

    def _left(self) -> int:
        """Count the records that are not exported yet."""
        return len(self._summaries) + len(self._cells) + len(self._current)

    def _ended(self) -> bool:
        """Return whether the thread has given up."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Export batches of records until closed (the thread's main function); back off after failures."""
        while batch := self._take():
            error = None
            try:
                self._export(batch)
            except Exception as raised:  # whatever MLflow, its database or the network raises stays here
                error = raised
            with self._changed:
                self._current = []
                given_up = error is not None and self._failed(batch, error)
                self._changed.notify_all()
            if given_up:
                return
        if self._connection is not None:
            with suppress(Exception):  # everything is written
                self._connection.close()

    def _take(self) -> list[RunRecord]:
        """Return the next records, summaries before cells; none when there is no more to do."""
        with self._changed:
            while not (self._summaries or self._cells) and not self._closing:
                self._changed.wait()
            queue = self._summaries or self._cells
            if not self._stopped:
                self._current = next_batch(queue, self._at_once, alone=self._suspect)
            for record in self._current:
                del queue[record.key]
            return self._current

    def _export(self, batch: list[RunRecord]) -> None:
        # Opened here, in the thread: importing MLflow takes seconds, and opening may fail like any export.
        if self._connection is None:
            self._connection = Connection(self._address, self._experiment, self._folder, verify=self._verify)
        changed = self._connection.export(batch, look_first=self._suspect)
        self._exported += changed
        self._unchanged += len(batch) - changed
        self._suspect.difference_update(record.key for record in batch)
        self._failures_in_a_row = self._hopeless_in_a_row = 0
        if not self._refused:
            self._error = None

    def _failed(self, batch: list[RunRecord], error: Exception) -> bool:
        """Requeue records at the end and back off; return True if the thread should end. The caller holds the lock."""
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.debug("MLflow export of %s failed", ", ".join(record.name for record in batch), exc_info=error)
        refused = getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"
        if refused and len(batch) == 1:
            self._refused[batch[0].key] = batch[0]
            return False
        for record in batch:
            self._suspect.add(record.key)
            # A newer version may have been put meanwhile.
            self._queue(record).setdefault(record.key, record)
        if refused:  # each of them is tried alone now
            return False
        self._failures_in_a_row += 1
        self._hopeless_in_a_row = 0 if passing(error) else self._hopeless_in_a_row + 1
        if self._closing and self._hopeless_in_a_row >= GIVE_UP_AFTER:
            return True
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures_in_a_row - 1))
        closing = self._closing  # `close` cuts the pause short when it begins, and when its time is up
        self._changed.wait_for(lambda: self._stopped or self._closing != closing, pause)
        return False


def passing(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is of a kind that can pass, and none is of one that stays."""
    found = False
    while error is not None:
        if getattr(error, "errno", None) in LASTING:
            return False
        if getattr(error, "sqlite_errorname", "").startswith(LASTING_IN_SQLITE):
            return False
        # By name: importing SQLAlchemy for its class takes long, and sqlite3 and other drivers have one of their own.
        found = found or bool(PASSING & {kind.__name__ for kind in type(error).__mro__})
        error = error.__cause__ or error.__context__
    return found


def next_batch(queue: Mapping[str, RunRecord], size: int, *, alone: Collection[str] = ()) -> list[RunRecord]:
    """Return the first records of a queue, parents before their children.

    Args:
        size: the largest number of records; 0 or fewer than that if the queue has no more.
        alone: keys of records that share no batch with others, so that a bad record doesn't hold up good ones.
    """
    batch: dict[str, RunRecord] = {}
    for key in queue:
        line: list[str] = []
        above: str | None = key
        while above is not None and above in queue and above not in batch:
            line.insert(0, above)
            above = queue[above].parent_key
        for each in line:
            if len(batch) == size or (batch and each in alone):
                return list(batch.values())
            batch[each] = queue[each]
            if each in alone:
                return list(batch.values())
    return list(batch.values())
