"""The results of a sweep as files that can be read without this package: Parquet, CSV and JSON."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from mlmclm.analysis.results import results_table
from mlmclm.errors import UserError
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import write_atomic, write_json
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.status import SweepStatus

MORE = ("weights", "task_data", "engine", "examples")
"""Entries of a result that the table has in addition to those of `results_table`."""


def export_sweep(found: SweepStatus, results_store: ResultsStore, folder: Path) -> int:
    """Write `results.parquet`, `results.csv` and `sweep.json`; return the number of results.

    Besides the columns of `results_table` there are `scores.SPLIT.METRIC`, `cost.NAME`, `protocol.NAME` and
    `streams.NAME`. `sweep.json` has all cells with their state.

    Raises:
        UserError: there are no results, or one is damaged.
        EnvironmentFault: the disk is full or not writable.
    """
    names = {(state.cell.model, state.cell.key): state.cell for state in found.states}
    there = results_store.find_all(key for _, key in names)
    results = [
        {**there[cell.key], "model": cell.model, "setting": cell.setting, "metric": cell.metric}
        for cell in names.values()
        if cell.key in there
    ]
    if not results:
        raise UserError(f"sweep {found.manifest.name!r} has no results yet.")
    more = pd.DataFrame([{"model": result["model"], "key": result["key"], **_flat(result)} for result in results])
    table = results_table(results).merge(more, on=["model", "key"], validate="one_to_one")
    parquet = io.BytesIO()
    table.to_parquet(parquet, index=False, compression="zstd")
    write_atomic(folder / "results.parquet", parquet.getvalue())
    write_atomic(folder / "results.csv", csv_text(table))
    write_json(
        folder / "sweep.json",
        {
            "name": found.manifest.name,
            "planned": found.manifest.planned,
            "waiting": dict(found.manifest.waiting),
            "cells": [state.row() for state in found.states],
        },
    )
    return len(table)


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a result that `results_table` leaves out, with dots between the names of nested ones."""
    flat = {name: result.get(name) for name in MORE}
    flat["started_from"] = (result.get("start") or {}).get("cell")
    for name in ("scores", "cost", "protocol", "streams"):
        flat |= _dotted(name, result.get(name) or {})
    return flat


def _dotted(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        # A column of a Parquet file has one type, but a setting may be a list in one protocol and missing in another.
        return {name: ", ".join(map(str, value)) if isinstance(value, list) else value}
    return {path: leaf for key, inner in value.items() for path, leaf in _dotted(f"{name}.{key}", inner).items()}
