"""Which pretraining states the store holds, and the metrics of how they came about.

    states/KEY/    state.safetensors, step.json (see `checkpoints`), and for a named model `model/`, its Hugging Face folder
                   state.json       what it was made of, and the state that it was trained from
                   metrics.jsonl    one line a step since that state

Nothing here needs torch, so a finished study is recognised in no time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlmclm.files import read_json


def state_folder(store: Path, key: str) -> Path:
    """Where a state with this key lies, or will."""
    return store / "states" / key


def exists(store: Path, key: str) -> bool:
    """Whether the state is there; it is whole if it is."""
    return (state_folder(store, key) / "state.json").is_file()


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
