"""Fine-tuned encoders kept for other cells to start from, in `store/tuned/KE/KEY/`.

A folder holds `encoder.safetensors` and `result.json`: the result of the run that made the weights, and the weights'
checksum. A folder is written completely or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.addresses import names_at
from mlmclm.storage.artifact import FolderArtifact, folders_in
from mlmclm.storage.checksums import Piece, described_damage, file_size, seal_damage, write_sealed
from mlmclm.storage.files import hash_file
from mlmclm.storage.unchanged import Unchanged

if TYPE_CHECKING:
    from torch import nn

WEIGHTS, RESULT = "encoder.safetensors", "result.json"


class KeptEncoder(FolderArtifact):
    """The fine-tuned encoder of a cell, in the store under the cell's key."""

    kind = "kept encoders"
    part = "tuned"
    mark = RESULT
    again = "`mlmclm study` or `mlmclm sweep` sets it aside and trains it again"

    @classmethod
    def all(cls, store: Path) -> Iterator[KeptEncoder]:
        """Yield the kept encoders of a store."""
        local = {folder.name for part in (store / cls.part).glob("??") for folder in folders_in(part)}
        for key in sorted(local | {folder.name for folder in names_at(store / cls.part, depth=2)}):
            yield cls(store, key).brought()

    @property
    def folder(self) -> Path:
        """The folder, whether or not it exists."""
        return self.store / self.part / self.key[:2] / self.key

    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with it, or None if it exists and is intact."""
        fault = seal_damage((self.brought().folder / RESULT).read_bytes)
        if fault is not None:
            return f"{RESULT}: {fault}"
        fault = described_damage(self.folder / RESULT, self.folder / WEIGHTS, "encoder") if read else None
        return None if fault is None else f"{WEIGHTS}: {fault}"

    def seal(self, folder: Path) -> None:
        """Do nothing: the result has the checksum of the weights."""

    def files(self) -> Iterator[Piece]:
        """Yield the weights, and the result that has their checksum."""
        result, weights = self.folder / RESULT, self.folder / WEIGHTS
        yield Piece(self.kind, self.again, str(result), file_size(result), partial(seal_damage, result.read_bytes))
        check = partial(described_damage, result, weights, "encoder")
        yield Piece(self.kind, self.again, str(weights), file_size(weights), check)


def write_kept(folder: Path, encoder: nn.Module, result: dict[str, Any]) -> None:
    """Write an encoder and its result into a temporary folder, which the caller moves into place.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # safetensors refuses tensors that are not contiguous.
    weights = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    try:
        save_file(weights, folder / WEIGHTS)
    except SafetensorError as error:
        raise EnvironmentFault(f"{folder / WEIGHTS}: cannot write ({error}).") from error
    write_sealed(folder / RESULT, {**result, "encoder": hash_file(folder / WEIGHTS)})


def load_kept(encoder: nn.Module, store: Path, key: str) -> None:
    """Load the kept weights of a cell into an encoder of the same base model.

    Raises:
        UserError: the weights are missing or altered.
    """
    from safetensors.torch import load_file

    kept = KeptEncoder(store, key).brought()
    folder = kept.folder
    if not (folder / RESULT).is_file():
        raise UserError(
            f"{folder}: the fine-tuned weights to start from are not there; run the sweep, which makes them."
        )
    files = Unchanged(folder, holds=lambda: kept.damage() is None)
    fault = kept.damage()
    if fault is not None:
        raise UserError(f"{folder}: {fault}. Delete it: the next sweep makes it again.")
    encoder.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    files.check()
