"""Leases: locks on parts of a store, so that no two processes make the same part at the same time.

A lease is a file `store/claims/PART-KEY` that names its holder. It is created atomically (by a hard link); its holder
renews its modification time and removes it at the end. The lease of a dead holder is taken over:

- On one machine the holder has a lock on the file (flock), which the kernel drops when the process dies, however it
  dies.
- Between machines that share a store, locks may not work (on NFS this depends on its version and mount options). A
  lease of another machine on which nobody has a lock is dead if it has not been renewed for `LEASE_SECONDS`, measured
  by the waiting process's own clock, so that the machines' clocks need not agree.

A lease saves work and keeps processes out of a folder that is changing, but it guarantees nothing: whoever gets a lease
must check again what exists. A process that is suspended for longer than `LEASE_SECONDS` while another machine waits
loses its lease.

An object store has no locks: whoever creates the object holds the lease.
A lease whose content has not changed for `LEASE_SECONDS`, by the clock of the process that looks, is dead and is removed. Its
holder may have died on any machine, also on this one. Only time in which the store answered counts, because a holder
cannot renew its lease during an outage.

Where the store creates objects exclusively, as S3 does, a lease has one holder. Elsewhere two processes may both see no
lease and both write; each reads back after that, and the one whose content is there holds it. Two processes can then
still hold a lease for a moment. That costs time only: equal keys mean equal results.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import platform
import random
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault, MlmclmError, StorageFault
from mlmclm.progress import repeated
from mlmclm.storage.files import disk_fault, usual_mode
from mlmclm.storage.files import machine as this_machine
from mlmclm.storage.objects import ObjectPath, read_all
from mlmclm.storage.retrying import NoAnswer, RetryPolicy

LEASE_SECONDS = 120.0
"""Seconds without renewal after which a lease is dead; longer than file systems cache a file's attributes (NFS: 60 s)."""
RENEWALS = 8
FEWEST_LOOKS = 4
"""Fewest looks at a lease after which it may count as dead. The time between two looks counts as at most `LEASE_SECONDS`
divided by this number, because storage or this process may have been suspended in between."""
SECONDS_BETWEEN_LOOKS = 0.5
PAUSES = RetryPolicy(first=0.02, most=SECONDS_BETWEEN_LOOKS)
"""Pauses between attempts to make a lease that nobody seems to hold."""
MOST_TRIES = 50
"""Attempts to make a lease that nobody seems to hold."""
SECONDS_FOR_RELEASE = 5.0
"""How long a release is tried at first, in seconds: without a release, others wait until the lease is dead."""
SECONDS_UNTIL_DOUBTFUL = 0.9
"""If creating a lease took at least this long, the client may have given up a request that the store carries out later."""


@dataclass(frozen=True)
class _Seen:
    """A lease as it was seen last, and for how many seconds it has been seen unchanged."""

    state: Any
    seconds: float
    at: float
    lost: float


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        since: time at which it took the lease, in seconds of the epoch; None if its lease can't be read.
        alive: false if it is dead, or has not renewed the lease in time.
    """

    host: str
    process: int | str
    since: float | None
    alive: bool


class Leases:
    """The leases on one store, as one process sees them; thread-safe.

    A lease that cannot be read or written, as on a full disk, is an `EnvironmentFault`.

    Args:
        seconds: the time without renewal after which another machine's lease is dead.
        machine: an identity that distinguishes this machine from others; by default the running kernel's.
    """

    def __init__(self, store: Path, *, seconds: float = LEASE_SECONDS, machine: str | None = None) -> None:
        self.folder = store / "claims"
        self._seconds = seconds
        self._machine = machine or this_machine()
        self._seen: dict[str, _Seen] = {}

    def holder(self, name: str) -> str | None:
        """Return who holds a lease ("process 12 on HOST"), or None if nobody does; a dead holder's lease is removed."""
        path = self.folder / name
        try:
            with path.open("r+b") as file:  # NFS locks only files that are open for writing
                status, content = os.fstat(file.fileno()), file.read()
                held, locked = read_lease(content), _lock(file.fileno())
                who = f"process {held['process']} on {held['host']}"
                if locked is False:
                    return who
                # A lock that could be taken proves death only on the holder's own machine; another machine's locks may
                # not reach here.
                died_here = locked and held["machine"] == self._machine
                if not died_here and self._unchanged(name, (status.st_ino, status.st_mtime_ns)) < self._seconds:
                    return who
                # While we have the lock, no process of this machine replaces the file.
                if path.stat().st_ino == status.st_ino:
                    path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise disk_fault(error, path) from error
        self._seen.pop(name, None)
        return None

    def held(self, prefix: str) -> dict[str, Holder]:
        """Return the holders of all leases whose names start with `prefix`, by the rest of the name; nothing is changed.

        Whether the lease of another machine is dead is judged by the clocks of this machine and of the file system, which
        is accurate enough for display; `holder` decides by this process's clock alone.
        """
        holders = {}
        for path in sorted(self.folder.glob(f"{prefix}*")):
            with suppress(OSError), path.open("rb") as file:  # it may have been released meanwhile
                who = read_lease(file.read())
                if who["machine"] == self._machine:
                    alive = _lock(file.fileno(), fcntl.LOCK_SH) is not True
                else:
                    alive = time.time() - os.fstat(file.fileno()).st_mtime < self._seconds
                holders[path.name.removeprefix(prefix)] = Holder(who["host"], who["process"], who.get("since"), alive)
        return holders

    @contextmanager
    def attempt(self, names: Sequence[str]) -> Iterator[str | None]:
        """Lease all of these, or none, for the duration of the block; yield None if that worked, else who holds one of them."""
        with ExitStack() as stack:
            for name in names:
                for failures in itertools.count(1):
                    if self._take(name, stack):
                        break
                    # None means that the lease was released or its holder is dead: try again.
                    if (holder := self.holder(name)) is not None:
                        # Holding some leases while waiting for others could block two processes forever.
                        stack.close()
                        yield holder
                        return
                    if failures == MOST_TRIES:
                        raise EnvironmentFault(
                            f"lease {name}: {MOST_TRIES} times it could not be made although nobody holds it. Does the "
                            "place of the leases keep what is written to it?"
                        )
                    time.sleep(PAUSES.pause(failures, random.random()))
            yield None

    @contextmanager
    def wait(self, names: Callable[[], Sequence[str]], waiting: Callable[[str], None]) -> Iterator[None]:
        """Lease all of these for the duration of the block, waiting for whoever holds one of them now.

        Args:
            names: called before each attempt, since the other process may have made some of the parts.
            waiting: called once with the holder if there is one to wait for.
        """
        said = False
        while True:
            with self.attempt(names()) as holder:
                if holder is None:
                    yield
                    return
            if not said:
                waiting(holder)
                said = True
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _take(self, name: str, stack: ExitStack) -> bool:
        """Create a lease, to be released by `stack`; return False if it exists."""
        path = self.folder / name
        if path.exists():
            return False
        who = {"machine": self._machine, "host": platform.node(), "process": os.getpid()}
        content = json.dumps({**who, "since": round(time.time(), 3)})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                os.write(descriptor, content.encode())
                os.fchmod(descriptor, usual_mode())  # other users may share the store
                _lock(descriptor)  # before others can see the file, or they could take it for a dead holder's
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
        stack.callback(_release, path, descriptor)
        # The renewal starts last, because it fails if the process may have no more threads.
        stack.enter_context(self._renewed(name, partial(_renew, descriptor)))
        return True

    def _renewed(self, name: str, renew: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager that renews a lease in time."""
        return repeated(renew, seconds=self._seconds / RENEWALS, name=f"mlmclm lease {name}")

    def _unchanged(self, name: str, state: Any, lost: float = 0.0) -> float:
        """Return for how many seconds this process has seen a lease in its present state.

        Args:
            lost: seconds so far in which the leases' storage has not answered; they don't count.
        """
        now, before, seconds = time.monotonic(), self._seen.get(name), 0.0
        if before is not None and before.state == state:
            counted = now - before.at - (lost - before.lost)
            seconds = before.seconds + min(max(0.0, counted), self._seconds / FEWEST_LOOKS)
        self._seen[name] = _Seen(state, seconds, now, lost)
        return seconds


class ObjectLeases(Leases):
    """The leases below an address (`root`), as one process sees them; thread-safe.

    A lease is dead after `seconds` without renewal.
    """

    def __init__(self, root: ObjectPath, *, seconds: float = LEASE_SECONDS) -> None:
        self._objects = root / "claims"
        self._seconds = seconds
        self._seen = {}

    def holder(self, name: str) -> str | None:
        path = self._objects / name
        try:
            content = path.read_bytes()
            held = read_lease(content)
            who = f"process {held['process']} on {held['host']}"
            if self._unchanged(name, content, path.bucket.availability.lost) < self._seconds:
                return who
            if path.read_bytes() == content:
                try:
                    path.hurried().unlink(missing_ok=True)
                except NoAnswer:
                    # A repeated request could delete a lease that has been renewed meanwhile.
                    return who
        except FileNotFoundError:
            pass
        self._seen.pop(name, None)
        return None

    def held(self, prefix: str) -> dict[str, Holder]:
        paths = [path for path in self._objects.iterdir() if path.name.startswith(prefix)]
        holders = {}
        for path, content in zip(paths, read_all(paths), strict=True):
            if content is not None:
                who = read_lease(content)
                alive = time.time() - who.get("renewed", 0.0) < self._seconds
                holders[path.name.removeprefix(prefix)] = Holder(who["host"], who["process"], who.get("since"), alive)
        return holders

    def _take(self, name: str, stack: ExitStack) -> bool:
        path, now = self._objects / name, round(time.time(), 3)
        who = {"host": platform.node(), "process": os.getpid(), "since": now, "token": uuid.uuid4().hex}
        asked = time.monotonic()
        # An existing lease may be our own: if the answer to our request was lost, the request has been repeated.
        with suppress(FileExistsError):
            path.write_bytes(_content(who), new=True)
        doubtful = time.monotonic() - asked >= SECONDS_UNTIL_DOUBTFUL
        with suppress(FileNotFoundError):
            if _ours(path, who):
                stack.callback(self._release, path, who, doubtful)
                stack.enter_context(self._renewed(name, partial(_renew_object, path, who)))
                return True
        if doubtful:
            self._release_later(path, who)
        return False

    def _release(self, path: ObjectPath, who: dict[str, Any], doubtful: bool) -> None:
        """Remove a lease of ours; look again later if that failed, or if a late request may make it anew."""
        if not _remove(path, who, SECONDS_FOR_RELEASE) or doubtful:
            self._release_later(path, who)

    def _release_later(self, path: ObjectPath, who: dict[str, Any]) -> None:
        """Remove a lease of this process in the background, repeatedly, until the time when it would have ended."""

        def look() -> None:
            for _ in range(RENEWALS):
                time.sleep(self._seconds / RENEWALS)
                _remove(path, who)

        threading.Thread(target=look, name=f"mlmclm release {path.name}", daemon=True).start()


def _renew(descriptor: int) -> None:
    with suppress(OSError):  # the file server may be unavailable for a moment
        os.utime(descriptor)


def _release(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        if path.stat().st_ino == os.fstat(descriptor).st_ino:  # unless another process has taken it over
            path.unlink()
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still have the file open
    os.close(descriptor)


def _link(temporary: str, path: Path) -> None:
    """Give a complete file its final name unless that name is taken.

    A hard link is the only way to do so that is atomic on every kind of network file system.

    Raises:
        FileExistsError: another process has taken the name.
        EnvironmentFault: this file system has no hard links.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise EnvironmentFault(
            f"{path}: this file system has no hard links ({error.strerror}), which a store needs so that two processes "
            "never make the same thing. Choose a folder on another with --store."
        ) from error


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open file: return whether that worked, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_lease(content: bytes) -> dict[str, Any]:
    """Return a lease's content; invalid content counts as the lease of an unknown machine."""
    unknown = {"machine": "", "host": "an unknown machine", "process": "?"}
    try:
        return unknown | dict(json.loads(content))
    except (ValueError, TypeError):
        return unknown


def _content(who: dict[str, Any]) -> bytes:
    return json.dumps({**who, "renewed": time.time()}).encode()


def _ours(path: ObjectPath, who: dict[str, Any]) -> bool:
    return bool(read_lease(path.read_bytes()).get("token") == who["token"])


def _renew_object(path: ObjectPath, who: dict[str, Any]) -> None:
    """Renew a lease of ours, without waiting for a store that is out of reach: the next renewal comes soon."""
    path = path.hurried()
    with suppress(MlmclmError, FileNotFoundError, FileExistsError):
        tag = path.tag()  # read before the content, so that a later change is noticed
        if not _ours(path, who):
            return
        try:
            path.write_bytes(_content(who), tag=tag)
        except NoAnswer:
            raise
        except StorageFault:  # a store that doesn't support this condition
            path.write_bytes(_content(who))


def _remove(path: ObjectPath, who: dict[str, Any], seconds: float = 0.0) -> bool:
    """Remove a lease if it is ours; return whether the store has answered.

    Args:
        seconds: how long this is tried. Each try looks at the lease again: if an earlier one has removed ours but its
            answer was lost, the lease can be another process's by now.
    """
    path = path.hurried()

    def look_and_remove() -> None:
        if _ours(path, who):
            path.unlink(missing_ok=True)

    try:
        path.bucket.availability.keep_asking(look_and_remove, waits=seconds)
    except FileNotFoundError:
        pass
    except MlmclmError:
        return False
    return True
