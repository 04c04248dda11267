"""A tracker in a process of its own, so that MLflow takes neither the driver's time nor its memory.

The driver hands over records and results through a pipe, by a thread that only pickles them. The process ends with the
driver, however that ends. Nothing is lost with it: the results are in the store.

Run as `python -m mlmclm.tracking.process` by `TrackingProcess` only.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlmclm.numbers import plural
from mlmclm.progress import say
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.summaries import CellGroup, Summaries
from mlmclm.tracking.tracker import ExportReport, Tracker
from mlmclm.tracking.views import cell_record

NICE = 19
"""Added to the process's niceness: if all cores are busy, the sweep goes first. Ray's workers have a niceness of 15."""
REMEDY = "Nothing is lost: the results are in the store, and `mlmclm tracking sync STUDY.yaml` writes what is missing."
START_SECONDS = 60.0
"""Seconds that closing grants the process to start, besides the time that it may spend without writing anything."""


class TrackingProcess:
    """A tracker in a process of its own; no call waits for it except `close`. Use it as a context manager.

    Args:
        store, experiment, address, verify: as in `Tracker`.
        patience: how long leaving the context waits without anything being written.
    """

    def __init__(self, store: Path, experiment: str, *, address: str, patience: float, verify: bool = False) -> None:
        self._patience = patience
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._report: ExportReport | None = None
        self._left, self._heard = 0, 0.0
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the standard library.
            [sys.executable, "-P", "-m", "mlmclm.tracking.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then closes this process
        )
        # Not on the command line, where other users could read an address's password.
        self._messages.put(("open", (store, experiment, address, verify)))
        self._thread = threading.Thread(target=self._hand_over, name="mlmclm-tracking", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the user wants the message, not a long wait for MLflow.
        self.close(self._patience, limit=math.inf if error is None else 5.0)

    def put(self, record: RunRecord) -> None:
        """Queue a record, as `Tracker.put` does."""
        self._messages.put(("record", record))

    def groups(self, groups: Mapping[tuple[str, str], CellGroup], rule: str) -> None:
        """Announce the sweep that the next results belong to; the arguments are those of `Summaries`."""
        self._messages.put(("groups", (groups, rule)))

    def cell(self, result: Mapping[str, Any]) -> None:
        """Queue a cell's result. Nothing may change it afterwards."""
        self._messages.put(("cell", result))

    def close(self, patience: float, *, limit: float = math.inf) -> ExportReport:
        """Export what is left, and end the process; say so if records remain. Arguments are those of `Tracker.close`."""
        if self._report is None:
            self._messages.put(("close", (patience, limit)))
            self._heard = time.monotonic()
            try:
                while self._thread.is_alive() and time.monotonic() - self._heard < patience + START_SECONDS:
                    self._thread.join(1.0)
            except KeyboardInterrupt:
                left = plural(self._left, "run") if self._left else "some runs"
                say(f"MLflow: {left} {'is' if self._left == 1 else 'are'} not written yet. {REMEDY}")
                raise
            finally:
                lost = not self._thread.is_alive()
                self._process.kill()  # it has nothing more to do once its report is here
                code = self._process.wait()
                self._thread.join()
            if self._report is None:
                reason = f"ended by itself, with exit code {code}" if lost else "does not end"
                self._report = ExportReport(0, 0, 0, f"the process that writes to MLflow {reason}")
                say(f"MLflow: {self._report.error}. {REMEDY}")
        return self._report

    def _hand_over(self) -> None:
        """Send messages until the process is closed, and receive its report (the thread's main function)."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        # If the process has ended, there is no report.
        with suppress(OSError, EOFError), to, back:
            kind = ""
            while kind != "close":
                kind, value = self._messages.get()
                pickle.dump((kind, value), to, pickle.HIGHEST_PROTOCOL)
                self._heard = time.monotonic()
                # If several cells wait, one call sends as many as its buffer holds.
                if kind == "close" or self._messages.empty():
                    to.flush()
            while isinstance(found := pickle.load(back), int):  # the number of runs left, as a sign of life
                self._left, self._heard = found, time.monotonic()
            self._report = found


def main() -> None:
    """Take messages from standard input until it ends, and write the report to standard output."""
    source, report = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever MLflow prints must not get between the driver and the report
    os.nice(NICE)

    def answer(value: ExportReport | int) -> None:
        pickle.dump(value, report)
        report.flush()

    try:
        _, (store, experiment, address, verify) = pickle.load(source)
        tracker, summaries = Tracker(store, experiment, address=address, verify=verify), Summaries(experiment, {}, "")
        while True:
            kind, value = pickle.load(source)
            if kind == "record":
                tracker.put(value)
            elif kind == "groups":
                summaries = Summaries(experiment, *value)
            elif kind == "cell":
                tracker.put(cell_record(experiment, value, about=summaries.about(value)))
                if (summary := summaries.add(value)) is not None:
                    tracker.put(summary)
            else:
                patience, limit = value
                answer(tracker.close(patience, limit=limit, waiting=answer))
                return
    except (EOFError, pickle.UnpicklingError, BrokenPipeError):
        return  # the driver has ended, perhaps in the middle of a message


if __name__ == "__main__":
    main()
