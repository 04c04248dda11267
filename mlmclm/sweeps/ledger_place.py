"""Where a store's results are: in the store, or at the address that its file `ledger.json` names.

Stores of several machines can thus keep their results in one place, and compute each cell once between them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.storage.files import read_json, write_json
from mlmclm.storage.objects import ObjectPath, check_url
from mlmclm.storage.store_address import address_of

FILE = "ledger.json"
LOCAL = "file://"
WAIT = "wait_for_storage"
"""Entry of the file: the longest outage of an object store that is waited for, in seconds, if the user has set it."""


def ledger_root(store: Path) -> Path | ObjectPath:
    """Return the folder or address that holds the store's results and their claims.

    Raises:
        UserError: the file `ledger.json` is damaged.
    """
    noted, address = _noted(store), address_of(store)
    if noted is None:
        return store if address is None else address
    url = str(noted["url"])
    if url.startswith(LOCAL):
        return Path(url.removeprefix(LOCAL))
    path = ObjectPath(url.rstrip("/"))
    if WAIT in noted:
        availability = path.bucket.availability
        availability.patience = replace(availability.patience, seconds=float(noted[WAIT]))
    return path


def place_ledger(store: Path, url: str | None, *, wait: float | None = None) -> None:
    """Note that a store's results are at this address: a URL, or a folder.

    Args:
        url: None for the place that the store knows.
        wait: the longest outage of an object store that is waited for, in seconds; None for what the store knows.

    Raises:
        UserError: the store has results already, in itself or elsewhere, or the address cannot be used.
        EnvironmentFault: the object store cannot be reached, or the disk is full or not writable.
    """
    noted, address = _noted(store), address_of(store)
    if address is not None:
        if url is not None:
            raise UserError(f"--ledger {url}: the store is at {address}, and its results are there, too.")
        noted = noted or {"url": str(address)}
    if url is None:
        url = str(noted["url"]) if noted else f"{LOCAL}{store}"
    if "://" not in url:
        url = f"{LOCAL}{Path(url).expanduser().resolve()}"
    if wait is not None and url.startswith(LOCAL):
        raise UserError(
            f"--wait-for-storage {wait:g}: the results of {store} are in a folder. Only an object store is waited for; name "
            "it with --ledger."
        )
    if noted is not None and noted["url"] != url:
        raise UserError(
            f"--ledger {url}: the results of {store} are at {noted['url']}. Use another --store, or delete {store / FILE}."
        )
    if noted is None and (store / "cells").is_dir():
        raise UserError(
            f"--ledger {url}: {store} has results of its own, which would no longer be found. Move {store / 'cells'} to "
            f"{url}/cells first, or use another --store."
        )
    # An address that worked before is not tried: the store may be out of reach, and is then waited for.
    if noted is None and not url.startswith(LOCAL):
        check_url(url)
    value = (noted or {}) | {"url": url} | ({} if wait is None else {WAIT: wait})
    if value != noted:
        write_json(store / FILE, value)
    if noted is None:
        say(f"the results of {store} are now kept at {url} (recorded in {store / FILE})")


def _noted(store: Path) -> dict[str, Any] | None:
    path = store / FILE
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise UserError(f'{path}: not the place of a ledger; write {{"url": "s3://bucket/prefix"}}.')
    if not isinstance(value.get(WAIT, 0.0), int | float) or value.get(WAIT, 0.0) < 0:
        raise UserError(f"{path}: {WAIT} is {value[WAIT]!r}; write a number of seconds.")
    return value
