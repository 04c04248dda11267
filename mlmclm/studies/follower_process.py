"""The process that follows a study and writes to MLflow, so that MLflow takes neither the driver's time nor its memory.

It reads from the study's folder what to follow, and how the study has ended. A study that has not ended, and whose lock nobody
holds, was killed. However a study ends, none of its runs stays marked as running.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from mlmclm.numbers import plural
from mlmclm.progress import SECONDS_OF_SILENCE, Bar, say
from mlmclm.storage.files import is_locked
from mlmclm.storage.retrying import RetryPolicy
from mlmclm.storage.unchanged import Mark, mark_of
from mlmclm.studies.follower import FILE, Follower, TrackedStudy, read_runs
from mlmclm.studies.place import LOCK, STUDIES
from mlmclm.sweeps.manifest import FILE as CELLS
from mlmclm.tracking.address import VARIABLE, default_address
from mlmclm.tracking.records import Status

PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # until `main` handles it
    "sys.path.insert(0, sys.argv.pop(1)); import mlmclm; del sys.path[0]; "
    "from mlmclm.studies.follower_process import main; main()"
)
PACKAGE = str(Path(__file__).parents[2])
"""First argument of `PROGRAM`, which the process runs: the folder of this package, which a notebook may have only in its own `sys.path`."""
NICE = 19
"""Added to the process's niceness while the study runs, so that the sweep has priority if all cores are busy. Ray's workers
have a niceness of 15."""
SECONDS_BETWEEN_READS = 0.25
OWN_TIMEOUT, TIMEOUT = RetryPolicy().seconds, 120.0
"""Seconds in which no run is written and after which the process gives up, once the study has ended: for the store's own database, and for
another address. The next run or `mlmclm tracking sync` writes the rest."""
LIMIT_AFTER_ERROR = 5.0
"""Seconds that the process continues after the study fails, is interrupted or is killed; few, as the user waits for the error's message."""
LIMIT_IF_TERMINATED = 1.0
SECONDS_TO_END = 2.0
"""Seconds after these limits in which the process can mark runs as killed and report what is missing, before it is killed itself."""


@contextmanager
def following(
    store: Path,
    name: str,
    address: str,
    shown: str,
    *,
    on_end: Callable[[Status], None] = lambda status: None,
    niceness: int = NICE,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `mlmclm tracking sync STUDY --follow` as a process; nothing is lost if it is killed.

    The end of the block waits until MLflow has everything or the time is up. It then ends the process, which has reported what is missing.

    Args:
        name: the study's.
        address: an MLflow tracking address.
        shown: the address at which its runs are seen.
        on_end: a function that writes how the study has ended; by default another process writes it.
        niceness: added to the process's own until the driver waits for it.
    """
    process = subprocess.Popen(
        # -P: a file in the working directory must not shadow a module of the standard library.
        [sys.executable, "-P", "-c", PROGRAM, PACKAGE, str(store), name, shown, str(niceness)],
        # The address is not on the command line, where other users could read its password.
        env={**os.environ, VARIABLE: address},
        stdin=subprocess.DEVNULL,
        stdout=2,  # whatever MLflow prints must not get between the command's results
        start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends this process
    )
    limit: float | None = None
    status: Status = "FINISHED"
    try:
        yield process
    except BaseException as error:
        limit, status = LIMIT_AFTER_ERROR + SECONDS_TO_END, "FAILED" if isinstance(error, Exception) else "KILLED"
        raise
    finally:
        with suppress(OSError):  # only root may do so, and the process may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        reason = "interrupted"
        try:
            on_end(status)
            code = process.wait(limit)
            reason = f"the process that writes to MLflow ended by itself, with exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"not finished within {limit:g} s"
        except BaseException:
            process.terminate()  # so that it marks its unfinished runs
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            raise
        finally:
            process.kill()  # safe at any moment, since it writes whole runs or none
            if process.wait():
                say_missing(shown, "some runs", reason)


def say_missing(shown: str, what: str, reason: str) -> None:
    """Say that MLflow lacks runs, and the remedy."""
    say(
        f"MLflow at {shown} lacks {what} ({reason}). Nothing is lost: the results are in the store, and the same "
        "command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
    )


def main() -> None:
    """Write what MLflow lacks of a study, with a progress bar once the study has ended, and report what is missing: the process's main function."""
    store, name, shown, niceness = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    address, folder = os.environ[VARIABLE], store / STUDIES / name
    timeout = OWN_TIMEOUT if address == default_address(store) else TIMEOUT
    terminated: list[int] = []
    # `ray job stop` sends SIGTERM to all of a job's processes, and kills them three seconds later.
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    os.nice(niceness)
    study, seen = TrackedStudy(), list[Mark]()
    follower = Follower(store, name, study, address, shown)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    changed_at = progress_at = time.monotonic()
    left, total, reason = -1, 0, ""
    with ExitStack() as stack:
        bar: Bar | None = None
        while thread.is_alive() and not reason:
            # The lock is checked first: the driver releases it after it has written how the study ended.
            now, previous, working = time.monotonic(), study, is_locked(folder / LOCK)
            if study.status == "RUNNING":
                progress_at, total = now, 0
                with suppress(OSError, ValueError):  # somebody deletes or edits the files
                    # The marks are taken before the files are read, because the driver may write these in between.
                    marks = [mark_of(path.stat()) for path in (folder / FILE, folder / CELLS) if path.exists()]
                    if marks != seen:
                        study, seen = read_runs(store, name), marks
            if (terminated or (study.status == "RUNNING" and not working)) and study.status != "KILLED":
                study = replace(study, status="KILLED")
            if study is not previous:
                changed_at = now
                follower.take(study)
            limit = LIMIT_IF_TERMINATED if terminated else LIMIT_AFTER_ERROR if study.stopped else math.inf
            backlog, error = follower.backlog
            total = max(total, backlog)
            if backlog != left:
                progress_at, left = now, backlog
            if now - changed_at > limit:
                reason = "interrupted" if terminated else f"not finished within {limit:g} s"
            elif now - progress_at > timeout:
                reason = f"nothing was written for {timeout:g} s"
            elif bar is None and left and study.status != "RUNNING" and now - changed_at > SECONDS_OF_SILENCE:
                title = "MLflow, one run a cell (Ctrl-C leaves them for later)"
                bar = stack.enter_context(Bar(title, total, unit="runs"))
            if bar is not None:
                bar.update(total - left, total, note=f"trying again ({error})" if error else "")
            thread.join(SECONDS_BETWEEN_READS)
        left, error = follower.backlog
        if bar is not None:
            bar.complete = not left
    if left:
        say_missing(shown, plural(left, "run"), error or reason)
    os._exit(0)  # the follower may still wait for an answer
