"""The exported models of a store. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlmclm.corpora.notes import damage_of_export, read_remembered
from mlmclm.storage.addresses import names_at
from mlmclm.storage.artifact import FolderArtifact, folders_in
from mlmclm.storage.pieces import Piece, pieces_in, sealed_in


class ExportedModel(FolderArtifact):
    """A model's Hugging Face folder in the store, under the key of its state."""

    kind = "models"
    part = "states"
    mark = "config.json"
    again = "`mlmclm study`, `mlmclm sweep` or `mlmclm pretrain` on its study sets it aside and exports it again"
    remade = "exported again"

    @property
    def folder(self) -> Path:
        """The folder, whether or not it exists."""
        return self.store / self.part / self.key / "model"

    @property
    def lease(self) -> str:
        """Name of the lease to hold while exporting it."""
        return f"models-{self.key}"

    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with it, or None if it is there and intact; weights are checked by size only."""
        if not (self.brought().folder / self.mark).is_file():
            return "config.json is missing"
        return damage_of_export(self.folder)

    def files(self) -> Iterator[Piece]:
        """Yield its files, those of its decoder, and the file of its hashes beside the folder."""
        for part in (self.folder, self.folder / "decoder"):
            yield from pieces_in(part, self.kind, self.again)
        yield from sealed_in(self.folder.parent, self.kind, self.again, "*.weights.json")

    @classmethod
    def all(cls, store: Path) -> Iterator[ExportedModel]:
        """Yield the exported models of a store."""
        local = {folder.name for folder in folders_in(store / cls.part) if (folder / "model").is_dir()}
        sent = {path.parent.name for path in names_at(store / cls.part, depth=2) if path.name == "model"}
        for key in sorted(local | sent):
            yield cls(store, key).brought()

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of its weights and tokenizer, by which keys of cells identify it; none if they aren't known yet."""
        return read_remembered(self.folder.with_name("model.weights.json"))
