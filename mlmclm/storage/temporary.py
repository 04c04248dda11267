"""Temporary folders that are removed even if the process that made them was killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

from mlmclm.storage.files import disk_faults, machine_tag

GRACE_SECONDS = 60.0
"""Minimum age of what is swept: a younger one may not have been locked by its owner yet."""
FOREIGN_SECONDS = 7 * 24 * 3600.0
"""Minimum age of another machine's files and folders that are swept: its locks may not be visible here.

After a reboot this machine counts as another one.
"""
UNFINISHED = re.compile(r"\..+\.(?P<machine>[0-9a-f]{8})\.[a-z0-9_]{8}")
"""Name of a file or folder that is not complete yet; see `files.temporary_file`."""


@contextmanager
def swept_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder `parent/prefix...` and remove it at the end, after sweeping those of dead owners.

    The owner holds a lock on the folder's `.lock` file, which the kernel drops when the process dies, however it dies.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    with disk_faults(parent):
        parent.mkdir(parents=True, exist_ok=True)
        sweep_folders(parent, prefix)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = (folder / ".lock").open("w")
    with lock:
        # Python's descriptors are not inherited by child processes, so no child can keep the lock alive.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_unfinished(store: Path) -> None:
    """Remove incomplete files and folders that killed processes left in a store.

    They are the hidden files and folders that `files.whole_file`, `whole_folder` and `temporary_file` make. Those that a
    process is working on are left alone, and those that another machine made are left alone for a week.
    """
    for folder in (store, *store.glob("*/"), *store.glob("*/*/")):
        for path in folder.glob(".*"):
            named = UNFINISHED.fullmatch(path.name)
            if named is None:
                continue
            grace = GRACE_SECONDS if named["machine"] == machine_tag() else FOREIGN_SECONDS
            with suppress(OSError):  # in use, another user's, or just removed by another process
                status = path.lstat()
                if time.time() - status.st_mtime < grace:
                    continue
                # NFS locks only files that are open for writing, but folders cannot be opened for writing.
                descriptor = os.open(path, (os.O_RDONLY if S_ISDIR(status.st_mode) else os.O_RDWR) | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                finally:
                    os.close(descriptor)


def sweep_folders(parent: Path, prefix: str) -> None:
    """Remove this user's abandoned folders; other users' folders, young ones and ones in use are left alone."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # in use, or just removed by another process
            status = folder.lstat()
            if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if time.time() - status.st_mtime < GRACE_SECONDS:
                continue
            # Creates the file again if an interrupted removal has deleted it but not the folder.
            with (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
