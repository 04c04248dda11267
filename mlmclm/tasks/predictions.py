"""A cell's predictions for the test examples: as plain objects, as JSON lines for other tools, and whether all are equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import family_of

ALIKE = 1e-6
"""Relative difference up to which predicted numbers count as equal."""


def predicted(kept: KeptExamples) -> list[dict[str, Any]]:
    """Return one plain object per test example (`Family.shown`), with names of labels, in the test split's order.

    An object has the number of its `row` if the examples have no `id`. Raises a `UserError` if a part of the predictions is missing.
    """
    shown, columns = family_of(kept.result).shown, {**kept.columns, **kept.predictions}
    absent = [name for name in shown.values() if name not in columns]
    if absent:
        raise UserError(
            f"result {kept.result['key']}: there is no {', '.join(absent)} of its predictions, as in a published bundle."
        )
    rows = zip(*(columns[name] for name in shown.values()), strict=True)
    return [
        {
            **({} if "id" in shown else {"row": row}),
            **{name: _plain(value, kept.label_names) for name, value in zip(shown, values, strict=True)},
        }
        for row, values in enumerate(rows)
    ]


def _plain(value: Any, names: Sequence[str]) -> Any:
    """Return a value as plain Python objects, in which label names, if there are any, replace whole numbers."""
    if isinstance(value, np.ndarray | list):
        return [_plain(item, names) for item in value]
    plain = value.item() if isinstance(value, np.generic) else value
    return names[plain] if names and type(plain) is int else plain


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Write the `predicted` objects as JSON lines."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predicted(kept)))


def predicts_the_same(kept: KeptExamples) -> bool:
    """Return whether a cell predicted the same for every test example; False if it kept no predictions.

    Tags are the same if all words have one tag, rankings if all queries have the same documents in the same order.
    """
    name = list(family_of(kept.result).shown.values())[1]
    values = kept.columns.get(name, kept.predictions.get(name))
    if values is None or len(values) < 2:
        return False
    if values.dtype != object:
        return bool(np.ptp(values.astype(np.float64)) <= ALIKE * np.abs(values).max())
    if isinstance(values[0], str):
        return len(set(values)) == 1
    return len(set(map(tuple, values))) == 1 or len({item for row in values for item in row}) == 1
