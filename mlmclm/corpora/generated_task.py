"""The data of tasks in the store: those that packages generate, and rows of users' files."""

from __future__ import annotations

from mlmclm.corpora.documents import StoredText
from mlmclm.storage.artifact import FolderArtifact, Origin
from mlmclm.storage.pieces import parsed


class GeneratedTask(FolderArtifact):
    """The data of a task in the store, made by a generator or from a user's file."""

    kind = part = "tasks"
    again = "the command that made it sets it aside and makes it again"

    def origin(self) -> Origin:
        """Read what it was made from, as its `meta.json` says it; `{"pydocs": ...}` names a kept text."""
        meta = parsed((self.folder / "meta.json").read_bytes, sealed=False)
        if isinstance(meta, str):
            return Origin()
        facts = {name: value for name, value in meta.items() if name != "rows"}
        return Origin(
            facts,
            needs=tuple(
                StoredText(self.store, f"{name}-{value}") for name, value in facts.items() if isinstance(value, str)
            ),
        )
