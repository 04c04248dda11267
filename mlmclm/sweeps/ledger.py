"""The ledger: one immutable file a finished cell, `store/cells/<first two digits of the key>/<key>.json`.

A file is written whole or not at all, by the worker that computed the cell, which holds a claim on it meanwhile (`claims`), so
that of several processes one computes it. What is there is never computed again. Beside it
lies `<key>.parquet`, what each example of the test split got; it is written first, so a result is never without its examples,
unless a version that kept none filed it. A result holds its own checksum and that of its examples.

A damaged file is refused until somebody deletes it: a result is evidence, and another machine may not give the same one again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault, UserError, for_each
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.results.examples import SPLIT, KeptExamples, about_of, from_parquet
from mlmclm.results.metrics import metric_parts
from mlmclm.storage.checksums import CHECKSUM, sealed, unsealed
from mlmclm.storage.claims import Claims
from mlmclm.storage.files import canonical_json, disk_fault, hash_file, write_atomic
from mlmclm.sweeps.cells import unique_by_key

SCHEMA = 1
NEEDED = ("key", "task", "learning_rate", "seed", "status", "scores")
EXAMPLES = "examples_sha256"
"""Entry of a result's file: SHA-256 of its examples' file."""


class Ledger:
    """The results of one store, and the claims of those who compute them."""

    part = "cells"

    def __init__(self, store: Path) -> None:
        self.folder = store / self.part
        self.claims = Claims(store)

    def claim(self, key: str) -> str:
        """The name of the claim that whoever computes the cell with this key holds."""
        return f"{self.part}-{key}"

    def claimed(self, key: str, waiting: Callable[[str], None]) -> AbstractContextManager[None]:
        """The claim on a cell for the time of a block, after whoever computes it now; none is needed where its result is
        there. `waiting` as in `Claims.wait`."""
        return self.claims.wait(lambda: [] if self.path(key).exists() else [self.claim(key)], waiting)

    def path(self, key: str) -> Path:
        """Where the result of the cell with this key is, or will be."""
        return self.folder / key[:2] / f"{key}.json"

    def find(self, key: str) -> dict[str, Any] | None:
        """The result with this key, or None where the cell has not been computed.

        Raises:
            UserError: the file is there but is not a whole result of this cell.
            EnvironmentFault: it cannot be read.
        """
        found = self._read(key)
        return None if found is None else {name: value for name, value in found.items() if name != EXAMPLES}

    def _read(self, key: str) -> dict[str, Any] | None:
        """The content of a result's file, without its checksum."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_fault(error, path) from error
        try:
            value = json.loads(content)
            result = unsealed(value)
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        if result.get("schema") != SCHEMA:
            raise _damaged(path, f"not a result of schema {SCHEMA}")
        absent = [name for name in NEEDED if name not in result]
        if absent:
            raise _damaged(path, f"without {', '.join(absent)}")
        if result["key"] != key:
            raise _damaged(path, f"it holds the result of another cell, {result['key']}")
        if CHECKSUM not in value:
            self._seal(path, result)
        return result

    def _seal(self, path: Path, result: dict[str, Any]) -> None:
        """Gives a result that an earlier version filed its checksum, where its examples bear its scores out.

        Raises:
            UserError: they are of other scores.
        """
        about = about_of(self.examples_path(result["key"]))
        if about is None:
            return
        if (about["key"], about["scores"]) != (result["key"], (result["scores"] or {}).get(SPLIT)):
            raise _damaged(path, f"its scores are not those of {path.with_suffix('.parquet').name} beside it")
        with suppress(EnvironmentFault):  # a store that this user may only read
            self._file(path, result)

    def _file(self, path: Path, result: dict[str, Any]) -> None:
        examples = self.examples_path(result["key"])
        sums = {EXAMPLES: hash_file(examples)} if examples.is_file() and result["status"] == "ok" else {}
        write_atomic(path, canonical_json(sealed({**result, **sums})) + "\n")

    def write(self, result: dict[str, Any]) -> None:
        """Files a result under its key; one that is there already stays, for equal keys mean equal results.

        Raises:
            EnvironmentFault: the disk is full or not writable; nothing is left behind.
        """
        path = self.path(result["key"])
        if not path.exists():
            self._file(path, result)

    def examples_path(self, key: str) -> Path:
        """Where the examples of the cell with this key are, or will be."""
        return self.path(key).with_suffix(".parquet")

    def write_examples(self, result: dict[str, Any], content: bytes) -> None:
        """Files the examples of a result that is filed next; those of one that is there already stay.

        Raises:
            EnvironmentFault: the disk is full or not writable; nothing is left behind.
        """
        if not self.path(result["key"]).exists():
            write_atomic(self.examples_path(result["key"]), content)

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return what each example of the test split got in a cell.

        Args:
            result: the cell's, from this ledger.

        Raises:
            UserError: it diverged, an earlier version filed it without examples, or these are damaged.
        """
        if result["status"] != "ok":
            raise UserError(
                f"result {result['key']} (model {result['model']}, task {result['task']}) diverged: it has no predictions."
            )
        return from_parquet(self.examples_path(result["key"]), result, (self._read(result["key"]) or {}).get(EXAMPLES))

    def complete(self, cell: Cell, compute: Callable[[Cell], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """A cell's result, computed and filed where it isn't there; and whether it was computed now. Call it with the claim.

        Raises:
            UserError: the file that is there is damaged.
            EnvironmentFault: the disk is full or not writable.
        """
        key = cell_key(cell)
        found = self.find(key)
        if found is not None:
            return found, False
        self.write(compute(cell))
        filed = self.find(key)
        if filed is None:
            raise EnvironmentFault(f"{self.path(key)}: written, but not there. Was it removed?")
        return filed, True

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells without a result, each key once, in order. Damaged files are found when they are read."""
        return [cell for key, cell in unique_by_key(cells).items() if not self.path(key).exists()]

    def results(self, cells: Iterable[Cell]) -> list[dict[str, Any]]:
        """The results of those of the cells that have one, in order, each under the name that its cell gives the model.

        Raises:
            UserError: a file is damaged.
        """
        cells = list(cells)
        found = zip(cells, self.find_all(map(cell_key, cells)), strict=True)
        return [named(result, cell) for cell, result in found if result is not None]

    def find_all(self, keys: Iterable[str]) -> list[dict[str, Any] | None]:
        """`find` of each key; all files that are damaged are named at once."""
        return for_each(keys, self.find)


def named(result: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """A result under the cell's names of model and setting and with its task's main metric: a key ignores these, so another
    study may have filed it, or the same before its choice of metrics was changed.

    Raises:
        UserError: a version that didn't compute the metric filed the result.
    """
    own = {"model": cell.model, **({"setting": cell.setting} if cell.setting else {})}
    if cell.declaration is None:
        return {**result, **own}
    metric = cell.declaration.metric
    for scores in (result["scores"] or {}).values():
        absent = [name for name in metric_parts(metric) if name not in scores]
        if absent:
            raise UserError(
                f"result {result['key']} (model {cell.model}, task {cell.task}) has no {', '.join(absent)}: an earlier "
                f"version filed it. Choose other metrics (the space's `metrics`), or delete the results of task "
                f"{cell.task}, each a file cells/<first two digits>/<key>.json of the store, and run the same command again."
            )
    return {**result, **own, "metric": metric}


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path}: damaged result file ({reason}). Delete it and run the same command again: only this cell is then "
        "computed again."
    )
