"""Claims: locks on parts of a store, so that no two processes make the same part at the same time.

A claim is a file `store/claims/PART-KEY` that names its holder. It is created atomically (by a hard link); its holder
renews its modification time and removes it at the end. The claim of a dead holder is taken over:

- On one machine the holder has a lock on the file (flock), which the kernel drops when the process dies, however it
  dies.
- Between machines that share a store, locks may not work (on NFS this depends on its version and mount options). A
  claim of another machine on which nobody has a lock is dead if it has not been renewed for `LEASE_SECONDS`, measured
  by the waiting process's own clock, so that the machines' clocks need not agree.

A claim saves work and keeps processes out of a folder that is changing, but it guarantees nothing: whoever gets a claim
must check again what exists. A process that is suspended for longer than a lease while another machine waits loses its
claim.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault
from mlmclm.progress import repeated
from mlmclm.storage.files import disk_fault, usual_mode
from mlmclm.storage.files import machine as this_machine
from mlmclm.storage.patience import Patience

LEASE_SECONDS = 120.0
"""Longer than file systems cache a file's attributes (NFS: 60 s)."""
RENEWALS_A_LEASE = 8
LOOKS_A_LEASE = 4
"""Fewest looks at a claim that prove its holder's death: the time between two looks counts at most this part of a lease,
since the claims' place, or this process, may have been stopped meanwhile without anybody noticing."""
SECONDS_BETWEEN_LOOKS = 0.5
PAUSES = Patience(first=0.02, most=SECONDS_BETWEEN_LOOKS)
"""Pauses between attempts to make a claim that nobody seems to hold."""
MOST_TRIES = 50
"""Attempts to make a claim that nobody seems to hold."""


@dataclass(frozen=True)
class _Seen:
    """A claim as it was seen last, and for how many seconds it has been seen unchanged."""

    state: Any
    seconds: float
    at: float
    lost: float


@dataclass(frozen=True)
class Holder:
    """The process that holds a claim.

    Attributes:
        since: time at which it took the claim, in seconds of the epoch; None if its claim can't be read.
        alive: false if it is dead, or has not renewed the claim for a lease.
    """

    host: str
    process: int | str
    since: float | None
    alive: bool


class Claims:
    """The claims on one store, as one process sees them; thread-safe.

    A claim that cannot be read or written, as on a full disk, is an `EnvironmentFault`.

    Args:
        lease: seconds without renewal after which another machine's claim is dead.
        machine: an identity that distinguishes this machine from others; by default the running kernel's.
    """

    def __init__(self, store: Path, *, lease: float = LEASE_SECONDS, machine: str | None = None) -> None:
        self.folder = store / "claims"
        self._lease = lease
        self._machine = machine or this_machine()
        self._seen: dict[str, _Seen] = {}

    def holder(self, name: str) -> str | None:
        """Return who holds a claim ("process 12 on HOST"), or None if nobody does; a dead holder's claim is removed."""
        path = self.folder / name
        try:
            with path.open("r+b") as file:  # NFS locks only files that are open for writing
                status, content = os.fstat(file.fileno()), file.read()
                held, locked = read_claim(content), _lock(file.fileno())
                who = f"process {held['process']} on {held['host']}"
                if locked is False:
                    return who
                # A lock that could be taken proves death only on the holder's own machine; another machine's locks may
                # not reach here.
                died_here = locked and held["machine"] == self._machine
                if not died_here and self._unchanged(name, (status.st_ino, status.st_mtime_ns)) < self._lease:
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
        """Return the holders of all claims whose names start with `prefix`, by the rest of the name; nothing is changed.

        The claim of another machine counts as dead by the clocks of this machine and of the file system, which is good
        enough to show; `holder` decides by this process's clock alone.
        """
        found = {}
        for path in sorted(self.folder.glob(f"{prefix}*")):
            with suppress(OSError), path.open("rb") as file:  # it may have been released meanwhile
                held = read_claim(file.read())
                if held["machine"] == self._machine:
                    alive = _lock(file.fileno(), fcntl.LOCK_SH) is not True
                else:
                    alive = time.time() - os.fstat(file.fileno()).st_mtime < self._lease
                found[path.name.removeprefix(prefix)] = Holder(held["host"], held["process"], held.get("since"), alive)
        return found

    @contextmanager
    def attempt(self, names: Sequence[str]) -> Iterator[str | None]:
        """Claim all of these, or none, for the duration of the block; yield None, or who holds one of them."""
        with ExitStack() as stack:
            for name in names:
                for failures in itertools.count(1):
                    if self._take(name, stack):
                        break
                    # None means that the claim was released or its holder is dead: try again.
                    if (other := self.holder(name)) is not None:
                        # Holding some claims while waiting for others could block two processes forever.
                        stack.close()
                        yield other
                        return
                    if failures == MOST_TRIES:
                        raise EnvironmentFault(
                            f"claim {name}: {MOST_TRIES} times it could not be made although nobody holds it. Does the "
                            "place of the claims keep what is written to it?"
                        )
                    time.sleep(PAUSES.pause(failures, random.random()))
            yield None

    @contextmanager
    def wait(self, names: Callable[[], Sequence[str]], waiting: Callable[[str], None]) -> Iterator[None]:
        """Claim all of these for the duration of the block, waiting for whoever holds one of them now.

        Args:
            names: called before each attempt, since the other process may have made some of the parts.
            waiting: called once with the holder if there is one to wait for.
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
        """Create a claim, to be released by `stack`; return False if it exists."""
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
        # Last, as it fails when the process may have no more threads.
        stack.enter_context(self._renewed(name, partial(_renew, descriptor)))
        return True

    def _renewed(self, name: str, renew: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager that calls a function several times a lease."""
        return repeated(renew, seconds=self._lease / RENEWALS_A_LEASE, name=f"mlmclm claim {name}")

    def _unchanged(self, name: str, state: Any, lost: float = 0.0) -> float:
        """Return for how many seconds this process has seen a claim in its present state.

        Args:
            lost: seconds so far in which the claims' place has not answered; they don't count.
        """
        now, known, seconds = time.monotonic(), self._seen.get(name), 0.0
        if known is not None and known.state == state:
            counted = now - known.at - (lost - known.lost)
            seconds = known.seconds + min(max(0.0, counted), self._lease / LOOKS_A_LEASE)
        self._seen[name] = _Seen(state, seconds, now, lost)
        return seconds


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


def _link(made: str, path: Path) -> None:
    """Give a complete file its final name unless that name is taken.

    A hard link is the only way to do so that is atomic on every kind of network file system.

    Raises:
        FileExistsError: another process has taken the name.
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


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open file: return whether that worked, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_claim(content: bytes) -> dict[str, Any]:
    """Return a claim's content; content that is no claim's counts as that of an unknown machine."""
    unknown = {"machine": "", "host": "an unknown machine", "process": "?"}
    try:
        return unknown | dict(json.loads(content))
    except (ValueError, TypeError):
        return unknown
