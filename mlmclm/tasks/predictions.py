"""A cell's predictions for the test examples, also as JSON lines for other evaluation tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlmclm.results.examples import KeptExamples
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.family import family_of


def predicted(kept: KeptExamples) -> list[dict[str, Any]]:
    """Return one plain object per test example (`Family.predictions`), in the test split's order."""
    return list(family_of(kept.result).predictions(kept))


def write_predictions(kept: KeptExamples, path: Path) -> None:
    """Write the `predicted` objects as JSON lines."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predicted(kept)))
