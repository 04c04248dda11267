"""The documentation of a store's Python environment as a corpus source, `pydocs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlmclm.corpora.documents import TRAIN, Piece
from mlmclm.corpora.process_map import Progress, silent
from mlmclm.pydocs import documentation
from mlmclm.pydocs.pin import settled


@dataclass(frozen=True)
class PydocsSource:
    """The documentation of a store's environment; training packages to train on, validation packages to validate on."""

    store: Path
    workers: int | None
    progress: Progress

    def fingerprint(self) -> str:
        """The store's; this environment's where the store has none yet."""
        return settled(self.store) or documentation.fingerprint()

    def settle(self) -> str:
        """The fingerprint that the store's documentation has from now on."""
        return documentation.settle_pydocs(self.store, workers=self.workers, progress=self.progress)

    def _folder(self) -> Path:
        """The extracted documents."""
        return documentation.prepare_pydocs(self.store, workers=self.workers, progress=self.progress)

    def train(self) -> Iterator[str]:
        """Docstrings of the training packages, and the documentation topics."""
        return documentation.read_texts(self._folder(), "train")

    def validation(self) -> Iterator[str]:
        """Docstrings of the validation packages."""
        return documentation.read_texts(self._folder(), "validation")

    def pieces(self, part: str) -> Sequence[Piece]:
        """One for each part: they are small."""
        return [self.train if part == TRAIN else self.validation]

    def left_out(self) -> str:
        """Nothing."""
        return ""

    def __reduce__(self) -> tuple[type[PydocsSource], tuple[Path, int, Progress]]:
        """Elsewhere, what it extracted here is read."""
        return PydocsSource, (self.store, 1, silent)
