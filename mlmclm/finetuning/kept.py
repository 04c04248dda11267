"""Encoders that are kept as a cell's fine-tuning left them, for other cells to start from: `store/tuned/KE/KEY/`.

A folder holds `encoder.safetensors` and `result.json`, the result of the run that made the weights with their checksum. It is
written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.progress import say
from mlmclm.storage.checksums import read_sealed, set_aside, write_sealed
from mlmclm.storage.files import hash_file

if TYPE_CHECKING:
    from torch import nn

WEIGHTS, RESULT = "encoder.safetensors", "result.json"


def kept_folder(store: Path, key: str) -> Path:
    """Where the encoder of the cell with this key is, or will be."""
    return store / "tuned" / key[:2] / key


def write_kept(folder: Path, encoder: nn.Module, result: dict[str, Any]) -> None:
    """Fills a folder; whoever calls puts it in its place when it is whole.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    try:
        save_file(weights, folder / WEIGHTS)
    except SafetensorError as error:
        raise EnvironmentFault(f"{folder / WEIGHTS}: cannot write ({error}).") from error
    write_sealed(folder / RESULT, {**result, "encoder": hash_file(folder / WEIGHTS)})


def set_aside_damaged(folder: Path) -> None:
    """Renames a folder that is not what was written, so that its weights are made again, and says so; reads it."""
    if not folder.is_dir():
        return
    try:
        _check(folder)
    except UserError as error:
        say(f"{error} It is kept as {set_aside(folder).name} and made again.")


def _check(folder: Path) -> None:
    """Raises UserError where the folder's files are not what was written."""
    noted = read_sealed(folder / RESULT, f"The weights of {folder} are not used.").get("encoder")
    file = folder / WEIGHTS
    if not file.is_file() or hash_file(file) != noted:
        raise UserError(f"{file}: altered or cut short.")


def load_kept(encoder: nn.Module, store: Path, key: str) -> None:
    """Gives an encoder of the same base model the weights that a cell left.

    Raises:
        UserError: they are not there, or altered.
    """
    from safetensors.torch import load_file

    folder = kept_folder(store, key)
    if not (folder / RESULT).is_file():
        raise UserError(
            f"{folder}: the fine-tuned weights to start from are not there; run the sweep, which makes them."
        )
    try:
        _check(folder)
    except UserError as error:
        raise UserError(f"{error} Delete {folder}: the next sweep makes it again.") from error
    encoder.load_state_dict(load_file(folder / WEIGHTS), strict=True)
