"""A pretraining state as files: fp32 weights and Adam's moments under their Hugging Face names.

    state.safetensors    weights `w/NAME`, first and second moments `m/NAME`, `v/NAME`
    step.json            the number of optimiser steps taken

The same files are a checkpoint of a running stage and a state of the store (see `states` for what lies beside them).
Any number of workers and any ZeRO stage can take them up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlmclm.errors import UserError
from mlmclm.models.stored_tensors import StoredTensors
from mlmclm.pretraining import states
from mlmclm.storage.checksums import write_checksums
from mlmclm.storage.files import read_json, whole_folder, write_json

WEIGHTS, FIRST, SECOND = "w/", "m/", "v/"


@dataclass(frozen=True)
class TrainingState:
    """Everything that the next step depends on, apart from the step's number, batch and learning rate."""

    step: int
    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    """Adam's running mean of gradients, by parameter name; empty before the first step."""
    second: Mapping[str, Tensor]
    """Adam's running mean of squared gradients."""


def write_tensors(folder: Path, state: TrainingState) -> None:
    """Writes `state.safetensors` and the step into an existing folder."""
    tensors = {
        f"{prefix}{name}": tensor.contiguous() for prefix, part in _parts(state) for name, tensor in part.items()
    }
    save_file(tensors, str(folder / "state.safetensors"))
    write_json(folder / "step.json", {"step": state.step})


def read_tensors(folder: Path) -> TrainingState:
    """Return what `write_tensors` wrote; each tensor is read when it is asked for.

    Raises:
        UserError: the folder holds no whole state.
    """
    path = folder / "state.safetensors"
    try:
        parts = [StoredTensors(path, prefix) for prefix in (WEIGHTS, FIRST, SECOND)]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole pretraining state ({error}). Delete {folder} and run again.") from error
    return TrainingState(int(read_json(folder / "step.json")["step"]), *parts)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights alone, by Hugging Face name.

    Raises:
        UserError: the folder is not whole, or not what was written.
    """
    damage = states.damage(folder)
    if damage is not None:
        raise UserError(f"{folder}: {damage}. Delete this folder and run `mlmclm pretrain` again: it makes it anew.")
    with safe_open(str(folder / "state.safetensors"), "pt") as handle:
        return {
            name.removeprefix(WEIGHTS): handle.get_tensor(name)
            for name in handle.keys()  # noqa: SIM118
            if name.startswith(WEIGHTS)
        }


def write_folder(
    target: Path, state: TrainingState, description: dict[str, Any], metrics: Iterable[dict[str, Any]]
) -> None:
    """Writes a state's folder with its checksums, whole or not at all."""
    with whole_folder(target) as folder:
        write_tensors(folder, state)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics), encoding="utf-8")
        write_json(folder / "state.json", {**description, "step": state.step})
        write_checksums(folder)


def deposit(
    store: Path, key: str, state: TrainingState, description: dict[str, Any], metrics: Iterable[dict[str, Any]]
) -> Path:
    """Puts a state into the store, in place of one that is not whole; a whole one stays as it is. Returns its folder."""
    folder = states.state_folder(store, key)
    if not states.exists(store, key):
        if folder.is_dir():
            states.set_aside(store, key)
        write_folder(folder, state, {**description, "key": key}, metrics)
    return folder


def _parts(state: TrainingState) -> list[tuple[str, Mapping[str, Tensor]]]:
    return [(WEIGHTS, state.weights), (FIRST, state.first), (SECOND, state.second)]


def fresh(weights: dict[str, Tensor]) -> TrainingState:
    """The state before the first step."""
    return TrainingState(0, {name: tensor.detach().to(torch.float32) for name, tensor in weights.items()}, {}, {})
