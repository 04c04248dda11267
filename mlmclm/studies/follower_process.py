"""The process that follows a study and writes to MLflow, so that MLflow takes neither the driver's time nor its memory.

It reads what to follow, and that the study has ended, from a file that the driver writes. It ends with the driver, and
however that ends, no run of the study is left marked as running.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, RootModel

from mlmclm.numbers import plural
from mlmclm.progress import SECONDS_OF_SILENCE, Bar, say
from mlmclm.storage.files import write_atomic
from mlmclm.storage.temporary import swept_folder
from mlmclm.storage.unchanged import mark_of
from mlmclm.studies.follower import Follower, TrackedStudy
from mlmclm.tracking.address import VARIABLE, own_database

PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # until it knows what to do
    "sys.path.insert(0, sys.argv.pop(1)); import mlmclm; del sys.path[0]; "
    "from mlmclm.studies.follower_process import main; main()"
)
"""The process's program. Its first argument is the folder of this package, which a notebook may have put on its own path only."""
NICE = 19
"""Added to the process's niceness beside a sweep: if all cores are busy, the sweep goes first. Ray's workers have a niceness
of 15."""
SECONDS_BETWEEN_READS = 0.25
LIMIT_AFTER_ERROR = 5.0
"""Seconds that the process goes on after a study that fails, is interrupted or is killed: the user wants the error's message."""
LIMIT_IF_TERMINATED = 1.0
SECONDS_TO_END = 2.0
"""Seconds that the process has to mark runs as killed and say what is missing, besides these limits, before it is killed."""


class _Told(RootModel[TrackedStudy]):
    model_config = ConfigDict(ser_json_inf_nan="constants")


def read(file: Path) -> TrackedStudy:
    """Return the study that a driver has written."""
    return _Told.model_validate_json(file.read_bytes()).root


class FollowerProcess:
    """A `Follower` in a process of its own; only leaving the context waits for it, and nothing is lost with it.

    Args:
        study: what to follow first.
        address: an MLflow tracking address.
        niceness: added to the process's own until the driver waits for it.
    """

    def __init__(self, study: TrackedStudy, address: str, *, niceness: int = NICE) -> None:
        self.told, self._open = study, ExitStack()
        folder = self._open.enter_context(swept_folder(own_database(study.store).parent, ".following-"))
        self._written = folder / "study.json"
        self.tell()
        package, driver = str(Path(__file__).parents[2]), str(os.getpid())
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the standard library.
            [sys.executable, "-P", "-c", PROGRAM, package, str(self._written), driver, str(niceness)],
            # The address is not on the command line, where other users could read its password.
            env={**os.environ, VARIABLE: address},
            stdin=subprocess.DEVNULL,
            stdout=2,  # whatever MLflow prints must not get between the command's results
            start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends this process
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until MLflow has everything or the time is up; then end the process, which has said what is left."""
        status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
        limit = None if error is None else LIMIT_AFTER_ERROR + SECONDS_TO_END
        with suppress(OSError):  # only root may, and the process may have ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        reason = "interrupted"
        try:
            self.tell(status=status)
            code = self._process.wait(limit)
            reason = f"the process that writes to MLflow ended by itself, with exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"not finished within {limit:g} s"
        except BaseException:
            self._process.terminate()  # so that it marks what it leaves
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
            raise
        finally:
            self._process.kill()  # at any moment, since it leaves whole runs or none
            if self._process.wait():
                say_missing(self.told, "some runs", reason)
            self._open.close()

    def tell(self, **changes: Any) -> None:
        """Change what is followed: fields of `TrackedStudy`.

        Raises:
            EnvironmentFault: the disk is full or not writable.
        """
        self.told = replace(self.told, **changes)
        write_atomic(self._written, _Told(self.told).model_dump_json().encode())


def say_missing(study: TrackedStudy, what: str, reason: str) -> None:
    """Say that MLflow lacks runs, and the remedy."""
    say(
        f"MLflow at {study.shown} lacks {what} ({reason}). Nothing is lost: the results are in the store, and the same "
        "command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
    )


def main() -> None:
    """Write what MLflow lacks of a study, at its end under a progress bar, and say what is left (the process's main function)."""
    file, driver, niceness = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    terminated: list[int] = []
    # `ray job stop` sends it to all of a job's processes, and kills them three seconds later.
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    os.nice(niceness)
    seen = mark_of(file.stat())  # before it is read: the driver may write it again in between
    study = read(file)
    follower = Follower(study, os.environ[VARIABLE])
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    since = moved = time.monotonic()
    left, total, reason = -1, 0, ""
    with ExitStack() as stack:
        bar: Bar | None = None
        while thread.is_alive() and not reason:
            thread.join(SECONDS_BETWEEN_READS)
            now, before = time.monotonic(), study
            if (terminated or os.getppid() != driver) and study.status != "KILLED":
                study = replace(study, status="KILLED")
            elif study.status == "RUNNING":
                moved, total = now, 0
                with suppress(OSError):  # somebody deletes MLflow's folder
                    if (written := mark_of(file.stat())) != seen:
                        study, seen = read(file), written
            if study is not before:
                since = now
                follower.take(study)
            limit = LIMIT_IF_TERMINATED if terminated else LIMIT_AFTER_ERROR if study.stopped else math.inf
            number, error = follower.backlog
            if number != left:
                moved, left, total = now, number, max(total, number)
            if now - since > limit:
                reason = "interrupted" if terminated else f"not finished within {limit:g} s"
            elif now - moved > study.timeout:
                reason = f"nothing was written for {study.timeout:g} s"
            elif bar is None and left and study.status != "RUNNING" and now - since > SECONDS_OF_SILENCE:
                title = "MLflow, one run a cell (Ctrl-C leaves them for later)"
                bar = stack.enter_context(Bar(title, total, unit="runs"))
            if bar is not None:
                bar.update(total - left, total, note=f"trying again ({error})" if error else "")
        left, error = follower.backlog
        if bar is not None:
            bar.complete = not left
    if left:
        say_missing(study, plural(left, "run"), error or reason)
    os._exit(0)  # the follower may still wait for an answer
