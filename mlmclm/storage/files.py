"""Atomic file writes, file locks, and hashes that are equal on every machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISLNK
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from mlmclm.errors import EnvironmentFault, UserError, meant

if TYPE_CHECKING:
    from mlmclm.storage.objects import ObjectPath


def canonical_json(value: Any) -> str:
    """Serialise to JSON with sorted keys, no spaces and floats in Python's shortest round-trip form; refuses NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def stable_hash(value: Any) -> str:
    """Return the SHA-256 (hex) of a value's canonical JSON: equal values hash equal in every process and machine."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash_file(path: Path | ObjectPath) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomic(path: Path | ObjectPath, content: str | bytes) -> None:
    """Write a file completely or not at all (temporary file in the same folder, fsync, rename), or put an object.

    Raises:
        EnvironmentFault: the disk is full or not writable; nothing is left behind.
    """
    content = content.encode() if isinstance(content, str) else content
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    with whole_file(path) as handle:
        handle.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield an open temporary file that becomes `path` on success and is removed on any error.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    with disk_faults(path), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = temporary_file(path.parent, path.name)
        temporary = Path(name)
        stack.callback(temporary.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(usual_mode())
        temporary.replace(path)


def usual_mode() -> int:
    """Return the mode that new files usually have; `mkstemp` makes files that only their owner can open."""
    umask = os.umask(0)  # it can only be read by setting it
    os.umask(umask)
    return 0o666 & ~umask


def write_json(path: Path | ObjectPath, value: Any) -> None:
    """Write indented JSON with sorted keys, atomically."""
    write_atomic(path, readable(value))


def readable(value: Any) -> str:
    """Return indented JSON with sorted keys."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing or not JSON; the message names it.
    """
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file.") from error


def parse_json(content: bytes, where: object) -> Any:
    """Parse the content of a JSON file.

    Raises:
        UserError: it is not JSON; the message names the file (`where`).
    """
    try:
        return json.loads(content.decode("utf-8"))
    # A ValueError can also mean that it is not UTF-8, or that a number has too many digits.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}).") from error


def expanded(path: str | Path) -> Path:
    """Return the path with a leading `~` or `~name` expanded.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: there is no home folder {Path(path).parts[0]!r}; write the path in full.") from error


def places_of(path: str | Path, beside: Path | None, data_root: Path | None = None) -> list[Path]:
    """List where to look for a path that a configuration file gives: the file's folder, the working directory, then `data_root`.

    `beside` is the file's folder; it is None if no file names the path.
    """
    target = expanded(path)
    if target.is_absolute():
        return [target]
    first = [beside / target] if beside is not None and beside.parts else []
    return [*first, target, *([data_root / target] if data_root is not None else [])]


def first_existing(places: Iterable[Path]) -> Path | None:
    """Return the first of these paths that exists."""
    return next((place for place in places if place.exists()), None)


def nearest(missing: Iterable[Path]) -> str:
    """Return " Did you mean 'FOLDER'?" with the name most like the first missing part of one of these paths; empty if none is."""
    for path in missing:
        folder, name = next((up, path.relative_to(up).parts[0]) for up in path.parents if up.is_dir())
        with suppress(PermissionError):
            if question := meant(name, sorted(entry.name for entry in folder.iterdir())):
                return question
    return ""


def disk_fault(
    error: OSError, path: Path | ObjectPath, *, choose: str = "another folder with --store"
) -> EnvironmentFault:
    """Return the `EnvironmentFault` for a failed write; it names the path, and what to do if the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(
            f"{path}: the disk is full. Free some space, or choose {choose}, and run the same command "
            "again: what is finished is kept."
        )
    return EnvironmentFault(f"{path}: cannot write ({error.strerror or error}).")


@contextmanager
def disk_faults(path: Path | ObjectPath) -> Iterator[None]:
    """Turn an `OSError` of the block into a `disk_fault`."""
    try:
        yield
    except OSError as error:
        raise disk_fault(error, path) from error


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that becomes `target` on success and is removed on any error.

    If `target` appears meanwhile (another process was faster with the same content), the temporary folder is dropped.
    Its folders and files get the usual modes, whatever wrote them: other users may share the store.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    with disk_faults(target), temporary_folder(target) as temporary:
        yield temporary
        finish_folder(temporary, target)


def finish_folder(temporary: Path, target: Path) -> bool:
    """Rename a `temporary_folder` to `target`; leave it and return False if another process has made `target`."""
    set_usual_modes(temporary)
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target`, which is removed at the end unless it has been renamed.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    with ExitStack() as stack:
        with disk_faults(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=_hidden(target.name)))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        held = os.open(temporary, os.O_RDONLY)
        stack.callback(os.close, held)
        _hold(held)
        yield temporary


def remove_folder(folder: Path) -> None:
    """Delete a folder if it is there.

    Raises:
        EnvironmentFault: it can't be deleted.
    """
    with disk_faults(folder):
        if folder.is_dir():
            # Hide it first, so that an interruption leaves no part of it under its name; `temporary.sweep_unfinished` removes the rest.
            hidden = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_hidden(folder.name)))
            folder.rename(hidden / folder.name)
            shutil.rmtree(hidden)


def set_usual_modes(folder: Path) -> None:
    """Give a folder and all that is in it the modes that new ones usually have.

    mkdtemp makes a folder that only its owner can enter, and safetensors files that only their owner can read.
    """
    mode = usual_mode()
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        wanted = mode | (mode >> 2 & 0o111) if S_ISDIR(status.st_mode) else mode
        # A link's target, or a hard link to another user's file, is not ours to change.
        if not S_ISLNK(status.st_mode) and status.st_uid == os.getuid() and S_IMODE(status.st_mode) != wanted:
            path.chmod(wanted)


def temporary_file(folder: Path, name: str) -> tuple[int, str]:
    """Create a hidden file that is to become `folder/name`; return its descriptor and its path.

    While the descriptor is open, `temporary.sweep_unfinished` leaves the file alone.
    """
    descriptor, path = tempfile.mkstemp(dir=folder, prefix=_hidden(name))
    _hold(descriptor)
    return descriptor, path


def machine() -> str:
    """Return the identity of this machine: the boot id of its kernel, which containers share along with its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


@cache
def machine_tag() -> str:
    """Return `machine` as eight hex digits, for file names."""
    return stable_hash(machine())[:8]


def _hidden(name: str) -> str:
    """Return the prefix of the temporary name of what will become `name`; `temporary.UNFINISHED` matches it."""
    return f".{name}.{machine_tag()}."


def _hold(descriptor: int) -> None:
    """Lock an open file or folder of this process, if the file system has locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_folder(path: Path) -> Path:
    """Return a folder to write to, which need not exist yet.

    Raises:
        UserError: a file is in its place, or in that of a folder above it.
    """
    existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise UserError(f"{path}: {existing} is a file; name a folder to write to.")
    return path


@contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Hold an advisory lock on `path`; the kernel drops it when the process dies, however it dies.

    Raises:
        UserError: another live process holds it.
        EnvironmentFault: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Append mode, so that opening the file doesn't erase the id of the process that holds the lock.
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
        handle.write(f"{os.getpid()} on {platform.node()}")
        handle.flush()
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds `only_one` or `in_turn` on `path`."""
    try:
        with path.open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or no locks
        return False
    return False


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`, waiting for its holder.

    Raises:
        EnvironmentFault: the file cannot be created, or the file system has no locks.
    """
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    with handle:
        _lock(handle, path)
        yield


def _lock(handle: IO[str], path: Path, more: int = 0) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process has it locked, and `more` says not to wait.
        EnvironmentFault: the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | more)
    except BlockingIOError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be locked ({error.strerror}). Put the store on a file system with locks (flock); some have them by "
            "a mount option."
        ) from error
