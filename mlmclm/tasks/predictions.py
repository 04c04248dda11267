"""Export of a cell's test predictions as JSON lines, for other evaluation tools."""

from __future__ import annotations

import json
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import family_of


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Write one JSON object per test example (`Family.predictions`), in the test split's order.

    Raises UserError if an earlier version of mlmclm computed the cell and kept no predictions.
    """
    family = family_of(kept.result)
    try:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in family.predictions(kept)]
    except KeyError as error:
        raise UserError(
            f"result {kept.result['key']} (model {kept.result['model']}, task {kept.result['task']}) has scores but no predictions: "
            "an earlier version computed it. Delete its two files in the store's cells/ and run the command that made it again: "
            "this cell alone is then computed again."
        ) from error
    write_atomic(path, "".join(lines))
