"""A cell's predictions for the test examples, as JSON lines that any other evaluator can read."""

from __future__ import annotations

import json
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import get_family


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Writes one JSON object a test example, in the test split's order: `Family.predictions` of the cell's family.

    Raises:
        UserError: an earlier version of mlmclm computed the cell and kept no predictions.
        EnvironmentFault: the file cannot be written.
    """
    family = get_family(kept.result["family"])
    try:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in family.predictions(kept)]
    except KeyError as error:
        raise UserError(
            f"result {kept.result['key']} (model {kept.result['model']}, task {kept.result['task']}) has scores but no predictions: "
            "an earlier version computed it. Delete its two files in the store's cells/ and run the command that made it again: "
            "this cell alone is then computed again."
        ) from error
    write_atomic(path, "".join(lines))
