"""Export of a cell's test predictions as JSON lines, for other evaluation tools."""

from __future__ import annotations

import json
from pathlib import Path

from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import family_of


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Write one JSON object per test example (`Family.predictions`), in the test split's order."""
    rows = family_of(kept.result).predictions(kept)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomic(path, "".join(lines))
