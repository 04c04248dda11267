"""The corpus source `pydocs`: the documentation of a store's Python environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlmclm.corpora.documents import Piece, Source
from mlmclm.pydocs import documentation
from mlmclm.pydocs.pin import resolved


@dataclass(frozen=True)
class PydocsSource(Source):
    """The documentation of a store's environment, with separate packages for training and validation."""

    store: Path

    def fingerprint(self) -> str:
        """Return the fingerprint of the store's documentation, or of this environment's if the store has none yet."""
        return resolved(self.store) or documentation.environment_fingerprint()

    def settle(self) -> None:
        """Pin the store's documentation, extracting it if needed."""
        documentation.settle_pydocs(self.store)

    def pieces(self, part: str) -> Sequence[Piece]:
        """Return one piece per part: the parts are small."""
        return [partial(self._read, part)]

    def _read(self, part: str) -> Iterator[str]:
        folder = documentation.prepare_pydocs(self.store)
        return documentation.read_texts(folder, part)
