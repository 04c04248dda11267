"""A pretraining state on disk: fp32 weights and Adam's moments under their Hugging Face names, for any number of workers and ZeRO stage.

    state.safetensors    weights `w/NAME`, first and second moments `m/NAME`, `v/NAME`
    state.json           step, tokens, and what it was made of
    metrics.jsonl        one line a step since the state that it was trained from
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlmclm.errors import UserError
from mlmclm.files import read_json, whole_folder, write_json

WEIGHTS, FIRST, SECOND = "w/", "m/", "v/"


@dataclass(frozen=True)
class TrainingState:
    """Everything that the next step depends on, apart from the step's number, batch and learning rate."""

    step: int
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    """Adam's running mean of gradients, by parameter name; empty before the first step."""
    second: dict[str, Tensor]
    """Adam's running mean of squared gradients."""


def state_folder(store: Path, key: str) -> Path:
    """Where a state with this key lies, or will."""
    return store / "states" / key


def exists(store: Path, key: str) -> bool:
    """Whether the state is there; it is whole if it is."""
    return (state_folder(store, key) / "state.json").is_file()


def write_tensors(folder: Path, state: TrainingState) -> None:
    """Writes `state.safetensors` and the step into an existing folder."""
    tensors = {f"{prefix}{name}": tensor.contiguous() for prefix, part in _parts(state) for name, tensor in part.items()}
    save_file(tensors, str(folder / "state.safetensors"))
    write_json(folder / "step.json", {"step": state.step})


def read_tensors(folder: Path) -> TrainingState:
    """Reads what `write_tensors` wrote.

    Raises:
        UserError: the folder holds no whole state.
    """
    path = folder / "state.safetensors"
    try:
        with safe_open(str(path), "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole pretraining state ({error}). Delete {folder} and run again.") from error
    step = int(read_json(folder / "step.json")["step"])
    parts = [
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (WEIGHTS, FIRST, SECOND)
    ]
    return TrainingState(step, *parts)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights alone, by Hugging Face name."""
    with safe_open(str(folder / "state.safetensors"), "pt") as handle:
        return {
            name.removeprefix(WEIGHTS): handle.get_tensor(name)
            for name in handle.keys()  # noqa: SIM118
            if name.startswith(WEIGHTS)
        }


def deposit(
    store: Path, key: str, state: TrainingState, description: dict[str, Any], metrics: Callable[[], Iterator[str]]
) -> None:
    """Puts a state into the store, whole or not at all; one that is there stays as it is."""
    if exists(store, key):
        return
    with whole_folder(state_folder(store, key)) as folder:
        write_tensors(folder, state)
        (folder / "metrics.jsonl").write_text("".join(metrics()), encoding="utf-8")
        write_json(folder / "state.json", {**description, "key": key, "step": state.step})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def curve(store: Path, key: str) -> list[dict[str, Any]]:
    """All metrics from initialisation to a state, through the states that it was trained from."""
    description = read_json(state_folder(store, key) / "state.json")
    before = curve(store, description["parent"]) if description.get("parent") else []
    reached = max((record["step"] for record in before), default=0)
    own = read_metrics(state_folder(store, key) / "metrics.jsonl")
    return before + [record for record in own if record["step"] > reached]


def _parts(state: TrainingState) -> list[tuple[str, dict[str, Tensor]]]:
    return [(WEIGHTS, state.weights), (FIRST, state.first), (SECOND, state.second)]


def fresh(weights: dict[str, Tensor]) -> TrainingState:
    """The state before the first step."""
    return TrainingState(0, {name: tensor.detach().to(torch.float32) for name, tensor in weights.items()}, {}, {})
