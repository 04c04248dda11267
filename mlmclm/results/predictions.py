"""A cell's predictions for the test examples, as JSON lines that any other evaluator can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Writes one JSON object a test example, in the test split's order.

    Classification and regression: `row`, `gold`, `prediction`. Token classification: the same, with a list of tags each. Question
    answering: `id` of the question and `prediction`, the answer's text. Retrieval: `id` of the query, `documents`, the ids of the
    ten best of the whole corpus, best first, and their `scores`.

    Raises:
        UserError: an earlier version of mlmclm computed the cell and kept no predictions.
        EnvironmentFault: the file cannot be written.
    """
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(kept)))


def _rows(kept: KeptExamples) -> Iterator[dict[str, Any]]:
    columns, found, names = kept.columns, kept.predictions, kept.label_names
    if "documents" in found:
        for query, documents, scores in zip(found["id"], found["documents"], found["document_scores"], strict=True):
            yield {"id": query, "documents": list(documents), "scores": [float(score) for score in scores]}
    elif "answer" in found:
        for question, answer in zip(found["id"], found["answer"], strict=True):
            yield {"id": question, "prediction": answer}
    elif "predicted_tags" in found:
        for row, pair in enumerate(zip(found["gold_tags"], found["predicted_tags"], strict=True)):
            gold, predicted = ([names[tag] for tag in tags] for tags in pair)
            yield {"row": row, "gold": gold, "prediction": predicted}
    elif "prediction" in columns:
        for row, (gold, predicted) in enumerate(
            zip(columns["gold"].tolist(), columns["prediction"].tolist(), strict=True)
        ):
            yield {
                "row": row,
                "gold": names[gold] if names else gold,
                "prediction": names[predicted] if names else predicted,
            }
    else:
        raise UserError(
            f"result {kept.result['key']} (model {kept.result['model']}, task {kept.result['task']}) has scores but no predictions: "
            "an earlier version computed it. Delete its two files in the store's cells/ and run the command that made it again: "
            "this cell alone is then computed again."
        )
