"""The folder or address of a store's results, and how long an outage of an address is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.storage.addresses import address_of
from mlmclm.storage.files import read_json, write_json
from mlmclm.storage.objects import ObjectPath

FILE = "storage.json"
WAIT = "wait_for_storage"
"""Entry of the file: the longest outage of an object store that is waited for, in seconds, if the user has set it."""


def results_root(store: Path) -> Path | ObjectPath:
    """Return the folder or address that holds the store's results and their leases.

    Raises:
        UserError: the file `storage.json` is damaged.
    """
    seconds, address = _noted(store), address_of(store)
    if address is not None and seconds is not None:
        availability = address.bucket.availability
        availability.retry = replace(availability.retry, seconds=seconds)
    return store if address is None else address


def wait_for_storage(store: Path, seconds: float) -> None:
    """Save in a store at an address (s3://...) how many seconds to wait out its outages.

    Raises:
        UserError: the store is a folder.
        EnvironmentFault: the disk is full or not writable.
    """
    if address_of(store) is None:
        raise UserError(
            f"--wait-for-storage {seconds:g}: {store} is a folder. Only a store at an address is waited for, such as --store "
            "s3://bucket/prefix."
        )
    if seconds != _noted(store):
        write_json(store / FILE, {WAIT: seconds})


def _noted(store: Path) -> float | None:
    path = store / FILE
    if not path.exists():
        return None
    value = read_json(path)
    seconds = value.get(WAIT) if isinstance(value, dict) else value
    if not isinstance(seconds, int | float) or seconds < 0:
        raise UserError(f"{path}: {WAIT} is {seconds!r}; write a number of seconds.")
    return float(seconds)
