"""Stores at an address: the object store has all files, and a folder of this machine has the copies that are worked on.

The folder's name spells the address, so every process, on any node of a cluster, can derive the address from a path:
`~/.cache/mlmclm/stores/s3++bucket+prefix/states/KEY` is the copy of `s3://bucket/prefix/states/KEY`.

Finished folders and files are uploaded when they are made, and fetched when they are used:

PART/KEY/manifest.json     size and SHA-256 of each file by its name, with its own checksum; written last
    PART/KEY/objects/SHA256    the content of one or several of these files

A folder exists once it has a manifest. Nothing is renamed, and nothing is written twice: objects are named by their
content, so those of an upload that was interrupted are not sent again, and two processes that make the same folder do
each other no harm. For a store on a disk, all of this does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlmclm.errors import MissingBucket, UserError, for_each, unknown
from mlmclm.progress import say
from mlmclm.storage.checksums import CHECKSUMS, parse_sealed, sealed, sums_of
from mlmclm.storage.files import (
    disk_faults,
    expanded,
    hash_file,
    in_turn,
    is_locked,
    readable,
    set_usual_modes,
    temporary_folder,
    write_atomic,
)
from mlmclm.storage.leases import Leases, ObjectLeases
from mlmclm.storage.objects import PACKAGES, PROTOCOLS, ObjectPath, check_url, read_all

FOLDER = "MLMCLM_STORE_FOLDER"
"""Environment variable that names the folder with this machine's copies of stores at an address."""
DEFAULT_FOLDER = "~/.cache/mlmclm/stores"
PARTED, SLASH = "++", "+"
"""How a folder's name spells :// and / of an address."""
MANIFEST, OBJECTS = "manifest.json", "objects"
ATTEMPTS = 3
"""How often a file is fetched before it counts as damaged, if its content differs from what was sent."""


def local_store(given: str | Path) -> Path:
    """Return the folder of a store: the given one, or this machine's folder of a store at an address.

    Raises:
        UserError: the address cannot be used, or there is no such bucket.
        EnvironmentFault: the object store cannot be reached, and this machine has no copy yet.
    """
    text = str(given)
    protocol, parted, rest = text.partition("://")
    if not parted:
        return Path(given)
    rest = rest.strip("/")
    if protocol not in PACKAGES:
        raise unknown("kind of object store", protocol, PACKAGES, where=f"--store {text}")
    if SLASH in text or not rest:
        raise UserError(f"--store {text}: allowed is PROTOCOL://BUCKET/PREFIX without {SLASH!r}.")
    name = f"{protocol}{PARTED}{rest.replace('/', SLASH)}"
    if len(name) > 200:
        raise UserError(f"--store {text}: the address is too long; allowed are 200 characters.")
    folder = expanded(os.environ.get(FOLDER) or DEFAULT_FOLDER).resolve() / name
    if not folder.is_dir():  # an address that worked before may be out of reach, and is then waited for
        check_url(f"{protocol}://{rest}")
    return folder


def address_of(path: Path) -> ObjectPath | None:
    """Return the address of which a path is the copy; None if the path is in a store without an address."""
    return _address(str(path))


@cache
def _address(path: str) -> ObjectPath | None:
    parts = Path(path).parts
    for number, part in enumerate(parts):
        protocol, parted, rest = part.partition(PARTED)
        if parted and rest and protocol in PROTOCOLS:
            return ObjectPath(f"{protocol}://{'/'.join((*rest.split(SLASH), *parts[number + 1 :]))}")
    return None


def leases_of(store: Path) -> Leases:
    """Return the leases on a store, which are in its folder or at its address."""
    address = address_of(store)
    return Leases(store) if address is None else ObjectLeases(address)


def send(folder: Path, names: Iterable[str] | None = None, *, to: Path | None = None) -> None:
    """Upload a finished folder, and its manifest last.

    Args:
        names: the folder's files to send, by their paths in it; by default all but hidden ones.
        to: the path in the store under which the folder is kept; by default its own path.

    Raises:
        StorageFault: the object store has not answered for too long, or refuses a request.
    """
    to = to or folder
    if address_of(to) is None:
        return
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file())
    files = sums_of(folder, names)
    upload(folder, files, to)
    complete_upload(files, to)


def upload(folder: Path, files: Mapping[str, Mapping[str, Any]], to: Path) -> None:
    """Upload the contents of files, given by name with their checksums; several machines may each upload some of a folder's."""
    address = address_of(to)
    if address is not None and files:
        uploaded = {path.name for path in (address / OBJECTS).iterdir()}
        for name, recorded in files.items():
            if recorded["sha256"] not in uploaded:
                (address / OBJECTS / recorded["sha256"]).upload(folder / name)
                uploaded.add(recorded["sha256"])


def complete_upload(files: Mapping[str, Mapping[str, Any]], to: Path) -> None:
    """Complete a folder at the address whose contents have been uploaded."""
    address = address_of(to)
    if address is not None:
        (address / MANIFEST).write_bytes(readable(sealed({"files": files})).encode())


def fetch_folder(folder: Path, *, of: Path | None = None) -> bool:
    """Fetch a folder that this machine doesn't have; return whether an intact one was fetched.

    The caller has checked that the folder is not here. One process of the machine fetches it, and it appears complete. A
    folder whose objects are missing or damaged is reported, and its manifest is deleted.

    Args:
        of: the path in the store under which the folder is kept; by default its own path.

    Raises:
        StorageFault: the object store has not answered for too long, or refuses a request.
        EnvironmentFault: the disk is full or not writable.
    """
    address = address_of(of or folder)
    if address is None:
        return False
    try:
        content = (address / MANIFEST).read_bytes()
    except FileNotFoundError:
        return False
    try:
        files = parse_sealed(content, address / MANIFEST, "")["files"]
        with disk_faults(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with in_turn(folder.parent / f".{folder.name}.fetching"):
                _fetch(address / OBJECTS, files, folder)
    except MissingBucket:
        raise
    except UserError as error:
        (address / MANIFEST).unlink(missing_ok=True)
        say(f"{address} is not used: {error} It is made again.")
        return False
    return True


def fetched(folder: Path, mark: str) -> Path:
    """Return a folder after fetching it, if it lacks the file `mark` and is in a store at an address."""
    if not (folder / mark).is_file():
        fetch_folder(folder)
    return folder


def _fetch(objects: ObjectPath, files: dict[str, Any], folder: Path) -> None:
    """Fetch the files of a folder that are not here, as its manifest lists them."""
    wanted = {name: recorded for name, recorded in files.items() if not (folder / name).is_file()}
    with temporary_folder(folder) as temporary:
        targets: dict[str, list[Path]] = {}
        for name, recorded in wanted.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            targets.setdefault(recorded["sha256"], []).append(temporary / name)

        def download(sha256: str) -> None:
            first, *copies = targets[sha256]
            _download(objects / sha256, first, sha256)
            for copy in copies:
                os.link(first, copy)

        for_each(targets, download)  # all of them, so that every damaged object is set aside
        set_usual_modes(temporary)
        if not folder.exists():
            temporary.rename(folder)
            return
        # A checkpoint's folder may be here with the exported model only. The file of checksums, which marks it as complete, comes last.
        for name in sorted(wanted, key=lambda name: name == CHECKSUMS):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(folder / name)


def _download(path: ObjectPath, target: Path, sha256: str) -> None:
    for _ in range(ATTEMPTS):
        try:
            path.download(target)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing.") from error
        if hash_file(target) == sha256:
            return
    aside = path.parent.parent / "damaged" / path.name
    path.rename(aside)  # or it would count as sent when the folder is made again
    raise UserError(f"{path} is not what was sent: its checksum differs. It is kept as {aside}.")


def discard(folder: Path) -> None:
    """Delete a folder at the address, its manifest first; this machine's copy stays."""
    address = address_of(folder)
    if address is not None:
        (address / MANIFEST).unlink(missing_ok=True)
        for path in address.iterdir():
            path.unlink(missing_ok=True)


def names_at(folder: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the paths of the folders `depth` levels below `folder` that are complete at the address."""
    address = address_of(folder)
    if address is not None:
        for path in address.iterdir():
            parts = path.below(address).split("/")
            if len(parts) == depth + 1 and parts[-1] == MANIFEST:
                yield folder.joinpath(*parts[:-1])


def send_files(folder: Path) -> None:
    """Upload a folder's files, which may change later, under their own names, except hidden ones and the subfolder `models`."""
    address = address_of(folder)
    if address is not None:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and parts[0] != "models" and not any(part.startswith(".") for part in parts):
                send_file(path)


def bring_files(folder: Path) -> None:
    """Fetch the files of the folders in `folder` that `send_files` has sent, in place of this machine's.

    A folder is left alone while a process of this machine works on it and holds its lock.
    """
    address = address_of(folder)
    if address is not None:
        paths = address.iterdir()
        for path, content in zip(paths, read_all(paths), strict=True):
            target = folder / path.below(address)
            busy = is_locked(folder / target.relative_to(folder).parts[0] / ".lock")
            if content is not None and not busy and not (target.is_file() and target.read_bytes() == content):
                write_atomic(target, content)


def send_file(path: Path) -> None:
    """Upload a small file under its own name."""
    address = address_of(path)
    if address is not None:
        address.write_bytes(path.read_bytes())


def is_local(path: Path) -> bool:
    """Return whether a small file exists, after fetching it if this machine doesn't have it."""
    address = None if path.is_file() else address_of(path)
    if address is not None:
        with suppress(FileNotFoundError):
            write_atomic(path, address.read_bytes())
    return path.is_file()
