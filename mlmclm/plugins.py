"""Extensions by other installed packages, through entry points of this project's groups.

| group | what an entry point names |
|---|---|
| `mlmclm.tasks` | a package whose folder holds task declarations (YAML) |
| `mlmclm.families` | a task family, a class `mlmclm.tasks.family.Family` |
| `mlmclm.generators` | a `mlmclm.tasks.generator.Generator`, under the `source` of the tasks whose data it makes |
| `mlmclm.corpora` | a function `(store, workers, progress) -> mlmclm.corpora.documents.Source`, under the name of a corpus source |
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from mlmclm.errors import UserError

TASKS, FAMILIES, GENERATORS, CORPORA = "mlmclm.tasks", "mlmclm.families", "mlmclm.generators", "mlmclm.corpora"


def plugin(group: str, name: str) -> Any:
    """Import the object that an entry point names, or return None if no installed package has one with this name.

    Raises:
        UserError: the other package fails to import.
    """
    found = importlib.metadata.entry_points(group=group, name=name)
    for point in found:
        try:
            return point.load()
        except Exception as error:  # whatever the other package raises
            raise UserError(
                f"entry point {name!r} of the group {group} ({point.value}) cannot be loaded: {type(error).__name__}: {error}."
            ) from error
    return None


def plugin_names(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted."""
    return sorted(importlib.metadata.entry_points(group=group).names)
