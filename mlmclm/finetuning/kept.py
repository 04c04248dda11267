"""Fine-tuned encoders kept for other cells to start from, in `store/tuned/KE/KEY/`.

A folder holds `encoder.safetensors` and `result.json`: the result of the run that made the weights, and the weights'
checksum. A folder is written whole or not at all.
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
    """Return the folder of the encoder of the cell with this key, whether or not it exists."""
    return store / "tuned" / key[:2] / key


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


def set_aside_damaged(folder: Path) -> None:
    """Rename a damaged folder and report it, so that its weights are made again. This reads and hashes the weights."""
    if not folder.is_dir():
        return
    try:
        _check(folder)
    except UserError as error:
        say(f"{error} It is kept as {set_aside(folder).name} and made again.")


def _check(folder: Path) -> None:
    """Verify the folder's checksums.

    Raises:
        UserError: a file is missing or not what was written.
    """
    noted = read_sealed(folder / RESULT, f"The weights of {folder} are not used.").get("encoder")
    file = folder / WEIGHTS
    if not file.is_file() or hash_file(file) != noted:
        raise UserError(f"{file}: altered or cut short.")


def load_kept(encoder: nn.Module, store: Path, key: str) -> None:
    """Load the weights that a cell left into an encoder of the same base model.

    Raises:
        UserError: the weights are missing or altered.
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
