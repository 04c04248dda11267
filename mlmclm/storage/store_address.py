"""Stores at an address: the object store has everything, and a folder of this machine is where it is worked on.

The name of that folder spells the address, so a process that has a path of the store knows the address, too, on every
node of a cluster: `~/.cache/mlmclm/stores/s3++bucket+prefix/states/KEY` stands for `s3://bucket/prefix/states/KEY`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from mlmclm.errors import UserError, unknown
from mlmclm.storage.buckets import PACKAGES, PROTOCOLS
from mlmclm.storage.claims import Claims
from mlmclm.storage.files import expanded
from mlmclm.storage.object_claims import ObjectClaims
from mlmclm.storage.objects import ObjectPath, check_url

FOLDER = "MLMCLM_STORE_FOLDER"
"""Environment variable that names the folder with this machine's copies of stores at an address."""
DEFAULT_FOLDER = "~/.cache/mlmclm/stores"
PARTED, SLASH = "++", "+"
"""How a folder's name spells :// and / of an address."""


def local_store(given: str | Path) -> Path:
    """Return the folder of a store: the one that is given, or this machine's of the store at an address.

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
    """Return the address that a path of a store stands for; None for a store that is a folder and nothing else."""
    return _address(str(path))


@cache
def _address(path: str) -> ObjectPath | None:
    parts = Path(path).parts
    for number, part in enumerate(parts):
        protocol, parted, rest = part.partition(PARTED)
        if parted and rest and protocol in PROTOCOLS:
            return ObjectPath(f"{protocol}://{'/'.join((*rest.split(SLASH), *parts[number + 1 :]))}")
    return None


def claims_of(store: Path) -> Claims:
    """Return the claims on a store, which are where the store is."""
    address = address_of(store)
    return Claims(store) if address is None else ObjectClaims(address)
