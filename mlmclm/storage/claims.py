"""Claims: which parts of a store a process makes now, so that no other process makes the same at the same time.

A claim is a file `store/claims/PART-KEY` that says who holds it. It appears whole (a hard link), its holder renews its time of
change, and removes it at the end. One whose holder has died is taken over:

- On one machine the holder has a lock on the file (flock), which the kernel drops when the process dies, however it dies.
- Between machines that share a store, locks may not reach (NFS, by its version and mount options). A claim of another machine
  that nobody has a lock on is dead once it has not been renewed for `LEASE_SECONDS` of the waiting process's own clock, so that
  machines' clocks need not agree.

A claim saves work and keeps processes out of a folder that changes; it proves nothing. Whoever gets one looks again at what is
there. A process that is stopped for longer than a lease, while another machine waits, loses its claim.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault
from mlmclm.progress import say
from mlmclm.storage.files import disk_fault
from mlmclm.storage.files import machine as this_machine

LEASE_SECONDS = 120.0
"""Longer than file systems keep a file's attributes in a cache (NFS: 60 s)."""
RENEWALS_A_LEASE = 8
SECONDS_BETWEEN_LOOKS = 0.5


class Claims:
    """The claims on one store, as one process sees them; safe to use from any thread.

    Args:
        machine: what tells this machine's processes from others'; by default the kernel's own identity.
    """

    def __init__(self, store: Path, *, lease: float = LEASE_SECONDS, machine: str | None = None) -> None:
        self.folder = store / "claims"
        self._lease = lease
        self._machine = machine or this_machine()
        self._seen: dict[str, tuple[Any, float]] = {}

    def holder(self, name: str) -> str | None:
        """Who holds a claim ("process 12 on HOST"), None where nobody does. One whose holder is dead is removed.

        Raises:
            EnvironmentFault: it cannot be read.
        """
        path = self.folder / name
        try:
            with path.open("r+b") as file:  # NFS locks only what is open for writing
                status, content = os.fstat(file.fileno()), file.read()
                held, locked = _read(content), _lock(file.fileno())
                who = f"process {held['process']} on {held['host']}"
                if locked is False:
                    return who
                died_here = locked and held["machine"] == self._machine
                since = self._unchanged_since(name, (status.st_ino, status.st_mtime_ns, content))
                if not died_here and time.monotonic() - since < self._lease:
                    return who
                if path.stat().st_ino == status.st_ino:  # while we have the lock, nobody of this machine exchanges it
                    path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise disk_fault(error, path) from error
        self._seen.pop(name, None)
        return None

    @contextmanager
    def attempt(self, names: Sequence[str]) -> Iterator[str | None]:
        """Claims all of these, or none, for the time of the block; yields None, or who holds one of them.

        Raises:
            EnvironmentFault: the disk is full or not writable.
        """
        with ExitStack() as stack:
            for name in names:
                while True:
                    if self._take(name, stack):
                        break
                    other = self.holder(name)
                    if other is not None:
                        stack.close()
                        yield other
                        return
            yield None

    @contextmanager
    def wait(self, names: Callable[[], Sequence[str]], waiting: Callable[[str], None]) -> Iterator[None]:
        """Claims all of these for the time of the block, after whoever holds one of them now.

        Args:
            names: asked before each attempt: the other process may have made some of it.
            waiting: called once with who holds it, where that takes time.

        Raises:
            EnvironmentFault: the disk is full or not writable.
        """
        said = False
        while True:
            with self.attempt(names()) as other:
                if other is None:
                    yield
                    return
            if not said:
                waiting(other)
                said = True
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _take(self, name: str, stack: ExitStack) -> bool:
        """Makes a claim, which `stack` then releases; False where there is one."""
        path = self.folder / name
        if path.exists():
            return False
        content = json.dumps({"machine": self._machine, "host": platform.node(), "process": os.getpid()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                os.write(descriptor, content.encode())
                os.fchmod(descriptor, 0o666 & ~_umask())
                _lock(descriptor)  # before it can be seen
                _link(temporary, path)
            except BaseException:
                os.close(descriptor)
                raise
            finally:
                Path(temporary).unlink(missing_ok=True)
        except FileExistsError:
            return False
        except OSError as error:
            raise disk_fault(error, path) from error
        released = threading.Event()
        renewal = threading.Thread(
            target=_renew, args=(descriptor, released, self._lease), name=f"mlmclm claim {name}", daemon=True
        )
        stack.callback(_release, path, descriptor, released, renewal)
        renewal.start()  # fails where a process may have no more threads
        return True

    def _unchanged_since(self, name: str, state: Any) -> float:
        """When (monotonic) this process first saw a claim as it is."""
        known = self._seen.get(name)
        if known is None or known[0] != state:
            known = self._seen[name] = (state, time.monotonic())
        return known[1]


def make_once(store: Path, name: str, title: str, *, there: Callable[[], bool], make: Callable[[], None]) -> None:
    """Makes a part of the store unless it is there, while no other process makes it.

    Args:
        name: of the claim.
        title: what it is, for the line that says that it is waited for.

    Raises:
        EnvironmentFault: the disk is full or not writable. Besides, whatever `make` raises.
    """

    def waiting(other: str) -> None:
        say(f"{title}: waiting for {other}, which makes it")

    with Claims(store).wait(lambda: [] if there() else [name], waiting):
        if not there():
            make()


def _renew(descriptor: int, released: threading.Event, lease: float) -> None:
    while not released.wait(lease / RENEWALS_A_LEASE):
        with suppress(OSError):  # a server that is away for a moment
            os.utime(descriptor)


def _release(path: Path, descriptor: int, released: threading.Event, renewal: threading.Thread) -> None:
    released.set()
    if renewal.ident is not None:
        renewal.join()
    with suppress(OSError):
        if path.stat().st_ino == os.fstat(descriptor).st_ino:  # not another's, who has taken it over
            path.unlink()
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still have the file open
    os.close(descriptor)


def _link(made: str, path: Path) -> None:
    """Gives a whole file its name, unless another has it: the only way that is one step on every kind of network file system.

    Raises:
        FileExistsError: another has it.
        EnvironmentFault: this file system has no hard links.
    """
    try:
        os.link(made, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise EnvironmentFault(
            f"{path}: this file system has no hard links ({error.strerror}), which a store needs so that two processes "
            "never make the same thing. Choose a folder on another with --store."
        ) from error


def _lock(descriptor: int) -> bool | None:
    """Locks an open file unless another process has: whether it did; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(content: bytes) -> dict[str, Any]:
    """A claim's content; one that is no claim's is some other machine's."""
    unknown = {"machine": "", "host": "an unknown machine", "process": "?"}
    try:
        return unknown | dict(json.loads(content))
    except (ValueError, TypeError):
        return unknown


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
