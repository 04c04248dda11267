"""Where a store's results are: in the store, which is a folder or at an address; and how long an address is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage.addresses import address_of
from mlmclm.storage.files import read_json, write_json
from mlmclm.storage.objects import ObjectPath

FILE = "ledger.json"
WAIT = "wait_for_storage"
"""Entry of the file: the longest outage of an object store that is waited for, in seconds, if the user has set it."""


def results_root(store: Path) -> Path | ObjectPath:
    """Return the folder or address that holds the store's results and their leases.

    Raises:
        UserError: the file `ledger.json` is damaged, or an earlier version has put the results outside of the store.
    """
    noted, address = _noted(store), address_of(store)
    if noted.get("url", str(address)) != str(address):
        url = noted["url"]
        raise UserError(
            f"{store / FILE}: an earlier version (--ledger) has put the results of this store at {url}, which is no longer "
            f"possible. Copy {url}/cells to {store / 'cells'} and delete this file, or work with --store {url}."
        )
    if address is not None and WAIT in noted:
        availability = address.bucket.availability
        availability.retry = replace(availability.retry, seconds=float(noted[WAIT]))
    return store if address is None else address


def wait_for_storage(store: Path, seconds: float) -> None:
    """Note how long an outage of the object store of a store at an address is waited for, in seconds.

    Raises:
        UserError: the store is a folder.
        EnvironmentFault: the disk is full or not writable.
    """
    if address_of(store) is None:
        raise UserError(
            f"--wait-for-storage {seconds:g}: {store} is a folder. Only a store at an address is waited for, such as --store "
            "s3://bucket/prefix."
        )
    value = _noted(store) | {WAIT: seconds}
    if value != _noted(store):
        write_json(store / FILE, value)


def _noted(store: Path) -> dict[str, Any]:
    path = store / FILE
    if not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("url", ""), str):
        raise UserError(f"{path}: not the place of a results store. Delete it if the results are in {store}.")
    if not isinstance(value.get(WAIT, 0.0), int | float) or value.get(WAIT, 0.0) < 0:
        raise UserError(f"{path}: {WAIT} is {value[WAIT]!r}; write a number of seconds.")
    return value
