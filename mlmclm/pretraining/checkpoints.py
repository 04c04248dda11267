"""A pretraining state on disk: fp32 weights and Adam's moments under their Hugging Face names.

    state.safetensors    weights `w/NAME`, first moments `m/NAME`, second moments `v/NAME`, callbacks' tensors `c/CALLBACK/NAME`
    step.json            the number of optimiser steps taken
    callbacks.json       the callbacks' other values, by callback and name; only if a callback has a state

A checkpoint of a running stage and a state in the store have the same files (`states` lists the other files beside
them). The format does not depend on the number of workers or the ZeRO stage: any of them can load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mlmclm.errors import UserError
from mlmclm.models.stored_tensors import StoredTensors
from mlmclm.pretraining import states
from mlmclm.storage.checksums import set_aside, write_checksums
from mlmclm.storage.files import read_json, whole_folder, write_json

WEIGHTS, FIRST, SECOND, CALLBACKS = "w/", "m/", "v/", "c/"


@dataclass(frozen=True)
class TrainingState:
    """Everything the next step depends on, except its batch and learning rate, which are functions of the step."""

    step: int
    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    """Adam's running mean of the gradients, by parameter name; empty before the first step."""
    second: Mapping[str, Tensor]
    """Adam's running mean of the squared gradients, in the same form."""
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """States of the callbacks that have one (`Callback.state_dict`), by the callback's name."""


def write_tensors(folder: Path, state: TrainingState) -> None:
    """Write `state.safetensors` and `step.json` into an existing folder."""
    parts = {WEIGHTS: state.weights, FIRST: state.first, SECOND: state.second}
    tensors = {
        f"{prefix}{name}": tensor.contiguous() for prefix, part in parts.items() for name, tensor in part.items()
    }
    plain: dict[str, dict[str, Any]] = {callback: {} for callback in state.callbacks}
    for callback, values in state.callbacks.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{CALLBACKS}{callback}/{name}"] = value.detach().cpu().contiguous()
            else:
                plain[callback][name] = value
    save_file(tensors, str(folder / "state.safetensors"))
    if plain:
        write_json(folder / "callbacks.json", plain)
    write_json(folder / "step.json", {"step": state.step})


def read_tensors(folder: Path) -> TrainingState:
    """Open a state that `write_tensors` wrote. Each tensor is read when it is accessed.

    Raises:
        UserError: if the folder does not hold a complete state.
    """
    path = folder / "state.safetensors"
    try:
        weights, first, second, kept = (StoredTensors(path, prefix) for prefix in (WEIGHTS, FIRST, SECOND, CALLBACKS))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: not a complete pretraining state ({error}). Delete {folder} and run again."
        ) from error
    file = folder / "callbacks.json"
    callbacks: dict[str, dict[str, Any]] = read_json(file) if file.is_file() else {}
    for name, tensor in kept.items():
        callback, _, own = name.partition("/")
        callbacks[callback][own] = tensor
    return TrainingState(int(read_json(folder / "step.json")["step"]), weights, first, second, callbacks)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read only the weights, by Hugging Face name.

    Raises:
        UserError: if the folder is incomplete or its checksums differ.
    """
    damage = states.damage(folder)
    if damage is not None:
        raise UserError(f"{folder}: {damage}. Delete this folder and run `mlmclm pretrain` again to rebuild it.")
    return dict(StoredTensors(folder / "state.safetensors", WEIGHTS))


def write_folder(
    target: Path, state: TrainingState, description: dict[str, Any], metrics: Iterable[dict[str, Any]]
) -> None:
    """Write a state's folder and its checksums atomically."""
    with whole_folder(target) as folder:
        write_tensors(folder, state)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics), encoding="utf-8")
        write_json(folder / "state.json", {**description, "step": state.step})
        write_checksums(folder)


def deposit(
    store: Path, key: str, state: TrainingState, description: dict[str, Any], metrics: Iterable[dict[str, Any]]
) -> Path:
    """Put a state into the store and return its folder. An intact one stays; a damaged one is set aside."""
    folder = states.state_folder(store, key)
    if not states.exists(store, key):
        if folder.is_dir():
            set_aside(folder)
        write_folder(folder, state, {**description, "key": key}, metrics)
        states.StoredState(store, key).send()
    return folder


def fresh(weights: dict[str, Tensor]) -> TrainingState:
    """Return the state before the first step, in fp32 and without moments."""
    return TrainingState(0, {name: tensor.detach().to(torch.float32) for name, tensor in weights.items()}, {}, {})
