"""The results store: one immutable file per finished cell, `store/cells/<first two digits of the key>/<key>.json`.

A worker holds a lease on a cell (`leases`) while it computes the cell, so that no other process does the same. It then
writes the cell's file, completely or not at all. A cell with a result is never computed again.

Beside the result lies `<key>.parquet`, with the outcome of each example of the test split. It is written first, so a
result never lacks it. A result contains its own checksum and that of its examples.

A damaged file is refused until somebody deletes it: a result is evidence, and another machine may not reproduce it.

A result for an object store is first filed in the store's folder `unfiled`, which is a results store too. If the object store or
the worker fails meanwhile, the result is not lost: the next process that uses the store files it in the object store.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

from mlmclm import versions
from mlmclm.errors import EnvironmentFault, MissingBucket, StorageFault, UserError, for_each
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.progress import say, say_once
from mlmclm.results.examples import KeptExamples, from_parquet
from mlmclm.storage.artifact import Artifact, Origin
from mlmclm.storage.checksums import UNSEALED, Piece, described_damage, file_size, parsed, sealed, set_aside, unsealed
from mlmclm.storage.files import canonical_json, disk_fault, disk_faults, write_atomic
from mlmclm.storage.leases import Holder, Leases, ObjectLeases
from mlmclm.storage.objects import ObjectPath, read_all
from mlmclm.storage.results_place import results_root
from mlmclm.storage.retrying import Availability
from mlmclm.sweeps.cell_failures import forget
from mlmclm.sweeps.cells import ListedCell, named_result

EXAMPLES = "examples_sha256"
"""Entry of a result file: SHA-256 of its examples file."""
UNFILED = "unfiled"
"""Folder of a store with the results that its object store does not have yet."""
_examples: dict[tuple[str, str], bytes] = {}
"""Examples of results that this process is about to file, by the results store's folder and the key."""


class ResultsStore:
    """The results of one store, and the leases of the processes that compute them; each result is an `Artifact`.

    Both are below `root`, by default the store's folder or address (`results_place.results_root`).
    """

    part = "cells"
    """Folder of the results below the results store's root; names of leases begin with it."""
    needed: tuple[str, ...] = ("key", "task", "learning_rate", "seed", "status", "scores")
    """Entries that every result has."""

    def __init__(self, store: Path, *, root: Path | ObjectPath | None = None) -> None:
        root = results_root(store) if root is None else root
        self.store, self.folder = store, root / self.part
        self.unfiled = type(self)(store, root=store / UNFILED) if isinstance(root, ObjectPath) else None
        """Results that the object store does not have yet; None for a results store in a folder."""
        self.availability = root.bucket.availability if isinstance(root, ObjectPath) else Availability(str(root))
        """Whether the object store of the results answers; a folder always does."""
        self.leases = ObjectLeases(root) if isinstance(root, ObjectPath) else Leases(root)

    def artifact(self, key: str) -> Artifact:
        """Return the artifact of this key, whether or not it exists."""
        return StoredResult(self.store, key, self)

    def lease(self, key: str) -> str:
        """Return the name of the lease to hold while computing the cell with this key."""
        return self.artifact(key).lease

    def leased(self, key: str, title: str) -> AbstractContextManager[None]:
        """Hold the lease on a cell inside the block, unless it has a result; see `Artifact.leased`."""
        return self.artifact(key).leased(lambda: self.path(key).exists(), title=title)

    def path(self, key: str) -> Path | ObjectPath:
        """Return the path of the result with this key, whether or not it exists."""
        return self.folder / key[:2] / f"{key}.json"

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the result with this key, or None if the cell has not been computed.

        Raises:
            UserError: the file is damaged, or holds the result of another cell.
            EnvironmentFault: the file cannot be read.
        """
        result = self._read(key)
        return None if result is None else _public(result)

    def _read(self, key: str) -> dict[str, Any] | None:
        """Return the content of a result file without its checksum."""
        try:
            content = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_fault(error, self.path(key)) from error
        return self._parsed(key, content)

    def _parsed(self, key: str, content: bytes | None) -> dict[str, Any] | None:
        if content is None:
            return None
        path = self.path(key)
        try:
            result = unsealed(json.loads(content))
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        if result.get("schema") != versions.RESULTS:
            raise _damaged(path, f"not a result of schema {versions.RESULTS}")
        absent = [name for name in self.needed if name not in result]
        if absent:
            raise _damaged(path, f"without {', '.join(absent)}")
        if result["key"] != key:
            raise _damaged(path, f"it holds the result of another key, {result['key']}")
        return result

    def write(self, result: dict[str, Any]) -> None:
        """File a result under its key; an existing one stays, because equal keys mean equal results.

        A result for an object store is first filed in `unfiled`.

        Raises:
            EnvironmentFault: the disk is full or not writable, and nothing is left behind; or the object store does not
                answer.
            MissingBucket: the object store has no such bucket.
        """
        examples, kept = _examples.pop((str(self.folder), result["key"]), None), ""
        if self.unfiled is None:
            self._file(result, examples)
            return
        try:
            self.unfiled._file(result, examples)
            kept = f" The computed result is kept in {self.unfiled.folder}, and the same command files it later."
        except EnvironmentFault as error:
            say_once(f"computed results cannot be kept here while they are filed: {error}")
        try:
            self._file(result, examples)
        except (StorageFault, MissingBucket) as error:
            raise type(error)(f"{error}{kept}") from error
        self.unfiled.artifact(result["key"]).remove()

    def _file(self, result: dict[str, Any], examples: bytes | None) -> None:
        key = result["key"]
        if self.path(key).exists():
            return
        if examples is not None:
            write_atomic(self.examples_path(key), examples)
            result = {**result, EXAMPLES: hashlib.sha256(examples).hexdigest()}
        write_atomic(self.path(key), canonical_json(sealed(result)) + "\n")
        forget(self.folder, key)

    def file_unfiled(self, keys: Iterable[str] | None = None) -> int:
        """File results that were computed earlier but could not be filed; return how many. Damaged ones are set aside.

        Args:
            keys: which of them to file; None for all.

        Raises:
            StorageFault: the object store does not answer, or refuses them.
            MissingBucket: the object store has no such bucket.
        """
        if (unfiled := self.unfiled) is None:
            return 0
        filed = 0
        for key in sorted(unfiled.keys()) if keys is None else keys:
            kept, path = unfiled.artifact(key), unfiled.path(key)
            reason = kept.damage()
            with suppress(FileNotFoundError):  # another process has filed it meanwhile
                # A result that names no examples is filed without them.
                if reason in (None, UNSEALED) and (result := unfiled._read(key)) is not None:
                    self._file(result, unfiled.examples_path(key).read_bytes() if EXAMPLES in result else None)
                    kept.remove()
                    filed += 1
                elif isinstance(path, Path) and path.is_file():
                    say(f"{path} is not used: {reason}. It is kept as {set_aside(path).name} and computed again.")
        return filed

    def examples_path(self, key: str) -> Path | ObjectPath:
        """Return the path of the examples of the cell with this key, whether or not it exists."""
        return self.path(key).with_suffix(".parquet")

    def write_examples(self, result: dict[str, Any], content: bytes) -> None:
        """Keep the examples of a result that is about to be filed; they are filed together with it."""
        _examples[str(self.folder), result["key"]] = content

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return the outcome of each test example of the cell with this result.

        Raises:
            UserError: the cell diverged, or the examples are missing or damaged.
        """
        if result["status"] != "ok":
            raise UserError(
                f"result {result['key']} (model {result['model']}, task {result['task']}) diverged: it has no predictions."
            )
        return from_parquet(self.examples_path(result["key"]), result, (self._read(result["key"]) or {}).get(EXAMPLES))

    def ensure(
        self, key: str, make: Callable[[], dict[str, Any]], *, title: str | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Return the result with this key, and whether it was made and filed now; no other process makes it meanwhile.

        Args:
            make: computes it; called only if it is missing.
            title: the result's name in the message that another process is waited for; by default its key.

        Raises:
            UserError: the existing file is damaged.
            EnvironmentFault: the disk is full or not writable. Whatever `make` raises is passed on.
        """
        with self.leased(key, title or key):
            self.file_unfiled([key])
            result = self.find(key)
            if result is not None:
                return result, False
            self.write(make())
            return self.filed(key), True

    def filed(self, key: str) -> dict[str, Any]:
        """Read back a result that has been filed: if another process filed one first, that one stays and counts."""
        result = self.find(key)
        if result is None:
            raise EnvironmentFault(f"{self.path(key)}: it was written but cannot be found. Was it removed?")
        return result

    def keys(self) -> set[str]:
        """Return the keys of all cells that have a result file, intact or damaged."""
        paths: Iterable[Path | ObjectPath]
        if isinstance(self.folder, ObjectPath):
            paths = self.folder.iterdir()
        else:  # two steps, because a single `glob` would pass over folders that it may not read
            paths = (path for folder in self.folder.glob("[0-9a-f][0-9a-f]") for path in folder.iterdir())
        return {path.stem for path in paths if path.suffix == ".json" and path.stem[:2] == path.parent.name}

    def holders(self) -> dict[str, Holder]:
        """Return the processes that are computing cells, by the cell's key."""
        return self.leases.held(self.lease(""))

    def set_aside(self, key: str) -> Path | ObjectPath:
        """Move a result and its examples out of the way, so that the cell is computed again; return the folder.

        Nothing is ever deleted: each call has a folder of its own, `set-aside/<key>-<time>`.

        Raises:
            UserError: another process is computing the cell, or there is no result.
            EnvironmentFault: the disk is full or not writable.
        """
        path = self.path(key)
        with self.leases.attempt([self.lease(key)]) as holder:
            if holder is not None:
                raise UserError(f"result {key}: {holder} is computing this cell; wait for it.")
            if not path.exists():
                raise UserError(f"result {key}: there is none in {self.folder}.")
            folder = self.folder / "set-aside" / f"{key}-{time.time_ns()}"
            with disk_faults(path):
                if isinstance(folder, Path):
                    folder.mkdir(parents=True)
                # The result first: examples without a result count for nothing.
                for file in (path, self.examples_path(key)):
                    if file.exists():
                        file.rename(folder / file.name)  # type: ignore[arg-type]  # both are on one file system
        return folder

    def as_filed(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells in order; one with a result under an earlier hash of its weights gets that hash.

        Only this method deals with earlier keys of a cell. All other code uses the keys of the cells that it returns.
        """
        variants = [variant for cell in cells for variant in (cell, *_earlier(cell)) if cell.earlier]
        missing = set(map(cell_key, self.missing(variants)))

        def filed(cell: Cell) -> Cell:
            return next((variant for variant in (cell, *_earlier(cell)) if cell_key(variant) not in missing), cell)

        return [filed(cell) if cell.earlier else cell for cell in cells]

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells without a result file, one per key, in order; damaged files are found when they are read."""
        unique: dict[str, Cell] = {}
        for cell in cells:
            unique.setdefault(cell_key(cell), cell)
        if isinstance(self.folder, ObjectPath):  # one listing instead of a request for each
            existing = self.keys() if unique else set()
            return [cell for key, cell in unique.items() if key not in existing]
        return [cell for key, cell in unique.items() if not self.path(key).exists()]

    def results(self, cells: Iterable[Cell | ListedCell]) -> list[dict[str, Any]]:
        """Return the results of the cells that have one, in order, each under the names of its cell (`named_result`).

        Raises:
            UserError: a file is damaged.
        """
        keyed = [(cell.key if isinstance(cell, ListedCell) else cell_key(cell), cell) for cell in cells]
        results = self.find_all(key for key, _ in keyed)
        return [named_result(results[key], cell) for key, cell in keyed if key in results]

    def find_all(self, keys: Iterable[str], *, listed: bool = False) -> dict[str, dict[str, Any]]:
        """Return the existing results with these keys, by key; one error names all damaged files.

        Args:
            listed: whether most of these are known to exist: an object store is then asked for each, without a listing.
        """
        keys = list(keys)
        if isinstance(self.folder, ObjectPath):  # one listing, and all contents concurrently
            existing = keys if listed else self.keys()
            paths = {key: self.folder / key[:2] / f"{key}.json" for key in keys if key in existing}
            contents = dict(zip(paths, read_all(list(paths.values())), strict=True))
            results = for_each(keys, lambda key: self._parsed(key, contents.get(key)))
        else:
            results = for_each(keys, self._read)
        return {key: _public(result) for key, result in zip(keys, results, strict=True) if result is not None}


class Evaluations(ResultsStore):
    """The results of zero-shot evaluations in one store, and the leases of the processes that compute them."""

    part = "evaluations"
    needed = ("key", "model", "task", "scoring", "metrics", "status")

    def artifact(self, key: str) -> Artifact:
        """Return the artifact of this key, whether or not it exists."""
        return StoredEvaluation(self.store, key, self)


@dataclass(frozen=True)
class StoredResult(Artifact):
    """The result of a cell, with its examples, in the results store."""

    kind = "results"
    part = "cells"
    again = "`mlmclm sweep retry SWEEP --status damaged --yes` sets it aside, and the next run computes it again"
    makes = "computes"
    stored_as: ClassVar[type[ResultsStore]] = ResultsStore
    made_from: ClassVar[tuple[str, ...]] = (
        "weights", "task", "task_data", "learning_rate", "seed", "engine", "start",
    )  # fmt: skip
    """Entries of a result that went into its key, beside those of its protocol."""

    at: ResultsStore | None = field(default=None, compare=False, repr=False)
    """The results store that has this result; by default that of `store`."""

    @cached_property
    def results_store(self) -> ResultsStore:
        """The results store that has this result."""
        return self.at or self.stored_as(self.store)

    @property
    def leases(self) -> Leases:
        """The results store's leases."""
        return self.results_store.leases

    @classmethod
    def all(cls, store: Path) -> Iterator[Self]:
        """Yield the results of a store, in its folder or at its address."""
        results_store = cls.stored_as(store)
        for key in sorted(results_store.keys()):
            yield cls(store, key, results_store)

    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with the result or its examples, or None if both exist and are intact."""
        return next((damage for piece in self.files() if (damage := piece.check()) is not None), None)

    def files(self) -> Iterator[Piece]:
        """Yield the result and its examples."""
        path = self.results_store.path(self.key)
        yield Piece(self.kind, self.again, str(path), file_size(path), self._seal_damage)
        yield self.examples()

    def examples(self) -> Piece:
        """Return the file of its examples, whose checksum is in the result."""
        path, examples = self.results_store.path(self.key), self.results_store.examples_path(self.key)
        check = partial(described_damage, path, examples, EXAMPLES)
        return Piece("examples", self.again, str(examples), file_size(examples), check)

    def remove(self) -> None:
        """Delete it and its examples."""
        for path in (self.results_store.path(self.key), self.results_store.examples_path(self.key)):
            with disk_faults(path):
                path.unlink(missing_ok=True)

    def origin(self) -> Origin:
        """Read what the result was computed from."""
        result = self.results_store.find(self.key) or {}
        facts = {name: result[name] for name in self.made_from if name in result} | result.get("protocol", {})
        return Origin(facts, {"model": result.get("model")}, result.get("cost") or {})

    def _seal_damage(self) -> str | None:
        result = parsed(self.results_store.path(self.key).read_bytes)
        if isinstance(result, str):
            return result
        return None if result.get("key") == self.key else "it holds the result of another key"


@dataclass(frozen=True)
class StoredEvaluation(StoredResult):
    """A zero-shot result in the store."""

    kind = "evaluations"
    part = "evaluations"
    again = "the study or `mlmclm evaluate`, after it is deleted"
    stored_as = Evaluations
    made_from = ("weights", "tokenizer", "scoring", "task", "task_data", "engine")

    def files(self) -> Iterator[Piece]:
        """Yield the result, which has no examples beside it."""
        yield next(super().files())


def _earlier(cell: Cell) -> list[Cell]:
    return [replace(cell, weights=weights) for weights in cell.earlier]


def _public(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the entry that only the results store uses."""
    return {name: value for name, value in result.items() if name != EXAMPLES}


def _damaged(path: Path | ObjectPath, reason: str) -> UserError:
    return UserError(
        f"{path}: damaged result file ({reason}). Delete it and run the same command again: only this result is then "
        "computed again."
    )
