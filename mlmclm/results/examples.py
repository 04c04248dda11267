"""Per-example results of a cell on the test split, as a Parquet file with one row per example in the split's order.

Results on the validation split are not stored: the learning rate is chosen on it, so a comparison there would be biased.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlmclm.errors import UserError
from mlmclm.storage.files import canonical_json
from mlmclm.storage.objects import ObjectPath

SPLIT = "test"
SCORES = "scores of examples"
"""The only column if nothing but the main score of each example is known."""
GROUP = "group"
"""The column of the groups of examples that belong together, where the task declares them (`Task.group`)."""
ABOUT = b"mlmclm"
"""Key of the file's metadata entry that names the result it belongs to."""


@dataclass(frozen=True)
class KeptExamples:
    """A cell's result with its per-example results."""

    result: Mapping[str, Any]
    columns: dict[str, np.ndarray[Any, Any]]
    """Numeric columns that scores are computed from, by name (`PreparedTask.examples`), with one value per example."""
    label_names: tuple[str, ...]
    """Names of the classes or tags, by number from 0; empty where there are none."""
    predictions: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Columns of texts and lists, by name. Empty if `columns` already holds the predictions."""

    @property
    def rows(self) -> int:
        """Number of examples."""
        return len(next(iter(self.columns.values())))

    @property
    def units(self) -> int:
        """Number of independent units: of the groups of examples if there are any, else of the examples."""
        return self.rows if self.groups is None else int(self.groups.max()) + 1

    @property
    def groups(self) -> np.ndarray[Any, Any] | None:
        """The number of each example's group, from 0; None if all examples are independent."""
        return group_numbers(self.columns[GROUP]) if GROUP in self.columns else None


def group_numbers(groups: Sequence[Any] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Number the groups of examples from 0; None if no two examples share one."""
    unique, numbers = np.unique(np.asarray(groups), return_inverse=True)
    return None if len(unique) == len(numbers) else numbers


class ExampleSource(Protocol):
    """A source of the outcomes of cells' test examples: a store, a published folder, or a reader of another tool's files."""

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return the outcome of each example in a cell with this result; raise a `UserError` if there are none."""
        ...


def to_parquet(
    result: Mapping[str, Any], columns: Mapping[str, np.ndarray[Any, Any]], label_names: Sequence[str]
) -> bytes:
    """Return the Parquet file of a scored cell's examples.

    Integers take the smallest type that holds them, and NaN becomes null.
    """
    table = pa.table({name: pa.array(_small(values), from_pandas=True) for name, values in columns.items()})
    about = {
        "key": result["key"],
        "split": SPLIT,
        "label_names": list(label_names),
        "scores": result["scores"][SPLIT],
    }
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({ABOUT: canonical_json(about)}),
        sink,
        compression="zstd",
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def from_parquet(path: Path | ObjectPath, result: Mapping[str, Any], sha256: str | None = None) -> KeptExamples:
    """Read the examples of a scored cell.

    Args:
        sha256: expected checksum of the file's bytes; None if none was recorded.

    Raises:
        UserError: the file is missing, damaged, or belongs to another result; the message names the remedy.
    """
    remedy = f"Delete {path.with_suffix('.json')} and run the command that made it again: this cell alone is then computed again."
    try:
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError("its checksum differs from the one noted with the result")
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
        about = json.loads((table.schema.metadata or {})[ABOUT])
    except FileNotFoundError as error:
        raise UserError(
            f"result {result['key']} (model {result['model']}, task {result['task']}) has no examples beside it: "
            f"{path.name} is missing. {remedy}"
        ) from error
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: damaged file of examples ({reason}). {remedy}") from error
    # The key alone would not do: a cell computed again has the same key, but its scores may differ.
    if (about["key"], about["scores"]) != (result["key"], result["scores"][SPLIT]):
        raise UserError(f"{path}: the examples are those of another result than the one beside it. {remedy}")
    # Texts and lists arrive as object arrays, numbers as numeric ones: the dtype tells predictions from scores.
    columns = {name: table[name].to_numpy() for name in table.column_names}
    objects = {name: column for name, column in columns.items() if column.dtype == object}
    numbers = {name: column for name, column in columns.items() if name not in objects}
    return KeptExamples(result, numbers, tuple(about["label_names"]), objects)


def _small(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cast non-negative integers to the smallest unsigned type; return any other column unchanged."""
    if values.dtype.kind not in "iu" or not len(values) or values.min() < 0:
        return values
    return values.astype(np.min_scalar_type(values.max()))
