"""Where a store's results are: in the store, or at the address that its file `ledger.json` names.

Stores of several machines can thus keep their results in one place, and compute each cell once between them.
"""

from __future__ import annotations

from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.storage.files import read_json, write_json
from mlmclm.storage.objects import ObjectPath, check_url

FILE = "ledger.json"
LOCAL = "file://"


def ledger_root(store: Path) -> Path | ObjectPath:
    """Return the folder or address that holds the store's results and their claims.

    Raises:
        UserError: the file `ledger.json` is damaged.
    """
    url = _noted(store)
    if url is None:
        return store
    return Path(url.removeprefix(LOCAL)) if url.startswith(LOCAL) else ObjectPath(url.rstrip("/"))


def place_ledger(store: Path, url: str) -> None:
    """Note that a store's results are at this address: a URL, or a folder.

    Raises:
        UserError: the store has results already, in itself or elsewhere, or the address cannot be used.
        EnvironmentFault: the object store cannot be reached, or the disk is full or not writable.
    """
    if "://" not in url:
        url = f"{LOCAL}{Path(url).expanduser().resolve()}"
    noted = _noted(store)
    if noted is not None and noted != url:
        raise UserError(
            f"--ledger {url}: the results of {store} are at {noted}. Use another --store, or delete {store / FILE}."
        )
    if noted is None and (store / "cells").is_dir():
        raise UserError(
            f"--ledger {url}: {store} has results of its own, which would no longer be found. Move {store / 'cells'} to "
            f"{url}/cells first, or use another --store."
        )
    if not url.startswith(LOCAL):
        check_url(url)
    if noted is None:
        write_json(store / FILE, {"url": url})
        say(f"the results of {store} are now kept at {url} (recorded in {store / FILE})")


def _noted(store: Path) -> str | None:
    path = store / FILE
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise UserError(f'{path}: not the place of a ledger; write {{"url": "s3://bucket/prefix"}}.')
    return str(value["url"])
