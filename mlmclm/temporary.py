"""Working folders that do not outlive their use, even when the process that made them was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlmclm.files import disk_fault

GRACE_SECONDS = 60.0
"""A folder younger than this is never swept: its owner may be between making it and locking it."""


@contextmanager
def swept_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a new folder `parent/prefix…`, removed at the end; folders of the same prefix whose owner died go first.

    The owner holds a lock on the folder's `.lock` file, which the kernel drops when the process dies, however it dies.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, prefix)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise disk_fault(error, parent) from error
    with lock:
        # Python's descriptors are not inherited by child processes, so no child can keep the lock alive.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes this user's abandoned folders; those of others, young ones and ones in use are left alone."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            status = folder.lstat()
            if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid():
                continue
            if time.time() - status.st_mtime < GRACE_SECONDS:
                continue
            with (folder / ".lock").open("a") as lock:  # made anew where a removal was cut short after it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or just removed by another process
