"""A cell's predictions for the test examples, also as JSON lines for other evaluation tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import family_of


def predicted(kept: KeptExamples) -> list[dict[str, Any]]:
    """Return one plain object per test example (`Family.predictions`), in the test split's order.

    Raises UserError if an earlier version of mlmclm computed the cell and kept no predictions.
    """
    try:
        return list(family_of(kept.result).predictions(kept))
    except KeyError as error:
        raise UserError(
            f"result {kept.result['key']} (model {kept.result['model']}, task {kept.result['task']}) has scores but no predictions: "
            "an earlier version computed it. Delete its two files in the store's cells/ and run the command that made it again: "
            "this cell alone is then computed again."
        ) from error


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Write the `predicted` objects as JSON lines."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predicted(kept)))
