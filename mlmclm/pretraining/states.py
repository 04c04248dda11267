"""Which pretraining states the store holds, and the metrics of how they came about.

    states/KEY/    state.safetensors, step.json (see `checkpoints`), and for a named model `model/`, its Hugging Face folder
                   state.json       what it was made of, and the state that it was trained from
                   metrics.jsonl    one line a step since that state
                   checksums.json   size and SHA-256 of each of these files, written last

A checkpoint of a running stage is a folder of the same files: `runs/KEY/ray_train/ATTEMPT/checkpoint_TIME/`.

Nothing here needs torch, so a finished study is recognised in no time.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.storage import checksums
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.checksums import damage as damage
from mlmclm.storage.files import read_json, whole_folder


def state_folder(store: Path, key: str) -> Path:
    """Where a state with this key lies, or will."""
    return store / "states" / key


def exists(store: Path, key: str) -> bool:
    """Whether the state is there with every file at its full size; `damage` also reads them."""
    return damage(state_folder(store, key), read=False) is None


def set_aside(store: Path, key: str) -> Path:
    """Renames a state that is not whole, so that it can be made again; returns where it is now."""
    return checksums.set_aside(state_folder(store, key))


def link(source: Path, target: Path) -> None:
    """The files of a whole state as another folder, hard-linked."""
    with whole_folder(target) as folder:
        for name in (*read_json(source / CHECKSUMS), CHECKSUMS):
            os.link(source / name, folder / name)


def checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of a run's checkpoints, the furthest first; -1 for a step that can't be read."""
    found = []
    for folder in run_folder.glob("ray_train/*/checkpoint_[0-9]*"):
        try:
            step = int(read_json(folder / "step.json")["step"])
        except (UserError, KeyError, TypeError, ValueError):
            step = -1
        found.append((step, folder))
    return sorted(found, reverse=True)


def prune_checkpoints(run_folder: Path, keep: int) -> None:
    """Deletes what earlier attempts at a run left, but for its `keep` furthest checkpoints; only while nothing runs there."""
    kept = [folder for _, folder in checkpoints(run_folder) if damage(folder, read=False) is None][:keep]
    for attempt in run_folder.glob("ray_train/*"):
        for folder in attempt.glob("*"):
            if folder.is_dir() and folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        if not any(folder.parent == attempt for folder in kept):
            shutil.rmtree(attempt, ignore_errors=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a crash cut short is left out.

    Raises:
        UserError: another line is damaged.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"])})
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{path}: line {number} is damaged ({error}). Delete this file and run the same command again."
                ) from error
    return records


def describe(folder: Path) -> dict[str, Any]:
    """Return what a state or a checkpoint was made of (`state.json`); its metrics are looked at too.

    Raises:
        UserError: they are not what was written.
    """
    found = damage(folder, names=("state.json", "metrics.jsonl"))
    if found is not None:
        raise UserError(
            f"{folder}: {found}. Put back a copy of the file; or delete this folder and run `mlmclm pretrain` on the study, which "
            "trains the state again."
        )
    description: dict[str, Any] = read_json(folder / "state.json")
    return description


def curve(store: Path, key: str) -> list[dict[str, Any]]:
    """All metrics from initialisation to a state, through the states that it was trained from."""
    return folder_curve(store, state_folder(store, key))


def folder_curve(store: Path, folder: Path) -> list[dict[str, Any]]:
    """`curve` of a state or a checkpoint in its folder."""
    description = describe(folder)
    before = curve(store, description["parent"]) if description.get("parent") else []
    reached = max((record["step"] for record in before), default=0)
    own = read_metrics(folder / "metrics.jsonl")
    return before + [record for record in own if record["step"] > reached]
