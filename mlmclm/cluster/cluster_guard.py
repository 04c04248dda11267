"""Guard of a private cluster: ends its processes and removes its folder as soon as the driver has died.

If a node has died and the driver uses its object store, Ray ends the driver at once and without a message. The guard prints why.

The kernel kills only the daemons that the driver itself started. Processes that a daemon starts check by themselves
whether it lives, but only once they have started up completely, which takes minutes if nothing answers them. The guard
reads from a pipe whose other end only the driver has open, so it notices the driver's death, however the driver dies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SECONDS_TO_END = 5.0
"""Grace period between asking a process to end and killing it."""
ENDED = b"."
"""Sent by a driver that has ended its cluster itself."""
RESUMES = "What is finished is kept, and the same command resumes from it."
NODE_HAS_DIED = f"Ray's node on this machine has died. {RESUMES}"
_ENDED_BY_RAY = "Terminate the process"
"""Text at the end of a driver's log if Ray ended the driver because its node doesn't answer."""
_WRITING = frozenset("wa+")


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Run a guard of the cluster in `folder` for the block, and end the cluster's processes after it.

    The guard also removes the folder, and the file beside it that tells Prometheus where the cluster's metrics are.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not end it before the driver
    )
    try:
        yield
    finally:
        end_processes(folder)
        with suppress(OSError):  # somebody killed the guard
            guard.communicate(ENDED)


def end_processes(folder: Path, grace: float = SECONDS_TO_END) -> None:
    """End the processes of the cluster in `folder`, first with SIGTERM and after `grace` seconds with SIGKILL.

    `ray.shutdown` doesn't wait for them, and it doesn't know of them if `ray.init` failed.
    """
    processes = processes_of(folder)
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(processes, grace)[1]:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, grace)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of the cluster in `folder`, without this one: those that write logs there.

    Ray's processes change their command lines, and get another parent when theirs dies, so neither identifies them.
    """
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended, or another user's
            if process.pid != os.getpid() and any(
                Path(file.path).is_relative_to(folder) and _WRITING & set(file.mode) for file in process.open_files()
            ):
                processes.append(process)
    return processes


def main() -> None:
    """Wait for the driver's end; if it has died, clean up, and print a message if its node was the reason."""
    folder, driver = Path(sys.argv[1]), os.getppid()
    if sys.stdin.buffer.read() == ENDED:
        return
    for log in folder.glob(f"*/session_2*/logs/python-core-driver-*_{driver}.log"):
        with suppress(OSError):  # a closed terminal
            if _ENDED_BY_RAY in log.read_text(encoding="utf-8", errors="replace"):
                print(f"mlmclm: {NODE_HAS_DIED}", file=sys.stderr, flush=True)
    # The second pass finds processes that those of the first pass had just started.
    for _ in range(2):
        end_processes(folder, grace=0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
