"""The exported models of a store. Needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlmclm.corpora.notes import EARLIER, damage_of_export, read_remembered
from mlmclm.models.folder import weights_hashes
from mlmclm.progress import say
from mlmclm.storage.addresses import names_at
from mlmclm.storage.artifact import FolderArtifact, folders_in
from mlmclm.storage.checksums import Piece, pieces_in, sealed_in, set_aside, write_sealed
from mlmclm.storage.files import read_json


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
        return read_remembered(self._hashes)

    @property
    def _hashes(self) -> Path:
        return self.folder.with_name("model.weights.json")

    def remembered(self) -> tuple[str, ...]:
        """Return its hashes; they are computed once and kept in a file beside the folder."""
        hashes, path = self.hashes, self._hashes
        if not hashes and path.is_file():
            say(f"{path} is not used: it is damaged. It is kept as {set_aside(path).name} and made again.")
        if not hashes or EARLIER not in read_json(path):
            # Hashes noted by an earlier version were verified then; they stay even if the folder has changed since.
            computed = weights_hashes(self.folder, read=not hashes)
            hashes = computed if not hashes or hashes[0] in computed else hashes
            write_sealed(path, {"weights": hashes[0], EARLIER: hashes[1:]})
        return hashes

    def link(self, target: Path) -> None:
        """Make `target` a folder of hard links to its files, so that a copy of `target` has the files themselves.

        Links to replaced files are renewed. A card that was edited after its export stays, and so do files that people added.
        """
        # config.json is linked last, because a folder without it is no model yet.
        for file in sorted(self.folder.rglob("*"), key=lambda file: (file == self.folder / self.mark, file)):
            link = target / file.relative_to(self.folder)
            if file.is_dir() or (link.is_file() and _up_to_date(link, file)):
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            try:
                os.link(file, link)
            except OSError:  # studies/ is on another file system
                shutil.copy2(file, link)


def _up_to_date(link: Path, file: Path) -> bool:
    if link.samefile(file):
        return True
    ours, theirs = link.stat(), file.stat()
    if link.name == "README.md":
        return ours.st_mtime_ns >= theirs.st_mtime_ns
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)  # a copy
