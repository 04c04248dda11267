"""Files that are whole or absent, and hashes that mean the same thing everywhere."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

from mlmclm.errors import EnvironmentFault, UserError


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; floats as Python's shortest round-trip form; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def stable_hash(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value's canonical form: equal values hash equal in every process and on every machine."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all (temporary file in the same folder, fsync, rename).

    Raises:
        EnvironmentFault: the disk is full or not writable; nothing is left behind.
    """
    with whole_file(path) as handle:
        handle.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields an open temporary file that becomes `path` on success, and vanishes on any error.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = temporary_file(path.parent, path.name)
        with os.fdopen(descriptor, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        raise disk_fault(error, path) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON with sorted keys."""
    write_atomic(path, readable(value))


def readable(value: Any) -> str:
    """Indented JSON with sorted keys."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Reads JSON; a file that isn't there or isn't JSON is a `UserError` that names it."""
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file.") from error


def parse_json(content: bytes, where: object) -> Any:
    """The value of a JSON file's content; a `UserError` names the file (`where`) that isn't JSON."""
    try:
        return json.loads(content.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not valid JSON ({error}).") from error


def expanded(path: str | Path) -> Path:
    """The path with `~` or `~name` at its beginning replaced.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: there is no home folder {Path(path).parts[0]!r}; write the path in full.") from error


def places_of(path: str | Path, beside: Path | None, data_root: Path | None = None) -> list[Path]:
    """Where a path that a configuration file names is looked for: in that file's folder, in the working directory, under
    `data_root`.

    Args:
        beside: the file's folder; None where no file names the path.
    """
    own = expanded(path)
    if own.is_absolute():
        return [own]
    first = [beside / own] if beside is not None and beside.parts else []
    return [*first, own, *([data_root / own] if data_root is not None else [])]


def first_there(places: Iterable[Path]) -> Path | None:
    """The first of these paths that there is."""
    return next((place for place in places if place.exists()), None)


def disk_fault(error: OSError, path: Path, *, choose: str = "another folder with --store") -> EnvironmentFault:
    """The `EnvironmentFault` for a failed write: says which path, and what to do when the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(
            f"{path}: the disk is full. Free some space, or choose {choose}, and run the same command "
            "again: what is finished is kept."
        )
    return EnvironmentFault(f"{path}: cannot write ({error.strerror or error}).")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target` that becomes `target` on success, and vanishes on any error.

    If `target` appears meanwhile (another process was faster with the same content), the temporary one is dropped.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    temporary: Path | None = None
    held: int | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=_hidden(target.name)))
        held = os.open(temporary, os.O_RDONLY)
        _hold(held)
        temporary.chmod(0o755)
        yield temporary
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except OSError as error:
        raise disk_fault(error, target) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)


def temporary_file(folder: Path, name: str) -> tuple[int, str]:
    """Makes a hidden file that is to become `folder/name`: its descriptor and its path.

    As long as the descriptor is open `temporary.sweep_unfinished` leaves it alone.
    """
    descriptor, path = tempfile.mkstemp(dir=folder, prefix=_hidden(name))
    _hold(descriptor)
    return descriptor, path


def machine() -> str:
    """The identity of this machine: that of the running kernel, which containers share as they share its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


@cache
def machine_tag() -> str:
    """`machine` in eight hex digits, for names of files."""
    return stable_hash(machine())[:8]


def _hidden(name: str) -> str:
    """How the name of what is to become `name` begins; `temporary.UNFINISHED` knows it by that."""
    return f".{name}.{machine_tag()}."


def _hold(descriptor: int) -> None:
    """Locks an open file or folder of our own, where the file system has locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel drops it when the process dies, however it dies.

    Raises:
        UserError: another live process holds it.
        EnvironmentFault: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            _lock(handle, path, fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise UserError(
                f"{what} is already being worked on by process {handle.read().strip() or '?'} (lock {path}). "
                "Wait for it, or choose another --store."
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


@contextmanager
def in_turn(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an advisory lock on `path`, after whoever holds it now; `waiting` is called where that takes time.

    Raises:
        EnvironmentFault: the file cannot be made, or the file system has no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError as error:
        raise disk_fault(error, path) from error
    with handle:
        try:
            _lock(handle, path, fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            _lock(handle, path)
        yield


def _lock(handle: IO[str], path: Path, more: int = 0) -> None:
    """Locks an open file; raises `BlockingIOError` where another process has it and `more` says not to wait."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | more)
    except BlockingIOError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be locked ({error.strerror}). Put the store on a file system with locks (flock); some have them by "
            "a mount option."
        ) from error
