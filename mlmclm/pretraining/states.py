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
from mlmclm.files import hash_file, read_json, whole_folder, write_json

CHECKSUMS = "checksums.json"


def state_folder(store: Path, key: str) -> Path:
    """Where a state with this key lies, or will."""
    return store / "states" / key


def exists(store: Path, key: str) -> bool:
    """Whether the state is there with every file at its full size; `damage` also reads them."""
    return damage(state_folder(store, key), read=False) is None


def write_checksums(folder: Path) -> None:
    """Notes size and SHA-256 of each file of a folder, and has the system put them on the disk."""
    sums = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        sums[path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    write_json(folder / CHECKSUMS, sums)


def damage(folder: Path, *, read: bool = True) -> str | None:
    """What a state's folder lacks to be whole, None if nothing.

    Args:
        read: compare checksums too; sizes alone are looked at otherwise, in no time.
    """
    if not folder.is_dir():
        return "it is not there"
    try:
        sums = read_json(folder / CHECKSUMS)
        for name, noted in sums.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != noted["bytes"]:
                return f"{name} has {size:,} bytes instead of {noted['bytes']:,}"
            if read and hash_file(path) != noted["sha256"]:
                return f"{name} is not what was written: its checksum differs"
    except (UserError, OSError, AttributeError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__})"
    return None


def set_aside(store: Path, key: str) -> Path:
    """Renames a state that is not whole, so that it can be made again; returns where it is now."""
    folder = state_folder(store, key)
    aside = folder.with_name(f"{key}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


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
    return folder_curve(store, state_folder(store, key))


def folder_curve(store: Path, folder: Path) -> list[dict[str, Any]]:
    """`curve` of a state or a checkpoint in its folder."""
    description = read_json(folder / "state.json")
    before = curve(store, description["parent"]) if description.get("parent") else []
    reached = max((record["step"] for record in before), default=0)
    own = read_metrics(folder / "metrics.jsonl")
    return before + [record for record in own if record["step"] > reached]
