"""Results of cells, as the results store has them, and the contents in which two stores of the same study are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_result(**changes: Any) -> dict[str, Any]:
    """Return a result, with some entries changed."""
    return {
        "schema": 1, "key": "k" * 64, "model": "2m-clm-600", "weights": "w", "task": "sst2",
        "family": "sequence-classification", "task_data": "d", "protocol": {"max_steps": 10, "epochs": None},
        "learning_rate": 1e-3, "seed": 2, "status": "ok", "metric": "accuracy",
        "scores": {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.6}}, "curve": [[1, 0.7], [10, 0.5]],
        "steps": 10, "examples": 320, "tokens": 900, "parameters": 5, "diverged_step": None,
        "cost": {"seconds": 2.0, "worker": "h/1", "finished": "2026-01-02T03:04:05+00:00"},
        **changes,
    }  # fmt: skip


def read_results(store: Path) -> dict[str, Any]:
    """The results of a store's cells by key."""
    return {path.stem: json.loads(path.read_text()) for path in store.glob("cells/??/*.json")}


def results(store: Path) -> dict[str, Any]:
    """Return `read_results` without costs and checksums, each with the bytes of its test examples' file."""
    return {
        key: ({**result, "cost": None, "checksum": None}, (store / "cells" / key[:2] / f"{key}.parquet").read_bytes())
        for key, result in read_results(store).items()
    }


def weights(store: Path) -> dict[str, bytes]:
    """Return the bytes of a store's checkpoints, which are weights and moments, by key."""
    return {path.parent.name: path.read_bytes() for path in store.glob("states/[!.]*/state.safetensors")}
