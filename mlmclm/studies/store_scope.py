"""The parts of a store that belong to one study or sweep, as far as its files say; damaged files are passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmclm.corpora.mixed_corpus import SOURCES
from mlmclm.corpora.shelf import INDEX
from mlmclm.errors import unknown
from mlmclm.pretraining.states import state_folder
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.studies.zero_shot import LISTING
from mlmclm.sweeps.manifest import FILE


@dataclass(frozen=True)
class Scope:
    """The keys of what is looked at; None for all that the store has."""

    study: str | None = None
    """A study's or sweep's name."""
    cells: frozenset[str] | None = None
    """Its results, and the results that they start from."""
    evaluations: frozenset[str] | None = None
    states: frozenset[str] | None = None
    """Its models' states, and those that these were trained from."""
    corpora: frozenset[str] | None = None
    tokenizers: frozenset[str] | None = None


WHOLE_STORE = Scope()


def studies_in(store: Path) -> list[str]:
    """Return the names of the studies and sweeps of a store, sorted."""
    return sorted(folder.name for folder in (store / "studies").glob("*") if folder.is_dir())


def scope_of(study: str, store: Path) -> Scope:
    """Return what belongs to a study or sweep.

    Raises:
        UserError: the store has none of this name; the message has the nearest one.
    """
    folder = store / "studies" / study
    if study not in studies_in(store):
        raise unknown("study", study, studies_in(store), where=str(store))
    cells = [cell for cell in _listed(folder / FILE, "cells") if isinstance(cell, dict)]
    evaluations = [each for each in _listed(folder / LISTING, "results") if isinstance(each, dict)]
    # A study's models are links to the files of their states, or copies.
    models = {file.read_bytes() for file in (folder / "models").glob(f"*/{CHECKSUMS}")}
    own = [file.parents[1].name for file in store.glob(f"states/*/model/{CHECKSUMS}") if file.read_bytes() in models]
    states = dict(_states(store, own))
    corpora = {str(state["corpus"]) for state in states.values() if "corpus" in state}
    for key in sorted(corpora):
        named = _read(store / "corpora" / key / SOURCES).get("sources")
        corpora |= set(named.values()) if isinstance(named, dict) else set()
    indexes = [_read(store / "corpora" / key / INDEX) for key in corpora]
    tokenizers = {str(index["tokenizer_key"]) for index in indexes if "tokenizer_key" in index}
    return Scope(
        study,
        frozenset(str(cell[name]) for cell in cells for name in ("key", "start") if cell.get(name)),
        frozenset(str(each["key"]) for each in evaluations if "key" in each),
        frozenset(states),
        frozenset(corpora) or None,
        frozenset(tokenizers) or None,
    )


def _states(store: Path, keys: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield states with their descriptions, and those that they were trained from."""
    seen = set[str]()
    while keys:
        key = keys.pop()
        if key not in seen and state_folder(store, key).is_dir():
            seen.add(key)
            state = _read(state_folder(store, key) / "state.json")
            yield key, state
            keys += [state["parent"]] if isinstance(state.get("parent"), str) else []


def _listed(path: Path, name: str) -> list[Any]:
    found = _read(path).get(name)
    return found if isinstance(found, list) else []


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}
